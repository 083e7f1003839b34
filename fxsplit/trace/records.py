"""Dataclasses and dict subclasses that a module is given: the program makes them again, by their class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from .refusal import CannotInlineError

Call = tuple[type, tuple[Any, ...], dict[str, Any]]


def made_again(value: Any) -> Call:
    """A call of the class of `value` that makes another one like it.

    Raises:
        CannotInlineError: there is none: the constructor does more than to keep what it is given.
    """
    for kind, args, kwargs in _ways(value):
        try:
            if _alike(kind(*args, **kwargs), value):
                return kind, args, kwargs
        except Exception:  # whatever the user's constructor raises
            continue
    name = type(value).__name__
    raise CannotInlineError(
        f"an operation takes a {name}, which {name}(...) does not make again from what it holds"
    )


def _ways(value: Any) -> list[Call]:
    ways: list[Call] = []
    if is_dataclass(value):
        held = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        ways.append((type(value), (), held))
    if isinstance(value, Mapping):
        ways.append((type(value), (dict(value),), {}))
        if all(isinstance(key, str) for key in value):
            ways.append((type(value), (), dict(value)))
    return ways


def _alike(a: Any, b: Any) -> bool:
    return type(a) is type(b) and all(
        x.keys() == y.keys() and all(x[key] is y[key] for key in x)
        for x, y in zip(_held(a), _held(b), strict=True)
    )


def _held(value: Any) -> list[Mapping[Any, Any]]:
    found: list[Mapping[Any, Any]] = [vars(value)] if hasattr(value, "__dict__") else []
    if is_dataclass(value):
        found.append({f.name: getattr(value, f.name) for f in fields(value)})
    if isinstance(value, Mapping):
        found.append(dict(value))
    return found
