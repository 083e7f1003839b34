"""What functions and classes are called: how a user writes them, and under which name they are imported again."""

from __future__ import annotations

import builtins
import functools
import importlib
import math
import operator
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..compat import OpOverload

# global name → (module, the name that it is imported by)
SPACES: dict[str, tuple[Any, str]] = {
    "torch": (torch, "torch"),
    "F": (F, "torch.nn.functional"),
    "math": (math, "math"),
    "operator": (operator, "operator"),
}


@functools.cache
def public_names() -> dict[int, str]:
    """id of a function → how a user writes it."""
    found: dict[int, str] = {}
    spaces: list[tuple[str, Any]] = [
        ("torch", torch), ("F", F), ("torch.linalg", torch.linalg), ("torch.fft", torch.fft),
        ("torch.special", torch.special), ("torch.nested", torch.nested), ("torch.sparse", torch.sparse),
        ("torch.nn.init", nn.init), ("torch.Tensor", torch.Tensor), ("math", math), ("operator", operator),
    ]  # fmt: skip
    for prefix, space in spaces:
        for name in dir(space):
            value = getattr(space, name, None) if not name.startswith("_") else None
            if callable(value) and not isinstance(value, types.ModuleType):
                found.setdefault(id(value), f"{prefix}.{name}")
    return found


def name_of(value: Any) -> str | None:
    """``module:qualified.name`` under which a function or class can be imported again; None if there is none."""
    own = getattr(value, "__name__", "?")
    if getattr(builtins, own, None) is value:
        return f"builtins:{own}"
    public = public_names().get(id(value))
    if public is not None:
        space, _, rest = public.partition(".")
        return f"{SPACES[space][1]}:{rest}"
    if isinstance(value, OpOverload):
        return f"torch:ops.{value}"
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not module or not qualified or "<" in qualified or module == "__main__":
        return None
    try:
        return f"{module}:{qualified}" if resolve_name(f"{module}:{qualified}") is value else None
    except (ImportError, AttributeError):
        return None


def resolve_name(name: str) -> Any:
    """The inverse of `name_of`."""
    module, _, qualified = name.partition(":")
    value: Any = importlib.import_module(module)
    for part in qualified.split("."):
        value = getattr(value, part)
    return value


def import_of(value: Any, name: str) -> str | None:
    """The statement that imports a function or class under this name; None where no module holds it."""
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not module or not qualified or "<" in qualified or module == "__main__":
        return None
    root, *rest = qualified.split(".")
    if rest:
        return None
    return f"from {module} import {root}" + ("" if root == name else f" as {name}")
