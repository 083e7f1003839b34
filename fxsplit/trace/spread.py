"""A model that is spread over devices: it is captured where it is, and its graph then reads as if all were on one.

parameters on cuda:0, cuda:1, ...      each operation where its parameter is,      the graph, for wherever
as a pipeline has left them        ─▶  what else it reads is brought there     ─▶  the next plan says
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..compat import tree_leaves, tree_map

# What takes tensors of several devices by itself.
_CROSSES: frozenset[Any] = frozenset(
    [torch.Tensor.to, torch.Tensor.copy_, torch.Tensor.type_as, torch.Tensor.backward]
)


def is_spread(model: nn.Module) -> bool:
    """Whether parameters and buffers are on several devices."""
    return len({t.device for t in (*model.parameters(), *model.buffers())}) > 1


# What gives a view of its first tensor, and reads of others but their shape or where to look.
_VIEWS = frozenset(["view_as", "reshape_as", "expand_as", "__getitem__"])


class Together(TorchFunctionMode):
    """What an operation reads is brought to one device: that of the first tensor of the model's own, else of the first.

    What is written or looked into stays where it is, and the rest is brought there; what is written all the same is brought back.
    Gradients go back by autograd.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        tables = [table for m in model.modules() for table in (m._parameters, m._buffers, vars(m))]
        self._own = {id(t) for table in tables for t in table.values() if isinstance(t, torch.Tensor)}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, torch.Tensor)]
        name = getattr(func, "__name__", "")
        if len(tensors) < 2 or func in _CROSSES or name == "__set__" or _is_autograds(func):
            return func(*args, **given)  # `p.data = q` moves p
        devices = [t.device for t in tensors if t.dim() or t.device.type != "cpu"]
        if len(set(devices)) < 2:
            return func(*args, **given)
        home = self._home(name, tensors, given)

        moved: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}

        def brought(leaf: Any) -> Any:
            elsewhere = isinstance(leaf, torch.Tensor) and leaf.device != home
            if not elsewhere or not (leaf.dim() or leaf.device.type != "cpu"):
                return leaf
            if id(leaf) not in moved:
                copy = leaf.to(home)
                moved[id(leaf)] = leaf, copy, _version(copy)
            return moved[id(leaf)][1]

        args, given = tree_map(brought, (tuple(args), given))
        result = func(*args, **given)
        written = {id(copy): (old, copy) for old, copy, before in moved.values() if _version(copy) != before}
        for original, copy in written.values():
            original.copy_(copy)
        return tree_map(lambda leaf: written[id(leaf)][0] if id(leaf) in written else leaf, result)

    def _home(self, name: str, tensors: Sequence[torch.Tensor], given: Mapping[str, Any]) -> torch.device:
        if isinstance(given.get("out"), torch.Tensor):
            return given["out"].device  # type: ignore[no-any-return]
        writes = name.startswith(("__i", "__setitem__")) or (name.endswith("_") and not name.endswith("__"))
        if writes or name in _VIEWS:
            return tensors[0].device
        return next((t.device for t in tensors if id(t) in self._own), tensors[0].device)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_autograds(func: Any) -> bool:
    return (getattr(func, "__module__", None) or "").startswith("torch.autograd")
