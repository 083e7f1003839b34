"""A loss in parts: the target cut like the outputs, and what each part counts in the loss of the whole batch.

encoding.parallel and `torch.nn.DataParallel` recipes take the mean of the replicas' losses: wrong where parts have unequal
rows or unequal targets that count, and a fraction of a sum. Here a part has the weight that it has in the whole.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..batch.merge import Merge
from ..compat import tree_leaves, tree_map
from ..errors import ArgumentError
from .reductions import LossFn, Reduction, reduction_of


@dataclass(frozen=True)
class Caller:
    """Who computes a loss in parts, and what its errors advise.

    Attributes:
        words: the reductions that may be said.
        say: how to say one.
        whole: how to compute the loss once, for the whole batch.
        because: what makes it necessary to know.
    """

    words: tuple[str, ...]
    say: str
    whole: str
    because: str


STEP = Caller(
    ("mean", "sum"),
    'step(..., reduction="mean") if it is a mean over rows, "sum" if it is a sum',
    'Plan(schedule="gpipe"), which computes it once for the whole batch',
    "this schedule computes it for each micro-batch",
)
CRITERION = Caller(
    ("mean", "sum", "none"),
    'pipe.criterion(loss_fn, reduction="mean") if it is a mean over rows, "sum" if it is a sum, "none" if it gives a loss '
    "for each row",
    "loss_fn(output.gather(), target), which computes it once for the whole batch",
    "the output has several parts",
)


@dataclass(frozen=True)
class LossInParts:
    """The loss of a batch in parts.

    Attributes:
        loss_fn: the user's.
        reduction: its own.
        targets: the target of each part; empty where there is none.
        rows: of each part.
        weights: what each part counts.
    """

    loss_fn: LossFn
    reduction: Reduction
    targets: Sequence[Any]
    rows: Sequence[int]
    weights: Sequence[float]

    def __call__(self, part: int, output: Any) -> torch.Tensor:
        """The loss of one part, weighted; for the reduction ``"none"``, of each of its rows.

        Raises:
            ArgumentError: `loss_fn` did not return a single number, or not one for each row; or output and target do
                not line up.
        """
        target = (beside(output, self.targets[part]),) if self.targets else ()
        _check_aligned(self.reduction, output, *target)
        if len(self.rows) > 1:
            _check_layout(self.reduction, output)
        weight = self.weights[part]
        if weight == 0.0:  # a mean over no target is not a number, and no part of the whole
            return _nothing(output)
        loss = self.loss_fn(output, *target)
        if (
            not self.reduction.how or self.reduction.doubt
        ):  # a single part: whatever it is, it is that of the whole
            return loss
        if self.reduction.how == "none":
            return _check_rows_of_loss(loss, self.rows[part])
        loss = check_loss(loss)
        return loss if weight == 1.0 else loss * weight

    def whole(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """The loss of the whole batch from those of its parts, on the device of the first."""
        moved = [loss.to(losses[0].device) for loss in losses[1:]]
        if not moved:
            return losses[0]
        if self.reduction.how == "none":
            return torch.cat([losses[0], *moved])
        return sum(moved, losses[0])


def beside(output: Any, target: Any) -> Any:
    """The target on the device of the output, wherever a loader has put it; as it is, if outputs are on several."""
    if isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor):
        return target if target.device == output.device else target.to(output.device)
    devices = {leaf.device for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)}
    if len(devices) != 1:
        return target
    (device,) = devices
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, target)


def in_parts(
    loss_fn: LossFn,
    target: Any,
    rows: Sequence[int],
    reduction: str | None,
    merges: Sequence[Merge],
    caller: Caller = STEP,
) -> LossInParts:
    """The loss in parts that make up the loss of the whole batch.

    Args:
        target: a tensor with a row for each of the batch, or any structure of such; None for none.
        rows: of each part.
        reduction: ``"mean"`` or ``"sum"`` over rows, or ``"none"``; None to know it from `loss_fn`.
        merges: how the outputs of the parts become those of the batch.

    Raises:
        ArgumentError: the reduction of `loss_fn` is not known, the outputs are not rows, or the target has no row for
            each of the batch.
    """
    found = reduction_of(loss_fn, reduction, caller.words)
    targets = split_target(target, rows) if target is not None else []
    return weighed(loss_fn, found, targets, rows, merges, caller)


def weighed(
    loss_fn: LossFn,
    reduction: Reduction,
    targets: Sequence[Any],
    rows: Sequence[int],
    merges: Sequence[Merge],
    caller: Caller,
) -> LossInParts:
    """As `in_parts`, for a target that is cut already."""
    if len(rows) == 1:
        return LossInParts(loss_fn, reduction, targets, rows, [1.0])
    if not reduction.how or reduction.doubt:
        why = f" ({reduction.doubt})" * bool(reduction.doubt)
        raise ArgumentError(
            f"how {reduction.name} reduces a batch to a number is not known{why}, and {caller.because}",
            remedy=f"{caller.say}; or {caller.whole}",
        )
    if reduction.how not in caller.words:
        raise ArgumentError(
            f"{reduction.name} gives a loss for each row, not a single number",
            remedy="return loss.mean() or loss.sum()",
        )
    _check_rows(merges, reduction, caller)
    weights = [1.0] * len(rows)
    if reduction.how == "mean":
        weights = [n / sum(rows) for n in rows]
        if reduction.over == "targets" and targets:
            counts = [_counted(part, reduction) for part in targets]
            # Without any target that counts the loss is not a number, as it is for the whole batch.
            weights = [c / sum(counts) for c in counts] if sum(counts) else weights
    return LossInParts(loss_fn, reduction, targets, rows, weights)


def check_loss_fn(loss_fn: Any, reduction: Any) -> None:
    """Refuse, before anything has run, a loss that cannot be called.

    Raises:
        ArgumentError: it cannot, or the reduction is no word.
    """
    if not callable(loss_fn):
        raise ArgumentError(
            f"loss_fn is {loss_fn!r}, which cannot be called", remedy="loss_fn=nn.functional.mse_loss"
        )
    if reduction is not None and not isinstance(reduction, str):
        raise ArgumentError(f"reduction={reduction!r} is not known", remedy='reduction="mean" or "sum"')


def check_loss(loss: Any) -> torch.Tensor:
    """The loss, if it is a single number.

    Raises:
        ArgumentError: it is not.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shown = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ArgumentError(
            f"loss_fn returned {shown}, not a single number", remedy="return loss.mean() or loss.sum()"
        )
    return loss.reshape(())


def split_target(target: Any, rows: Sequence[int]) -> list[Any]:
    """The target of each part: rows of its tensors, in order; one of no dimension, or a None, is given to all.

    Raises:
        ArgumentError: a leaf is no tensor, or has no row for each of the batch.
    """
    whole = sum(rows)
    for leaf in tree_leaves(target):
        if not isinstance(leaf, torch.Tensor) and leaf is not None:
            raise ArgumentError(
                f"a target is a {type(leaf).__name__}, which is not cut into micro-batches",
                remedy="tensors in the target, and what is not about rows in loss_fn itself",
            )
        if leaf is not None and leaf.dim() and leaf.size(0) != whole:
            raise ArgumentError(
                f"a target of shape {tuple(leaf.shape)} has no row for each of the {whole} of the batch",
                remedy="rows first in the target, and flatten them in loss_fn; what is not about rows: in loss_fn itself",
            )
    places = list(map(slice, itertools.accumulate(rows, initial=0), itertools.accumulate(rows)))
    if isinstance(target, torch.Tensor):
        return [target[place] if target.dim() else target for place in places]
    return [tree_map(functools.partial(_cut, place), target) for place in places]


def _cut(place: slice, leaf: Any) -> Any:
    return leaf[place] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _nothing(output: Any) -> torch.Tensor:
    """Zero, with a gradient of zero: also where the output is not a number, as in a loss that ignores those rows."""
    leaf = next(t for t in tree_leaves(output) if _is_tensor(t) and t.is_floating_point())
    return torch.where(torch.zeros((), dtype=torch.bool, device=leaf.device), leaf.sum(), leaf.new_zeros(()))


def _check_rows(merges: Sequence[Merge], reduction: Reduction, caller: Caller) -> None:
    """The parts add up to the whole if the outputs are rows, or means of rows in a mean, or sums of rows in a sum."""
    said = reduction.over == "said"
    for merge in merges:
        rows = merge.how == "rows" and (merge.dim == 0 or said)
        if merge.weight is not None or merge.how == "total":
            raise ArgumentError(
                f"an output is a mean {merge.note or 'of several terms'}, and what the whole batch weighs is not known before "
                "the first micro-batch goes backward",
                remedy=caller.whole,
            )
        alike = said and merge in (Merge("mean"), Merge("sum")) and merge.how == reduction.how
        if not rows and not alike:
            raise ArgumentError(
                "an output is no tensor with a row for each of the batch in dimension 0, so the loss of the batch is not "
                "the sum of those of micro-batches",
                remedy=caller.whole,
            )


def _check_aligned(reduction: Reduction, output: Any, target: Any = None) -> None:
    """Broadcast, a row of the target would meet rows of the output that are not its own."""
    if reduction.over != "elements" or not (
        isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)
    ):
        return
    if target.dim() and output.dim() != target.dim():
        raise ArgumentError(
            f"a target of shape {tuple(target.shape)} does not line up with an output of shape {tuple(output.shape)}: "
            "each of its rows would meet all of the others",
            remedy="as many dimensions in both, such as target.unsqueeze(1) or output.squeeze(1)",
        )


def _check_layout(reduction: Reduction, output: Any) -> None:
    """What PyTorch's losses take for rows has to be the rows of the batch."""
    if reduction.over == "said" or not isinstance(output, torch.Tensor):
        return
    if reduction.over in ("rows", "targets") and output.dim() < 2:
        raise ArgumentError(
            f"an output of shape {tuple(output.shape)} is to {reduction.name} the classes of a single row, so its parts "
            "are not rows of the batch",
            remedy="an output of shape (rows, classes)",
        )
    for name, value in reduction.settings.items():
        # The weight of a class is looked up; other tensors meet the output from the last dimension on.
        looked_up = name == "weight" and reduction.over == "targets"
        if not _is_tensor(value) or looked_up or value.dim() < output.dim():
            continue
        if value.dim() > output.dim() or (value.dim() and value.size(0) != 1):
            raise ArgumentError(
                f"{name} of {reduction.name} has shape {tuple(value.shape)}: a row for each of the batch, which is not cut "
                "with it",
                remedy=f"{name} in the target: criterion(lambda y, t: f(y, t[0], {name}=t[1]), reduction='sum') of "
                f"(target, {name})",
            )


def _check_rows_of_loss(loss: Any, rows: int) -> torch.Tensor:
    if not _is_tensor(loss) or not loss.dim() or loss.size(0) % max(rows, 1):
        shown = f"shape {tuple(loss.shape)}" if _is_tensor(loss) else type(loss).__name__
        raise ArgumentError(
            f"loss_fn returned {shown}, not a loss for each of {rows} rows",
            remedy='reduction="mean" or "sum" if it is a number'
            if not _is_tensor(loss) or not loss.dim()
            else "rows first",
        )
    result: torch.Tensor = loss
    return result


def _counted(target: Any, reduction: Reduction) -> float:
    """How much of a mean these targets are: the sum of their weights, without those that are ignored."""
    if not _is_tensor(target):
        raise ArgumentError("the target of a classification loss is not a tensor", remedy="target=labels")
    if not target.dim():
        raise ArgumentError(
            f"the target of {reduction.name} is a single class", remedy="a target of shape (rows,)"
        )
    if target.is_floating_point():  # probabilities: a mean over all of them, whatever their class
        return float(target.numel())
    settings = reduction.settings
    counted = target[target != settings.get("ignore_index", -100)].long()
    weight = settings.get("weight")
    return float(counted.numel() if weight is None else weight.to(counted.device)[counted].double().sum())
