"""Find the node that makes the first number that is none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from ..compat import tree_leaves
from ..errors import AnomalyError
from ..ops import checkpoint
from ..rng import Stream


def run_watched(module: fx.GraphModule, inputs: Iterable[Any], kind: str) -> Any:
    """``module(*inputs)``, node by node.

    Args:
        kind: ``"nan"``, or ``"inf"`` for infinities too.

    Raises:
        AnomalyError: names the first node whose result has such a number.
    """
    return _Watched(module, kind).run(*inputs)


def is_bad(value: Any, kind: str) -> bool:
    """Whether a floating point tensor in `value` has such a number."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            bad = leaf.detach().isnan() if kind == "nan" else ~leaf.detach().isfinite()
            if not leaf.is_meta and bool(bad.any()):
                return True
    return False


class _Watched(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, kind: str) -> None:
        super().__init__(module)
        self.kind = kind
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        stream = Stream.current()
        before = None if stream is None else stream.copy()
        result = super().run_node(n)
        if is_bad(result, self.kind):
            if n.target is checkpoint:
                region, *values = self.fetch_args_kwargs_from_env(n)[0]
                with torch.no_grad(), before or torch.no_grad():
                    run_watched(region, values, self.kind)
            raise AnomalyError(
                f"{'a NaN' if self.kind == 'nan' else 'a NaN or infinity'} first appears in {n.name}",
                where=_place(n),
                remedy="look at what this operation is given; without detect_anomaly= it would have gone on",
            )
        return result


def _place(node: fx.Node) -> str | None:
    parts = [node.meta.get("module_path"), str(node.meta["source"]) if node.meta.get("source") else None]
    return ", ".join(part for part in parts if part) or None
