"""Play lists of actions, each list in a thread of its own.

Threads live as long as one call. Nothing is left to collect, to fork or to hang the interpreter's exit, and
a worker costs about 0.1 ms a call. A finished action is a token in the inbox of every worker that waits
for it, which is the only place where a worker blocks; to stop, a token that means "stop" is enough.
"""

from __future__ import annotations

import contextvars
import os
import sys
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from ..actions import Action, Needs
from ..compat import modes_in_force
from ..errors import WorkerError
from ..schedules.proof import serial_order
from .stuck import Stuck, look
from .threads import settle_autocast, thread_state

Act = Callable[[Action], None]


class MeetingPlace(Protocol):
    """Where actions wait for each other."""

    def members(self, action: Action) -> Sequence[Action]:
        """Those that meet there."""

    def close(self) -> None:
        """Nobody waits any more."""

    def leave(self, thread: threading.Thread) -> None:
        """This one waits for ever, and is left where it is."""


class StoppedError(Exception):
    """The call has ended, and with it what an action waited for: no error of its own."""


LOOK = 1.0  # seconds after which the caller looks whether the workers that it waits for are still there


def play(
    workers: Sequence[Sequence[Action]],
    needs: Needs,
    act: Act,
    names: Sequence[str],
    intra_op: int | None = None,
    meetings: MeetingPlace | None = None,
) -> None:
    """Play every list to its end, with the caller's thread state and context variables.

    One list is played in the calling thread. So are several inside of a TorchFunctionMode or TorchDispatchMode, one
    action after the other: modes are not made for being called by several threads at once.

    Args:
        workers: lists of actions; `needs` may name actions that are in none of them: they are done already.
        act: computes one action.
        names: of the lists.
        intra_op: threads that each worker uses inside of an operation; else the caller's, shared out.
        meetings: where actions wait for each other.

    Raises:
        BaseException: of the actions that failed, the error of the one that a loop over the micro-batches would have
            come to first; an interrupt goes before. Nothing starts after a failure or an interrupt of the caller, and
            no thread is left: what a worker is computing is waited for, however often the caller is interrupted. But
            a worker whose module waits for a copy that has failed, or after an interrupt for one that waits too, would wait
            for ever: it is left, and the error says so.
        WorkerError: a thread is gone without having said so, or waits for copies that have all finished: it is left.
    """
    busy = [(list(actions), name) for actions, name in zip(workers, names, strict=True) if actions]
    if len(busy) == 1 or modes_in_force():
        play_serially(workers, needs, act)
        return
    _Players([a for a, _ in busy], needs, act, [n for _, n in busy], intra_op, meetings).run()


def play_serially(workers: Sequence[Sequence[Action]], needs: Needs, act: Act) -> None:
    """Play the lists one action after the other in the calling thread."""
    for action in serial_order(workers, needs):
        act(action)


class _Players:
    def __init__(
        self,
        workers: list[list[Action]],
        needs: Needs,
        act: Act,
        names: Sequence[str],
        intra_op: int | None,
        meetings: MeetingPlace | None,
    ) -> None:
        self.workers, self.act, self.names, self.meetings = workers, act, names, meetings
        self.left: list[str] = []
        worker_of = {a: w for w, actions in enumerate(workers) for a in actions}
        self.waits = {
            a: {n for n in needs(a) if n in worker_of and worker_of[n] != worker_of[a]} for a in worker_of
        }
        self.tell: dict[Action, list[int]] = {a: [] for a in worker_of}
        for action, before in self.waits.items():
            for needed in before:
                if worker_of[action] not in self.tell[needed]:
                    self.tell[needed].append(worker_of[action])
        self.inboxes: list[SimpleQueue[Action | None]] = [SimpleQueue() for _ in workers]
        self.outbox: SimpleQueue[int] = SimpleQueue()
        self.stopping = False
        self.failures: list[tuple[Action, BaseException]] = []
        self.at = [actions[0] for actions in workers]
        self.finished = [False] * len(workers)
        self.running: set[int] = set()
        self.done: set[Action] = set()
        self.stuck: dict[int, Stuck] = {}
        self.interrupted = False
        self.broken: list[int] = []  # ended early, and nobody had told them to
        self.callers = torch.get_num_threads()
        self.share = intra_op or max(1, self.callers // len(workers))
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
        at = {w: self.at[w] for w in self.running if self.at[w].kind == "F"}
        others = {w: set(self.meetings.members(action)) - {action} for w, action in at.items()}
        at = {w: action for w, action in at.items() if others[w]}
        self.stuck = look(self.threads, at, self.stuck, LOOK)
        failed = {action for action, _ in self.failures}
        waiting = {at[w] for w, stuck in self.stuck.items() if stuck.for_ever}
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
            done: set[Action] = set()
            with self.state():
                for action in self.workers[w]:
                    self.at[w] = action
                    waits = self.waits[action]
                    while not waits <= done:
                        token = self.inboxes[w].get()
                        if token is None:
                            return
                        done.add(token)
                    if self.stopping:
                        return
                    self.act(action)
                    self.done.add(action)
                    for other in self.tell[action]:
                        self.inboxes[other].put(action)
            self.finished[w] = True
        except StoppedError:
            pass
        except BaseException as error:  # also KeyboardInterrupt and SystemExit: the caller has to see them
            self.failures.append((self.at[w], error))
            self._stop()
        finally:
            self.outbox.put(w)


def _when(failure: tuple[Action, BaseException]) -> tuple[bool, int, bool, int, str]:
    """Interrupts first; then as in a loop over micro-batches that goes forward and backward with each."""
    (kind, stage, micro_batch), error = failure
    backward = kind != "F"
    return isinstance(error, Exception), micro_batch, backward, -stage if backward else stage, kind


def _is_gone(thread: threading.Thread) -> bool:
    """Whether a thread has ended. Python does not know of one that was ended by the system; Linux does."""
    if not thread.is_alive():
        return True
    return sys.platform == "linux" and not os.path.exists(f"/proc/self/task/{thread.native_id}")
