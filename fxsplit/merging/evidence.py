"""What a program gives for a batch and for its parts, in values and gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..batch.dims import BatchDims
from ..batch.merge import Merge, merged_one, split_gradients
from ..compare import agree, gradient_for
from ..errors import BatchError
from ..graph.ir import Traced
from ..modules.state import preserved
from .probes import Probe


@dataclass(frozen=True, eq=False)
class Evidence:
    """The flat outputs of a batch and of its parts, with their graphs.

    Attributes:
        leaves: of the whole run and of each part what gradients are asked of: parameters, then inputs.
        shared: how many of them are parameters.
        draws: whether random numbers were drawn, so that equal values are not to be expected.
        writes: whether a run writes to what others have read, so that none can go backward any more.
        eps: of the least precise type that anything is computed in: kernels of another size round in another way, and an
            output of float32 may come from bfloat16.
    """

    whole: Sequence[Any]
    parts: Sequence[Sequence[Any]]
    leaves: Sequence[Sequence[torch.Tensor]]
    dims: Sequence[int | None]
    shared: int
    rows: Sequence[int]
    draws: bool
    writes: bool
    eps: float = 0.0

    def fits(self, i: int, merge: Merge, merges: Sequence[Merge] = ()) -> bool:
        """Whether `merge` gives output `i` of the whole batch, and its gradients.

        Args:
            merges: of all outputs, where `merge` has a weight among them.
        """
        every = list(merges) or [Merge("same")] * len(self.whole)
        every[i] = merge
        columns = [list(values) for values in zip(*self.parts, strict=True)]
        try:
            if merge.how == "same" and not all(
                agree(v, self.whole[i], **_near(self.whole[i], self.eps)) for v in columns[i]
            ):
                return False
            found = columns[i][0] if merge.how == "same" else merged_one(i, every, columns, self.rows)
        except (BatchError, RuntimeError, TypeError):
            return False
        whole = self.whole[i]
        if self.draws:
            return not isinstance(whole, torch.Tensor) or (found.shape == whole.shape and merge.how == "rows")
        if not agree(found, whole, **_near(whole, self.eps)):
            return False
        try:
            return self._same_gradients(i, every, columns)
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            return True  # another run has written to what this one would read

    def _same_gradients(self, i: int, merges: Sequence[Merge], columns: Sequence[Sequence[Any]]) -> bool:
        whole = self.whole[i]
        if self.writes or not isinstance(whole, torch.Tensor) or not whole.requires_grad or whole.is_meta:
            return True
        seed = gradient_for(whole)
        expected = _gradients([whole], [seed], self.leaves[0])
        pieces = split_gradients(merges, {i: seed}, columns, self.rows)
        by_part = []
        for k, part in enumerate(self.parts):
            pairs = [(part[j], row[k]) for j, row in pieces.items()]
            given = [(v, g) for v, g in pairs if g is not None and v.requires_grad]
            by_part.append(_gradients([v for v, _ in given], [g for _, g in given], self.leaves[k + 1]))
        found = [_together(row, d) for row, d in zip(zip(*by_part, strict=True), self._dims(), strict=True)]
        largest = max(
            (float(g.nan_to_num().abs().max()) for g in expected if g is not None and g.numel()), default=0.0
        )
        near = max(1e-3, _eps(whole) * 16, self.eps * 8)
        noise = max(_eps(whole) * 1e3, self.eps * 8)
        return all(
            agree(_filled(a, b), _filled(b, a), atol=noise + largest * near / 50, of_largest=near)
            for a, b in zip(found, expected, strict=True)
        )

    def _dims(self) -> list[int | None]:
        return [None] * self.shared + list(self.dims)

    def described(self, i: int) -> str:
        """The values, for a message."""
        shown = [_show(part[i]) for part in self.parts]
        rows = " and ".join(map(str, self.rows))
        return f"whole batch: {_show(self.whole[i])}; micro-batches of {rows} rows: {', '.join(shown)}"


def evidence_of(
    model: nn.Module, traced: Traced, probe: Probe, dims: BatchDims, *, writes: bool
) -> Evidence | None:
    """Run the program on a batch and on its parts; None where it does not take what was made up."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    outputs, leaves, draws = [], [], False
    for inputs in (probe.inputs, *dims.split(probe.inputs, probe.rows)):
        own = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        try:
            with preserved(model), torch.enable_grad():
                before = torch.get_rng_state()
                outputs.append(list(traced.module(*own)))
                draws = draws or not torch.equal(before, torch.get_rng_state())
        except Exception:
            if probe.made_up:
                return None
            raise
        leaves.append([*parameters, *(x for x in own if x.requires_grad)])
    asked = [d for x, d in zip(probe.inputs, dims.dims, strict=True) if x.requires_grad]
    return Evidence(
        outputs[0], outputs[1:], leaves, asked, len(parameters), probe.rows, draws, writes, traced.eps
    )


def are_rows(whole: Any, parts: Sequence[Any], dim: int) -> bool:
    """Whether the value of a batch is that of its parts, one after the other."""
    if not isinstance(whole, torch.Tensor) or whole.is_meta:
        return True
    try:
        found = torch.cat(list(parts), dim) if whole.dim() else parts[0]
    except (RuntimeError, IndexError):
        return False
    return agree(found, whole, **_near(whole))


def _gradients(
    roots: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    if not roots or not leaves:
        return [None] * len(leaves)
    return torch.autograd.grad(roots, leaves, seeds, allow_unused=True, retain_graph=True)


def _together(pieces: Sequence[torch.Tensor | None], dim: int | None) -> torch.Tensor | None:
    there = [p for p in pieces if p is not None]
    if not there:
        return None
    if dim is not None:
        return torch.cat(there, dim) if len(there) == len(pieces) else None
    return sum(there[1:], there[0])


def _filled(gradient: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """No gradient is one of zeros."""
    return torch.zeros_like(other) if gradient is None and other is not None else gradient


def _near(value: Any, least: float = 0.0) -> dict[str, float]:
    """How near two values are that differ by the order of their terms; those may be of the order of 1 and cancel out.

    Args:
        least: the precision of what they come from, of which there may be a few digits in them.
    """
    if not isinstance(value, torch.Tensor):
        return {"rtol": 32e-12, "atol": 100e-12, "of_largest": 1e-9}
    eps = _eps(value)
    few = 4 * least if eps else 0.0
    rtol, atol = max(eps * 32, few), max(eps * 100, few)
    return {"rtol": rtol, "atol": atol, "of_largest": max(1e-5, eps * 16, few) if eps else 1e-9}


def _eps(value: torch.Tensor) -> float:
    kind = value.dtype
    return torch.finfo(kind).eps if kind.is_floating_point or kind.is_complex else 0.0


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.item():.6g}" if value.numel() == 1 else f"shape {tuple(value.shape)}"
    return repr(value)
