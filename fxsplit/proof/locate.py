"""Where does the graph begin to compute something else than the model?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from ..compare import agree
from ..compat import Interpreter, tree_leaves
from ..graph.ir import Traced
from ..graph.nodes import resolve
from ..modules.state import preserved


def first_other_module(model: nn.Module, traced: Traced, inputs: Sequence[torch.Tensor]) -> str | None:
    """The first module, in program order, whose output in the graph is not its output in the model.

    Modules that are one node of the graph are compared, call by call. None where they all agree.
    """
    calls = [n for n in traced.graph.nodes if n.op == "call_module"]
    paths = {traced.names[str(n.target)]: str(n.target) for n in calls}
    expected: dict[str, list[list[Any]]] = {path: [] for path in paths.values()}
    handles = []
    try:
        for path, calls_of_path in expected.items():

            def record(module: nn.Module, args: Any, output: Any, seen: list[Any] = calls_of_path) -> None:
                seen.append(values_of(output))

            handles.append(resolve(model, path).register_forward_hook(record))
        args, kwargs = traced.signature.unflatten([x.detach().clone() for x in inputs])
        with preserved(model, parameters=True), torch.no_grad():
            model.forward(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    comparison = _Comparison(traced, paths, expected)
    with preserved(model, parameters=True), torch.no_grad():
        try:
            comparison.run(*(x.detach().clone() for x in inputs))
        except Exception:
            return None
    return comparison.first


class _Comparison(Interpreter):
    def __init__(self, traced: Traced, paths: dict[str, str], expected: dict[str, list[list[Any]]]) -> None:
        super().__init__(traced.module)
        self.traced, self.paths = traced, paths
        self.expected = {path: iter(calls) for path, calls in expected.items()}
        self.first: str | None = None

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "call_module" and self.first is None:
            path = self.paths[str(n.target)]
            eager = next(self.expected[path], None)
            found = values_of(value)
            same = eager is not None and len(eager) == len(found)
            if not same or not all(
                agree(a, b, of_largest=1e-4) for a, b in zip(found, eager or [], strict=True)
            ):
                source = self.traced.facts[n.name].source
                self.first = f"first seen in the output of {path!r}" + (f" ({source})" if source else "")
        return value


def values_of(output: Any) -> list[Any]:
    """The leaves of a value, tensors as copies."""
    return [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in tree_leaves(output)]
