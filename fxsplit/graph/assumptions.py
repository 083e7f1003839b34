"""What a program takes for granted of the model and of its caller: a table, and whether a model still agrees with it.

Rows name things by their paths, so that one table is compared with the model that was captured, with a copy of it,
and with another one that a saved pipeline is loaded over.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..compat import GLOBAL_HOOKS
from ..modules.callbacks import on_replicate_of
from ..modules.seen import MISSING, OWN, Seen, seen

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
ASKS_FOR_GRAD = "torch.is_grad_enabled()"
TABLES = ("_modules", "_parameters", "_buffers")


@dataclass(frozen=True)
class Assumption:
    """One row of the table.

    Attributes:
        kind: how it is looked up: a key of `LOOKUPS`.
        where: path of the object, or name of the argument; ``""`` is the model.
        what: name of the attribute, table or property.
        was: what it was.
    """

    kind: str
    where: str
    what: str
    was: Seen

    @property
    def name(self) -> str:
        """``blocks.3.tau``."""
        return f"{self.where}.{self.what}" if self.where and self.what else self.where or self.what


@dataclass(frozen=True)
class Assumptions:
    """All that capture took for granted.

    Attributes:
        names: of the modules, parameters and buffers that there were.
        grad: whether the caller wanted gradients; True where forward did not ask.
    """

    rows: tuple[Assumption, ...] = ()
    names: frozenset[str] = frozenset()
    grad: bool = True

    @property
    def asks_for_grad(self) -> bool:
        """Whether forward decides by the gradient mode of its caller, or by what follows from it."""
        return any(row.what in (ASKS_FOR_GRAD, "requires_grad") for row in self.of_kind("caller", "value"))

    def without(self, what: str) -> Assumptions:
        """Without what was asked of the caller."""
        return replace(self, rows=tuple(r for r in self.rows if (r.kind, r.what) != ("caller", what)))

    def of_kind(self, *kinds: str) -> Iterator[Assumption]:
        """The rows that are looked up in this way."""
        return (row for row in self.rows if row.kind in kinds)

    def changes(self, model: nn.Module) -> str:
        """What is not so in `model`: ``blocks.3.tau was 1.0, is 2.0``; empty if all is."""
        texts = [text for row, now in self.differences(model) for text in _differs(row, now)]
        more = f" (and {len(texts) - 3} more)" if len(texts) > 3 else ""
        return "; ".join(texts[:3]) + more

    def differences(self, model: nn.Module) -> list[tuple[Assumption, Seen]]:
        """The rows that are not so in `model`, with what is."""
        lookup = Lookup(model, self)
        found = []
        for row in self.rows:
            if row.kind in LOOKUPS:
                now = LOOKUPS[row.kind](lookup, row)
                if not row.was.same(now):
                    found.append((row, now))
        return found

    def lines(self) -> list[str]:
        """What is worth reading: numbers, flags and texts by class, what was asked, and how much else there is."""
        kinds = {row.where: row.was.text.rpartition(":")[2] for row in self.of_kind("class")}
        shown: dict[str, list[str]] = {}
        others: Counter[str] = Counter()
        for row in self.rows:
            if row.kind in ("asked", "argument", "caller"):
                shown.setdefault(f"{row.name} = {row.was}", [])
            elif row.kind == "attribute" and row.was.kind not in (
                "function",
                "module",
                "tensor",
                "object",
                "missing",
            ):
                owner = kinds.get(row.where, "")
                label = f"{owner}.{row.what}" if owner else row.name
                shown.setdefault(f"{label} = {row.was}", []).append(row.where)
            else:
                others[
                    _PLURALS.get(row.kind if row.kind != "attribute" else row.was.kind, "other things")
                ] += 1
        lines = [
            text + (f" ({len(paths)} modules)" if len(paths) > 1 else "") for text, paths in shown.items()
        ]
        if len(lines) > _SHOWN:
            lines[_SHOWN:] = [f"and {len(lines) - _SHOWN} more numbers, flags and texts"]
        if others:
            counted = ", ".join(f"{n} {word}" for word, n in sorted(others.items()))
            lines.append(f"and {counted}" if lines else counted)
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        rows = [[row.kind, row.where, row.what, row.was.to_json()] for row in self.rows]
        return {"rows": rows, "names": sorted(self.names), "grad": self.grad}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Assumptions:
        """The inverse of `to_json`."""
        rows = (Assumption(str(k), str(p), str(n), Seen.from_json(was)) for k, p, n, was in data["rows"])
        return cls(tuple(rows), frozenset(data["names"]), bool(data["grad"]))


_SHOWN = 20
_PLURALS = {
    "class": "classes of modules",
    "function": "functions",
    "missing": "things that are not there",
    "module": "submodules",
    "tensor": "parameters and buffers",
    "table": "lists of what a module has",
}


def _differs(row: Assumption, now: Seen) -> list[str]:
    """``tau was 1.0, is 2.0``; of a table, the entries that differ."""
    if row.was.kind != "table" or now.kind != "table":
        if (part := _part_that_differs(row.was, now)) is not None:
            return _differs(replace(row, where=row.name, what=part[0].text[1:-1], was=part[1]), part[2])
        was = f"{row.was} ({row.was.kind})" if str(row.was) == str(now) else row.was
        is_ = f"another {now}" if str(was) == str(now) else now
        return [f"{row.name} was {was}, is {is_}"]
    before, after = (dict(zip(*[iter(s.parts)] * 2, strict=True)) for s in (row.was, now))
    texts = []
    for key in [*before, *(k for k in after if k not in before)]:
        old, new = before.get(key, MISSING), after.get(key, MISSING)
        if not old.same(new):
            label = f"{row.where}.{key.text}".lstrip(".")
            if row.kind != "model":
                texts.append(f"{label} was {old}, is {new}")
            elif new is MISSING:
                texts.append(f"{label} has no longer {old}")
            else:
                texts.append(f"{label} got {new} after compile" + ("" if old is MISSING else f", had {old}"))
    return texts or [f"{row.name} are in another order"]


def _part_that_differs(was: Seen, now: Seen) -> tuple[Seen, Seen, Seen] | None:
    """Of two objects of one class: the name of the first attribute that differs, what it was, and what it is."""
    if was.kind != "object" or (was.kind, was.text, was.parts[::2]) != (now.kind, now.text, now.parts[::2]):
        return None
    pairs = zip(was.parts[::2], was.parts[1::2], now.parts[1::2], strict=True)
    return next((found for found in pairs if found[0].kind == "str" and not found[1].same(found[2])), None)


class Lookup:
    """What a model is now, row by row."""

    def __init__(self, model: nn.Module, table: Assumptions) -> None:
        self.model, self.names = model, table.names
        self.modules = dict(model.named_modules())
        self.known = {id(m): f"{path or 'the model'} ({_class(m)})" for path, m in self.modules.items()}
        self.objects: dict[str, Any] = {}
        for row in table.of_kind("attribute"):
            if row.was.kind == "object" and row.was.text.endswith(f" at {row.name}"):
                self.follow(row.where, row.what)

    def follow(self, where: str, what: str) -> None:
        """An object whose attributes have rows of their own, under this path."""
        value = read(self.at(where), what)
        path = f"{where}.{what}" if where else what
        if value is not _NOT_THERE:
            self.known.setdefault(id(value), f"{_class(value)} at {path}")
            self.objects[path] = value

    def at(self, path: str) -> Any:
        """The module or object with this path."""
        return self.modules[path] if path in self.modules else self.objects.get(path, _NOT_THERE)

    def attribute(self, row: Assumption) -> Seen:
        """An attribute of a module or of an object that a module has."""
        owner = self.at(row.where)
        value = read(owner, row.what)
        if value is _NOT_THERE:
            return MISSING
        if isinstance(value, nn.Module) and isinstance(owner, nn.Module):
            return Seen("module", _class(value))
        return seen(value, self.known)

    def kind(self, row: Assumption) -> Seen:
        """The class of a module."""
        owner = self.at(row.where)
        return MISSING if owner is _NOT_THERE else Seen("class", _class(owner))

    def table(self, row: Assumption) -> Seen:
        """What a module has of submodules, parameters or buffers."""
        owner = self.modules.get(row.where)
        if owner is None:
            return MISSING
        rows = []
        for key, value in vars(owner).items() if row.what == "__dict__" else vars(owner)[row.what].items():
            if row.what != "__dict__" or key not in OWN:
                is_module = isinstance(value, nn.Module)
                rows += [
                    Seen("key", key),
                    Seen("module", _class(value)) if is_module else seen(value, self.known),
                ]
        return Seen("table", "", tuple(rows))

    def asked(self, row: Assumption) -> Seen:
        """What forward asked of a parameter or buffer."""
        path, _, leaf = row.where.rpartition(".")
        tensor = read(self.at(path), leaf)
        return ASKED[row.what](tensor) if isinstance(tensor, torch.Tensor) else MISSING

    def whole(self, row: Assumption) -> Seen:
        """What is counted over the whole model."""
        return MODEL_WIDE[row.what](self)


LOOKUPS: dict[str, Callable[[Lookup, Assumption], Seen]] = {
    "class": Lookup.kind,
    "attribute": Lookup.attribute,
    "table": Lookup.table,
    "asked": Lookup.asked,
    "model": Lookup.whole,
}


def _hooks(lookup: Lookup) -> Seen:
    return _counts({p: _count_hooks(m) for p, m in lookup.modules.items() if p}, "hook")


def _callbacks(lookup: Lookup) -> Seen:
    return _counts({p: len(on_replicate_of(m)) for p, m in lookup.modules.items()}, "replication callback")


def _counts(counts: Mapping[str, int], word: str) -> Seen:
    rows = [
        (Seen("key", p or "the model"), Seen("count", f"a {word}" if n == 1 else f"{n} {word}s"))
        for p, n in counts.items()
        if n
    ]
    return Seen("table", "", tuple(item for row in rows for item in row))


def global_hooks() -> list[Any]:
    """The hooks that all modules have, without torch's own, which look on."""
    hooks = [hook for table in GLOBAL_HOOKS for hook in table.values()]
    return [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("torch.")]


def _ties(lookup: Lookup) -> Seen:
    """Which names are one object."""
    model, first = lookup.model, dict[int, str]()
    rows: list[Seen] = []
    for named in (
        model.named_modules,
        model.named_parameters,
        model.named_buffers,
        lambda **_: attribute_tensors(model),
    ):
        for name, value in named(remove_duplicate=False):
            known = first.setdefault(id(value), name) if name in lookup.names else name
            if known != name:
                rows += [Seen("key", name), Seen("tie", f"a tie to {known}")]
    return Seen("table", "", tuple(rows))


def attribute_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that are plain attributes of modules."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}" if path else name, value


MODEL_WIDE: dict[str, Callable[[Lookup], Seen]] = {
    "hooks": _hooks,
    "replication callbacks": _callbacks,
    "hooks of all modules": lambda lookup: Seen("count", str(len(global_hooks()))),
    "ties": _ties,
}


def _plain(value: Any) -> Seen:
    return seen(value, {})


ASKED: dict[str, Callable[[torch.Tensor], Seen]] = {
    "dtype": lambda t: _plain(t.dtype),
    "shape": lambda t: _plain(tuple(t.shape)),
    "requires_grad": lambda t: _plain(t.requires_grad),
    "layout": lambda t: _plain(t.layout),
    "is_leaf": lambda t: _plain(t.is_leaf),
}

# How forward asks for the state of its caller, and where that is found.
CALLER: dict[str, tuple[Any, str]] = {
    **{
        f"torch.{name}": (torch, name)
        for name in (
            "is_grad_enabled",
            "is_inference_mode_enabled",
            "is_autocast_enabled",
            "is_autocast_cpu_enabled",
            "is_autocast_cache_enabled",
            "get_autocast_dtype",
            "get_autocast_cpu_dtype",
            "get_autocast_gpu_dtype",
            "get_default_dtype",
        )
    },
    "torch.backends.mha.get_fastpath_enabled": (torch.backends.mha, "get_fastpath_enabled"),
}


def caller_now(what: str) -> Seen:
    """``torch.is_autocast_enabled('cpu')``, asked now."""
    name, _, arguments = what.partition("(")
    owner, attribute = CALLER[name]
    inside = arguments.removesuffix(")")
    return _plain(getattr(owner, attribute)(*([ast.literal_eval(inside)] if inside else [])))


_NOT_THERE = object()


def _count_hooks(module: nn.Module) -> int:
    """How many it has, beside those with which torch's FSDP brings its parameters together."""
    every = [hook for table in HOOKS for hook in getattr(module, table).values()]
    return sum(
        not str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp") for hook in every
    )


def _class(module: Any) -> str:
    """Its own: torch's FSDP makes a class over it, with the same forward."""
    own = next(cls for cls in type(module).__mro__ if not cls.__module__.startswith("torch.distributed.fsdp"))
    return f"{own.__module__}:{own.__qualname__}"


def read(owner: Any, name: str) -> Any:
    """What ``owner.name`` gives; of a module without running anything of its class. `_NOT_THERE` where it is not."""
    if owner is _NOT_THERE:
        return owner
    if not isinstance(owner, nn.Module):
        return getattr(owner, name, _NOT_THERE)
    own = vars(owner)
    if name in own:
        return own[name]
    for cls in type(owner).__mro__:
        if name in vars(cls):
            return vars(cls)[name]
    for table in TABLES:
        if name in own[table]:
            return own[table][name]
    return _NOT_THERE


def is_there(value: Any) -> bool:
    """Whether `read` found something."""
    return value is not _NOT_THERE
