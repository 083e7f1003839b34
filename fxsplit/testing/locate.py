"""Where do a pipeline and its model begin to compute different numbers?

Three things compute the same: the model, its graph, and the stages put back into one graph. They are run on one micro-batch
after the other, and compared node by node::

    model ── modules ── graph ── nodes ── stages ── the run itself ── pipeline
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from ..compare import agree, difference
from ..compat import Interpreter
from ..compiled import Compiled
from ..graph.nodes import resolve
from ..modules.state import preserved
from ..pipeline import Pipeline
from ..proof.inline import inline
from ..proof.locate import first_other_module, values_of

Around = Callable[[int], contextlib.AbstractContextManager[object]]


def located(
    model: nn.Module,
    pipe: Pipeline,
    chunks: Sequence[Sequence[torch.Tensor]],
    around: Around,
    bound: tuple[float, float],
) -> str:
    """The first node whose value differs, with its stage, micro-batch and line of the model; in words.

    Args:
        model, pipe: in the state that they were in before; they are copied.
        around: of a micro-batch, what is entered to draw its random numbers.
        bound: relative and absolute.
    """
    other = _other_state(model, pipe.model)
    if other:
        return f"the model and that of the pipeline differ before anything is run: {other}"
    graph, split = copy.deepcopy(pipe).active, copy.deepcopy(pipe)
    for i, chunk in enumerate(chunks):
        of = f"micro-batch {i} of {len(chunks)}, " if len(chunks) > 1 else ""
        with around(i):
            expected = _Values(graph, graph.traced.module.graph)
            expected.run(*chunk)
        with around(i):
            found = _Values(split.active, inline(split.active.program), split.model)
            found.run(*chunk)
        ways = ((name, _how(found, expected, name, bound)) for name in found.values)
        name, how = next(((name, how) for name, how in ways if how), ("", ""))
        if not name:
            with preserved(model, parameters=True):
                module = first_other_module(model, graph.traced, chunk)
            if module is not None and not _draws(graph):
                return f"{of}the graph is not the model: {module}"
            continue
        stage, source = graph.assignment.stage_of().get(name), graph.traced.facts[name].source
        path = graph.traced.facts[name].module_path
        lines = [f"{of}stage {stage}, in {path or 'the model itself'}: node {name} is {how}"]
        lines += [f"of {source.with_text()}"] if source else []
        strange = [n for n in found.order[: found.order.index(name)] if n not in graph.traced.facts]
        lines += [f"after {', '.join(strange[-3:])}, which the graph of the model has not"] if strange else []
        return ", ".join(lines)
    return (
        "forward agrees, node by node: the difference comes about in backward, or in how the stages are run"
    )


def _other_state(model: nn.Module, theirs: nn.Module) -> str:
    """The first parameter or buffer that two models do not have alike."""
    ours = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    others = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    for name in [*ours, *(n for n in others if n not in ours)]:
        if name not in ours or name not in others:
            return f"only one has {name}"
        if not agree(ours[name], others[name]):
            return f"{name} is {difference(others[name], ours[name])}"
    return ""


def _draws(made: Compiled) -> bool:
    return any(fact.random for fact in made.traced.facts.values())


def _how(found: _Values, expected: _Values, name: str, bound: tuple[float, float]) -> str:
    """How the values of a node differ; empty if they do not, or only one of the two has it."""
    if name not in expected.values:
        return ""
    a, b = found.values[name], expected.values[name]
    if len(a) != len(b):
        return f"{len(a)} values instead of {len(b)}"
    rtol, atol = bound
    odd = (difference(x, y) for x, y in zip(a, b, strict=True) if not agree(x, y, rtol=rtol, atol=atol))
    return next(odd, "")


class _Values(Interpreter):
    """What each node gives, as copies."""

    def __init__(self, made: Compiled, graph: fx.Graph, model: nn.Module | None = None) -> None:
        super().__init__(made.traced.module, graph=graph)
        self.made, self.model = made, model
        self.values: dict[str, list[Any]] = {}
        self.order: list[str] = []

    def fetch_attr(self, target: str) -> Any:
        """An object of the model, or a constant of the program; by its path, where the graph has paths."""
        if self.model is None:
            return super().fetch_attr(target)
        constants = self.made.traced.constants
        return constants[target] if target in constants else resolve(self.model, target)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op not in ("placeholder", "output"):
            name = self._name(n)
            self.order.append(name)
            self.values[name] = [v for v in values_of(value) if isinstance(v, torch.Tensor | int | float)]
        return value

    def _name(self, n: fx.Node) -> str:
        """That of the model's graph; what a stage has beside it may be called like a node of another stage."""
        stage: int | None
        name: str
        stage, name = n.meta.get("of", (None, n.name))
        if stage is None or name in self.made.stages[stage].nodes:
            return name
        return f"{name} of stage {stage}"
