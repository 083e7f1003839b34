"""Random numbers of micro-batches that run at the same time.

The rule: with one micro-batch the stages run one after the other on the caller's own generator, so masks and
the state afterwards are eager's. With more, a call draws one number from the caller's default CPU generator,
and micro-batch i of stage s has a stream of its own, whose seed is a function of that number, i and s alone.
Masks then do not depend on the schedule, on thread timing or on the checkpoint mode.

torch's default generator is one for all threads. A `Stream` lends it its own state for each operation that draws, so
that only those operations take turns, and not the stages that they are in.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch

from ..compat import OpOverload, TorchDispatchMode, same_generator

# Who has the default generators. Threads that somebody starts while he has them (a pipeline inside of a module) inherit
# his context variables, and so take turns among themselves, and not with him, who waits for them.
_TURNS: contextvars.ContextVar[threading.RLock] = contextvars.ContextVar("turns")
_EVERYBODY = threading.RLock()


@contextlib.contextmanager
def having_generators() -> Iterator[None]:
    """Nobody else of fxsplit's draws from the default generators, or lends them a state, meanwhile."""
    with _TURNS.get(_EVERYBODY):
        token = _TURNS.set(threading.RLock())
        try:
            yield
        finally:
            _TURNS.reset(token)


def draw_base_seed() -> int:
    """One number from the caller's default CPU generator."""
    with having_generators():  # not from a state that is lent
        return int(torch.randint(0, 2**62, (), dtype=torch.int64, device="cpu").item())


class BaseSeed:
    """The number that a call draws from the caller's generator. If nothing was drawn with it, it is put back.

    What may draw and does not (a dropout in eval mode) then leaves the generator as eager does.
    """

    def __init__(self) -> None:
        self._stream, self._used = Stream.current(), False
        with having_generators():
            self._before = self._state()
            self._value = draw_base_seed()
            self._after = self._state()

    def of(self, micro_batch: int, stage: int) -> int:
        """The seed of one micro-batch of one stage."""
        return stage_seed(self._value, micro_batch, stage)

    def use(self) -> None:
        """Something was drawn with it."""
        self._used = True

    def settle(self) -> None:
        """The end of what may draw first. (Who has drawn meanwhile, in a thread of his own, keeps what he has drawn.)"""
        with having_generators():
            if self._used or not _same(self._state(), self._after):
                return
            self._used = True
            if self._before is None:
                assert self._stream is not None
                self._stream.states.pop(_CPU)
            elif self._stream is None:
                torch.default_generator.set_state(self._before)
            else:
                self._stream.states[_CPU] = self._before

    def _state(self) -> torch.Tensor | None:
        if self._stream is not None:
            return self._stream.states.get(_CPU)
        return torch.default_generator.get_state()


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and bool(torch.equal(a, b)))


def stage_seed(base: int, micro_batch: int, stage: int) -> int:
    """The seed of one micro-batch of one stage: 63 bits of a hash of the three numbers."""
    digest = hashlib.blake2b(f"{base}/{micro_batch}/{stage}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """The default generators start from `seed` inside and are as before afterwards; nobody else draws meanwhile.

    What runs inside sees no dispatch mode, under which some of autograd's formulas round in another way.
    """
    devices = [device.index or 0] if device.type == "cuda" else []
    with having_generators(), torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


class Stream(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In this thread, operations that draw from a default generator draw from this stream instead.

    Args:
        states: of the generators, by device; a device that is new starts from `seed`.
        seed: makes the seed of the stream, when it is drawn from.
        drawn: called when something was; operations that may draw need not.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        seed: Callable[[], int],
        states: dict[torch.device, torch.Tensor] | None = None,
        drawn: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.seed, self.states, self.drawn = seed, dict(states or {}), drawn

    @classmethod
    def current(cls) -> Self | None:
        """The innermost stream of this thread."""
        streams: list[Self] = _ENTERED.__dict__.get("streams", [])
        return streams[-1] if streams else None

    def copy(self) -> Stream:
        """A stream that will draw what this one will draw."""
        states = {device: state.clone() for device, state in self.states.items()}
        return Stream(self.seed, states, self.drawn)

    def __enter__(self) -> Self:
        _ENTERED.__dict__.setdefault("streams", []).append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        _ENTERED.streams.pop()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _ENTERED.__dict__.get("lends") or not draws(func, args, kwargs):
            return func(*args, **kwargs)
        with self.lent(device_of(args, kwargs)):
            return func(*args, **kwargs)

    @contextlib.contextmanager
    def lent(self, device: torch.device) -> Iterator[None]:
        """The default generator of `device` has the state of this stream inside."""
        generator = _default_generator(device)
        seed = self.seed() if device not in self.states else 0
        with having_generators():
            theirs = generator.get_state()
            if device in self.states:
                generator.set_state(self.states[device])
            else:
                generator.manual_seed(seed)
            first = generator.get_state()
            _ENTERED.lends = True  # the operation of an inner stream comes by at the outer ones
            try:
                yield
            finally:
                _ENTERED.lends = False
                now = generator.get_state()
                generator.set_state(theirs)
                if not torch.equal(first, now):
                    self.states[device] = now
                    self.drawn()


_ENTERED = threading.local()
_CPU = torch.device("cpu")


def draws(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether it may draw from a default generator. What torch does not know, is asked to take its turn."""
    if func.namespace not in ("aten", "prim", "prims", "c10d", "profiler"):
        return True
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    known = func._schema.arguments
    given = {a.name: a.default_value for a in known}
    given |= dict(zip((a.name for a in known), args, strict=False)) | kwargs
    generator = given.get("generator")
    return (generator is None or is_default(generator)) and given.get("dropout_p") != 0.0


def is_default(generator: torch.Generator) -> bool:
    """Whether it is the default generator of its device; operations are given another object for the same one."""
    return same_generator(generator, _default_generator(generator.device))


def device_of(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    """Where an operation runs: its generator is that device's."""
    found = kwargs.get("device")
    if found is None:
        found = next((a.device for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), "cpu")
    device = torch.device(found)
    return torch.empty(0, device=device).device if str(device) == "cuda" else device


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator
