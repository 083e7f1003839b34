"""Is a loss what the user says that it is? In value and gradients, compared with the loss of the whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..compare import agree, gradient_for
from ..compat import tree_leaves
from ..errors import ArgumentError
from ..modules.state import preserved
from .reductions import LossFn, Reduction

Gradients = Sequence[torch.Tensor | None]


def what_counts(targets: Sequence[Any], rows: Sequence[int]) -> tuple[Any, ...]:
    """Equal for two batches whose parts have as many rows, and targets of which as many are zero or negative.

    What a loss ignores is marked by such values; where none of these numbers changes, what is compared once holds on.
    """
    found: list[Any] = [tuple(rows)]
    for part in targets:
        for leaf in tree_leaves(part):
            if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.bool:
                found.append(int(leaf.sum()))
            elif isinstance(leaf, torch.Tensor) and not leaf.is_complex():
                found += [
                    int((leaf == 0).sum()),
                    int((leaf < 0).sum()) if not leaf.is_floating_point() else 0,
                ]
    return tuple(found)


def loss_of_the_whole(
    loss_fn: LossFn, output: Any, target: Any, devices: Sequence[torch.device]
) -> torch.Tensor | None:
    """The loss of a gathered output, of which no trace is left; None where it draws random numbers: it is another then.

    Args:
        devices: of the parts.
    """
    cuda = sorted({d.index or 0 for d in devices if d.type == "cuda"})
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        if isinstance(loss_fn, nn.Module):
            stack.enter_context(preserved(loss_fn))
        before = _random_states(cuda)
        expected = loss_fn(output) if target is None else loss_fn(output, target)
        if any(not torch.equal(a, b) for a, b in zip(before, _random_states(cuda), strict=True)):
            return None
    one = isinstance(expected, torch.Tensor) and expected.numel() == 1
    return expected.reshape(()) if one else expected


def gradients_of(loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> Gradients:
    """The gradients of parts of the output; the graph stays."""
    if not leaves or not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        return [None] * len(leaves)
    return torch.autograd.grad(loss, leaves, gradient_for(loss), retain_graph=True, allow_unused=True)


def compare(
    reduction: Reduction,
    losses: Sequence[torch.Tensor],
    found: torch.Tensor,
    expected: Any,
    gradients: tuple[Gradients, Gradients],
    where: str,
    whole: str,
) -> None:
    """Refuse a loss that is not what is said.

    Args:
        losses: of the parts, weighted.
        found, expected: the loss made of the parts, and that of the whole batch.
        gradients: of the parts of the output, by either.
        whole: how to compute it once for the whole batch.

    Raises:
        ArgumentError: it is not; says both figures.
    """
    none = reduction.how == "none"
    sizes = [part.detach().abs() for part in losses if part.numel()]
    scale = max((float(s.max()) for s in sizes), default=0.0) if none else sum(map(float, sizes))
    kinds = [t.dtype for t in (found, *gradients[0]) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    digits = max(map(_digits, kinds), default=0.0)
    same = isinstance(expected, torch.Tensor) and expected.shape == found.shape
    if same:
        atol = digits * (scale if scale < float("inf") else 0.0)
        near = torch.allclose(
            expected.detach().to(found), found.detach(), rtol=0.0, atol=atol, equal_nan=True
        )
        if near and _same_gradients(*gradients, near=max(digits, 1e-9)):
            return
    raise ArgumentError(
        f"{reduction.name} is said to be a {reduction.how}, and its parts make {_show(found)} of it, but of the whole batch "
        f"it is {_show(expected)}" + ", or has other gradients" * same,
        where=where,
        remedy='a loss that is a sum over rows, with reduction="sum", divided outside by what counts in the batch, such as '
        "criterion(output, target) / (target != -100).sum(); or " + whole,
    )


def _same_gradients(found: Gradients, expected: Gradients, near: float) -> bool:
    sizes = [float(g.nan_to_num().abs().max()) for g in expected if g is not None and g.numel()]
    largest = max(sizes, default=0.0)
    for a, b in zip(found, expected, strict=True):
        known = b if a is None else a
        if known is None:
            continue
        filled = [torch.zeros_like(known) if g is None else g for g in (a, b)]
        if not agree(filled[0].to(filled[1].device), filled[1], atol=near * largest):
            return False
    return True


def _random_states(cuda: Sequence[int]) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(i) for i in cuda)]


def _digits(kind: torch.dtype) -> float:
    """What rounding may make of a sum of many terms."""
    eps = torch.finfo(kind).eps
    return min(8 * eps, 0.1) if eps > 1e-4 else 1e-4 if eps > 1e-10 else 1e-9


def _show(loss: Any) -> str:
    if not isinstance(loss, torch.Tensor):
        return f"a {type(loss).__name__}"
    if loss.numel() == 1:
        return f"{loss.item():.6g}"
    return f"{[round(v, 6) for v in loss.flatten().tolist()[:6]]} of shape {tuple(loss.shape)}"
