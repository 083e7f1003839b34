"""Sizes of micro-batches, and how their outputs are merged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch

from ..compare import equal
from ..errors import BatchError


def sizes(batch: int, micro_batches: int) -> list[int]:
    """Rows of each micro-batch: they differ by at most one, larger ones first; none is empty.

    ``sizes(5, 4) == [2, 1, 1, 1]``; ``sizes(3, 8) == [1, 1, 1]``; an empty batch is one empty micro-batch.
    """
    count = max(1, min(batch, micro_batches))
    return [batch // count + (i < batch % count) for i in range(count)]


How = Literal["rows", "same", "mean", "sum", "total"]
Counts = Sequence[int | torch.Tensor]


@dataclass(frozen=True)
class Total:
    """What the weights of a mean add up to, where a number keeps the program from dividing by zero.

    Of weights ``clamp(s, min=number)`` it is ``clamp(s₁ + … + s_m, min=number)``, and so with ``s + number``.

    Attributes:
        output: the flat output that is s.
    """

    output: int
    how: Literal["clamp", "add"]
    number: float

    def of(self, columns: Sequence[Sequence[Any]]) -> Any:
        """The number for the whole batch."""
        total = _sum(together(columns[self.output]))
        return total.clamp(min=self.number) if self.how == "clamp" else total + self.number


@dataclass(frozen=True)
class Merge:
    """How the values of one output, one for each micro-batch, become the value for the whole batch.

    ``rows``: concatenated along `dim`. ``same``: equal in all, the first is taken. ``mean``: averaged, weighted by what
    counts in each micro-batch. ``sum``: added up. ``total``: the sum of `terms`, each of which is merged in its own way.

    Attributes:
        weight: of a mean, the flat output that says how much counts; None for rows.
        total: what these add up to; None for their sum.
        terms: of a total, the flat outputs that it is made of, and how often each.
        note: what people should know of it.
    """

    how: How
    dim: int = 0
    weight: int | None = None
    total: Total | None = None
    terms: tuple[tuple[int, float], ...] = ()
    note: str = field(default="", compare=False)

    def merge(self, values: Sequence[Any], counts: Counts, total: Any = None) -> Any:
        """The value for the whole batch.

        Args:
            counts: how much each micro-batch counts in a mean. One that counts nothing may have any value.
            total: what they add up to; None for their sum.

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
        if self.how == "sum":
            return _sum(values)
        return _sum([_part(v, n) for v, n in zip(values, _shares(values, counts, total), strict=True)])

    def split_gradient(
        self, gradient: torch.Tensor, values: Sequence[torch.Tensor], counts: Counts, total: Any = None
    ) -> list[torch.Tensor | None]:
        """The gradient of each micro-batch's value, given the gradient of the merged one.

        None for one that counts nothing: its value may be no number, and a number times its gradient would not be one.
        """
        if len(values) == 1:
            return [gradient]
        if self.how == "rows":
            return list(torch.split(gradient, [v.shape[self.dim] for v in values], self.dim))
        if self.how == "mean":
            shares = _shares(values, counts, total)
            return [None if _is_nothing(n) else gradient * n for n in shares]
        return [gradient, *([None] * (len(values) - 1))] if self.how == "same" else [gradient] * len(values)


class Merges(tuple[Merge, ...]):
    """How each flat output of a program is merged: of the model's own, and after them of weights and terms.

    Attributes:
        shown: how many are the model's.
    """

    shown: int

    def __new__(cls, merges: Iterable[Merge]) -> Self:
        """As a tuple."""
        found = super().__new__(cls, merges)
        hidden = [m.weight for m in found if m.weight is not None]
        hidden += [m.total.output for m in found if m.total is not None]
        hidden += [term for m in found for term, _ in m.terms]
        found.shown = min(hidden, default=len(found))
        return found


def merged(merges: Merges, columns: Sequence[Sequence[Any]], rows: Sequence[int]) -> list[Any]:
    """The model's flat outputs for the whole batch.

    Args:
        columns: of each flat output the values of all micro-batches; they are put together where the first one is.
        rows: of each micro-batch.
    """
    return [merged_one(i, merges, columns, rows) for i in range(merges.shown)]


def check_rows(merges: Merges, columns: Sequence[Sequence[Any]]) -> None:
    """Refuse rows that do not fit together, where nobody asks for the merged output.

    Raises:
        BatchError: as `Merge.merge`.
    """
    for merge, values in zip(merges[: merges.shown], columns, strict=False):
        if (
            merge.how == "rows"
            and len({(*v.shape[: merge.dim], *v.shape[merge.dim + 1 :]) for v in values}) > 1
        ):
            merge.merge(together(values), ())  # says so, if it is so


def merged_one(i: int, merges: Sequence[Merge], columns: Sequence[Sequence[Any]], rows: Sequence[int]) -> Any:
    """Flat output `i` for the whole batch."""
    values = together(columns[i])
    if not merges[i].terms or len(values) == 1:
        return merges[i].merge(values, *_counts(merges[i], columns, rows))
    return _sum([merged_one(j, merges, columns, rows).to(values[0].device) * n for j, n in merges[i].terms])


def split_gradients(
    merges: Sequence[Merge],
    gradients: Mapping[int, torch.Tensor],
    columns: Sequence[Sequence[Any]],
    rows: Sequence[int],
) -> dict[int, list[torch.Tensor | None]]:
    """Of each flat output the gradients of its values in all micro-batches, given those of the merged ones."""
    found: dict[int, list[torch.Tensor | None]] = {}
    for i, gradient in gradients.items():
        merge = merges[i]
        if merge.terms and len(columns[i]) > 1:
            of_terms = {j: (gradient * n).sum_to_size(columns[j][0].shape) for j, n in merge.terms}
            for j, pieces in split_gradients(merges, of_terms, columns, rows).items():
                _add(found, j, pieces)
            continue
        counts, total = _counts(merge, columns, rows)
        _add(found, i, merge.split_gradient(gradient, columns[i], counts, total))
        if merge.weight is not None and len(counts) > 1 and any(_has_gradient(n) for n in counts):
            for j, given in _weight_gradients(i, merge, gradient, columns).items():
                _add(found, j, given)
    return found


def _weight_gradients(
    i: int, merge: Merge, gradient: torch.Tensor, columns: Sequence[Sequence[Any]]
) -> dict[int, list[torch.Tensor | None]]:
    """Of a mean whose weights depend on parameters: of ``Σ w_i v_i / W``, by w_i and by W."""
    assert merge.weight is not None
    counts, total = _counts(merge, columns, ())
    whole = merge.merge(together(columns[i]), counts, total)
    total = _sum(counts) if total is None else total
    by_total = -gradient * whole / total
    place = merge.weight if merge.total is None else merge.total.output
    if merge.total is not None and merge.total.how == "clamp":  # at the bound, nothing depends on the sum
        inside = _sum(together(columns[place])) >= merge.total.number
        by_total = torch.where(inside, by_total, torch.zeros_like(by_total))
    found: dict[int, list[torch.Tensor | None]] = {}
    by_weight = [gradient * v.to(whole.device) / total for v in columns[i]]
    for j, pieces in ((merge.weight, by_weight), (place, [by_total] * len(by_weight))):
        _add(found, j, [p.sum_to_size(n.shape) for p, n in zip(pieces, columns[j], strict=True)])
    return found


Pieces = Sequence[torch.Tensor | None]


def _add(found: dict[int, list[torch.Tensor | None]], i: int, pieces: Pieces) -> None:
    known = found.get(i, [None] * len(pieces))
    found[i] = [p if k is None else k if p is None else k + p for k, p in zip(known, pieces, strict=True)]


def _counts(merge: Merge, columns: Sequence[Sequence[Any]], rows: Sequence[int]) -> tuple[Counts, Any]:
    """How much each micro-batch counts, and what that adds up to if it is not their sum."""
    if merge.weight is None:
        return rows, None
    return together(columns[merge.weight]), None if merge.total is None else merge.total.of(columns)


def _sum(values: Sequence[Any]) -> Any:
    return sum(values[1:], values[0])


def _shares(values: Sequence[Any], counts: Counts, total: Any) -> list[Any]:
    """The part of each micro-batch in a mean, as numbers or as tensors that fit its value."""
    total = _sum(counts) if total is None else total
    if not isinstance(total, torch.Tensor):  # of nothing, a mean is no number
        return [n / total if total else float("nan") for n in counts]
    exact = torch.promote_types(values[0].dtype, torch.float32)  # bfloat16 counts to 256
    shares = [
        torch.as_tensor(n, device=total.device).detach().to(exact) / total.detach().to(exact) for n in counts
    ]
    return [n.to(v.device, v.dtype) for n, v in zip(shares, values, strict=True)]


def _part(value: Any, share: Any) -> Any:
    """A term of a mean; nothing where it counts nothing, whatever its value is."""
    if _is_nothing(share):
        return torch.zeros_like(value, requires_grad=False)
    if isinstance(share, torch.Tensor) and share.dim():
        return torch.where(share == 0, torch.zeros_like(value), value * share)
    return value * share


def _is_nothing(share: Any) -> bool:
    return bool((share == 0).all()) if isinstance(share, torch.Tensor) else share == 0


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def together(values: Sequence[Any]) -> list[Any]:
    """The values of one output on the device of the first: replicas of a stage may be on several."""
    home = next((v.device for v in values if isinstance(v, torch.Tensor)), None)
    return [v.to(home) if isinstance(v, torch.Tensor) else v for v in values]


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.item():.6g}" if value.numel() == 1 else f"shape {tuple(value.shape)}"
    return repr(value)
