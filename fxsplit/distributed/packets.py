"""A packet as bytes: a header that says what is in it, and the numbers of each tensor, in the order of its memory.

The header of the last packet of the same kind is known on both ends, and is sent again only where it is another one: a
step of the same shapes sends numbers alone. Dimensions travel in the order in which they lie in memory, and expanded
ones once, so that what computes with a tensor sees the layout that it sees in one process.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..compat import tree_leaves, tree_map
from ..errors import RankError

# Name, which of the packet's micro-batches, first name of the same tensor, value.
Item = tuple[str, int, str | None, Any]


@dataclass(frozen=True)
class _Layout:
    """What the receiver needs to know of a tensor. `order`: its dimensions, from the farthest apart in memory."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    expanded: tuple[int, ...]
    requires_grad: bool

    @property
    def lying(self) -> list[int]:
        """Sizes of what travels."""
        return [1 if d in self.expanded else self.sizes[d] for d in self.order]


def packed(items: Sequence[Item]) -> tuple[bytes, list[torch.Tensor]]:
    """Header and numbers.

    Raises:
        RankError: a tensor has no plain memory: it is sparse, say.
    """
    rows: list[Any] = []
    tensors: list[torch.Tensor] = []
    for name, i, same, value in items:

        def describe(leaf: Any, name: str = name) -> Any:
            return _described(name, leaf, tensors) if isinstance(leaf, torch.Tensor) else leaf

        rows.append((name, i, same, tree_map(describe, value)))
    return pickle.dumps(rows), tensors


def _described(name: str, leaf: torch.Tensor, tensors: list[torch.Tensor]) -> _Layout:
    if leaf.layout != torch.strided or type(leaf) not in (torch.Tensor, torch.nn.Parameter):
        kind = leaf.layout if leaf.layout != torch.strided else type(leaf).__name__
        raise RankError(
            f"{name} is a tensor of the kind {kind}, which does not travel between ranks",
            remedy="a cut at another place, where tensors are dense: Plan(cut=[...])",
        )
    grad, leaf = leaf.requires_grad, leaf.detach()
    expanded = tuple(d for d in range(leaf.dim()) if leaf.stride(d) == 0 and leaf.size(d) > 1)
    order = tuple(sorted(range(leaf.dim()), key=lambda d: (-leaf.stride()[d], d)))
    layout = _Layout(leaf.dtype, tuple(leaf.shape), order, expanded, grad)
    for d in expanded:
        leaf = leaf.narrow(d, 0, 1)
    lying = leaf.permute(order).contiguous()
    if leaf.is_conj() or leaf.is_neg():
        lying = lying.resolve_conj().resolve_neg()
    if lying.numel():
        tensors.append(lying.reshape(-1).view(torch.uint8))
    return layout


class Unpacking:
    """A packet that is to come, once its header is known."""

    def __init__(self, header: bytes, device: torch.device) -> None:
        self._rows: list[Item] = pickle.loads(header)
        layouts = [x for *_, value in self._rows for x in tree_leaves(value) if isinstance(x, _Layout)]
        self._tensors = [torch.empty(x.lying, dtype=x.dtype, device=device) for x in layouts]
        self.places = [t.reshape(-1).view(torch.uint8) for t in self._tensors if t.numel()]

    def items(self) -> list[Item]:
        """What was packed; the numbers have come."""
        tensors = iter(self._tensors)
        found: list[Item] = []
        for name, i, same, described in self._rows:
            value = tree_map(
                lambda x: _laid_out(next(tensors), x) if isinstance(x, _Layout) else x, described
            )
            found.append((name, i, same, value))
        return found


def _laid_out(lying: torch.Tensor, layout: _Layout) -> torch.Tensor:
    back = [0] * len(layout.order)
    for place, d in enumerate(layout.order):
        back[d] = place
    return lying.permute(back).expand(layout.sizes).requires_grad_(layout.requires_grad)
