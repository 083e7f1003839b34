"""Who is still there: each rank says so a few times a second, and the first cause of a failure is known to all.

Beats and the cause are in the store of torchrun, to which each rank has a connection of its own. A rank looks at the one
after it, and the last one at the first; whoever sees a failure first writes it down, once for all, and everybody raises
the same error::

    rank 0 ──looks at──▶ rank 1 ──▶ rank 2 ──▶ rank 3 ──▶ rank 0        store:  beat/0 … beat/3, cause

What is noticed          by                                              after
    an error             the rank that has it                            at once
    gone, or stopped     its beat does not change                        SILENT seconds
    hangs                its beat says how long it computes              `patience` seconds
    cut off              the store does not answer, by a second clock    CUT_OFF seconds
"""

from __future__ import annotations

import atexit
import datetime
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from ..errors import RankError

_TORCH: Any = dist  # has its stores without saying so to mypy
BEAT = 0.25  # seconds between two
SILENT = 3.0  # without a beat of a rank that had one
CUT_OFF = 8.0  # without an answer of the store
_ANSWER = datetime.timedelta(seconds=5)  # that one question to the store may take
_CAUSE = "cause"


class Watch:
    """Of this process.

    Args:
        store: a connection of its own.
        rank, size: of all processes.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self.rank, self.size = store, rank, size
        self._patience = 600.0
        self._changed = threading.Condition()
        self._cause: str | None = None
        self._lost: BaseException | None = None
        self._doing: tuple[str, float] = ("", 0.0)  # since when
        self._said = ""
        self._answered = time.monotonic()
        self._ended = False
        self._raised = False
        self._refused = ""
        store.set(f"beat/{rank}", self._beat(0))
        self._thread = threading.Thread(target=self._run, name="fxsplit watches the ranks", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def be_patient(self, seconds: float) -> None:
        """How long an instruction may take."""
        self._patience = seconds

    # -- what this rank does ---------------------------------------------------------------------------------------

    def computes(self, what: str) -> None:
        """What it begins; "" for nothing that others may wait for."""
        self._doing = what, time.monotonic()

    def says(self, what: str) -> None:
        """What it takes to be the same on all ranks, for the error where it is not."""
        self._said = what

    def wait(self, there: Callable[[], bool], what: str) -> None:
        """Until something is there.

        Raises:
            RankError: a rank has failed: the same error on every rank.
        """
        before, self._doing = self._doing, (f"waiting for {what}", time.monotonic())
        with self._changed:
            while not there():
                self._check()
                self._changed.wait(BEAT)
        self._doing = before[0], time.monotonic()

    def notify(self) -> None:
        """Something may be there now."""
        with self._changed:
            self._changed.notify_all()

    def failed(self, error: BaseException) -> None:
        """This rank has failed: the others are to know why."""
        if not self._raised:
            notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
            self._raised = True
            cause = f"rank {self.rank} failed: {type(error).__name__}: {error}{notes}"
            telling = threading.Thread(
                target=self._declare, args=(cause,), name="fxsplit tells why", daemon=True
            )
            telling.start()
            telling.join(SILENT)  # the store may be out of reach

    def refused(self, error: BaseException) -> None:
        """A call was refused here before anything had gone to others; they hear of it if this rank ends."""
        self._refused = f"{type(error).__name__}: {error}"

    def lost(self, error: BaseException) -> None:
        """The connection to another rank has broken; why, its beat will say."""
        with self._changed:
            self._lost = self._lost or error
            self._lost_since = time.monotonic()
            self._changed.notify_all()

    def disagrees(self, other: int) -> None:
        """Another rank has sent what belongs to another call."""
        time.sleep(2 * BEAT)  # what it has sent is newer than its beat
        theirs = json.loads(self._ask(f"beat/{other}"))["said"]
        self._declare(
            f"the ranks do not do the same: rank {other} has {theirs}; rank {self.rank} has {self._said}"
        )

    def check(self) -> None:
        """Raise the failure of any rank that is known by now.

        Raises:
            RankError: there is one.
        """
        with self._changed:
            self._check()

    def _check(self) -> None:
        cut_off = time.monotonic() - self._answered
        if self._cause is None and cut_off > CUT_OFF:
            self._cause = (
                f"the store of the ranks has not answered for {CUT_OFF:.0f} s: who has it (torchrun's first agent, or rank 0) "
                "is gone or stopped, or this host is cut off from it"
            )
        if (
            self._cause is None
            and self._lost is not None
            and time.monotonic() - self._lost_since > 2 * SILENT
        ):
            self._cause = f"rank {self.rank} has lost its connection to another rank: {self._lost}"
        if self._cause is not None:
            self._raised = True
            raise RankError(
                self._cause,
                where=f"seen by rank {self.rank}",
                remedy="torchrun --max-restarts 3 ..., with fxsplit.distributed.load at the start, goes on from the last "
                "checkpoint",
            ) from self._lost

    # -- beats -----------------------------------------------------------------------------------------------------

    def _beat(self, number: int) -> str:
        what, since = self._doing
        seconds = round(time.monotonic() - since, 2) if what else 0.0
        return json.dumps(
            {
                "n": number,
                "what": what,
                "seconds": seconds,
                "said": self._said,
                "ended": self._ended,
                "refused": self._refused,
            }
        )

    def _ask(self, key: str) -> str:
        return str(self._store.get(key).decode())

    def _run(self) -> None:
        other, seen, since = (self.rank + 1) % self.size, "", time.monotonic()
        number = 0
        while not self._ended:
            number += 1
            try:
                self._store.set(f"beat/{self.rank}", self._beat(number))
                cause = self._ask(_CAUSE) if self._store.check([_CAUSE]) else None
                beat = self._ask(f"beat/{other}") if self._store.check([f"beat/{other}"]) else ""
            except Exception as error:  # the store is gone, or does not answer in time
                with self._changed:
                    self._lost = self._lost or error
                    self._lost_since = getattr(self, "_lost_since", time.monotonic())
                    self._changed.notify_all()
                time.sleep(BEAT)
                continue
            self._answered = now = time.monotonic()
            if cause is not None:
                self._hear(cause)
            if beat != seen:
                seen, since = beat, now
            elif beat and now - since > SILENT:
                self._silent(other, json.loads(beat), now - since)
            if beat:
                self._look(other, json.loads(beat))
            time.sleep(BEAT)

    def _silent(self, other: int, beat: dict[str, Any], seconds: float) -> None:
        if beat["ended"]:
            return
        doing = f", last in {beat['what']}" if beat["what"] else ""
        waiting = [
            f"rank {r} is {what}" for r, what in self._waiting() if what.endswith(f"from rank {other}")
        ]
        self._declare(
            f"rank {other} has not answered for {seconds:.0f} s: killed, stopped, or its host cut off"
            f"{'; '.join([doing, *waiting])}"
        )

    def _waiting(self) -> Iterator[tuple[int, str]]:
        """What each rank says that it is doing."""
        for rank in range(self.size):
            if self._store.check([f"beat/{rank}"]):
                yield rank, json.loads(self._ask(f"beat/{rank}"))["what"]

    def _look(self, other: int, beat: dict[str, Any]) -> None:
        what, seconds = beat["what"], beat["seconds"]
        waits = what.startswith("waiting for")
        if what and not waits and seconds > self._patience:
            self._declare(f"rank {other} hangs: it has been in {what} for {seconds:.0f} s")
        mine, since = self._doing
        if beat["ended"] and mine.startswith("waiting for") and time.monotonic() - since > SILENT:
            why = f" after {beat['refused']}" if beat["refused"] else ""
            self._declare(f"rank {other} has ended{why}, and rank {self.rank} is still {mine}")

    def _declare(self, cause: str) -> None:
        """The first cause of any rank is that of all."""
        try:
            cause = self._store.compare_set(_CAUSE, "", cause).decode()
        except Exception as error:
            self._lost = self._lost or error
        self._hear(cause)

    def _hear(self, cause: str) -> None:
        with self._changed:
            self._cause = self._cause or cause
            self._changed.notify_all()

    def end(self) -> None:
        """This process ends, and says so.

        After a failure threads may wait in gloo, which nobody can end, and under which the interpreter would be aborted:
        then the process ends here, with status 1, when everybody else who wanted to know of the end has been told.
        """
        if self._ended:
            return
        self._ended = True
        if not self._raised:  # otherwise all know why, and the store may be out of reach
            self._thread.join(2 * BEAT)
            try:
                self._store.set(f"beat/{self.rank}", self._beat(-1))
            except Exception:  # the store went first
                self._raised = True
        if self._raised and any(t.daemon and t.name.startswith("fxsplit ") for t in threading.enumerate()):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


@functools.cache
def watch_of_process() -> Watch:
    """The one of this process; torch.distributed is initialized."""
    rank, size = dist.get_rank(), dist.get_world_size()
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if address and port:
        store = _TORCH.TCPStore(address, int(port), is_master=False, timeout=_ANSWER)
    else:  # whoever initialized torch.distributed has a store that we do not know
        store = _own_store(rank)
    watch = Watch(_TORCH.PrefixStore(f"fxsplit/{attempt}", store), rank, size)
    dist.barrier()  # every rank has a beat
    return watch


def _own_store(rank: int) -> Any:
    where: list[Any] = [None, None]
    store = None
    if rank == 0:
        import socket

        where[0] = socket.gethostbyname(socket.gethostname())
        store = _TORCH.TCPStore(where[0], 0, is_master=True, timeout=_ANSWER, wait_for_workers=False)
        where[1] = store.port
    dist.broadcast_object_list(where, src=0)
    return store or _TORCH.TCPStore(where[0], where[1], is_master=False, timeout=_ANSWER)
