"""Which threads seem to wait for ever, in code that is not fxsplit's."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..schedules.tape import Instruction

LOOKS = 3  # in which a worker waits at the same place before it is taken to wait for ever
LOOKS_IN_C = 10  # the same where it cannot be seen that it waits: it may be in a long operation
BUSY = 0.1  # who computes for more than this part of the time does not wait
_WAITING = (threading.__file__, queue.__file__)
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep


def look(
    threads: Sequence[threading.Thread],
    at: Mapping[int, Instruction],
    before: Mapping[int, Stuck],
    seconds: float,
) -> dict[int, Stuck]:
    """Where some of the threads are, and whether they have moved since the last look.

    Args:
        at: number of a thread → the forward that it is in.
        before: what the last look gave, so many `seconds` ago.
    """
    found = {}
    for number, action in at.items():
        now, last = _stands_at(threads[number], action), before.get(number)
        if now is None:
            continue
        moved = last is None or (last.action, last.place) != (now.action, now.place)
        if last is None or moved or now.computed - last.computed > BUSY * seconds:
            found[number] = now
        else:
            found[number] = replace(now, looks=last.looks + 1)
    return found


@dataclass(frozen=True)
class Stuck:
    """Where a worker is, in code that is not fxsplit's.

    Attributes:
        action: in which.
        place: code and instruction of every frame.
        line: the user's.
        waits: whether it waits by Python's own means; else it computes, or waits in C.
        computed: seconds, where the system tells.
        looks: in which it was there.
    """

    action: Instruction
    place: tuple[tuple[int, int], ...]
    line: str
    waits: bool
    computed: float
    looks: int = 1

    @property
    def for_ever(self) -> bool:
        """Whether it has been there for so long that it may be left."""
        return self.looks >= (LOOKS if self.waits else LOOKS_IN_C)


def _stands_at(thread: threading.Thread, action: Instruction) -> Stuck | None:
    """Where a thread is; None if in fxsplit's own code, which waits for nothing that does not come."""
    frame = sys._current_frames().get(thread.ident or 0)
    waits = frame is not None and frame.f_code.co_filename in _WAITING
    while frame is not None and frame.f_code.co_filename in _WAITING:
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_OURS):
        return None
    line, place = f"{frame.f_code.co_filename}:{frame.f_lineno}", []
    while frame is not None:
        place.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return Stuck(action, tuple(place), line, waits, _computed(thread))


def _computed(thread: threading.Thread) -> float:
    """Seconds that a thread has computed; zero where the system does not tell."""
    try:
        with open(f"/proc/self/task/{thread.native_id}/stat") as file:
            user, system = file.read().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0
