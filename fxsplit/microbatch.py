"""Sizes of micro-batches, and how their outputs are merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .batch import BatchDims
from .compare import agree, equal
from .errors import BatchError


def sizes(batch: int, micro_batches: int) -> list[int]:
    """Rows of each micro-batch: they differ by at most one, larger ones first; none is empty.

    ``sizes(5, 4) == [2, 1, 1, 1]``; ``sizes(3, 8) == [1, 1, 1]``; an empty batch is one empty micro-batch.
    """
    count = max(1, min(batch, micro_batches))
    return [batch // count + (i < batch % count) for i in range(count)]


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
        """The value for the whole batch.

        Raises:
            BatchError: values that were the same for all micro-batches of the example are not so now, or rows
                do not fit together.
        """
        if len(values) == 1:
            return values[0]
        if self.how == "same":
            if not all(equal(v, values[0]) for v in values[1:]):
                raise BatchError(
                    "an output was the same for all micro-batches of the example, and is not so for this batch: "
                    + ", ".join(map(_show, values)),
                    remedy="return the rows and reduce them outside of the model, or Plan(micro_batches=1)",
                )
            return values[0]
        if self.how == "rows":
            try:
                return torch.cat(list(values), self.dim)
            except RuntimeError as error:
                raise BatchError(
                    f"micro-batches of an output do not fit together: {', '.join(map(_show, values))}",
                    remedy="pad the rows to one width, or Plan(micro_batches=1)",
                ) from error
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


def together(values: Sequence[Any]) -> list[Any]:
    """The values of one output on the device of the first: replicas of a stage may be on several."""
    home = next((v.device for v in values if isinstance(v, torch.Tensor)), None)
    return [v.to(home) if isinstance(v, torch.Tensor) else v for v in values]


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
    probes = [list(inputs)] if batch >= 2 else [_two_rows(inputs, dims)]
    probes.append(_other_values(probes[0], dims))
    # Unequal parts, so that a mean is told from a mean of means; not of one row, which some models take for a special case.
    least = max((batch - 1) // 2, 1)
    rows = [max(batch, 2) - least, least]
    seen = []
    for number, probe in enumerate(probes):
        try:
            whole, parts = run(probe), [run(chunk) for chunk in dims.split(probe, rows)]
        except Exception as error:
            if number == 0:
                names_split = [n for n, d in zip(dims.names, dims.dims, strict=True) if d is not None]
                raise BatchError(
                    f"the model does not run on a part of the batch: {str(error).splitlines()[0]}",
                    where=f"split along the batch: {', '.join(names_split)}",
                    remedy="name what is not split, such as Plan(batch_dims={'mask': None}); "
                    "or compile with an example of at least 2 rows",
                ) from error
            continue  # the model does not take numbers that were made up
        seen.append(list(zip(whole, *parts, strict=True)))
    found = [_find_merge(name, evidence, rows) for name, *evidence in zip(names, *seen, strict=True)]
    return [merge for merge, _ in found], [
        name for name, (_, exact) in zip(names, found, strict=True) if not exact
    ]


def _two_rows(inputs: Sequence[torch.Tensor], dims: BatchDims) -> list[torch.Tensor]:
    """An example of one row twice; the second time with other numbers."""
    other = _other_values(inputs, dims)
    return [
        x if d is None else torch.cat([x, y], d) for x, y, d in zip(inputs, other, dims.dims, strict=True)
    ]


def _other_values(inputs: Sequence[torch.Tensor], dims: BatchDims) -> list[torch.Tensor]:
    """Other numbers of the same kind: what is zero, or equal, on the example by chance is not so here."""
    return [
        x if d is None else (x.flip(d) * -2.5 + 0.3).to(x.dtype) if x.is_floating_point() else x.flip(d)
        for x, d in zip(inputs, dims.dims, strict=True)
    ]


def _find_merge(name: str, evidence: Sequence[tuple[Any, ...]], rows: Sequence[int]) -> tuple[Merge, bool]:
    """The rule that fits every probe, and whether it gives the very value of the whole batch."""
    whole, *parts = evidence[0]
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
        fits = [_fit(merge, whole, parts, rows) for whole, *parts in evidence]
        if merge.how == "rows" and all(merged is not None for _, merged in fits):
            return merge, all(exact for exact, _ in fits)
        if all(exact for exact, _ in fits):
            return merge, True
    whole, *parts = evidence[-1]
    raise BatchError(
        f"{name} cannot be put together from micro-batches: it is neither rows, nor a mean, nor a sum over the batch",
        where=f"whole batch: {_show(whole)}; micro-batches of {list(rows)} rows: {', '.join(map(_show, parts))}",
        remedy="return the rows and reduce them outside of the model, or Plan(micro_batches=1)",
    )


def _fit(merge: Merge, whole: Any, parts: Sequence[Any], rows: Sequence[int]) -> tuple[bool, Any]:
    """Whether `merge` gives `whole`, and what it gives where it gives something of that shape."""
    if merge.how == "same" and not all(_close(p, whole) for p in parts):
        return False, None
    try:
        merged = parts[0] if merge.how == "same" else merge.merge(parts, rows)
    except (BatchError, RuntimeError, TypeError):
        return False, None
    if isinstance(whole, torch.Tensor) and merged.shape != whole.shape:
        return False, None
    return _close(merged, whole), merged


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, int | float) and not isinstance(value, bool))


def _close(a: Any, b: Any) -> bool:
    return agree(a, b, rtol=1e-3, atol=1e-6, of_largest=1e-4)


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.item():.6g}" if value.numel() == 1 else f"shape {tuple(value.shape)}"
    return repr(value)
