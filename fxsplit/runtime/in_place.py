"""A pipeline in the place of its model: whoever calls the model calls stages, also with other kinds of arguments.

model.generate(ids)
  └ model(ids, cache: empty)       no pipeline for such a call  ─▶  compiled, under the same placement, and kept
  └ model(id, cache: 5 positions)  nor for such a one           ─▶  the same
  └ model(id, cache: 6 positions)  the pipeline of the call before
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import nn

from ..errors import ArgumentError, AssumptionError, BatchError, GuardError

_MOST = 16  # kinds of calls; who needs more compiles for every call


class Callee(Protocol):
    """A pipeline."""

    model: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""


class InPlace:
    """What the model is while a pipeline is in its place.

    Args:
        pipe: the first to be asked.
        another: makes one for other arguments, of the same model.
    """

    def __init__(self, pipe: Callee, another: Callable[[tuple[Any, ...], dict[str, Any]], Callee]) -> None:
        self.pipes, self._another = [pipe], another

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output for these arguments, of the pipeline that takes them; a new one, if none does."""
        for pipe in self.pipes:
            try:
                found = pipe(*args, **kwargs)
            except (ArgumentError, AssumptionError, BatchError, GuardError):
                continue  # nothing has been changed; if no pipeline can be made for them, that says why
            self.pipes.remove(pipe)
            self.pipes.insert(0, pipe)  # the next call will be like this one
            return found
        made = self._another(args, kwargs)
        self.pipes = [made, *self.pipes[: _MOST - 1]]
        return made(*args, **kwargs)


@contextlib.contextmanager
def in_the_place_of(model: nn.Module, stand_in: InPlace) -> Iterator[None]:
    """``model(...)`` calls `stand_in`, as after ``model.compile()``; ``model.forward`` is the model's own."""
    own, name = model.__dict__, "_compiled_call_impl"  # torch 2.9 to 2.15
    before = own.get(name)
    was_there = name in own
    own[name] = stand_in
    try:
        yield
    finally:
        if was_there:
            own[name] = before
        else:
            del own[name]
