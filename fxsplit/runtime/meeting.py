"""Micro-batches of a stage that meet: they go forward at the same time, each in a worker of its own, and backward as one.

So it is where modules talk to their copies on other replicas, and where batch normalisation is by all micro-batches: what
one computes depends on the others, and so do the gradients.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping

from ..actions import Action
from ..schedules.needs import members
from .worker import StoppedError


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
    """The meetings of one call.

    Args:
        rounds: stage → how many micro-batches meet there, one after the other.
    """

    def __init__(self, rounds: Mapping[int, int]) -> None:
        self.rounds = rounds
        self._doors: dict[Action, Door] = {}
        self._turns: dict[Action, threading.Lock] = {}
        self._done: dict[Action, bool] = {}
        self._closed = False
        self._lock = threading.Lock()

    def members(self, action: Action) -> list[Action]:
        """The same action of all micro-batches that meet with this one, itself among them."""
        return members(action, self.rounds)

    def enter(self, action: Action) -> None:
        """Wait until the forwards of all members can begin: none begins if not all do.

        Raises:
            StoppedError: the call has been stopped meanwhile.
        """
        everybody = self.members(action)
        if len(everybody) == 1:
            return
        with self._lock:
            door = self._doors.setdefault(everybody[0], Door(len(everybody)))
            if self._closed:
                door.close()
        door.enter()

    def close(self) -> None:
        """Nobody waits for others any more."""
        with self._lock:
            self._closed = True
            for door in self._doors.values():
                door.close()

    @contextlib.contextmanager
    def leading(self, action: Action) -> Iterator[bool]:
        """Whether this worker goes backward for all members: the first to come does, and the others wait for it.

        Raises:
            StoppedError: the first one has failed.
        """
        first = self.members(action)[0]
        with self._lock:
            turn = self._turns.setdefault(first, threading.Lock())
        with turn:
            if first in self._done:
                if not self._done[first]:
                    raise StoppedError
                yield False
                return
            self._done[first] = False
            yield True
            self._done[first] = True

    def again(self) -> None:
        """Another backward begins."""
        self._done.clear()
