"""What a call of a pipeline must not leave behind: half-written buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..loss.inside import LossInside
from .autograd import Runner

Places = Sequence[tuple[dict[str, Any], str]]  # tables, and names in them


class Guarded(Runner):
    """A `Runner` that takes the pipeline's lock, and puts buffers back after a failed forward.

    A step's are put back by who takes the step: its end is not the runner's.

    Args:
        written: the buffers that the forward may write.
    """

    def __init__(self, lock: Any, written: Places, *args: Any) -> None:
        super().__init__(*args)
        self._pipeline_lock = lock
        self._written = written

    def forward(self) -> tuple[list[torch.Tensor], list[bool]]:
        with buffers_as_before(self._written):
            found = super().forward()
            self._commit()
            return found

    def step(self, loss: LossInside) -> list[torch.Tensor | None]:
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


@contextlib.contextmanager
def buffers_as_before(written: Places) -> Iterator[None]:
    """After an error, buffers are those that they were before, with the contents that they had."""
    if not written:
        yield
        return
    before = [(table[name], table[name].detach().clone()) for table, name in written]
    try:
        yield
    except BaseException:
        for (table, name), (buffer, value) in zip(written, before, strict=True):
            buffer.data.copy_(value)
            table[name] = buffer
        raise
