"""Micro-batches of a stage that meet: they go forward at the same time, each in a worker of its own, and backward as one.

So it is where modules talk to their copies on other replicas, and where batch normalisation is by all micro-batches: what
one computes depends on the others, and so do the gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence


class StoppedError(Exception):
    """The call has ended, and with it what an action waited for: no error of its own."""


class Door:
    """Opens when all are there, and stays open: either all who come get through, or none does.

    Not a `threading.Barrier`: its `abort` also turns away those who were let through and have not woken yet.

    Args:
        parties: how many come.
    """

    def __init__(self, parties: int) -> None:
        self._missing = parties
        self._closed = False
        self._changed = threading.Condition()

    def enter(self) -> None:
        """Wait for all the others.

        Raises:
            StoppedError: it was closed before all were there.
        """
        with self._changed:
            if not self._closed:
                self._missing -= 1
                if not self._missing:
                    self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or not self._missing)
            if self._missing:
                raise StoppedError

    def close(self) -> None:
        """Nobody waits any more; who was let through, is."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Meetings:
    """The meetings of one call."""

    def __init__(self) -> None:
        self._doors: dict[int, Door] = {}
        self._closed = False
        self._lock = threading.Lock()

    def enter(self, beside: Sequence[int]) -> None:
        """Wait until all of these forwards can begin: none begins if not all do.

        Raises:
            StoppedError: the call has been stopped meanwhile.
        """
        with self._lock:
            door = self._doors.setdefault(beside[0], Door(len(beside)))
            if self._closed:
                door.close()
        door.enter()

    def close(self) -> None:
        """Nobody waits for others any more."""
        with self._lock:
            self._closed = True
            for door in self._doors.values():
                door.close()
