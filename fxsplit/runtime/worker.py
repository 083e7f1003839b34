"""Play lists of actions, each list in a thread of its own.

Threads live as long as one call. Nothing is left to collect, to fork or to hang the interpreter's exit, and
a worker costs about 0.1 ms a call. A finished action is a token in the inbox of every worker that waits
for it, which is the only place where a worker blocks; to stop, a token that means "stop" is enough.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import torch

from ..actions import Action, Needs
from ..errors import WorkerError
from ..schedules.proof import serial_order

Act = Callable[[Action], None]
Context = Callable[[], contextlib.AbstractContextManager[None]]


def play(
    workers: Sequence[Sequence[Action]], needs: Needs, act: Act, context: Context, names: Sequence[str]
) -> None:
    """Play every list to its end. One list is played in the calling thread.

    Args:
        workers: lists of actions; `needs` may name actions that are in none of them: they are done already.
        act: computes one action.
        context: entered by each thread first; carries the caller's thread state.
        names: of the threads.

    Raises:
        BaseException: the error of the action that comes first (in micro-batch, then in stage order) among
            those that failed. Nothing starts after a failure, and no thread is left.
    """
    busy = [list(actions) for actions in workers if actions]
    if len(busy) == 1:
        play_serially(busy, needs, act)
        return
    _Players(busy, needs, act, context, names).run()


def play_serially(workers: Sequence[Sequence[Action]], needs: Needs, act: Act) -> None:
    """Play the lists one action after the other in the calling thread."""
    for action in serial_order(workers, needs):
        act(action)


class _Players:
    def __init__(
        self, workers: list[list[Action]], needs: Needs, act: Act, context: Context, names: Sequence[str]
    ) -> None:
        self.workers, self.act, self.context, self.names = workers, act, context, names
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
        self.finished = [False] * len(workers)
        self.intra_op = torch.get_num_threads()

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._work, args=(w,), name=f"fxsplit {self.names[w]}")
            for w in range(len(self.workers))
        ]
        started = []
        try:
            for thread in threads:
                thread.start()
                started.append(thread)
            for _ in threads:
                self.outbox.get()
        except BaseException:
            self._stop()
            raise
        finally:
            for thread in started:
                thread.join()
            if self.intra_op > 1:
                torch.set_num_threads(self.intra_op)  # the workers changed what new threads start with
        if self.failures:
            _, error = min(self.failures, key=lambda failure: (failure[0].micro_batch, failure[0].stage))
            raise error
        if not all(self.finished):
            raise WorkerError(
                "a worker ended before its actions were done", where=self.names[self.finished.index(False)]
            )

    def _stop(self) -> None:
        self.stopping = True
        for inbox in self.inboxes:
            inbox.put(None)

    def _work(self, w: int) -> None:
        action = self.workers[w][0]
        try:
            torch.set_num_threads(max(1, self.intra_op // len(self.workers)))  # the caller's, shared out
            done: set[Action] = set()
            with self.context():
                for action in self.workers[w]:
                    waits = self.waits[action]
                    while not waits <= done:
                        token = self.inboxes[w].get()
                        if token is None:
                            return
                        done.add(token)
                    if self.stopping:
                        return
                    self.act(action)
                    for other in self.tell[action]:
                        self.inboxes[other].put(action)
            self.finished[w] = True
        except BaseException as error:  # also KeyboardInterrupt and SystemExit: the caller has to see them
            self.failures.append((action, error))
            self._stop()
        finally:
            self.outbox.put(w)


@contextlib.contextmanager
def _entered(contexts: Sequence[contextlib.AbstractContextManager[object]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def thread_state() -> Context:
    """The caller's autocast and inference mode and default device, to be entered in another thread."""
    autocast = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]
    inference = torch.is_inference_mode_enabled()
    device = torch.get_default_device()

    def enter() -> contextlib.AbstractContextManager[None]:
        contexts: list[contextlib.AbstractContextManager[object]] = [torch.inference_mode(inference)]
        contexts += [
            torch.autocast(kind, dtype=dtype, cache_enabled=cache) for kind, dtype, cache in autocast
        ]
        if device.type != "cpu":
            contexts.append(device)
        return _entered(contexts)

    return enter
