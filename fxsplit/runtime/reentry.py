"""A call of a pipeline from inside of its own call would wait for itself: it is refused."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from ..errors import ArgumentError

_HERE = threading.local()  # which pipelines, by their locks, this thread computes for while another one waits


@contextlib.contextmanager
def computing_for(lock: Any) -> Iterator[None]:
    """This thread computes what the holder of the lock waits for."""
    mine: list[int] = _HERE.__dict__.setdefault("locks", [])
    mine.append(id(lock))
    try:
        yield
    finally:
        mine.pop()


def check_not_inside(lock: Any, schedule: str) -> None:
    """Refuse a call from inside of the same pipeline.

    Raises:
        ArgumentError: it is one.
    """
    if id(lock) in _HERE.__dict__.get("locks", ()):
        raise ArgumentError(
            "the pipeline is called from inside of its own call, by its loss, a hook or a module, under "
            f"schedule={schedule!r}",
            remedy="pipe.unsplit(); or, in a loss, Plan(schedule='gpipe'), whose loss comes after all forwards",
        )
