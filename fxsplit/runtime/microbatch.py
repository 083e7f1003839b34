"""Split the tensor inputs into micro-batches, and merge the outputs of the micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..errors import BatchError, PlanError, did_you_mean
from ..signature import Signature


def sizes(batch: int, micro_batches: int) -> list[int]:
    """Rows of each micro-batch: they differ by at most one, larger ones first; none is empty.

    ``sizes(5, 4) == [2, 1, 1, 1]``; ``sizes(3, 8) == [1, 1, 1]``; an empty batch is one empty micro-batch.
    """
    count = max(1, min(batch, micro_batches))
    return [batch // count + (i < batch % count) for i in range(count)]


@dataclass(frozen=True)
class BatchDims:
    """For each tensor input the dimension that holds the batch, or None for an input that is not split."""

    dims: tuple[int | None, ...]
    names: tuple[str, ...]

    @classmethod
    def of_example(
        cls, signature: Signature, inputs: Sequence[torch.Tensor], chosen: Mapping[str, int | None] | None
    ) -> BatchDims:
        """Dimension 0 of every tensor whose dimension 0 is as long as that of the first one; `chosen` overrides.

        Raises:
            PlanError: `chosen` names an unknown argument, or a dimension that it does not have.
            BatchError: two chosen dimensions differ in length.
        """
        chosen = dict(chosen or {})
        known = {a.name for a in signature.arguments} | {a.argument for a in signature.arguments}
        for name in chosen:
            if name not in known:
                raise PlanError(
                    f"batch_dims names {name!r}, which is no tensor argument",
                    remedy=did_you_mean(name, known),
                )
        asked = [chosen.get(a.name, chosen.get(a.argument, -1)) for a in signature.arguments]
        for argument, dim in zip(signature.arguments, asked, strict=True):
            if dim is not None and dim >= argument.dim:
                raise PlanError(
                    f"batch_dims[{argument.name!r}] is {dim}, but the argument has {argument.dim} dimensions"
                )
        first = [(x.shape[d], d) for x, d in zip(inputs, asked, strict=True) if d is not None and d >= 0]
        guess = [x.shape[0] for x, d in zip(inputs, asked, strict=True) if d == -1 and x.dim()]
        batch = first[0][0] if first else guess[0] if guess else None
        dims = tuple(
            (0 if x.dim() and x.shape[0] == batch else None) if d == -1 else d
            for x, d in zip(inputs, asked, strict=True)
        )
        found = cls(dims, tuple(a.name for a in signature.arguments))
        found.batch_size(inputs)
        return found

    def batch_size(self, inputs: Sequence[torch.Tensor]) -> int | None:
        """Rows of this batch; None where no input is split.

        Raises:
            BatchError: two inputs disagree; names both.
        """
        batch: tuple[str, int] | None = None
        for name, x, dim in zip(self.names, inputs, self.dims, strict=True):
            if dim is None:
                continue
            if batch is not None and x.shape[dim] != batch[1]:
                raise BatchError(
                    f"{batch[0]!r} has a batch of {batch[1]} rows, {name!r} of {x.shape[dim]} (dimension {dim})",
                    remedy=f"give both the same batch; or, where {name!r} is not split, Plan(batch_dims={{{name!r}: None}})",
                )
            batch = batch or (name, x.shape[dim])
        return batch[1] if batch else None

    def split(self, inputs: Sequence[torch.Tensor], rows: Sequence[int]) -> list[list[torch.Tensor]]:
        """Per micro-batch the inputs: views of rows, in order; an input that is not split is given whole."""
        if len(rows) == 1:
            return [list(inputs)]
        pieces = [
            torch.split(x, list(rows), dim) if dim is not None else [x] * len(rows)
            for x, dim in zip(inputs, self.dims, strict=True)
        ]
        return [list(piece) for piece in zip(*pieces, strict=True)]


How = Literal["rows", "same", "mean", "sum"]


@dataclass(frozen=True)
class Merge:
    """How the values of one output, one for each micro-batch, become the value for the whole batch.

    ``rows``: concatenated along `dim`. ``same``: equal in all, the first is taken. ``mean``: averaged,
    weighted by the rows of each micro-batch. ``sum``: added up.
    """

    how: How
    dim: int = 0

    def merge(self, values: Sequence[Any], rows: Sequence[int]) -> Any:
        """The value for the whole batch."""
        if len(values) == 1 or self.how == "same":
            return values[0]
        if self.how == "rows":
            return torch.cat(list(values), self.dim)
        weights = [n / sum(rows) for n in rows] if self.how == "mean" else [1] * len(rows)
        return sum((v * w for v, w in zip(values[1:], weights[1:], strict=True)), values[0] * weights[0])

    def split_gradient(
        self, gradient: torch.Tensor, values: Sequence[torch.Tensor], rows: Sequence[int]
    ) -> list[torch.Tensor | None]:
        """The gradient of each micro-batch's value, given the gradient of the merged one."""
        if len(rows) == 1:
            return [gradient]
        if self.how == "rows":
            return list(torch.split(gradient, [v.shape[self.dim] for v in values], self.dim))
        if self.how == "mean":
            return [gradient * (n / sum(rows)) for n in rows]
        return [gradient, *([None] * (len(rows) - 1))] if self.how == "same" else [gradient] * len(rows)


def find_merges(
    run: Callable[[Sequence[torch.Tensor]], Sequence[Any]],
    inputs: Sequence[torch.Tensor],
    dims: BatchDims,
    names: Sequence[str],
) -> tuple[list[Merge], list[str]]:
    """Decide by evidence how each output is merged: run the example whole and in two micro-batches.

    Args:
        run: the model in eval mode, flat inputs to flat outputs.
        names: of the outputs, for messages.

    Returns:
        The merges, and the names of outputs that mix rows of the batch (their micro-batched value is not the
        unsplit one).

    Raises:
        BatchError: an output that no rule reproduces.
    """
    batch = dims.batch_size(inputs)
    if batch is None:
        raise BatchError(
            "no input has a batch dimension, so there is nothing to split into micro-batches",
            remedy='Plan(micro_batches=1), or Plan(batch_dims={"x": 0})',
        )
    rows = [batch - 1, 1] if batch >= 2 else [batch]
    whole = run(inputs)
    parts = [run(chunk) for chunk in dims.split(inputs, rows)]
    merges, mixing = [], []
    for name, expected, *values in zip(names, whole, *parts, strict=True):
        merge, exact = _find_merge(name, expected, values, rows)
        merges.append(merge)
        if not exact:
            mixing.append(name)
    return merges, mixing


def _find_merge(name: str, whole: Any, parts: Sequence[Any], rows: Sequence[int]) -> tuple[Merge, bool]:
    if len(parts) == 1:  # an example of one row: only shapes can tell
        if isinstance(whole, torch.Tensor) and whole.dim() and whole.shape[0] == sum(rows):
            return Merge("rows"), True
        if not isinstance(whole, torch.Tensor):
            return Merge("same"), True
        raise BatchError(
            f"{name} has shape {tuple(whole.shape)}: an example of {sum(rows)} row cannot show how micro-batches of it are merged",
            remedy="compile with an example of at least 2 rows",
        )
    candidates = [Merge("same"), *([Merge("mean"), Merge("sum")] if _is_number(whole) else [])]
    if isinstance(whole, torch.Tensor):
        grown = [
            d
            for d in range(whole.dim())
            if whole.dim() == parts[0].dim() and whole.shape[d] != parts[0].shape[d]
        ]
        if grown:
            candidates = [Merge("rows", grown[0])]
    for merge in candidates:
        if merge.how == "same" and not all(_close(p, whole) for p in parts):
            continue
        try:
            merged = merge.merge(parts, rows)
        except (RuntimeError, TypeError):
            continue
        if _close(merged, whole):
            return merge, True
        if merge.how == "rows" and merged.shape == whole.shape:
            return merge, False
    raise BatchError(
        f"{name} cannot be put together from micro-batches: it is neither rows, nor a mean, nor a sum over the batch",
        where=f"whole batch: {_show(whole)}; micro-batches of {list(rows)} rows: {', '.join(map(_show, parts))}",
        remedy="return the rows and reduce them outside of the model, or Plan(micro_batches=1)",
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, int | float) and not isinstance(value, bool))


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if not (a.dtype.is_floating_point or a.dtype.is_complex):
            return bool(torch.equal(a, b))
        return bool(
            torch.allclose(
                a,
                b,
                rtol=1e-3,
                atol=1e-4 * max(1.0, float(b.abs().max()) if b.numel() else 1.0),
                equal_nan=True,
            )
        )
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-4 * max(1.0, abs(b))
    return type(a) is type(b) and bool(a == b)


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.item():.6g}" if value.numel() == 1 else f"shape {tuple(value.shape)}"
    return repr(value)
