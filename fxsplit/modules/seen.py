"""What a value is, as plain data: to be compared with what it is later, in another copy or in another process."""

from __future__ import annotations

import enum
import functools
import hashlib
import threading
import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), range)
_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
OWN = frozenset(vars(nn.Module()))  # what every module has
HEAP_CLASS = 1 << 9  # of type.__flags__: a class made in Python
_LONG, _DEEP = 60, 12
_OPAQUE = frozenset(("logging", "threading", "_thread", "random", "weakref", "contextvars", "queue", "torch"))


@dataclass(frozen=True)
class Seen:
    """A value at some time.

    Attributes:
        kind: its type, ``"tensor"``, ``"module"``, ``"missing"``, …
        text: what a plain value prints as, or the name of a class or function.
        parts: of a container its items (of a dict keys and values in turn), of a function what it closes over.
        thing: what else is compared where it is at hand: the code of a function, a tensor that is in a container.
    """

    kind: str
    text: str = ""
    parts: tuple[Seen, ...] = ()
    thing: Any = field(default=None, compare=False, repr=False)

    def same(self, other: Seen) -> bool:
        """Whether nothing shows that the values differ."""
        if (self.kind, self.text, len(self.parts)) != (other.kind, other.text, len(other.parts)):
            return False
        if not _same_thing(self.thing, other.thing):
            return False
        return all(a.same(b) for a, b in zip(self.parts, other.parts, strict=True))

    def __str__(self) -> str:
        shown = self._shown()
        return shown if len(shown) <= _LONG else shown[: _LONG - 1] + "…"

    def _shown(self) -> str:
        inside = (
            [part._shown() for part in self.parts[:20]] if self.kind not in ("function", "object") else []
        )
        match self.kind:
            case "missing":
                return "not there"
            case "tensor":
                return "a tensor"
            case "module" | "object" | "table":
                return self.text or f"{{{', '.join(inside)}}}"
            case "dict":
                return "{" + ", ".join(f"{k}: {v}" for k, v in zip(*[iter(inside)] * 2, strict=False)) + "}"
            case "list" | "deque":
                return f"[{', '.join(inside)}]"
            case "tuple":
                return f"({', '.join(inside)})"
            case "set" | "frozenset":
                return f"{{{', '.join(inside)}}}"
        return self.text

    def to_json(self) -> list[Any]:
        """As plain JSON; a thing as what can be said of it."""
        text = f"{self.text} {_digest(self.thing)}" if isinstance(self.thing, torch.Tensor) else self.text
        return [self.kind, text, [part.to_json() for part in self.parts]]

    @classmethod
    def from_json(cls, row: list[Any]) -> Seen:
        """The inverse of `to_json`; nothing is imported or called."""
        kind, text, parts = row
        thing = None
        if kind == "tensor" and " " in text:
            text, _, thing = text.rpartition(" ")
        return cls(str(kind), str(text), tuple(cls.from_json(part) for part in parts), thing)


MISSING = Seen("missing")


def seen(value: Any, known: Mapping[int, str], inside: tuple[int, ...] = ()) -> Seen:
    """What `value` is.

    Args:
        known: id → what stands for an object that is looked at elsewhere: a module of the model, a config.
        inside: ids of the containers around it.
    """
    if type(value) in _PLAIN or isinstance(value, _TORCH):
        return Seen(type(value).__name__, repr(value))
    if isinstance(value, torch.Tensor):
        return Seen("tensor", "", (), value if inside else None)
    if id(value) in known:
        return Seen("module" if isinstance(value, nn.Module) else "object", known[id(value)])
    if isinstance(value, types.ModuleType):
        return Seen("object", value.__name__)  # of Python: what is in it is everybody's
    if id(value) in inside:
        return Seen("cycle", str(len(inside) - inside.index(id(value))))
    if len(inside) > _DEEP:
        return Seen("deep", type(value).__name__)
    inside = (*inside, id(value))
    items = [seen(part, known, inside) for part in _parts(value)]
    if isinstance(value, set | frozenset):
        items.sort(key=repr)
    if isinstance(value, types.FunctionType):
        return Seen("function", _name(value), tuple(items), value.__code__)
    if isinstance(value, _WRAPPERS):
        return Seen("function", str(type(value).__name__), tuple(items))
    if type(value) in (tuple, list, dict, set, frozenset, deque):
        return Seen(type(value).__name__, "", tuple(items))
    if isinstance(value, type):
        return Seen("class", _name(value))
    if isinstance(value, enum.Enum):
        return Seen("enum", f"{_name(type(value))}.{value.name}")
    if _is_array(value):
        return Seen("array", f"{value.dtype}{list(value.shape)} {_digest(value)}")
    if isinstance(value, types.BuiltinFunctionType) or type(value).__module__ == "builtins":
        return Seen("builtin", getattr(value, "__name__", type(value).__name__))
    return Seen("object", _name(type(value)), tuple(items))


_WRAPPERS = (types.MethodType, functools.partial, property, staticmethod, classmethod)


def is_opaque(value: Any) -> bool:
    """Whether a value is told by its class alone: a logger, a lock, what is torch's. An event is a flag."""
    return type(value).__module__.partition(".")[0] in _OPAQUE and type(value) is not threading.Event


def _parts(value: Any) -> Iterator[Any]:
    """What is inside of a value, and may be changed there."""
    if isinstance(value, types.FunctionType) and not str(value.__module__).startswith("torch."):
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not set yet
                yield None
    elif isinstance(value, types.MethodType):
        yield value.__func__
        if not isinstance(value.__self__, nn.Module):
            yield value.__self__
    elif type(value) is threading.Event:
        yield from ("is_set()", value.is_set())
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, property):
        yield value.fget
    elif isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from (key, item)
        yield from _fields(value)
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from value
        yield from _fields(value)
    elif not (
        isinstance(value, type | enum.Enum | types.FunctionType) or _is_array(value) or is_opaque(value)
    ):
        yield from _fields(value)


def _fields(value: Any) -> Iterator[Any]:
    """Names and values of the attributes of an object of some class in Python."""
    for name, item in getattr(value, "__dict__", {}).items():
        if not (isinstance(value, nn.Module) and name in OWN):
            yield from (name, item)
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType) and kind.__flags__ & HEAP_CLASS:
                try:
                    yield from (name, slot.__get__(value))
                except AttributeError:
                    yield from (name, None)


def changeable(value: Any, found: dict[int, Any] | None = None) -> dict[int, Any]:
    """The containers in `value` that may change without being replaced, by id, without modules and tensors."""
    found = {} if found is None else found
    if (
        type(value) in _PLAIN
        or isinstance(value, (*_TORCH, torch.Tensor, type, enum.Enum, types.ModuleType))
        or id(value) in found
    ):
        return found
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, *_WRAPPERS)) or is_opaque(value):
        return found
    if not isinstance(value, tuple | frozenset):
        found[id(value)] = value
    for part in _parts(value):
        changeable(part, found)
    return found


def contents(value: Any) -> tuple[Any, ...]:
    """What a changeable container holds now, to be compared object by object."""
    if _is_array(value):
        return (value.tobytes(),)
    if isinstance(value, set):
        return tuple(sorted(value, key=id))
    return tuple(_parts(value))


def same_contents(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Whether two results of `contents` hold the same objects."""
    return len(before) == len(now) and all(
        a is b or (type(a) is bytes and a == b) for a, b in zip(before, now, strict=True)
    )


def _is_array(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tobytes")


def _digest(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu()
        if plain.layout is torch.strided:
            held = plain.flatten().tolist()
        else:  # not made dense: it may be large
            coo = plain.to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
            held = [coo.indices().tolist(), coo.values().tolist()]
        data = repr((value.dtype, tuple(value.shape), held)).encode()
    else:
        data = value.tobytes() if value.dtype.kind != "O" else repr(value.tolist()).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def _same_thing(a: Any, b: Any) -> bool:
    if a is b or a is None or b is None:
        return True
    if isinstance(a, types.CodeType):
        return bool(a == b)
    return _digest(a) == _digest(b)


def _name(value: Any) -> str:
    return f"{value.__module__}:{value.__qualname__}"
