"""Run the user's model without leaving a trace on it."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import operator
import random
import sys
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..compat import TorchDispatchMode, storage_key
from .reach import Reach, around_of, holds_state, parts_of


def state_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that a forward may write to: buffers, and plain tensor attributes; by path, ties once."""
    found = dict(model.named_buffers())
    seen = {id(t) for t in found.values()}
    for path, module in model.named_modules():
        for key, value in module.__dict__.items():
            if isinstance(value, torch.Tensor) and id(value) not in seen:
                seen.add(id(value))
                found[f"{path}.{key}" if path else key] = value
    return found


def python_random_state() -> tuple[Any, ...]:
    """The state of Python's `random`, and of NumPy's global generator where NumPy has been imported."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state(legacy=True)


def restore_python_random(state: tuple[Any, ...]) -> None:
    """Put back what `python_random_state` returned."""
    own, numpy = state
    random.setstate(own)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)


def python_random_digest() -> int:
    """A number that tells whether anything was drawn."""
    own, numpy = python_random_state()
    return hash((own, numpy and (numpy[1].tobytes(), *numpy[2:])))


def same_python_random(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether nothing was drawn between two states."""
    if a[0] != b[0] or a[1] is None or b[1] is None:
        return bool(a[0] == b[0])
    return bool(a[1][2] == b[1][2] and (a[1][1] == b[1][1]).all())


def others_draw() -> bool:
    """Whether another thread draws from torch's default generator right now: nothing is drawn here for a moment."""
    states = [torch.get_rng_state()]
    for _ in range(5):
        time.sleep(0.02)
        states.append(torch.get_rng_state())
    return any(not torch.equal(a, b) for a, b in itertools.pairwise(states))


@contextlib.contextmanager
def preserved(model: nn.Module, *, parameters: bool = False) -> Iterator[None]:
    """The model and the random number generators end as they were, also when the body raises: buffers and
    tensor attributes (values and objects), gradients, modes, hooks and plain attributes of every module.

    Args:
        parameters: also the values of the parameters; costs a copy of those that the body writes.
    """
    outer = _LOOK.get()
    before = outer if outer is not None and outer.model is model and outer.holds() else _Look(model)
    modes = [(module, module.training) for module in before.modules]
    owned = list(model.parameters()) if parameters else []
    watched = [p for p in owned if _is_plain(p)]
    written = [*before.written, *(p for p in owned if not _is_plain(p))]
    values = [(t, t.detach().clone()) for t in written if t.layout is torch.strided and not _overlaps(t)]
    grads = [(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in model.parameters()]
    devices = sorted(
        {t.device.index for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"}
    )
    drawn = python_random_state()
    memory = _Memory(watched)
    with torch.random.fork_rng(devices=devices):
        token = _LOOK.set(before)
        try:
            with _KeptWhenWritten.around(memory) if watched else contextlib.nullcontext():
                yield
        finally:
            _LOOK.reset(token)
            memory.restore()
            restore_python_random(drawn)
            before.restore()
            for module, mode in modes:
                if module.training != mode:
                    module.training = mode
            with torch.no_grad():
                for tensor, value in values:
                    tensor.data.copy_(value)  # .data: autograd graphs of the user may have saved the tensor
                for parameter, grad, kept in grads:
                    parameter.grad = grad
                    if grad is not None and kept is not None:
                        grad.data.copy_(kept)


class _Look:
    """What the modules of a model held at some time, beside the values of tensors and their modes.

    `compile` runs a model some twenty times, one run inside of another's `preserved`. What was written down once is
    compared in a moment, without a call of Python's for each attribute, and written down again only if it is no more so.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        others = unregistered(model)
        self.modules = [*model.modules(), *others]
        self.attributes = [attributes_of(module) for module in self.modules]
        self._around = [Snapshot(o) for o in around_of(model)]
        self.written = [*state_tensors(model).values()]
        self.written += [b for module in others for b in module._buffers.values() if b is not None]
        self.written += _inside_of_objects(self.modules)
        self._tables = [module.__dict__ for module in self.modules]
        self._keys = [key for table in self._tables for key in table]
        self._values = [value for table in self._tables for value in table.values()]
        owners = [table for table in self._tables for _ in table]
        self._modes = [i for i, key in enumerate(self._keys) if key == "training"]
        self._owners = [owners[i] for i in self._modes]
        self._inside = [v for v in self._values if isinstance(v, dict | list | set) and v]
        self._empty = [v for v in self._values if isinstance(v, dict | list | set) and not v]
        self._items = [_items(v) for v in self._inside]
        held = (v for attributes in self.attributes for v in attributes.values())
        self._snapshots = [*self._around, *(v for v in held if isinstance(v, Snapshot))]

    def holds(self) -> bool:
        """Whether all of it is still so."""
        tables, values = self._tables, self._values
        for i, owner in zip(self._modes, self._owners, strict=True):
            values[i] = owner.get("training")
        return (
            list(map(len, tables)) == list(map(len, self.attributes))
            and list(itertools.chain.from_iterable(tables)) == self._keys
            and all(map(operator.is_, itertools.chain.from_iterable(map(dict.values, tables)), values))
            and not any(self._empty)
            and all(map(_same_items, map(_items, self._inside), self._items))
            and not any(snapshot.changed() for snapshot in self._snapshots)
        )

    def restore(self) -> None:
        """Make it so again; modes too, where they are attributes of Python's."""
        if self.holds():
            return
        for module, before in zip(self.modules, self.attributes, strict=True):
            restore_attributes(module, before)
        for snapshot in self._around:
            snapshot.restore()


_LOOK: contextvars.ContextVar[_Look | None] = contextvars.ContextVar("_LOOK", default=None)  # of `preserved`


def _items(value: Any) -> tuple[Any, ...]:
    return (*value, *value.values()) if isinstance(value, dict) else tuple(value)


def _same_items(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return len(a) == len(b) and all(map(operator.is_, a, b))


class _Memory:
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
        self._memories: list[_Memory] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for position, name in _written_by(func):
            written = args[position] if position < len(args) else (kwargs or {}).get(name)
            for tensor in written if isinstance(written, list | tuple) else (written,):
                if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                    for memory in self._memories:
                        memory.keep(tensor)
        return func(*args, **(kwargs or {}))

    @staticmethod
    @contextlib.contextmanager
    def around(memory: _Memory) -> Iterator[None]:
        """Until the end, what is about to be written is kept in `memory`."""
        mode = _WATCHING.get()
        if mode is not None:
            mode._memories.append(memory)
            try:
                yield
            finally:
                mode._memories.remove(memory)
            return
        mode = _KeptWhenWritten()
        mode._memories.append(memory)
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


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory is its own to look at: no subclass that wraps others, dense, on a device."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether one number is several elements, as after `expand`: nobody can write to it in place."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _inside_of_objects(modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    """The tensors in lists, dicts and objects that are attributes of modules; parameters left out."""
    found = Reach()
    for module in modules:
        for key, value in module.__dict__.items():
            if key not in _TABLES and (isinstance(value, tuple) or holds_state(value)):
                for part in parts_of(value):
                    if not isinstance(part, nn.Module):
                        found.add(part)
    return [t for t in found.tensors.values() if not isinstance(t, nn.Parameter)]


class Snapshot:
    """What an object holds that changes without the attribute being set: a generator, an object, nested containers."""

    def __init__(self, value: Any) -> None:
        with torch._C.DisableTorchFunction():  # it is nobody's business that a generator's state is a tensor
            self.value, self.state = value, _state_of(value, set())

    def changed(self) -> bool:
        """Whether it holds something else now."""
        with torch._C.DisableTorchFunction():
            return not _same_state(self.state, _state_of(self.value, set()))

    def restore(self) -> None:
        """Let it hold what it held."""
        if self.changed():
            with torch._C.DisableTorchFunction():
                _put_state(self.value, self.state)


def _state_of(value: Any, around: set[int]) -> Any:
    """What `value` holds now. An object that holds itself is looked at once."""
    if type(value) in _PLAIN or not holds_state(value) or id(value) in around:
        return None
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, types.GeneratorType):
        return None if value.gi_frame is None else (value.gi_frame.f_lasti, repr(value.gi_frame.f_locals))
    around = around | {id(value)}
    table = _table_of(value)
    if table is not None:
        return {k: (v, _state_of(v, around)) for k, v in list(table.items())}
    if isinstance(value, set):
        return frozenset(value)
    return [(v, _state_of(v, around)) for v in value]


def _table_of(value: Any) -> dict[Any, Any] | None:
    """The dict that a dict or an object is."""
    return value if isinstance(value, dict) else getattr(value, "__dict__", None)


def _same_state(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and _same_state(list(a.values()), list(b.values()))
    if isinstance(a, list):
        return len(a) == len(b) and all(
            (x is y or (type(x) in _PLAIN and type(x) is type(y) and x == y)) and _same_state(s, t)
            for (x, s), (y, t) in zip(a, b, strict=True)
        )
    return bool(a == b)


def _put_state(value: Any, state: Any) -> None:
    if isinstance(value, random.Random):
        value.setstate(state)
    elif isinstance(value, torch.Generator):
        value.set_state(state)
    elif isinstance(state, dict):
        table = _table_of(value)
        assert table is not None
        table.clear()
        table.update({k: v for k, (v, _) in state.items()})
        for item, inner in state.values():
            _put_state(item, inner)
    elif isinstance(state, frozenset):
        value.clear()
        value.update(state)
    elif isinstance(state, list):
        value.clear()
        value.extend(v for v, _ in state)
        for item, inner in state:
            _put_state(item, inner)


def _holds_state(value: Any) -> bool:
    """Whether a shallow copy of it would not show all changes."""
    if isinstance(value, dict | list):
        return any(holds_state(v) for v in (value.values() if isinstance(value, dict) else value))
    return not isinstance(value, set) and holds_state(value)


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """A copy of the attributes of `module`, to compare or restore later.

    Deeper than `__dict__`: `_parameters`, `_buffers`, `_modules` and the hooks are dicts, a forward may append to a
    list, and generators and namespaces change inside.
    """

    def copied(key: str, value: Any) -> Any:
        if key not in _TABLES and _holds_state(value):
            return Snapshot(value)
        return value.copy() if isinstance(value, dict | list | set) else value

    # most attributes are plain: this is called often
    return {k: v if type(v) in _PLAIN else copied(k, v) for k, v in module.__dict__.items()}


_PLAIN = (bool, int, float, str, type(None), tuple)
_TABLES = frozenset(vars(nn.Module()))  # of every module: modules, parameters, buffers, hooks


def unregistered(model: nn.Module) -> list[nn.Module]:
    """Modules in plain lists and dicts of `model`, which `model.modules()` does not give."""
    known = {id(m) for m in model.modules()}
    found: dict[int, nn.Module] = {}
    for module in model.modules():
        for value in module.__dict__.values():
            items = (
                value
                if isinstance(value, list | tuple)
                else value.values()
                if isinstance(value, dict)
                else ()
            )
            for item in items:
                if isinstance(item, nn.Module) and id(item) not in known:
                    found.update({id(m): m for m in item.modules()})
    return list(found.values())


def changed_attributes(module: nn.Module, before: dict[str, Any]) -> list[str]:
    """Names of the attributes of `module` that were set, deleted or extended since `attributes_of`."""
    now = module.__dict__
    changed = []
    for key in [*before, *(k for k in now if k not in before)]:
        old, new = before.get(key), now.get(key)
        if isinstance(old, Snapshot):
            if new is not old.value or old.changed():
                changed.append(key)
        elif key in _TABLES and isinstance(old, dict) and isinstance(new, dict):
            inner = [*old, *(k for k in new if k not in old)]
            changed += [str(k) for k in inner if old.get(k) is not new.get(k)]
        elif _differs(new, old):
            changed.append(key)
    return changed


def restore_attributes(module: nn.Module, before: dict[str, Any]) -> None:
    """Put the attributes of `module` back to what `attributes_of` returned."""
    now = module.__dict__
    for key in [k for k in now if k not in before]:
        del now[key]
    for key, value in before.items():
        present = now.get(key)
        if isinstance(value, Snapshot):
            now[key] = value.value
            value.restore()
        elif isinstance(present, dict | list | set) and type(present) is type(value):
            if _differs(present, value):
                present.clear()  # in place: others may hold the container itself
                present.extend(value) if isinstance(value, list) else present.update(value)  # type: ignore[union-attr]
        elif key not in now or present is not value:  # None and not there are two things
            now[key] = value


def _differs(now: Any, before: Any) -> bool:
    if type(now) is not type(before):
        return True
    if isinstance(before, dict):
        return list(now) != list(before) or any(now[k] is not before[k] for k in before)
    if isinstance(before, list):
        return len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True))
    return bool(now != before) if isinstance(before, set) else now is not before
