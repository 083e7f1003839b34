"""Inputs that are made up to try how outputs are merged: other numbers, and integers that are ignored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..batch.dims import BatchDims

_ROWS = (
    5  # at least: two parts of unequal size, and none of one row, which some models take for a special case
)
IGNORED = -100  # what PyTorch's cross entropy ignores by default


@dataclass(frozen=True)
class Probe:
    """A batch, and the rows of each part that it is cut into.

    Attributes:
        made_up: the model need not take it.
    """

    inputs: Sequence[torch.Tensor]
    rows: tuple[int, ...]
    made_up: bool = True


def probes_of(inputs: Sequence[torch.Tensor], dims: BatchDims) -> Iterator[Probe]:
    """The example, grown to five rows where it has fewer; and the same with other values."""
    first = _grown(inputs, dims)
    batch = dims.batch_size(first) or 0
    least = (batch - 1) // 2
    rows = (batch - least, least)
    yield Probe(first, rows, made_up=False)
    yield Probe(_other_values(first, dims), rows)
    for i, (x, dim) in enumerate(zip(first, dims.dims, strict=True)):
        if dim is not None and not x.is_floating_point() and not x.is_complex() and x.dtype is not torch.bool:
            yield Probe([_ignored(x, dim) if j == i else v for j, v in enumerate(first)], rows)


def _grown(inputs: Sequence[torch.Tensor], dims: BatchDims) -> list[torch.Tensor]:
    found, other = list(inputs), _other_values(inputs, dims)
    while (dims.batch_size(found) or _ROWS) < _ROWS:
        found = [
            x if d is None else torch.cat([x, y], d) for x, y, d in zip(found, other, dims.dims, strict=True)
        ]
        other = _other_values(other, dims)
    least = [x if d is None else x.narrow(d, 0, _ROWS) for x, d in zip(found, dims.dims, strict=True)]
    return least if (dims.batch_size(inputs) or _ROWS) < _ROWS else found


def _other_values(inputs: Sequence[torch.Tensor], dims: BatchDims) -> list[torch.Tensor]:
    """Other numbers of the same kind: what is zero, or equal, on the example by chance is not so here."""
    return [
        x if d is None else (x.flip(d) * -2.5 + 0.3).to(x.dtype) if x.is_floating_point() else x.flip(d)
        for x, d in zip(inputs, dims.dims, strict=True)
    ]


def _ignored(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Integers of which the later rows have more and more that are ignored, so that no two parts count alike."""
    masked = x.detach().clone().movedim(dim, 0)
    rows = masked.size(0)
    flat = masked.reshape(rows, -1)
    for row in range(1, rows):
        flat[row, : flat.size(1) * row // rows if flat.size(1) > 1 else row % 2] = IGNORED
    return flat.reshape(masked.shape).movedim(0, dim)
