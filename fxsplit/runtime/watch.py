"""Whether the model is still what was compiled, and its current tensors for the generated code."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..compat import autocast_kinds
from ..errors import ArgumentError, AssumptionError
from ..graph.assumptions import (
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
from ..graph.binding import use_current
from ..graph.effects import has_hooks
from ..graph.ir import Program, Stage, Traced
from ..graph.nodes import resolve
from ..modules.callbacks import registered
from ..modules.seen import changeable, contents, same_contents
from ..replicas.meet import NORM_LAYERS
from ..saving.skeleton import Skeleton
from .halves import can_be_halved

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
        self.tensors = [t for table_ in tables for t in table_.values() if isinstance(t, torch.Tensor)]
        inlined = dict.fromkeys(row.where for row in table.of_kind("attribute"))
        self._modules = [m for path, m in modules if path in inlined]
        self._classes = list(map(type, self._modules))
        self._empty = [t for t in (*hooks, *tables) if not t]
        self._full = [t for t in (*hooks, *tables) if t]
        self._copies = [dict(t) for t in self._full]
        self._registered, self._global = registered(), len(global_hooks())
        self._entries: list[tuple[dict[str, Any], str, Any]] = []
        self._sized: list[Any] = []
        self._lists: list[list[Any]] = []
        self._others: list[Any] = []
        self._in_classes: dict[tuple[type, str], Any] = {}
        for table_ in self._full:  # tensors of one element that are equal are taken for the same by `==`
            self._entries += [
                (table_, k, t) for k, t in table_.items() if isinstance(t, torch.Tensor) and t.numel() < 2
            ]
        self._attributes(lookup, table)
        self._contents(lookup, table)
        self._asked(lookup, table)
        self._compile()

    def _attributes(self, lookup: Lookup, table: Assumptions) -> None:
        """Attributes by the dict that they are in, or are missing in; those of classes."""
        owners: dict[str, dict[str, Any]] = {}
        for row in table.of_kind("attribute"):
            owner = lookup.at(row.where)
            if not isinstance(owner, nn.Module):
                continue
            own = owners[row.where] = vars(owner)
            if any(row.what in own[table_] for table_ in TABLES):
                continue
            self._entries.append((own, row.what, own.get(row.what, _MISSING)))
            for cls in type(owner).__mro__ if row.what not in own else ():
                self._in_classes[cls, row.what] = vars(cls).get(row.what, _MISSING)
                if row.what in vars(cls):
                    break
        self._sized += owners.values()
        for path in lookup.objects:
            self._hold(lookup.at(path))

    def _contents(self, lookup: Lookup, table: Assumptions) -> None:
        """Containers that may change without being replaced."""
        found: dict[int, Any] = {}
        for row in table.of_kind("attribute"):
            value = read(lookup.at(row.where), row.what)
            if is_there(value) and id(value) not in lookup.known:
                changeable(value, found)
        for key, value in found.items():
            if key not in lookup.known:
                self._hold(value)

    def _hold(self, value: Any) -> None:
        tables = [value] if isinstance(value, dict) else []
        tables += [vars(value)] if getattr(value, "__dict__", None) else []
        for table in tables:
            self._entries += [(table, key, item) for key, item in table.items()]
            self._sized.append(table)
        if isinstance(value, list):
            self._lists.append(value)
            self._sized.append(value)
        elif not tables:
            self._others.append(value)

    def _compile(self) -> None:
        """The lists that `holds` goes through."""
        self._dicts, self._keys = [d for d, _, _ in self._entries], [k for _, k, _ in self._entries]
        self._values = [value for _, _, value in self._entries]
        self._sizes = list(map(len, self._sized))
        self._items = [item for one in self._lists for item in one]
        self._held = list(map(contents, self._others))
        self._getters = [vars(cls).get for cls, _ in self._in_classes]
        self._names, self._found = [k for _, k in self._in_classes], list(self._in_classes.values())

    def _asked(self, lookup: Lookup, table: Assumptions) -> None:
        """What was asked of tensors of the model."""
        tensors: dict[str, list[torch.Tensor]] = {}
        for row in table.of_kind("asked"):
            path, _, leaf = row.where.rpartition(".")
            tensor = read(lookup.at(path), leaf)
            if isinstance(tensor, torch.Tensor) and row.what in _GETTERS:
                tensors.setdefault(row.what, []).append(tensor)
        self._tensors = [
            (_GETTERS[what], found, list(map(_GETTERS[what], found))) for what, found in tensors.items()
        ]

    def holds(self) -> bool:
        """Whether nothing that counts is another object."""
        try:
            return (
                not any(self._empty)
                and all(map(operator.eq, self._full, self._copies))
                and list(map(type, self._modules)) == self._classes
                and list(map(len, self._sized)) == self._sizes
                and all(map(operator.is_, map(dict.get, self._dicts, self._keys, _FOREVER), self._values))
                and all(map(operator.is_, map(_CALL, self._getters, self._names, _FOREVER), self._found))
                and all(map(operator.is_, itertools.chain.from_iterable(self._lists), self._items))
                and all(map(same_contents, self._held, map(contents, self._others)))
                and all(list(map(get, tensors)) == before for get, tensors, before in self._tensors)
                and (registered(), len(global_hooks())) == (self._registered, self._global)
            )
        except (RuntimeError, ValueError):  # tensors were compared: they are others
            return False


_CALL: Any = operator.call
_FOREVER: Any = itertools.repeat(_MISSING)
_GETTERS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    what: operator.attrgetter(what) for what in ("dtype", "shape", "requires_grad", "layout")
}


Key = tuple[Any, ...]


class Asked:
    """What forward asked, when it was captured, of its caller, of its arguments, and of values on the way.

    The last can be told only where the value is made. So a call in circumstances that there was none in before is run
    node by node; what may change such an answer is the key of the circumstances.
    """

    def __init__(self, traced: Traced, program: Program) -> None:
        rows = traced.assumptions
        places = {a.name: i for i, a in enumerate(traced.signature.arguments)}
        self._caller = list(rows.of_kind("caller"))
        self._arguments = [(places[row.where], row) for row in rows.of_kind("argument")]
        self._names = [a.name for a in traced.signature.arguments]
        self._getters = [
            _GETTERS[what] for what in {row.what for row in rows.of_kind("value")} if what in _GETTERS
        ]
        types = {device.type for stage in program.stages for device in (stage.device, *stage.row)}
        self._autocast = sorted(types & set(autocast_kinds()))
        self._seen: list[Key] = []

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
                    remedy="torch.no_grad() instead of inference_mode()"
                    if "inference" in row.what
                    else "pipe.recompile() here, in this state: inside of the same torch.no_grad and torch.autocast",
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

    def circumstances(self, tensors: Sequence[torch.Tensor]) -> Key | None:
        """A key of the circumstances if there was no call in them yet; `tensors` are arguments and the model's."""
        if not self._getters:
            return None
        states = [(torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in self._autocast]
        key = (torch.is_grad_enabled(), *states, *(list(map(get, tensors)) for get in self._getters))
        return None if key in self._seen else key

    def passed(self, key: Key) -> None:
        """A call in these circumstances was right."""
        self._seen = [key, *self._seen[:7]]


class Watch:
    """Notices what is not what it was, and lets stages see what has been replaced by its like."""

    def __init__(self, model: nn.Module, traced: Traced, program: Program) -> None:
        self._model, self._program, self._traced = model, program, traced
        self._paths = {name: fqn for fqn, name in traced.names.items() if fqn not in traced.constants}
        # Inlined modules of a model that was made from a state_dict have neither classes nor attributes.
        self._assumed = Assumptions() if isinstance(model, Skeleton) else traced.assumptions
        self._fingerprint: Fingerprint | None = None
        self.parameters: dict[
            str, Any
        ] = {}  # FQN → what the stages read, a parameter or what stands there for one
        self._halved: frozenset[int] | None = None
        self._compiled: set[Key] = set()
        self._written: list[tuple[nn.Module | None, tuple[dict[str, Any], str]]] = []
        self._by_norms = _written_by_owners(traced)
        self.asked = Asked(traced, program)
        self._stages: Sequence[Stage] = program.stages

    def look_at(self, stages: Sequence[Stage]) -> None:
        """Look at the tensors of these stages alone: the others are in other processes."""
        self._stages, self._fingerprint = stages, None

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
        for stage in self._stages:
            use_current(stage.module, stage.paths, self._model)
        use_current(self._traced.module, self._paths, self._model)
        read = dict.fromkeys(fqn for stage in self._stages for fqn in stage.parameters)
        self.parameters = {fqn: resolve(self._model, fqn) for fqn in read}
        self._check_values()
        self._halved, self._compiled = None, set()
        written = dict.fromkeys(name for stage in self._stages for name in stage.writes)
        self._written = [self._place_of(name) for name in written]
        self._fingerprint = Fingerprint(self._model, self._assumed)

    def _check_values(self) -> None:
        modules = [s.module for s in self._stages]
        tensors = {id(t): t for m in modules for t in itertools.chain(m.parameters(), m.buffers())}
        empty = sum(t.is_meta for t in tensors.values())
        if empty:
            raise ArgumentError(
                f"the pipeline has no weights yet: {empty} tensors are on the meta device",
                remedy="pipe.load_weights(SOURCE): a state_dict, a file, a folder, or a function from a name to a tensor",
            )

    def _place_of(self, name: str) -> tuple[nn.Module | None, tuple[dict[str, Any], str]]:
        """A buffer that may be written: the layer that alone does so and only in train mode, and where it is."""
        path, _, leaf = name.rpartition(".")
        owner = resolve(self._model, path)
        table = owner._buffers if leaf in owner._buffers else owner.__dict__  # or a plain attribute
        alone = name in self._by_norms and type(owner) in NORM_LAYERS and "forward" not in vars(owner)
        alone = alone and not has_hooks(owner) and not global_hooks()
        return owner if alone else None, (table, leaf)

    def written(self) -> list[tuple[dict[str, Any], str]]:
        """The buffers that a forward may write to, in the modes that layers are in: tables, and names in them."""
        return [place for norm, place in self._written if norm is None or norm.training]

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that get gradients. (torch.func.functional_call puts tensors there.)"""
        return {fqn: p for fqn, p in self.parameters.items() if p.requires_grad}

    def halved(self) -> frozenset[int]:
        """The stages that can go backward in two, with the hooks that their modules have now."""
        if self._halved is None:
            stages = self._program.stages
            self._halved = frozenset(s.index for s in stages if can_be_halved(s.module))
        return self._halved

    def may_compile_anew(self, chunks: Sequence[Sequence[torch.Tensor]], *, grad: bool) -> bool:
        """Whether `torch.compile` has not seen micro-batches like these yet; it has from now on.

        It compiles in one thread at a time (in two, AOTAutograd of torch 2.9 fails now and then).
        """
        kinds = {tuple((x.shape, x.dtype, x.device, x.requires_grad) for x in chunk) for chunk in chunks}
        new = {(grad, self._model.training, *kind) for kind in kinds} - self._compiled
        self._compiled |= new
        return bool(new)

    def circumstances(self, inputs: Sequence[torch.Tensor]) -> Key | None:
        """A key of the circumstances of a call if there was none in them yet, and forward asked what they decide."""
        owned = [] if self._fingerprint is None else self._fingerprint.tensors
        return self.asked.circumstances([*inputs, *owned])


def _written_by_owners(traced: Traced) -> frozenset[str]:
    """The buffers that only the module which has them may write, where that is called whole."""
    by: dict[str, set[str]] = {}
    for node in traced.graph.nodes:
        for name in traced.facts[node.name].buffers:
            by.setdefault(name, set()).add(str(node.target) if node.op == "call_module" else "")
    return frozenset(name for name, callers in by.items() if callers == {name.rpartition(".")[0]})
