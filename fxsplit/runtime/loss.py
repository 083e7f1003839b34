"""The loss inside of a schedule: computed for each micro-batch, weighted so that the sum is that of the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..compat import tree_leaves, tree_map
from ..errors import ArgumentError, GradientError
from ..microbatch import Merge

LossFn = Callable[..., torch.Tensor]

# Their mean is over the elements, so over rows of equal size.
_BY_ROWS: tuple[Any, ...] = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss),
    *(nn.KLDivLoss, nn.PoissonNLLLoss, nn.SoftMarginLoss),
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy),
    *(F.binary_cross_entropy_with_logits, F.kl_div, F.poisson_nll_loss, F.soft_margin_loss),
)
# Their mean is over the targets that count, each with the weight of its class.
_BY_TARGETS: tuple[Any, ...] = (nn.CrossEntropyLoss, nn.NLLLoss, F.cross_entropy, F.nll_loss)


@dataclass(frozen=True)
class MicroLoss:
    """The loss of a batch in parts.

    Attributes:
        loss_fn: the user's.
        targets: the target of each micro-batch; empty where there is none.
        weights: what each part counts.
    """

    loss_fn: LossFn
    targets: Sequence[Any]
    weights: Sequence[float]

    def __call__(self, micro_batch: int, output: Any) -> torch.Tensor:
        """The part of one micro-batch, weighted.

        Raises:
            ArgumentError: `loss_fn` did not return a single number.
        """
        weight = self.weights[micro_batch]
        if weight == 0.0:  # a mean over no target is not a number, and no part of the whole
            return torch.zeros(
                (), device=next((t.device for t in tree_leaves(output) if _is_tensor(t)), None)
            )
        target = (self.targets[micro_batch],) if self.targets else ()
        loss = check_loss(self.loss_fn(output, *target))
        return loss if weight == 1.0 else loss * weight


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


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


def check_differentiable(depends: bool) -> None:
    """Refuse a step that has nothing to go backward with.

    Raises:
        GradientError: the loss depends on nothing that requires a gradient.
    """
    if not depends:
        raise GradientError(
            "the loss depends on nothing that requires a gradient",
            remedy="pipe(x) computes without gradients",
        )


def leaves_of(loss: torch.Tensor) -> list[torch.Tensor]:
    """The leaves of the loss's graph that require a gradient."""
    found: dict[int, torch.Tensor] = {}
    seen, waiting = set(), [loss.grad_fn] if loss.grad_fn is not None else []
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            found[id(leaf)] = leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return list(found.values())


def in_parts(
    loss_fn: LossFn, target: Any, rows: Sequence[int], reduction: str | None, merges: Sequence[Merge]
) -> MicroLoss:
    """The loss in parts whose sum is the loss of the whole batch.

    Args:
        target: a tensor with a row for each of the batch, or any structure of such; None for none.
        rows: of each micro-batch.
        reduction: ``"mean"`` or ``"sum"`` over rows; None to know it from `loss_fn`.
        merges: how the outputs of micro-batches become those of the batch.

    Raises:
        ArgumentError: the reduction of `loss_fn` is not known, the outputs are not rows, or the target has no row for
            each of the batch.
    """
    targets = _split(target, rows) if target is not None else []
    by_rows = [n / sum(rows) for n in rows]
    if reduction not in (None, "mean", "sum"):
        raise ArgumentError(f"reduction={reduction!r} is not known", remedy='reduction="mean" or "sum"')
    kind, settings = _known(loss_fn)
    said = settings.get("reduction", "mean")
    if kind is not None and reduction is not None and reduction != said.replace("batchmean", "mean"):
        raise ArgumentError(
            f"reduction={reduction!r}, but that of {_name(loss_fn)} is {said!r}",
            remedy="leave out reduction=",
        )
    _check_rows(merges, reduction)
    if reduction is not None and kind is None:
        return MicroLoss(loss_fn, targets, by_rows if reduction == "mean" else [1.0] * len(rows))
    if kind is not None and said == "sum":
        return MicroLoss(loss_fn, targets, [1.0] * len(rows))
    if kind in _BY_ROWS and said in ("mean", "batchmean"):
        return MicroLoss(loss_fn, targets, by_rows)
    if kind in _BY_TARGETS and said == "mean" and targets and not _smooths_over_nothing(settings):
        counts = [_counted(part, settings) for part in targets]
        total = sum(counts)
        # Without any target that counts the loss is not a number, as it is for the whole batch.
        return MicroLoss(loss_fn, targets, [c / total for c in counts] if total else by_rows)
    raise ArgumentError(
        f"how {_name(loss_fn)} reduces a batch to a number is not known, and this schedule computes it for each "
        "micro-batch",
        remedy='step(..., reduction="mean") if it is a mean over rows, "sum" if it is a sum; or Plan(schedule="gpipe"), '
        "which computes it once for the whole batch",
    )


def _name(loss_fn: LossFn) -> str:
    return str(getattr(loss_fn, "__name__", type(loss_fn).__name__))


def _check_rows(merges: Sequence[Merge], reduction: str | None) -> None:
    """The parts add up to the whole if the outputs are rows, or means of rows in a mean."""
    for merge in merges:
        rows = merge.how == "rows" and (merge.dim == 0 or reduction is not None)
        if not rows and not (merge.how == "mean" and reduction == "mean"):
            raise ArgumentError(
                "an output is no tensor with a row for each of the batch in dimension 0, so the loss of the batch is not "
                "the sum of those of micro-batches",
                remedy='Plan(schedule="gpipe"), which computes the loss once for the whole batch',
            )


def _smooths_over_nothing(settings: Mapping[str, Any]) -> bool:
    """Label smoothing spreads over all classes: also where those of a micro-batch weigh nothing."""
    weight = settings.get("weight")
    return bool(settings.get("label_smoothing") and weight is not None and (weight == 0).any())


# Arguments that are the reduction by another name, or what is given to the loss itself.
_NOT_SETTINGS = ("size_average", "reduce", "input", "target")


def _known(loss_fn: LossFn) -> tuple[Any, Mapping[str, Any]]:
    """The loss of PyTorch that this is, and its settings."""
    if isinstance(loss_fn, functools.partial):
        kind, settings = _known(loss_fn.func)
        if loss_fn.args or any(name in loss_fn.keywords for name in _NOT_SETTINGS):
            return None, {}
        return kind, {**settings, **loss_fn.keywords}
    kind = type(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
    if kind not in (*_BY_ROWS, *_BY_TARGETS):
        return None, {}
    return kind, vars(loss_fn) | dict(loss_fn.named_buffers()) if isinstance(loss_fn, nn.Module) else {}


def _counted(target: Any, settings: Mapping[str, Any]) -> float:
    """How much of a mean these targets are: the sum of their weights, without those that are ignored."""
    if not isinstance(target, torch.Tensor):
        raise ArgumentError("the target of a classification loss is not a tensor", remedy="target=labels")
    if target.is_floating_point():  # probabilities: a mean over all of them, whatever their class
        return float(target.numel())
    counted = target[target != settings.get("ignore_index", -100)]
    weight = settings.get("weight")
    return float(counted.numel() if weight is None else weight.to(counted.device)[counted].double().sum())


def _split(target: Any, rows: Sequence[int]) -> list[Any]:
    for leaf in tree_leaves(target):
        if not _is_tensor(leaf) and leaf is not None:
            raise ArgumentError(
                f"a target is a {type(leaf).__name__}, which is not cut into micro-batches",
                remedy="tensors in the target, and what is not about rows in loss_fn itself",
            )
        if leaf is not None and leaf.dim() and leaf.size(0) != sum(rows):
            raise ArgumentError(
                f"a target of shape {tuple(leaf.shape)} has no row for each of the {sum(rows)} of the batch",
                remedy="rows first in the target, and flatten them in loss_fn; what is not about rows: in loss_fn itself",
            )
    ends = [sum(rows[: i + 1]) for i in range(len(rows))]
    return [tree_map(_rows_of(end - n, end), target) for n, end in zip(rows, ends, strict=True)]


def _rows_of(begin: int, end: int) -> Callable[[Any], Any]:
    def cut(leaf: Any) -> Any:
        return leaf[begin:end] if _is_tensor(leaf) and leaf.dim() else leaf

    return cut
