"""Queues of devices: the one module that knows of streams and events.

A CPU computes when it is told to. A CUDA device has a stream for each stage and one for copies. An action is put on its
stage's stream behind events of the actions that it needs, so that no thread of the host waits for a device: what the
host is told to be done, is queued. A copy from another device waits for those events alone and not for what the stage
still computes, and so overlaps with it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..schedules.tape import Instruction

Act = Callable[[Instruction], None]


class Lanes:
    """Devices without queues."""

    has_queues = False

    def queued(self, act: Act) -> Act:
        """`act` on the queue of its stage, behind what the instruction is after."""
        return act

    @contextlib.contextmanager
    def fenced(self) -> Iterator[None]:
        """What is queued inside begins after what the caller has queued, and the caller goes on after it."""
        yield

    def move(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A copy on another device, for the action of this thread."""
        return tensor.to(device)

    def uses(self, stage: int, micro_batch: int, tensors: Iterable[Any]) -> None:
        """The memory of these tensors is read by a stage: it is not given to others before that is done."""

    @contextlib.contextmanager
    def adding(self, term: torch.Tensor | None) -> Iterator[None]:
        """What is done inside with this term, and with terms that came before, is done one after the other."""
        yield

    def leaves(self, tensors: Iterable[Any]) -> None:
        """The same for the caller, who gets these tensors."""


class CudaLanes(Lanes):
    """Streams of CUDA devices: one for each replica of a stage, and for each device one for copies and one for sums.

    Args:
        rows: per stage the devices of its replicas.
        plain: stages that compute on the devices' default streams: there, what modules give to each other past the
            runtime is in the order of the host.
        cuda: `torch.cuda`, or what stands for it in a test.
    """

    has_queues = True

    def __init__(
        self, rows: Sequence[Sequence[torch.device]], cuda: Any = torch.cuda, plain: Container[int] = ()
    ) -> None:
        self._cuda = cuda
        self._rows = rows

        def stream(stage: int, device: torch.device) -> Any:
            if device.type != "cuda":
                return None
            return cuda.default_stream(device) if stage in plain else cuda.Stream(device=device)

        self._compute = [[stream(s, d) for d in row] for s, row in enumerate(rows)]
        kinds = dict.fromkeys(d for row in rows for d in row if d.type == "cuda")
        self._copy = {d: cuda.Stream(device=d) for d in kinds}
        self._sum = {d: cuda.Stream(device=d) for d in kinds}
        self._events: dict[int, list[Any]] = {}  # by number of an instruction

    def queued(self, act: Act) -> Act:
        def on_stream(instruction: Instruction) -> None:
            device, stream = self._at(instruction.stage, instruction.micro_batches[0])
            before = [event for n in instruction.after for event in self._events.get(n, ())]
            with _doing(_Doing(stream, before)) as now:
                if stream is None:  # what it needs is copied to the host, and the copies are waited for
                    act(instruction)
                    self._events[instruction.number] = now.copies
                    return
                with self._cuda.device(device), self._cuda.stream(stream):
                    for event in before:
                        stream.wait_event(event)
                    act(instruction)
                    self._events[instruction.number] = [stream.record_event()]

        return on_stream

    @contextlib.contextmanager
    def fenced(self) -> Iterator[None]:
        computing = [s for row in self._compute for s in row if s is not None]
        streams = [*computing, *self._copy.values(), *self._sum.values()]
        for stream in streams:
            stream.wait_stream(self._cuda.current_stream(stream.device))
        try:
            yield
        finally:
            for stream in streams:
                self._cuda.current_stream(stream.device).wait_stream(stream)

    def move(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        device, now = torch.device(device), _THREAD.doing
        ends = [self._copy[d] for d in dict.fromkeys((tensor.device, device)) if d in self._copy]
        if tensor.device == device or not ends:
            return tensor.to(device)
        for stream in ends:
            if now.stream is not None and tensor.device == now.stream.device:
                stream.wait_stream(now.stream)  # this action has made it
            for event in now.before:
                stream.wait_event(event)
        with contextlib.ExitStack() as stack:
            for stream in ends:
                stack.enter_context(self._cuda.stream(stream))
            # A copy to the host is read at once, so it is waited for.
            moved = tensor.to(device, non_blocking=device.type == "cuda")
            done = [stream.record_event() for stream in ends]
        if tensor.device in self._copy:
            tensor.record_stream(self._copy[tensor.device])
        now.copies += done
        if now.stream is not None:
            for event in done:
                now.stream.wait_event(event)
            if device == now.stream.device:
                moved.record_stream(now.stream)
        return moved

    def _at(self, stage: int, micro_batch: int) -> tuple[torch.device, Any]:
        number = micro_batch % len(self._rows[stage])
        return self._rows[stage][number], self._compute[stage][number]

    def uses(self, stage: int, micro_batch: int, tensors: Iterable[Any]) -> None:
        device, stream = self._at(stage, micro_batch)
        if stream is not None:
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and tensor.device == device:
                    tensor.record_stream(stream)

    @contextlib.contextmanager
    def adding(self, term: torch.Tensor | None) -> Iterator[None]:
        stream, now = (self._sum.get(term.device), _THREAD.doing) if term is not None else (None, None)
        if term is None or stream is None or now is None:
            yield
            return
        if now.stream is not None and now.stream.device == term.device:
            stream.wait_stream(now.stream)  # this action has made it
        for event in now.copies:
            stream.wait_event(event)
        term.record_stream(stream)
        with self._cuda.stream(stream):
            yield

    def leaves(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda":
                tensor.record_stream(self._cuda.current_stream(tensor.device))


@dataclass
class _Doing:
    """The action of a thread: its stage's stream, what it is behind, and the copies that it has made."""

    stream: Any = None
    before: Sequence[Any] = ()
    copies: list[Any] = field(default_factory=list)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.doing = _Doing()


_THREAD = _Thread()


@contextlib.contextmanager
def _doing(now: _Doing) -> Iterator[_Doing]:
    before, _THREAD.doing = _THREAD.doing, now
    try:
        yield now
    finally:
        _THREAD.doing = before


_NO_LANES = Lanes()


def lanes_of(rows: Sequence[Sequence[torch.device]], plain: Container[int] = ()) -> Lanes:
    """The queues of the devices of the stages' replicas."""
    if any(d.type == "cuda" for row in rows for d in row):
        return CudaLanes([[torch.empty(0, device=d).device for d in row] for row in rows], plain=plain)
    return _NO_LANES
