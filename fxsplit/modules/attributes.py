"""Attributes of modules: what they held at some time, whether that has changed, and how it is put back."""

from __future__ import annotations

import itertools
import random
import types
from typing import Any

import torch
from torch import nn

from .reach import holds_state

_PLAIN = (bool, int, float, str, type(None), tuple)
TABLES = frozenset(vars(nn.Module()))  # of every module: modules, parameters, buffers, hooks


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
        if key not in TABLES and _holds_state(value):
            return Snapshot(value)
        return value.copy() if isinstance(value, dict | list | set) else value

    # most attributes are plain: this is called often
    return {k: v if type(v) in _PLAIN else copied(k, v) for k, v in module.__dict__.items()}


def changed_attributes(module: nn.Module, before: dict[str, Any]) -> list[str]:
    """Names of the attributes of `module` that were set, deleted or extended since `attributes_of`."""
    now = module.__dict__
    changed = []
    for key in [*before, *(k for k in now if k not in before)]:
        old, new = before.get(key), now.get(key)
        if isinstance(old, Snapshot):
            if new is not old.value or old.changed():
                changed.append(key)
        elif key in TABLES and isinstance(old, dict) and isinstance(new, dict):
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
