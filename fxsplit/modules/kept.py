"""What parameters hold is kept when an operation is about to write to it, and not before."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..compat import TorchDispatchMode, storage_key


class Memory:
    """What parameters hold, as far as somebody has written to it."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = [
            (p, p.detach()) for p in parameters
        ]  # the memory lives, whatever becomes of ``p.data``
        self._untouched = {storage_key(p): p.detach() for p in parameters}
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep what the memory of `tensor`, which is about to be written to, holds."""
        memory = self._untouched.pop(storage_key(tensor), None)
        if memory is not None:
            whole = memory.as_strided((memory.untyped_storage().nbytes() // memory.element_size(),), (1,), 0)
            self._kept.append((whole, whole.clone()))

    def restore(self) -> None:
        """Parameters have the memory that they had, and that holds what it held."""
        with torch.no_grad():
            for parameter, before in self._parameters:
                if not _same_place(parameter, before):
                    parameter.data = before
            for memory, value in self._kept:
                memory.data.copy_(value)


class _KeptWhenWritten(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what parameters hold when an operation is about to write to them, below autograd and past ``.data``.

    A copy of all of them would be as large as the model, and next to no forward writes to any. Every operation of a
    compile is seen, so one inside of another is no mode of its own.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.memories: list[Memory] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for position, name in _written_by(func):
            written = args[position] if position < len(args) else (kwargs or {}).get(name)
            for tensor in written if isinstance(written, list | tuple) else (written,):
                if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                    for memory in self.memories:
                        memory.keep(tensor)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def kept_when_written(memory: Memory) -> Iterator[None]:
    """Until the end, what is about to be written is kept in `memory`."""
    mode = _WATCHING.get()
    if mode is not None:
        mode.memories.append(memory)
        try:
            yield
        finally:
            mode.memories.remove(memory)
        return
    mode = _KeptWhenWritten()
    mode.memories.append(memory)
    token = _WATCHING.set(mode)
    try:
        with mode:
            yield
    finally:
        _WATCHING.reset(token)


_WATCHING: contextvars.ContextVar[_KeptWhenWritten | None] = contextvars.ContextVar("_WATCHING", default=None)


@functools.cache
def _written_by(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operation writes to."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    arguments = enumerate(schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def _same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same numbers of the same memory."""
    places = [(t.dtype, t.shape, t.stride(), t.storage_offset()) for t in (a, b)]
    return storage_key(a) == storage_key(b) and places[0] == places[1]
