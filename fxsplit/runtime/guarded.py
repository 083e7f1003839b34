"""What a call of a pipeline must not do: leave half-written buffers behind, or wait for itself."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ArgumentError
from ..graph import resolve
from ..ir import Program
from .autograd import Runner
from .inside import LossInside

_LOSSES = threading.local()  # of which pipelines this thread computes the loss, by their locks


@contextlib.contextmanager
def inside_loss(lock: Any) -> Iterator[None]:
    """While a worker computes the loss: a call of that pipeline would wait for the step, which waits for the loss."""
    mine = _LOSSES.__dict__.setdefault("locks", set())
    mine.add(id(lock))
    try:
        yield
    finally:
        mine.discard(id(lock))


def check_not_in_loss(lock: Any, schedule: str) -> None:
    """Refuse a call from inside of the loss of the same pipeline.

    Raises:
        ArgumentError: it is one.
    """
    if id(lock) in _LOSSES.__dict__.get("locks", ()):
        raise ArgumentError(
            f"loss_fn calls the pipeline, which is in the middle of its step under schedule={schedule!r}",
            remedy='Plan(schedule="gpipe"), whose loss is computed after all forwards; or call pipe.unsplit()',
        )


class Guarded(Runner):
    """A `Runner` that takes the pipeline's lock, and puts buffers back after a failed forward."""

    def __init__(self, lock: Any, program: Program, model: nn.Module, *args: Any) -> None:
        super().__init__(*args)
        self._pipeline_lock = lock
        self._written = written_buffers(program, model)

    def forward(self) -> tuple[list[torch.Tensor], list[bool]]:
        with buffers_as_before(self._written):
            found = super().forward()
            self._commit()
            return found

    def step(self, loss: LossInside) -> list[torch.Tensor | None]:
        with buffers_as_before(self._written):
            found = super().step(loss)
            self._commit()
            return found

    def _commit(self) -> None:
        if self.call.norms is not None:
            self.call.norms.commit()

    def backward(
        self, gradients: Sequence[torch.Tensor | None], *, keep_graph: bool
    ) -> list[torch.Tensor | None]:
        with self._pipeline_lock:
            return super().backward(gradients, keep_graph=keep_graph)


def written_buffers(program: Program, model: nn.Module) -> list[torch.Tensor]:
    """The buffers that a forward writes to."""
    return [resolve(model, name) for stage in program.stages for name in stage.writes]


@contextlib.contextmanager
def buffers_as_before(written: Sequence[torch.Tensor]) -> Iterator[None]:
    """After an error, buffers have the contents that they had before."""
    before = [buffer.detach().clone() for buffer in written]
    try:
        yield
    except BaseException:
        for buffer, value in zip(written, before, strict=True):
            buffer.data.copy_(value)
        raise
