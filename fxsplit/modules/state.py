"""Run the user's model without leaving a trace on it."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import operator
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .attributes import TABLES, Snapshot, attributes_of, restore_attributes
from .kept import Memory, kept_when_written
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
    memory = Memory(watched)
    with torch.random.fork_rng(devices=devices):
        token = _LOOK.set(before)
        try:
            with kept_when_written(memory) if watched else contextlib.nullcontext():
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
            if key not in TABLES and (isinstance(value, tuple) or holds_state(value)):
                for part in parts_of(value):
                    if not isinstance(part, nn.Module):
                        found.add(part)
    return [t for t in found.tensors.values() if not isinstance(t, nn.Parameter)]


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
