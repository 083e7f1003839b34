"""A pipeline in the place of its model: whoever calls the model calls stages, also with other kinds of arguments.

model.generate(ids)
  └ model(ids, cache: empty)       no pipeline for such a call  ─▶  compiled, under the same placement, and kept
  └ model(id, cache: 5 positions)  nor for such a one           ─▶  the same
  └ model(id, cache: 6 positions)  the pipeline of the call before
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import nn

from ..caches import is_cache
from ..errors import GuardError
from .reentry import check_not_inside

_MOST = 16  # kinds of calls; who needs more compiles for every call


class Callee(Protocol):
    """A pipeline."""

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments is like the example."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""


class InPlace:
    """What the model is while a pipeline is in its place.

    Args:
        pipe: the one in whose name this is.
        others: those of other kinds of calls, the last used first; more are added.
        another: makes one for other arguments, of the same model.
        lock: held in calls, and while one is made, which runs the model: the lock of all of them.
        schedule: of all of them.
    """

    def __init__(
        self,
        pipe: Callee,
        others: list[Callee],
        another: Callable[[tuple[Any, ...], dict[str, Any]], Callee],
        lock: contextlib.AbstractContextManager[Any],
        schedule: str,
    ) -> None:
        self._pipe, self._last, self._others = pipe, pipe, others
        self._another, self._lock, self._schedule = another, lock, schedule

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output for these arguments, of the pipeline that takes them; a new one, if none does.

        Raises:
            ArgumentError: a hook or a module calls the model from inside of such a call.
        """
        check_not_inside(self._lock, self._schedule)
        with self._lock:
            # The next call will be like the last.
            for pipe in sorted([self._pipe, *self._others], key=lambda one: one is not self._last):
                if pipe.takes(args, kwargs):
                    with contextlib.suppress(GuardError):  # nothing has been changed; it decides by a size
                        return self._called(pipe, args, kwargs)
            return self._called(self._another(args, kwargs), args, kwargs)

    def _called(self, pipe: Callee, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = pipe(*args, **kwargs)
        self._last = pipe
        if pipe is not self._pipe:
            self._others[:] = [pipe, *(other for other in self._others if other is not pipe)][:_MOST]
        _written_back([*args, *kwargs.values()], found)
        return found


def _written_back(given: list[Any], output: Any) -> None:
    """A cache that was passed in holds what the model's own forward would have left in it: what is in the output."""
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
    mine, new = [v for v in given if is_cache(v)], [v for v in values if is_cache(v)]
    for old, now in zip(mine, new, strict=False) if len(mine) == len(new) else ():
        if type(old) is type(now) and old is not now:
            vars(old).update(vars(now))


_ACTIVE: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_NAME = "_compiled_call_impl"  # torch 2.9 to 2.15


@contextlib.contextmanager
def in_the_place_of(model: nn.Module, stand_in: InPlace) -> Iterator[None]:
    """``model(...)`` calls `stand_in`, as after ``model.compile()``; ``model.forward`` is the model's own.

    Several may be in its place, in threads too; the last that came is called, and who goes last leaves what was there.
    """
    with _lock:
        _ACTIVE.setdefault(model, [vars(model).get(_NAME)]).append(stand_in)
        vars(model)[_NAME] = stand_in
    try:
        yield
    finally:
        with _lock:
            row = _ACTIVE[model]
            del row[len(row) - 1 - row[::-1].index(stand_in)]
            if row[-1] is None:
                vars(model).pop(_NAME, None)
            else:
                vars(model)[_NAME] = row[-1]
            if len(row) == 1:
                del _ACTIVE[model]
