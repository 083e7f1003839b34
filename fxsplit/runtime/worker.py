"""Play a tape, each worker's list in a thread of its own.

Threads live as long as one call. Nothing is left to collect, to fork or to hang the interpreter's exit, and
a worker costs about 0.1 ms a call. A finished instruction is a token in the inbox of every worker that waits
for it, which is the only place where a worker blocks; to stop, a token that means "stop" is enough.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from ..compat import modes_in_force
from ..errors import WorkerError
from ..inserted.recompute import Around
from ..replicas.meeting import StoppedError
from ..schedules.tape import Instruction, Tape
from .stuck import Stuck, look
from .threads import settle_autocast, thread_state

Act = Callable[[Instruction], None]


class MeetingPlace(Protocol):
    """Where forwards wait for each other."""

    def close(self) -> None:
        """Nobody waits any more."""

    def leave(self, thread: threading.Thread) -> None:
        """This one waits for ever, and is left where it is."""


LOOK = 1.0  # seconds after which the caller looks whether the workers that it waits for are still there


def play(
    tape: Tape,
    act: Act,
    intra_op: int | None = None,
    meetings: MeetingPlace | None = None,
    inside: Around = contextlib.nullcontext,
) -> None:
    """Play every worker's list to its end, with the caller's thread state and context variables.

    One list is played in the calling thread. So are several inside of a TorchFunctionMode or TorchDispatchMode, one
    instruction after the other: modes are not made for being called by several threads at once.

    Args:
        act: does what one instruction says.
        intra_op: threads that each worker uses inside of an operation; else the caller's, shared out.
        meetings: where forwards wait for each other.
        inside: entered by each worker.

    Raises:
        BaseException: of the actions that failed, the error of the one that a loop over the micro-batches would have
            come to first; an interrupt goes before. Nothing starts after a failure or an interrupt of the caller, and
            no thread is left: what a worker is computing is waited for, however often the caller is interrupted. But
            a worker whose module waits for a copy that has failed, or after an interrupt for one that waits too, would wait
            for ever: it is left, and the error says so.
        WorkerError: a thread is gone without having said so, or waits for copies that have all finished: it is left.
    """
    if sum(map(bool, tape.workers)) == 1 or modes_in_force():
        play_serially(tape, act)
    else:
        _Players(tape, act, intra_op, meetings, inside).run()


def threads_of_each(tape: Tape, intra_op: int | None) -> int:
    """How many threads a worker uses inside of an operation: what the plan says, or the caller's, shared out."""
    return intra_op or max(1, torch.get_num_threads() // sum(map(bool, tape.workers)))


@contextlib.contextmanager
def using(threads: int) -> Iterator[None]:
    """Operations of this thread use so many."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def play_serially(tape: Tape, act: Act) -> None:
    """Play everything in the calling thread."""
    for instruction in tape.order:
        act(instruction)


class _Players:
    def __init__(
        self,
        tape: Tape,
        act: Act,
        intra_op: int | None,
        meetings: MeetingPlace | None,
        inside: Around,
    ) -> None:
        self.numbers = [number for number, row in enumerate(tape.workers) if row]
        self.workers = workers = [tape.workers[number] for number in self.numbers]
        self.names = names = [tape.names[number] for number in self.numbers]
        self.tape = tape
        self.act, self.meetings, self.inside = act, meetings, inside
        self.left: list[str] = []
        self.inboxes: list[SimpleQueue[int | None]] = [SimpleQueue() for _ in tape.workers]
        self.outbox: SimpleQueue[int] = SimpleQueue()
        self.stopping = False
        self.failures: list[tuple[Instruction, BaseException]] = []
        self.at = [row[0] for row in workers]
        self.finished = [False] * len(workers)
        self.running: set[int] = set()
        self.done: set[int] = set()
        self.stuck: dict[int, Stuck] = {}
        self.interrupted = False
        self.broken: list[int] = []  # ended early, and nobody had told them to
        self.callers = torch.get_num_threads()
        self.share = threads_of_each(tape, intra_op)
        self.state = thread_state()
        # A daemon: one that is gone without having said so must not hold up the interpreter's exit.
        self.threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._work, w),
                name=f"fxsplit {names[w]}",
                daemon=True,
            )
            for w in range(len(workers))
        ]

    def run(self) -> None:
        try:
            for w, thread in enumerate(self.threads):
                self.running.add(w)
                thread.start()
            self._wait()
        except BaseException:
            self.interrupted = True
            raise
        finally:
            self._end()
        if self.failures:
            error = min(self.failures, key=_when)[1]
            for text in self.left:
                error.add_note(text)
            try:
                raise error
            finally:  # no cycle through the traceback: what the workers made is freed with the error
                self.failures.clear()
                del error
        if self.broken:
            w = self.broken[0]
            raise WorkerError(
                "a worker thread ended before its actions were done",
                where=f"{self.names[w]}, at action {self.at[w]}",
                remedy="see what ends threads from outside: an extension that calls pthread_exit, say",
            )

    def _wait(self) -> None:
        """Until every worker has said that it ended, or is found gone."""
        while self.running:
            try:
                ended = self.outbox.get(timeout=LOOK)
                self.running.discard(ended)
                if not self.finished[ended]:
                    self.broken.append(ended)
                    self._stop()
            except Empty:
                self._leave_waiting()
                gone = [w for w in self.running if _is_gone(self.threads[w])]
                if gone and self.outbox.empty():  # not one that said so at the last moment
                    self.broken += gone
                    self.running.difference_update(gone)
                    self._stop()

    def _leave_waiting(self) -> None:
        """Leave the workers in which a module waits for copies that do not answer any more: it does so for ever.

        One that waits by Python's own means (`threading`, `queue`) is left at once if a copy that it meets has failed, and
        after `stuck.LOOKS` looks at the same place if the others have all finished, failed, or wait in the same way. One that waits
        in C (`queue.SimpleQueue`, a bare lock, `time.sleep`) cannot be told from one that computes: it is left in the same
        circumstances, but only in a forward, after `stuck.LOOKS_IN_C` looks at the same place, and where the system tells how
        long a thread has computed, if it did so for less than `stuck.BUSY` of the time.
        """
        if self.meetings is None:
            return
        at = {w: self.at[w] for w in self.running if self.at[w].beside}
        others = {w: set(forward.beside) - {forward.number} for w, forward in at.items()}
        self.stuck = look(self.threads, at, self.stuck, LOOK)
        failed = {instruction.number for instruction, _ in self.failures}
        waiting = {at[w].number for w, stuck in self.stuck.items() if stuck.for_ever}
        leaving = []
        for w, stuck in sorted(self.stuck.items()):
            fails = bool(others[w] & failed)
            alone = others[w] <= self.done | waiting and bool(others[w] & self.done or self.interrupted)
            if (fails and (stuck.waits or stuck.for_ever)) or (alone and stuck.for_ever):
                leaving.append((w, fails))
        for w, fails in leaving:
            line = self.stuck[w].line
            if not (fails or self.interrupted or self.failures):
                error = WorkerError(
                    "a copy of a module waits for others that have finished: they were not called equally often",
                    where=f"{self.names[w]}, at action {at[w]}: {line}; it was left there",
                    remedy="a forward in which the copies wait for each other equally often, whatever the data",
                )
                self.failures.append((at[w], error))
            else:
                what = "a copy that has failed" if fails else "copies that do not answer"
                self.left.append(f"fxsplit: {self.names[w]} waits for {what}, {line}; it was left there")
            self.running.discard(w)
            self.meetings.leave(self.threads[w])
            self.threads[w] = threading.current_thread()  # nobody joins it
        if leaving:
            self._stop()

    def _end(self) -> None:
        """Nothing runs afterwards. An interrupt that comes meanwhile is raised at the end.

        Not left to `Thread.join`: after an interrupt it takes threads for dead that are not (Python 3.11).
        """
        interrupt = None
        while True:
            try:
                self._stop()
                self._wait()
                for thread in self.threads:
                    if thread is not threading.current_thread() and not _is_gone(thread):
                        thread.join()
                settle_autocast()
                if self.share != self.callers:
                    torch.set_num_threads(self.callers)  # the workers changed what new threads start with
                break
            except BaseException as error:
                interrupt, self.interrupted = error, True
        if interrupt is not None:
            raise interrupt

    def _stop(self) -> None:
        self.stopping = True
        if self.meetings is not None:
            self.meetings.close()
        for inbox in self.inboxes:
            inbox.put(None)

    def _work(self, w: int) -> None:
        try:
            torch.set_num_threads(self.share)
            with self.state(), self.inside():
                finished = self._play(w)
            self.finished[w] = finished
        except StoppedError:
            pass
        except BaseException as error:  # also KeyboardInterrupt and SystemExit: the caller has to see them
            self.failures.append((self.at[w], error))
            self._stop()
        finally:
            self.outbox.put(w)

    def _play(self, w: int) -> bool:
        """Whether it came to the end of its list."""
        waits, tells, inboxes = self.tape.waits, self.tape.tells, self.inboxes
        inbox, heard = inboxes[self.numbers[w]], set[int]()
        for instruction in self.workers[w]:
            self.at[w], number = instruction, instruction.number
            for needed in waits.get(number, ()):
                while needed not in heard:
                    token = inbox.get()
                    if token is None:
                        return False
                    heard.add(token)
            if self.stopping:
                return False
            self.act(instruction)
            self.done.add(number)
            for other in tells.get(number, ()):
                inboxes[other].put(number)
        return True


def _when(failure: tuple[Instruction, BaseException]) -> tuple[bool, int, int, int, str]:
    """Interrupts first; then as in a loop over micro-batches that goes forward and backward with each."""
    at, error = failure
    half = {"forward": 0, "loss": 1}.get(at.kind, 2)
    stage = at.stage if half == 0 else -at.stage
    return isinstance(error, Exception), at.micro_batches[0], half, stage, at.kind


def _is_gone(thread: threading.Thread) -> bool:
    """Whether a thread has ended. Python does not know of one that was ended by the system; Linux does."""
    if not thread.is_alive():
        return True
    return sys.platform == "linux" and not os.path.exists(f"/proc/self/task/{thread.native_id}")
