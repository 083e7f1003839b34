"""A training step: with the loss in the middle of the schedule, or after all forwards."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..compat import tree_map
from ..loss.check import check_differentiable
from ..loss.inside import LossInside
from ..loss.losses import beside, check_loss
from ..loss.reductions import LossFn
from .autograd import Runner

_STEP = threading.local()  # the pipeline, by its lock, of which this thread takes a step from outside


def step_inside(
    runner: Runner, loss: LossInside, leaves: Sequence[torch.Tensor], check: Callable[[], None]
) -> None:
    """Play the whole schedule and add gradients to ``.grad``.

    Args:
        leaves: the inputs and parameters that the runner gives gradients of, in its order; one may be there twice.
        check: called before anything is added.

    Raises:
        BatchError: the outputs are no rows of one batch, and so the loss is not that of one.
    """
    gradients = runner.step(loss)
    # Backward in this thread, here and below: autograd's own for a device may be waiting for the pipeline, in another one.
    with torch.autograd.set_multithreading_enabled(False):
        check()
    runner.check_rows(loss.rows())
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for tensor, gradient in (*zip(leaves, gradients, strict=True), *loss.sums()):
        if gradient is not None:
            known = found.get(id(tensor))
            found[id(tensor)] = (tensor, gradient if known is None else known[1] + gradient)
    with torch.autograd.set_multithreading_enabled(False):
        # Autograd adds them to .grad, and runs the hooks of parameters.
        torch.autograd.backward([t for t, _ in found.values()], [g for _, g in found.values()])


def step_outside(
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss_fn: LossFn,
    target: Any,
) -> tuple[torch.Tensor, Any]:
    """Forward, the loss of the merged output, and its backward: the loss and the output, detached."""
    output = forward(*args, **kwargs)
    loss = check_loss(loss_fn(output) if target is None else loss_fn(output, beside(output, target)))
    check_differentiable(loss.requires_grad)
    torch.autograd.backward(loss)
    return loss.detach(), tree_map(lambda v: v.detach() if isinstance(v, torch.Tensor) else v, output)


def call_merged(pipe: Callable[..., Any], lock: Any, *args: Any, **kwargs: Any) -> Any:
    """``pipe(*args, **kwargs)`` with its hooks, and the output of the whole batch, whatever the plan says of gather."""
    with _taking_step(lock):
        return pipe(*args, **kwargs)


def takes_step(lock: Any) -> bool:
    """Whether a step calls: it asks for the output of the whole batch, and puts buffers back itself."""
    return getattr(_STEP, "lock", None) is lock


@contextlib.contextmanager
def _taking_step(lock: Any) -> Iterator[None]:
    before, _STEP.lock = getattr(_STEP, "lock", None), lock
    try:
        yield
    finally:
        _STEP.lock = before
