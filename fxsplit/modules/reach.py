"""What the forward of a module can get hold of: modules, tensors and objects, and the names in its code.

More than its children: a module may keep another one in a list, share a dict with it, or draw from a generator that
the whole process has.
"""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import random
import re
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
MODELS = (
    "fxsplit.demo.",
    "fxsplit.testing.programs",
)  # modules of this package that are models, as a user's are
_PYTHONS: Any = getattr(random.random, "__self__")  # noqa: B009  # the one behind the functions of `random`
_TABLES = frozenset(vars(nn.Module()))  # of every module: modules, parameters, buffers, hooks


@dataclass
class Reach:
    """What was found.

    Attributes:
        modules: itself, its children, and those in its attributes.
        tensors: by id: their parameters, buffers and attributes, also in containers.
        objects: by id: what may be changed without an attribute being set: containers, generators, plain objects.
        around: of those, the ones in global variables and closures of forward.
    """

    modules: dict[int, nn.Module] = field(default_factory=dict)
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    objects: dict[int, Any] = field(default_factory=dict)
    around: list[Any] = field(default_factory=list)

    def add(self, value: Any) -> None:
        """Take in a value and all that hangs on it."""
        todo = [value]
        while todo:
            value = todo.pop()
            if isinstance(value, _PLAIN) or id(value) in self.objects or id(value) in self.modules:
                continue
            if isinstance(value, torch.Tensor):
                self.tensors[id(value)] = value
            elif isinstance(value, nn.Module):
                self.modules[id(value)] = value
                tables = (value._parameters, value._buffers, value._modules)
                others = (item for key, item in value.__dict__.items() if key not in _TABLES)
                todo += reversed([*(v for table in tables for v in table.values()), *others])
            elif isinstance(value, tuple):
                todo += reversed(value)
            elif holds_state(value):
                self.objects[id(value)] = value
                todo += reversed(parts_of(value))
            elif isinstance(value, types.MethodType | types.BuiltinMethodType):
                todo.append(value.__self__)
            elif isinstance(value, functools.partial):
                todo += [*value.args, *value.keywords.values(), value.func]


def reach(value: Any) -> Reach:
    """What hangs on a module, or on anything else; of a module of the user's, also what its code has around it."""
    found = Reach()
    found.add(value)
    if isinstance(value, nn.Module):
        found.around = around_of(value)
        for item in found.around:
            found.add(item)
    return found


def around_of(module: nn.Module) -> list[Any]:
    """What holds state in global variables and closures that forward may use, of it and of its children."""
    kinds = dict.fromkeys(type(m) for m in module.modules())
    return list({id(o): o for kind in kinds for o in _around(kind)}.values())


def objects_in(value: Any) -> list[Any]:
    """The objects that may change, in a value."""
    found = Reach()
    found.add(value)
    return list(found.objects.values())


def holds_state(value: Any) -> bool:
    """Whether a value can change and still be the same object: containers, generators, objects of the user's classes."""
    if isinstance(
        value, (*_CONTAINERS, random.Random, torch.Generator, types.SimpleNamespace, threading.local)
    ):
        return not isinstance(value, tuple | frozenset)
    if isinstance(value, itertools.count | types.GeneratorType):
        return True
    if isinstance(value, type | types.ModuleType | nn.Module | torch.Tensor) or callable(value):
        return False
    return hasattr(value, "__dict__") and _is_users(type(value))


def parts_of(value: Any) -> list[Any]:
    """What hangs on an object that holds state."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | collections.deque):
        return list(value)
    return list(vars(value).values()) if hasattr(value, "__dict__") else []


def draws_python_random(module: nn.Module) -> bool:
    """Whether the code that its forward may run, or a child's, names Python's or NumPy's random numbers.

    Or it has such a function as an attribute.
    """
    return any(
        _names_random(type(m))  # type: ignore[arg-type]  # a class can be hashed
        or any(_is_random(value, set()) for value in m.__dict__.values())
        for m in module.modules()
    )


@functools.cache
def _names_random(cls: Any) -> bool:
    return any(_is_random(value, names) for value, names in _globals_of(_run_by_forward(cls)))


def _around(cls: type) -> list[Any]:
    """What holds state in global variables and closures of a class's forward."""
    return [value for value, _ in _globals_of(_run_by_forward(cls)) if holds_state(value)]


def _run_by_forward(cls: type) -> list[types.FunctionType]:
    """The functions of a class that forward may call: it names them, or they are named by one that it names."""
    todo, found = ["forward"], dict[str, types.FunctionType]()
    while todo:
        name = todo.pop()
        function = inspect.getattr_static(cls, name, None)
        function = inspect.unwrap(getattr(function, "__func__", getattr(function, "fget", function)))
        if name not in found and isinstance(function, types.FunctionType) and _is_users(function):
            found[name] = function
            todo += _names_in(function)
    return list(found.values())


def _names_in(function: types.FunctionType) -> set[str]:
    names, codes = set[str](), [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return names


def _globals_of(functions: list[types.FunctionType]) -> Iterator[tuple[Any, set[str]]]:
    """What global names and closures stand for in these functions and in those of the user's that they call; each with
    all names of the function."""
    todo, seen = list(functions), set[int]()
    while todo:
        function = todo.pop()
        seen.add(id(function))
        names = _names_in(function)
        values = [function.__globals__[n] for n in sorted(names) if n in function.__globals__]
        values += [
            sys.modules[n] for n in ("random", "numpy") if n in names and n in sys.modules
        ]  # imported inside
        values += [c for cell in function.__closure__ or () if (c := _content(cell)) is not None]
        for value in values:
            yield value, names
            if isinstance(value, types.FunctionType) and id(value) not in seen and _is_users(value):
                todo.append(value)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _is_users(thing: types.FunctionType | type) -> bool:
    """Whether a function or class is neither Python's, nor torch's, nor this package's, but for the models in it."""
    name = thing.__module__ or ""
    space = name.partition(".")[0]
    return name.startswith(MODELS) or (
        space not in ("torch", "fxsplit") and space not in sys.stdlib_module_names
    )


def _is_random(value: Any, names: set[str]) -> bool:
    owner = getattr(value, "__self__", None)
    if value is random or owner is _PYTHONS:  # a Random of one's own is an object like others
        return True
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    return (
        value is numpy.random
        or (value is numpy and "random" in names)
        or (owner is not None and owner is numpy.random.rand.__self__)
    )


def named_by(model: nn.Module) -> list[Any]:
    """The functions and classes of the user's that the forwards of a model name, or have as attributes; and the classes
    of its modules."""
    found: dict[int, Any] = {}
    for kind in dict.fromkeys(type(m) for m in model.modules()):
        found[id(kind)] = kind
        for value in _named_by_class(kind):
            found[id(value)] = value
    for module in model.modules():
        for value in module.__dict__.values():
            if _is_users_own(value):
                found[id(value)] = value
    return list(found.values())


def _named_by_class(cls: type) -> Iterator[Any]:
    functions = _run_by_forward(cls)
    for value, names in _globals_of(functions):
        if _is_users_own(value):
            yield value
        if isinstance(value, types.ModuleType) or _is_users_own(value):
            inside = [inspect.getattr_static(value, n, None) for n in names if n in vars(value)]
            yield from (v for v in inside if _is_users_own(v))
    for function in functions:
        for annotation in function.__annotations__.values():
            words = re.findall(r"\w+", annotation) if isinstance(annotation, str) else ()
            named = [function.__globals__.get(word) for word in words]
            yield from (v for v in (annotation, *named) if _is_users_own(v))


def _is_users_own(value: Any) -> bool:
    return isinstance(value, types.FunctionType | type) and _is_users(value)
