"""Stages node by node: which one makes the first number that is none, or is not what forward asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from ..compat import Interpreter, tree_leaves
from ..errors import AnomalyError, AssumptionError
from ..graph.assumptions import ASKED
from ..inserted.ops import checkpoint
from ..inserted.random import Stream
from ..modules.seen import MISSING


def run_watched(
    module: fx.GraphModule, inputs: Iterable[Any], kind: str | None, *, asked: bool = False
) -> Any:
    """``module(*inputs)``, node by node.

    Args:
        kind: ``"nan"``, or ``"inf"`` for infinities too; those below zero are masks, and not looked for. None to look
            for no numbers.
        asked: compare what forward asked of values when it was captured, such as their dtype.

    Raises:
        AnomalyError: names the first node whose result has such a number.
        AssumptionError: names the first node whose result is not what it was.
    """
    watched = _Watched(module, kind, asked)
    try:
        return watched.run(*inputs)
    except BaseException:
        for context in reversed(watched.entered):  # as the `with` of the generated code does
            context.__exit__(None, None, None)
        raise


def is_bad(value: Any, kind: str) -> bool:
    """Whether a floating point tensor in `value` has such a number."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            x = leaf.detach()
            bad = x.isnan() if kind == "nan" or x.is_complex() else x.isnan() | (x == float("inf"))
            if not leaf.is_meta and bool(bad.any()):
                return True
    return False


class _Watched(Interpreter):
    def __init__(self, module: fx.GraphModule, kind: str | None, asked: bool) -> None:
        super().__init__(module)
        self.kind, self.asked, self.entered = kind, asked, list[Any]()
        self.extra_traceback = False

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_method(target, args, kwargs)
        if target == "__enter__":
            self.entered.append(args[0])
        elif target == "__exit__":
            self.entered.remove(args[0])
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is checkpoint and self.asked:
            args = (_Region(args[0]), *args[1:])
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        stream = Stream.current()
        before = None if stream is None else stream.copy()
        try:
            result = super().run_node(n)
        except AnomalyError:
            raise
        except Exception as error:
            if place := _place(n):
                error.add_note(f"fxsplit: in {n.name}, {place}")
            raise
        if self.asked and "asked" in n.meta:
            _compare(n, result)
        if self.kind is not None and is_bad(result, self.kind):
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


class _Region:
    """A region that is recomputed, run node by node; otherwise the region itself."""

    def __init__(self, region: fx.GraphModule) -> None:
        self._region = region

    def __call__(self, *values: Any) -> Any:
        return run_watched(self._region, values, None, asked=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._region, name)


def _compare(node: fx.Node, result: Any) -> None:
    for what, was in node.meta["asked"].items():
        now = ASKED[what](result) if isinstance(result, torch.Tensor) else MISSING
        if not was.same(now):
            raise AssumptionError(
                f"forward asked for the {what} of {node.name}, which was {was}, and is {now}",
                where=_place(node),
                remedy="pipe.recompile() here, in this state: inside of the same torch.autocast and torch.no_grad",
            )


def _place(node: fx.Node) -> str | None:
    parts = [node.meta.get("module_path"), str(node.meta["source"]) if node.meta.get("source") else None]
    return ", ".join(part for part in parts if part) or None
