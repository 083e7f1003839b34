"""How packets travel: sends go at once; a thread for each rank that this one hears from takes what comes, in order.

gloo cannot be woken while it waits. So the thread that plays stages never waits in it: it waits for an inbox, into which
the threads put what has come, and into which `Watch` puts the first cause when any rank has failed::

    backend ──▶ thread of rank 0 ──┐
    backend ──▶ thread of rank 2 ──┼──▶ inbox ──▶ the player
    store ────▶ watch ─────────────┘
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from .packets import Item, Unpacking, packed
from .watch import Watch, watch_of_process

Key = tuple[Any, ...]  # of packets of one kind, whose headers are alike
_END = 2.0  # seconds, for the threads of a channel that is closed
_PREFIX = 2  # numbers: what both ends have to agree on, and the length of a header that is new


class Channel:
    """To and from the other ranks of a pipeline.

    Args:
        group: the ranks of the pipeline, in its order.
        device: where tensors are here.

    Attributes:
        sent: bytes that have gone to other ranks, headers with them.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, watch: Watch) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), len(self._ranks)
        self._device, self._watch = device, watch
        # One group for each direction: two opposite messages of a pair never wait for each other in one communicator.
        self._groups = {
            up: dist.new_group(self._ranks, use_local_synchronization=True) for up in (True, False)
        }
        self._sent: dict[
            tuple[int, Key], tuple[bytes, list[int]]
        ] = {}  # header and sizes of the last of a kind
        self._headers: dict[tuple[int, Key], bytes] = {}
        self._inbox: dict[tuple[int, int], list[Item]] = {}
        self._numbers: dict[tuple[bool, int], int] = {}  # of the packets to and from each rank
        self._expected: dict[int, SimpleQueue[tuple[int, Key, int] | None]] = {}
        self._going: dict[int, SimpleQueue[tuple[Any, Any] | None]] = {}
        self._threads: list[threading.Thread] = []
        self.sent = 0

    # -- going -----------------------------------------------------------------------------------------------------

    def send(self, target: int, key: Key, digest: int, items: Sequence[Item]) -> None:
        """Hand a packet over; does not wait until it has come.

        Args:
            key: its kind; where the last one of it had the same header, none is sent.
            digest: what the other end has to agree on.
        """
        header, tensors = packed(items)
        known, sizes = self._sent.get((target, key), (None, []))
        new = known != header
        self._sent[target, key] = header, [t.numel() for t in tensors]
        parts = [torch.tensor([digest, len(header) if new else 0], dtype=torch.int64)]
        if new:  # the other end has made room for what came last: it is filled with nothing
            parts += [torch.zeros(size, dtype=torch.uint8, device=self._device) for size in sizes]
            parts.append(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        parts += tensors
        group, to = self._groups[target > self.rank], self._ranks[target]
        for part in parts:
            work = dist.isend(part, to, group=group)
            self.sent += part.numel() * part.element_size()
            self._ending(target).put((work, part))

    def _ending(self, target: int) -> SimpleQueue[tuple[Any, Any] | None]:
        """Who keeps what is sent until it has gone."""
        if target not in self._going:
            self._going[target] = queue = SimpleQueue[tuple[Any, Any] | None]()
            self._start(lambda: self._end(queue), f"fxsplit sends to rank {target}")
        return self._going[target]

    def _end(self, queue: SimpleQueue[tuple[Any, Any] | None]) -> None:
        while (going := queue.get()) is not None:
            going[0].wait()
            _settled(going[1])
            del going

    # -- coming ----------------------------------------------------------------------------------------------------

    def expect(self, source: int, keys: Sequence[Key], digest: int) -> None:
        """These come next from a rank."""
        if source not in self._expected:
            self._expected[source] = queue = SimpleQueue[tuple[int, Key, int] | None]()
            self._start(lambda: self._take(source, queue), f"fxsplit hears from rank {source}")
        first = self._numbers.get((False, source), 0)
        for number, key in enumerate(keys, start=first):
            self._expected[source].put((number, key, digest))
        self._numbers[False, source] = first + len(keys)

    def receive(self, source: int, what: str = "a packet") -> list[Item]:
        """The next packet from a rank; `what` it is.

        Raises:
            RankError: a rank has failed.
        """
        number = self._numbers.get((True, source), 0)
        self._numbers[True, source] = number + 1
        self._watch.wait(lambda: (source, number) in self._inbox, f"{what}, from rank {self._ranks[source]}")
        return self._inbox.pop((source, number))

    def _take(self, source: int, queue: SimpleQueue[tuple[int, Key, int] | None]) -> None:
        group, origin = self._groups[source < self.rank], self._ranks[source]

        def begin(places: Sequence[torch.Tensor]) -> list[Any]:
            return [(dist.irecv(place, origin, group=group), place) for place in places]

        def end(coming: Sequence[Any]) -> None:
            for work, place in coming:
                work.wait()
                _settled(place)

        while (expected := queue.get()) is not None:
            number, key, digest = expected
            prefix, header = torch.empty(_PREFIX, dtype=torch.int64), self._headers.get((source, key))
            coming = Unpacking(header, self._device) if header is not None else None
            first = begin([prefix])
            rest = begin(coming.places if coming is not None else [])
            end(first)
            found, length = prefix.tolist()
            if found != digest:
                self._watch.disagrees(origin)
                return
            end(rest)
            if length:
                text = torch.empty(length, dtype=torch.uint8)
                end(begin([text]))
                self._headers[source, key] = header = bytes(text.numpy().tobytes())
                coming = Unpacking(header, self._device)
                end(begin(coming.places))
            assert coming is not None
            self._inbox[source, number] = coming.items()
            self._watch.notify()

    # -- both ------------------------------------------------------------------------------------------------------

    def awaited(self, collective: Callable[[], Any], what: str) -> Any:
        """The result of what waits for other ranks, in a thread of its own.

        Raises:
            RankError: a rank has failed.
        """
        results: list[Any] = []

        def run() -> None:
            results.append(collective())
            self._watch.notify()

        self._start(run, f"fxsplit: {what}")
        self._watch.wait(lambda: bool(results), what)
        return results[0]

    def _start(self, run: Callable[[], None], name: str) -> None:
        def guarded() -> None:
            try:
                with torch.inference_mode(False):
                    if self._device.type == "cuda":
                        torch.cuda.set_device(self._device)
                    run()
            except BaseException as error:
                self._watch.lost(error)

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def close(self) -> None:
        """Its threads end; who goes on to use it gets new ones."""
        queues: list[SimpleQueue[Any]] = [*self._expected.values(), *self._going.values()]
        for queue in queues:
            queue.put(None)
        until = time.monotonic() + _END
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._expected.clear()
        self._going.clear()


@functools.cache
def channel_of(group: dist.ProcessGroup, device: torch.device) -> Channel:
    """The one of all pipelines over these ranks, which are called one after the other: a group keeps threads, as long as
    the process lives, that look for messages all the time."""
    return Channel(group, device, watch_of_process())


def _settled(tensor: torch.Tensor) -> None:
    """On an accelerator the end of a message is an event of a stream: whoever reads it is in another thread."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
