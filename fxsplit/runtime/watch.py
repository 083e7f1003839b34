"""Whether the model is still what was compiled, and its current tensors for the generated code."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..assumptions import (
    ASKED,
    HOOKS,
    TABLES,
    Assumptions,
    Lookup,
    caller_now,
    global_hooks,
    is_there,
    read,
)
from ..compat import autocast_kinds
from ..errors import AssumptionError
from ..ir import Program, Traced
from ..rebind import use_current
from ..replication import OWN_CALLBACKS
from ..saving.skeleton import Skeleton
from ..seen import changeable, contents, same_contents

_MISSING = object()


class Fingerprint:
    """A model at some time; `holds` tells in a moment that nothing which counts has been replaced since.

    It looks at objects, not at values, and at more than what was assumed: where it does not hold, `Assumptions`
    decides. Written out as calls of builtins over lists, because it is made in every call.
    """

    def __init__(self, model: nn.Module, table: Assumptions) -> None:
        lookup = Lookup(model, table)
        modules = list(lookup.modules.items())
        hooks = [vars(m)[name] for path, m in modules if path for name in HOOKS]
        tables = [vars(m)[name] for _, m in modules for name in TABLES]
        self._modules = [m for _, m in modules]
        self._classes = list(map(type, self._modules))
        self._empty = [t for t in (*hooks, *tables) if not t]
        self._full = [t for t in (*hooks, *tables) if t]
        self._copies = [dict(t) for t in self._full]
        self._attributes = [vars(m) for m in self._modules]
        self._callbacks = [a.get(OWN_CALLBACKS) and dict(a[OWN_CALLBACKS]) for a in self._attributes]
        self._global = len(global_hooks())
        self._entries(lookup, table)
        self._contents(lookup, table)
        self._asked(lookup, table)

    def _entries(self, lookup: Lookup, table: Assumptions) -> None:
        """Attributes by the dict that they are in; the names in that dict; attributes of classes."""
        small = [
            (table_, key, value)
            for table_ in self._full
            for key, value in table_.items()
            if isinstance(value, torch.Tensor) and value.numel() < 2  # equal ones are taken for the same by `==`
        ]
        owners: dict[str, dict[str, Any]] = {}
        classes: dict[tuple[type, str], Any] = {}
        for row in table.of_kind("attribute"):
            owner = lookup.at(row.where)
            if not is_there(owner) or not hasattr(owner, "__dict__"):
                continue
            own = owners[row.where] = vars(owner)
            if not isinstance(owner, nn.Module):
                continue
            if row.what in own:
                small.append((own, row.what, own[row.what]))
                continue
            for cls in type(owner).__mro__:
                classes[cls, row.what] = vars(cls).get(row.what, _MISSING)
                if row.what in vars(cls):
                    break
        for path in lookup.objects:
            if hasattr(lookup.at(path), "__dict__"):
                own = owners[path] = vars(lookup.at(path))
                small += [(own, key, value) for key, value in own.items()]
        self._dicts, self._keys = [d for d, _, _ in small], [k for _, k, _ in small]
        self._values = [v for _, _, v in small]
        self._named = list(owners.values())
        self._names = list(map(tuple, self._named))
        self._in_classes = [vars(cls).get for cls, _ in classes]
        self._class_keys, self._class_values = [key for _, key in classes], list(classes.values())

    def _contents(self, lookup: Lookup, table: Assumptions) -> None:
        """Containers that may change without being replaced."""
        found: dict[int, Any] = {}
        known = {*lookup.known}
        for row in table.of_kind("attribute"):
            value = read(lookup.at(row.where), row.what)
            if is_there(value) and id(value) not in known and not isinstance(value, nn.Module):
                changeable(value, found)
        for key in known:
            found.pop(key, None)
        self._containers = list(found.values())
        self._held = list(map(contents, self._containers))

    def _asked(self, lookup: Lookup, table: Assumptions) -> None:
        """What was asked of tensors of the model."""
        tensors: dict[str, list[torch.Tensor]] = {}
        for row in table.of_kind("asked"):
            path, _, leaf = row.where.rpartition(".")
            tensor = read(lookup.at(path), leaf)
            if isinstance(tensor, torch.Tensor) and row.what in _GETTERS:
                tensors.setdefault(row.what, []).append(tensor)
        self._tensors = [(_GETTERS[what], found, list(map(_GETTERS[what], found))) for what, found in tensors.items()]

    def holds(self) -> bool:
        """Whether nothing that counts is another object."""
        try:
            return (
                not any(self._empty)
                and all(map(operator.eq, self._full, self._copies))
                and list(map(type, self._modules)) == self._classes
                and all(map(operator.is_, map(dict.get, self._dicts, self._keys, _FOREVER), self._values))
                and list(map(tuple, self._named)) == self._names
                and all(map(operator.is_, map(operator.call, self._in_classes, self._class_keys, _FOREVER), self._class_values))
                and list(map(dict.get, self._attributes, _CALLBACKS)) == self._callbacks
                and all(map(same_contents, self._held, map(contents, self._containers)))
                and all(list(map(get, tensors)) == before for get, tensors, before in self._tensors)
                and len(global_hooks()) == self._global
            )
        except (RuntimeError, ValueError):  # tensors were compared: they are others
            return False


_FOREVER: Any = itertools.repeat(_MISSING)
_CALLBACKS: Any = itertools.repeat(OWN_CALLBACKS)
_GETTERS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    what: operator.attrgetter(what) for what in ("dtype", "shape", "requires_grad", "layout")
}


Key = tuple[Any, ...]


class Asked:
    """What forward asked, when it was captured, of its caller, of its arguments, and of values on the way.

    The last can be told only where the value is made. So a call in circumstances that there was none in before is run
    node by node; what may change such an answer is the key of the circumstances.
    """

    def __init__(self, model: nn.Module, traced: Traced, program: Program) -> None:
        rows = traced.assumptions
        places = {a.placeholder: i for i, a in enumerate(traced.signature.arguments)}
        self._caller = list(rows.of_kind("caller"))
        self._arguments = [(places[row.where], row) for row in rows.of_kind("argument")]
        self._names = [a.name for a in traced.signature.arguments]
        self._getters = [_GETTERS[what] for what in {row.what for row in rows.of_kind("value")} if what in _GETTERS]
        types = {device.type for stage in program.stages for device in (stage.device, *stage.row)}
        self._autocast = sorted(types & set(autocast_kinds()))
        self._model, self._seen = model, list[Key]()

    def check(self, inputs: Sequence[torch.Tensor]) -> None:
        """Compare the state of the caller, and the arguments.

        Raises:
            AssumptionError: names what was and what is.
        """
        for row in self._caller:
            now = caller_now(row.what)
            if not row.was.same(now):
                raise AssumptionError(
                    f"forward asked for {row.what}, which was {row.was} when the pipeline was compiled, and is {now}",
                    remedy="pipe.recompile() here, in this state: inside of the same torch.no_grad and torch.autocast",
                )
        for i, row in self._arguments:
            now = ASKED[row.what](inputs[i])
            if not row.was.same(now):
                raise AssumptionError(
                    f"forward asked for the {row.what} of argument {self._names[i]!r}, which was {row.was} when the "
                    f"pipeline was compiled, and is {now}",
                    remedy="convert the argument; or pipe.recompile(...) with these arguments, to compile again with "
                    "them as the example",
                )

    def circumstances(self, inputs: Sequence[torch.Tensor]) -> Key | None:
        """A key of the circumstances if there was no call in them yet."""
        if not self._getters:
            return None
        tensors = [*inputs, *self._model.parameters(), *self._model.buffers()]
        states = [(torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in self._autocast]
        key = (torch.is_grad_enabled(), *states, *(get(t) for get in self._getters for t in tensors))
        return None if key in self._seen else key

    def passed(self, key: Key) -> None:
        """A call in these circumstances was right."""
        self._seen = [key, *self._seen[:7]]


class Watch:
    """Notices what is not what it was, and lets stages see what has been replaced by its like."""

    def __init__(self, model: nn.Module, traced: Traced, program: Program) -> None:
        self._model, self._program = model, program
        # Inlined modules of a model that was made from a state_dict have neither classes nor attributes.
        self._assumed = Assumptions() if isinstance(model, Skeleton) else traced.assumptions
        self._fingerprint: Fingerprint | None = None
        self.asked = Asked(model, traced, program)

    def use_current_modules(self) -> None:
        """Stages see what is in the model now: ``.to(dtype)`` and ``load_state_dict(assign=True)`` replace tensors.

        Raises:
            AssumptionError: something that the program takes for granted has changed.
        """
        if self._fingerprint is not None and self._fingerprint.holds():
            return
        changes = self._assumed.changes(self._model)
        if changes:
            raise AssumptionError(
                f"what the pipeline was compiled for has changed: {changes}",
                remedy="pipe.recompile(), to compile again under the same plan",
            )
        for stage in self._program.stages:
            use_current(stage.module, stage.paths, self._model)
        self._fingerprint = Fingerprint(self._model, self._assumed)
