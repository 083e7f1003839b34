"""Which attributes of modules, and of the objects that they have, a forward reads."""

from __future__ import annotations

import contextlib
import enum
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..compat import transforms_left
from ..graph.assumptions import HOOKS
from ..modules.seen import HEAP_CLASS, is_opaque
from .capture import Request, Taken
from .source import is_ours

_OWN = frozenset(vars(nn.Module())) - {"_modules", "_parameters", "_buffers"}
_MODULE_FILE = sys.modules["torch.nn.modules.module"].__file__
_MACHINERY = frozenset(
    ("__getattr__", "__setattr__", "__delattr__", "__call__", "_wrapped_call_impl", "inner")
)
_QUIET = (
    os.path.dirname(torch.__file__) + os.sep + "fx",
    os.path.dirname(torch.__file__) + os.sep + "_dynamo",
)

_GET = "__getattribute__"

Patch = tuple[Any, str, Any]


class Reads:
    """Names that were read, by the path of their owner.

    Attributes:
        names: path of a module, or of an object that is an attribute of one → the names, in order.
        objects: paths of the objects, in the order in which they were met.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names: dict[str, dict[str, None]] = {}
        self.objects: dict[str, None] = {}
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._held: dict[int, Any] = {}  # so that no other object has their id
        self._patched: list[tuple[type, Any]] = []
        self._undo: list[tuple[str, str]] = []
        self.is_on: Callable[[], bool] = lambda: True

    def note(self, owner: Any, name: str) -> None:
        """``owner.name`` is read."""
        path = self._paths.get(id(owner))
        if path is None or (name.startswith("__") and name != "__dict__") or name in _OWN:
            return
        names = self.names.setdefault(path, {})
        if name not in names:
            names[name] = None
            self._undo.append((path, name))

    def mark(self) -> int:
        """For `rewind`."""
        return len(self._undo)

    def rewind(self, mark: int) -> None:
        """Forget what has been read since: the forward that did is called again when the program runs."""
        while len(self._undo) > mark:
            path, name = self._undo.pop()
            del self.names[path][name]

    def patches(self) -> Iterator[Patch]:
        """What notes the reads of modules. Those of other objects are noted from when they are met, until `close`."""
        original: Any = nn.Module.__getattribute__

        def read(module: nn.Module, name: str) -> Any:
            if not self.is_on() or _is_machinery(sys._getframe(1), name):
                return original(module, name)
            self.note(module, name)
            value = original(module, name)
            self._meet(module, name, value)
            return value

        yield nn.Module, _GET, read

    def close(self) -> None:
        """Leave the classes of the user's objects as they were."""
        for cls, before in reversed(self._patched):
            if before is None:
                delattr(cls, _GET)
            else:
                setattr(cls, _GET, before)
        self._patched.clear()

    def _meet(self, owner: Any, name: str, value: Any) -> None:
        """Note what is read of an object of a class of somebody's."""
        path = self._paths.get(id(owner))
        if path is None or id(value) in self._paths or not _is_config(value) or id(value) in self._held:
            return
        if vars(owner).get(name) is not value or not self._patch(type(value)):
            return
        self._held[id(value)] = value
        self._paths[id(value)] = whole = f"{path}.{name}" if path else name
        self.objects[whole] = None

    def _patch(self, cls: type) -> bool:
        if any(cls is known for known, _ in self._patched):
            return True
        original: Any = cls.__getattribute__

        def read(thing: Any, name: str) -> Any:
            if not self.is_on() or id(thing) not in self._held or name.startswith("__"):
                return original(thing, name)
            self.note(thing, name)
            value = original(thing, name)
            self._meet(thing, name, value)
            return value

        before = vars(cls).get(_GET)
        try:
            setattr(cls, _GET, read)
        except (TypeError, AttributeError):
            return False
        self._patched.append((cls, before))
        return True


def reads_of_a_run(request: Request) -> Taken:
    """What the model's own forward reads in one run: for a front end that does not tell."""
    reads = Reads(request.model)
    args, kwargs = request.arguments()
    with transforms_left(), torch.set_grad_enabled(request.grad), contextlib.ExitStack() as stack:
        stack.callback(reads.close)
        for owner, name, value in reads.patches():
            setattr(owner, name, value)
            stack.callback(delattr, owner, name)
        request.model.forward(*args, **kwargs)
    return Taken(reads.names, reads.objects)


def _is_machinery(frame: types.FrameType, name: str) -> bool:
    """Whether torch looks something up to call a module, or fxsplit does: not the forward."""
    path, function = frame.f_code.co_filename, frame.f_code.co_name
    if path == _MODULE_FILE:
        return function in _MACHINERY or (function == "_call_impl" and name != "forward") or name in HOOKS
    return path.startswith(_QUIET) or is_ours(path)


def _is_config(value: Any) -> bool:
    """Whether a value is an object of a class in Python, that has attributes and is no container."""
    cls = type(value)
    if not cls.__flags__ & HEAP_CLASS or not hasattr(value, "__dict__") or is_opaque(value):
        return False
    if isinstance(value, nn.Module | torch.Tensor | type | enum.Enum | tuple | list | dict | set | frozenset):
        return False
    return cls.__module__.partition(".")[0] not in ("builtins", "numpy", "functools", "threading")
