"""`Criterion`: from the parts of an output and a target for the whole batch to the loss of the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..arguments import explained
from ..batch.scattered import Scattered
from ..compat import tree_leaves, tree_map
from ..errors import ArgumentError
from .losses import CRITERION, LossInParts, beside, split_target, weighed
from .reductions import LossFn, reduction_of
from .said import compare, gradients_of, loss_of_the_whole, what_counts


class Criterion(nn.Module):
    """A loss that takes a `fxsplit.Scattered` output, and is the loss of the whole batch.

    ``criterion(output, target)``, or ``criterion(output)`` for a loss without target. The target is cut like the output
    and moved to the device of each part; the loss is computed on each part where it is, weighed by the rows or targets
    that count in it, and added up on the device of the first. Of an output that is not scattered it is `loss_fn` itself.

    The peer is ``DataParallelCriterion`` of encoding.parallel, which averages the losses of the replicas without weights.

    Args:
        loss_fn: ``loss_fn(output, target)``, or ``loss_fn(output)`` where the target is None. A module is a child of
            this one.
        reduction: ``"mean"`` over rows, ``"sum"``, or ``"none"`` (a loss for each row, rows first), of a `loss_fn` that
            is none of PyTorch's; those are known. What is said is compared with the loss of the gathered output, in value and
            gradients, in the first call with several parts, and whenever other numbers of targets are zero or negative,
            unless the loss draws random numbers.

    Raises:
        ArgumentError: `loss_fn` is not callable, or `reduction` is not its own.
    """

    @explained(ArgumentError, "fxsplit.Criterion(nn.CrossEntropyLoss())")
    def __init__(self, loss_fn: LossFn, reduction: str | None = None) -> None:
        super().__init__()
        if not callable(loss_fn):
            raise ArgumentError(
                f"loss_fn is a {type(loss_fn).__name__}, which cannot be called",
                remedy="Criterion(nn.CrossEntropyLoss())",
            )
        if isinstance(loss_fn, Criterion):
            raise ArgumentError("loss_fn is a Criterion already", remedy="use that, or its loss_fn")
        reduction_of(loss_fn, reduction, CRITERION.words)
        self.loss_fn, self.reduction = loss_fn, reduction
        self._compared: tuple[Any, ...] = ()

    @explained(
        ArgumentError, "criterion(output, target); give the rest to the loss: nn.CrossEntropyLoss(weight=w)"
    )
    def forward(self, output: Any, target: Any = None) -> torch.Tensor:
        """The loss.

        Args:
            output: what the pipeline gave.
            target: a tensor with a row for each of the batch in dimension 0, or any structure of such and None; those
                without dimensions are given to all parts. Or a `Scattered` of the same sizes.

        Returns:
            0-dim for a mean or a sum; for ``"none"`` the losses of the rows in order. On the device of the first part.

        Raises:
            ArgumentError: several parts, and the reduction cannot be shown to be that of the whole batch; or a target
                without a row for each of the batch. The message says what to type instead.
        """
        if not isinstance(output, Scattered):
            target = target.gather() if isinstance(target, Scattered) else target
            found: torch.Tensor = (
                self.loss_fn(output) if target is None else self.loss_fn(output, beside(output, target))
            )
            return found
        targets = _targets(output, target)
        reduction = reduction_of(self.loss_fn, self.reduction, CRITERION.words)
        loss = weighed(self.loss_fn, reduction, targets, output.sizes, output.merges, CRITERION)
        if reduction.over == "elements" and reduction.how == "mean":
            _check_even(output)
        moved = [tree_map(_to(d), t) for d, t in zip(output.devices, targets, strict=bool(targets))]
        losses = [_loss_of(replace(loss, targets=moved), i, output) for i in range(len(output))]
        whole = loss.whole(losses)
        if reduction.over == "said" and len(output) > 1:
            counts = what_counts(targets, output.sizes)
            if counts != self._compared:
                self._compare(loss, losses, whole, output, target)
                self._compared = counts
        return whole

    def _compare(
        self,
        loss: LossInParts,
        losses: Sequence[torch.Tensor],
        found: torch.Tensor,
        output: Scattered,
        target: Any,
    ) -> None:
        """Whether the loss of the whole batch is what was made of the parts."""
        whole = target.gather() if isinstance(target, Scattered) else target
        moved = tree_map(_to(output.devices[0]), whole)
        expected = loss_of_the_whole(self.loss_fn, output.gather(), moved, output.devices)
        if expected is None:
            return
        leaves = [
            t for part in output for t in tree_leaves(part) if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        gradients = gradients_of(found, leaves), gradients_of(expected, leaves)
        compare(loss.reduction, losses, found, expected, gradients, repr(output), CRITERION.whole)

    def extra_repr(self) -> str:
        name = (
            ""
            if isinstance(self.loss_fn, nn.Module)
            else f"{getattr(self.loss_fn, '__name__', self.loss_fn)}"
        )
        return ", ".join([name] * bool(name) + [f"reduction={self.reduction!r}"] * bool(self.reduction))


def _targets(output: Scattered, target: Any) -> list[Any]:
    """The target of each part; empty where there is none."""
    if target is None:
        return []
    if isinstance(target, Scattered):
        if target.sizes != output.sizes:
            raise ArgumentError(
                f"the output has parts of {list(output.sizes)} rows, the target of {list(target.sizes)}",
                remedy="target.gather()",
            )
        return list(target.parts)
    return split_target(target, output.sizes) if output.has_batch else [target]


def _to(device: torch.device) -> Any:
    return lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf


def _loss_of(loss: LossInParts, i: int, output: Scattered) -> torch.Tensor:
    try:
        here = _on_device(loss.loss_fn, output.devices[0], output.devices[i])
        return replace(loss, loss_fn=here)(i, output[i])
    except BaseException as error:
        error.add_note(f"fxsplit: in the loss of part {i} of {len(loss.rows)}, of {loss.rows[i]} rows")
        raise


def _on_device(loss_fn: LossFn, first: torch.device, device: torch.device) -> LossFn:
    """The loss with copies of its tensors for a part on another device than the first; gradients reach the originals."""
    if device == first:
        return loss_fn

    def copies(tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: t.to(device)
            for name, t in tensors.items()
            if isinstance(t, torch.Tensor) and t.device == first
        }

    if isinstance(loss_fn, functools.partial):
        inner = _on_device(loss_fn.func, first, device)
        return functools.partial(inner, *loss_fn.args, **{**loss_fn.keywords, **copies(loss_fn.keywords)})
    if isinstance(loss_fn, nn.Module):
        own = copies({**dict(loss_fn.named_parameters()), **dict(loss_fn.named_buffers())})
        return lambda *given, **named: torch.func.functional_call(loss_fn, own, given, named)
    return loss_fn


def _check_even(output: Scattered) -> None:
    """A mean over elements is one over rows where all rows have as many of them."""
    shapes = [t.shape for part in output for t in tree_leaves(part) if isinstance(t, torch.Tensor)]
    each = {s.numel() * (sum(output.sizes) / n) for s, n in zip(shapes, output.sizes, strict=False) if n}
    if len(shapes) == len(output) and len(each) > 1 and max(each) - min(each) > 0.5:
        raise ArgumentError(
            f"the rows of the parts have unequal numbers of elements: {', '.join(str(tuple(s)) for s in shapes)}",
            remedy='reduction="sum" in the loss, divided outside by what counts',
        )
