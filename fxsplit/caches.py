"""Caches of keys and values, such as those of transformers: objects whose tensors a program takes and gives.

They are known by their names, because transformers has had many of them, and is not imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .errors import ArgumentError

_LENGTHS = ("cumulative_length", "_seen_tokens")  # how many positions a cache has seen


def is_cache(value: Any) -> bool:
    """Whether `value` is a cache, or one layer of one."""
    return hasattr(value, "__dict__") and not isinstance(value, type) and _is_cache_class(type(value))


def _is_cache_class(kind: type) -> bool:
    return any(k.__name__.endswith(("Cache", "CacheLayerMixin")) for k in kind.__mro__)


def taken_apart(cache: Any) -> tuple[dict[str, Any], tuple[tuple[str, Any], ...]]:
    """The attributes of a cache that hold tensors and numbers, and the others.

    What follows from its tensors (their type, their device, how many positions they hold) is no number of its own:
    it is the name of what it follows from.

    Raises:
        ArgumentError: it keeps its tensors in a form that only its own class can read.
    """
    kind = type(cache).__name__
    if "Quantized" in kind:
        raise ArgumentError(
            f"a {kind} keeps its tensors in a form of its own, which cannot be cut into micro-batches",
            remedy="a cache that is not quantized: past_key_values=DynamicCache(config=model.config)",
        )
    if getattr(cache, "offloading", False):
        raise ArgumentError(
            f"the {kind} offloads its layers to the host by itself, which would race with the stages",
            remedy="a cache with offloading=False",
        )
    sample = _sample(vars(cache))
    held, rest = {}, []
    for key, value in vars(cache).items():
        follows = _follows(key, value, sample)
        if follows is not None:
            rest.append((key, follows))
        elif isinstance(value, torch.Tensor | list | tuple | dict) or _is_number(value) or is_cache(value):
            held[key] = value
        else:
            rest.append((key, value))
    return held, tuple(rest)


def put_together(kind: type, held: Mapping[str, Any], rest: tuple[tuple[str, Any], ...]) -> Any:
    """The inverse of `taken_apart`; the constructor of the class is not called."""
    cache: Any = object.__new__(kind)
    sample = _sample(held)
    found = {key: value.of(sample) if isinstance(value, Follows) else value for key, value in rest}
    vars(cache).update({**held, **found})
    return cache


class Follows(str):
    """What an attribute is that follows from the tensors beside it: ``dtype``, ``device`` or ``length``."""

    __slots__ = ()

    def of(self, sample: torch.Tensor | None) -> Any:
        """Its value for these tensors."""
        if sample is None:
            return None
        return sample.shape[-2] if self == "length" else getattr(sample, self)


def _follows(key: str, value: Any, sample: torch.Tensor | None) -> Follows | None:
    if sample is None:
        return None
    if isinstance(value, torch.dtype) and value == sample.dtype:
        return Follows("dtype")
    if isinstance(value, torch.device) and value == sample.device:
        return Follows("device")
    counts = key in _LENGTHS and _is_number(value) and sample.dim() == 4
    return Follows("length") if counts and value == sample.shape[-2] else None  # traced: two sizes, guarded


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sample(held: Mapping[str, Any]) -> torch.Tensor | None:
    """The first tensor among the attributes with as many dimensions as keys and values have."""
    rows = [v for value in held.values() for v in (value if isinstance(value, list) else [value])]
    tensors = [t for t in rows if isinstance(t, torch.Tensor)]
    return next((t for t in tensors if t.dim() >= 3), None)
