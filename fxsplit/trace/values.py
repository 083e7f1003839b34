"""Numbers that remember the node that computes them: sizes stay symbolic in the graph, with a value at hand.

They are subclasses of torch's `SymInt` and `SymFloat`, because torch's argument parser takes those wherever it
takes a number, and they say that their class is `int` or `float`, because models ask.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from .source import in_a_message

if TYPE_CHECKING:
    from .tracer import Ref, ValueTracer


class TracedNumber:
    """What `TracedInt` and `TracedFloat` share.

    Arithmetic records a node. A comparison, or a conversion to a plain number, decides something while the
    model is traced: it is baked in, and the tracer records a guard that makes any other outcome an error.
    """

    value: Any
    ref: Ref
    tracer: ValueTracer

    def __init__(self, value: Any, ref: Ref, tracer: ValueTracer) -> None:
        self.value, self.ref, self.tracer = value, ref, tracer
        self.node = _SymNode(self)  # what torch's C++ side asks

    def concrete(self) -> Any:
        """The value, with a guard that it stays this one."""
        self.tracer.guard_value(self)
        return self.value

    def __bool__(self) -> bool:
        return bool(self.tracer.guard_comparison(operator.ne, self, 0))

    def __int__(self) -> int:
        return int(self.concrete())

    __index__ = __int__

    def __float__(self) -> float:
        return float(self.concrete())

    def __hash__(self) -> int:
        # a cache would keep the number, and a later trace would find it there; torch's own SymInt refuses too
        raise TypeError("unhashable type: a size of a traced program")

    def __repr__(self) -> str:
        return repr(self.value)

    def __str__(self) -> str:
        return str(self.value if in_a_message() else self.concrete())

    def __format__(self, spec: str) -> str:
        return format(self.value if in_a_message() else self.concrete(), spec)

    def __round__(self, digits: int | None = None) -> Any:
        return (
            self.tracer.number(round, (self, digits))
            if digits is not None
            else self.tracer.number(round, (self,))
        )

    def __trunc__(self) -> Any:
        return self.tracer.number(math.trunc, (self,))

    def __floor__(self) -> Any:
        return self.tracer.number(math.floor, (self,))

    def __ceil__(self) -> Any:
        return self.tracer.number(math.ceil, (self,))

    def is_integer(self) -> bool:
        """Whether the value is whole; baked in."""
        return float(self.concrete()).is_integer()

    @property
    def real(self) -> Any:
        """The number itself."""
        return self


class TracedInt(TracedNumber, torch.SymInt):
    """An int of the traced program."""

    __class__ = property(lambda self: int)

    def bit_length(self) -> int:
        """Of the value; baked in."""
        return int(self).bit_length()

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self


class TracedFloat(TracedNumber, torch.SymFloat):
    """A float of the traced program."""

    __class__ = property(lambda self: float)


def plain(value: Any) -> Any:
    """The value of a traced number; anything else as it is."""
    return value.value if isinstance(value, TracedNumber) else value


def _binary(name: str, function: Callable[[Any, Any], Any], reflected: bool) -> None:
    def method(self: TracedNumber, other: Any) -> Any:
        if not isinstance(plain(other), int | float | bool):
            return NotImplemented
        return self.tracer.number(function, (other, self) if reflected else (self, other))

    setattr(TracedNumber, name, method)
    for kind in (TracedInt, TracedFloat):
        setattr(kind, name, method)


def _comparison(name: str, function: Callable[[Any, Any], bool]) -> None:
    def method(self: TracedNumber, other: Any) -> Any:
        if not isinstance(plain(other), int | float | bool):
            return NotImplemented
        return self.tracer.guard_comparison(function, self, other)

    for kind in (TracedInt, TracedFloat):
        setattr(kind, name, method)


def _unary(name: str, function: Callable[[Any], Any]) -> None:
    def method(self: TracedNumber) -> Any:
        return self.tracer.number(function, (self,))

    for kind in (TracedInt, TracedFloat):
        setattr(kind, name, method)


for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "lshift",
    "rshift",
    "and_",
    "or_",
    "xor",
):
    _stem = _name.rstrip("_")
    _binary(f"__{_stem}__", getattr(operator, _name), reflected=False)
    _binary(f"__r{_stem}__", getattr(operator, _name), reflected=True)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _comparison(f"__{_name}__", getattr(operator, _name))
for _name in ("neg", "pos", "abs"):
    _unary(f"__{_name}__", getattr(operator, _name))
for _kind in (TracedInt, TracedFloat):  # defined above, but torch's classes have them too and come later
    for _name in (
        "__bool__",
        "__int__",
        "__index__",
        "__float__",
        "__hash__",
        "__repr__",
        "__str__",
        "__format__",
    ):
        setattr(_kind, _name, getattr(TracedNumber, _name))


class _SymNode:
    """The part of torch 2.13's SymNode protocol that its C++ side uses on a number handed to it."""

    def __init__(self, number: TracedNumber) -> None:
        self._number = number

    def is_int(self) -> bool:
        return isinstance(self._number.value, int)

    def is_float(self) -> bool:
        return isinstance(self._number.value, float)

    def is_bool(self) -> bool:
        return False

    def is_nested_int(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    def has_hint(self) -> bool:
        return True

    def maybe_as_int(self) -> int | None:
        return None

    def guard_int(self, file: str, line: int) -> int:
        return int(self._number.concrete())

    def guard_float(self, file: str, line: int) -> float:
        return float(self._number.concrete())

    def int_(self) -> int:
        return int(self._number.concrete())


def nested_leaves(value: Any) -> Iterator[Any]:
    """Leaves of nested tuples, lists, dicts, dataclasses and slices."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from nested_leaves(item)
    elif isinstance(value, dict):
        yield from nested_leaves(tuple(value.values()))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from nested_leaves(tuple(getattr(value, f.name, None) for f in fields(value)))
    elif isinstance(value, slice):
        yield from nested_leaves((value.start, value.stop, value.step))
    else:
        yield value


_FLAT = frozenset(
    (torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device)
)


def nested_plain(value: Any) -> Any:
    """`value` with plain numbers for traced ones, inside nested tuples, lists, dicts and slices."""
    if type(value) is tuple and _FLAT.issuperset(map(type, value)):  # the arguments of most operations
        return value
    if isinstance(value, TracedNumber):
        return value.value
    if isinstance(value, torch.Size):
        return torch.Size([plain(item) for item in value])
    if isinstance(value, tuple | list):
        if not any(isinstance(leaf, TracedNumber) for leaf in nested_leaves(value)):
            return value
        items = [nested_plain(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is dict:
        return {key: nested_plain(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(nested_plain(part) for part in (value.start, value.stop, value.step)))
    return value
