"""The way of weights to the stages: all names, shapes and types are compared first, all tensors are put in place last.

source ─ shapes ─▶ compared with the model ─ all fit ─▶ read, stage by stage ─ all there ─▶ put in place, all at once
                   an error names all that               one at a time, each to              nothing can fail any more
                   do not fit                            the device of its stage
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..compare import equal
from ..compat import like, restore_rnn, storage_key
from ..errors import WeightsError
from ..graph.ir import Stage
from ..graph.optimizers import replaced
from ..graph.place import home_of, tensors_of
from ..plan.sizes import in_units
from .computed import computed
from .sources import Shape, Source

CPU = torch.device("cpu")
_TIED = " = "  # between the names of one tensor
_SHOWN = 12  # names of each kind in an error
_LONG = 2**30  # bytes, from which a bar is shown


@dataclass(eq=False)
class _Slot:
    """One tensor of the model.

    Attributes:
        names: all FQNs under which the model has it.
        places: the modules that hold it, the kind of table, and its name there.
        home: where it goes.
        stage: which stage is there, for the order; -1 if none reads it.
        stored: whether a state_dict holds it.
    """

    tensor: torch.Tensor
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str, str]] = field(default_factory=list)
    home: torch.device = CPU
    stage: int = -1
    stored: bool = True


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Attributes:
        tensors: how many came from the source.
        nbytes: of these.
        computed: the buffers that the model's own code has computed, because no checkpoint holds them.
    """

    tensors: int
    nbytes: int
    computed: tuple[str, ...]

    def __str__(self) -> str:
        more = f"; computed: {', '.join(self.computed)}" if self.computed else ""
        return f"{self.tensors} tensors, {in_units(self.nbytes)}{more}"


def fill(model: nn.Module, stages: Sequence[Stage], source: Source, *, whole: bool = True) -> Loaded:
    """Put weights into a model, each where its stage is.

    Args:
        whole: also what none of these stages reads.

    Raises:
        WeightsError: names all that is missing, not known, or of another shape or type. The model is as it was.
    """
    every = _slots(model, stages)
    slots = [slot for slot in every if whole or slot.stage >= 0]
    _refuse_what_would_be_lost(slots)
    shapes = source.shapes()
    known = {name for slot in every for name in slot.names}
    names = _check(model, slots, shapes, source, known) if shapes is not None else {s: s.names for s in slots}
    found: dict[_Slot, torch.Tensor] = {}
    problems = _Problems()
    total = sum(s.tensor.numel() * s.tensor.element_size() for s in slots)
    for slot in _with_bar(slots, total):
        value = _read(slot, names.get(slot, []), source, problems)
        if value is not None:
            found[slot] = value
    done = len(found), sum(v.numel() * v.element_size() for v in found.values())
    own = _computed(model, [s for s in slots if s not in found and s.tensor.is_meta], problems)
    problems.check(model, source)
    found.update(own)
    for slot, value in found.items():
        _put(slot, value)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            restore_rnn(module)
    return Loaded(*done, tuple(s.names[0] for s in own))


def _slots(model: nn.Module, stages: Sequence[Stage]) -> list[_Slot]:
    """All tensors of a model, in the order of the stages."""
    slots: dict[int, _Slot] = {}
    seen: set[tuple[int, str]] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        tables: list[tuple[str, dict[str, Any]]] = [
            ("_parameters", module._parameters),
            ("_buffers", module._buffers),
            ("__dict__", module.__dict__),
        ]
        for kind, table in tables:
            for name, tensor in table.items():
                if not isinstance(tensor, torch.Tensor) or (kind == "__dict__" and not tensor.is_meta):
                    continue
                slot = slots.setdefault(id(tensor), _Slot(tensor, stored=False))
                slot.names.append(f"{path}.{name}" if path else name)
                transient = kind == "__dict__" or name in module._non_persistent_buffers_set
                slot.stored |= not transient
                if (id(table), name) not in seen:
                    seen.add((id(table), name))
                    slot.places.append((module, kind, name))
    for stage in reversed(stages):
        for holder, kind, name in tensors_of(model, stage):
            slot = slots[id(getattr(holder, kind)[name])]
            slot.home, slot.stage = torch.empty(0, device=home_of(stage, kind)).device, stage.index
    return sorted(slots.values(), key=lambda slot: slot.stage)


def _refuse_what_would_be_lost(slots: Sequence[_Slot]) -> None:
    """Tensors without values are replaced: what is tied to the object, or to its memory, would be gone.

    Raises:
        WeightsError: a parameter has hooks, or shares its memory with another tensor.
    """
    memory: dict[int, _Slot] = {}
    for slot in slots:
        tensor = slot.tensor
        if not tensor.is_meta:
            continue
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise WeightsError(
                f"{slot.names[0]} has hooks, and is replaced by a parameter with values",
                remedy="register hooks of parameters after load_weights",
            )
        other = memory.setdefault(storage_key(tensor), slot)
        if other is not slot:
            raise WeightsError(
                f"{other.names[0]} and {slot.names[0]} are two tensors over one memory, which no checkpoint says",
                remedy=f"one parameter for both: module.{slot.names[0]} = module.{other.names[0]}; or a model with values",
            )


class _Problems:
    """All that does not fit, to be said at once."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.unknown: list[str] = []
        self.others: list[str] = []
        self.types: set[torch.dtype | None] = (
            set()
        )  # to which the model would be converted; None for other sizes

    def check(self, model: nn.Module, source: Source) -> None:
        """Raise if there is any."""
        parts = [
            f"missing {_some(self.missing)}" if self.missing else "",
            f"not known to the model {_some(self.unknown)}" if self.unknown else "",
            _some(self.others, "; ") if self.others else "",
        ]
        if any(parts):
            raise WeightsError(
                f"{source.what} does not fit {type(model).__name__}: {'; '.join(p for p in parts if p)}",
                remedy=self._remedy(),
            )

    def _remedy(self) -> str:
        for a, b, text in (
            (self.missing, self.unknown, "weights=lambda name: checkpoint[{!r} + name]"),
            (self.unknown, self.missing, "weights={{{!r} + name: t for name, t in checkpoint.items()}}"),
        ):
            prefix = _prefix(a, b)
            if prefix:
                return text.format(prefix) + ", with checkpoint a state_dict"
        types = list(self.types)
        if len(types) == 1 and types[0] is not None:
            return f"model.to({types[0]}) before it is compiled, or a checkpoint of the model's type"
        if self.missing and not self.unknown and not self.others:
            return (
                "a source that has them; for what no checkpoint holds, make the model with buffers that have values "
                "(accelerate's init_empty_weights() does), or weights= a function that computes them"
            )
        return "the checkpoint of this model"


def _prefix(missing: Sequence[str], unknown: Sequence[str]) -> str:
    """What all names of the one need to be names of the other."""
    if not missing or not unknown:
        return ""
    names = [tied.split(_TIED) for tied in missing]
    prefix = next((u.removesuffix(n) for n in names[0] for u in unknown if u.endswith(f".{n}")), "")
    found = all(any(prefix + name in unknown for name in tied) for tied in names)
    return prefix if prefix and found else ""


def _some(names: Sequence[str], by: str = ", ") -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return by.join(names[:_SHOWN]) + more


def _check(
    model: nn.Module,
    slots: Sequence[_Slot],
    shapes: Mapping[str, Shape],
    source: Source,
    known: Collection[str],
) -> dict[_Slot, list[str]]:
    """The names under which the source has each of the tensors.

    Raises:
        WeightsError: it lacks some, has others, or has them in other shapes or types.
    """
    problems = _Problems()
    found: dict[_Slot, list[str]] = {}
    for slot in slots:
        given = [name for name in slot.names if name in shapes]
        if given:
            found[slot] = given
        elif slot.stored:
            problems.missing.append(_TIED.join(slot.names))
        for name in given:
            _compare(slot, name, shapes[name], problems)
    problems.unknown = [name for name in shapes if name not in known]
    problems.check(model, source)
    return found


def _compare(slot: _Slot, name: str, given: Shape, problems: _Problems) -> None:
    wanted = Shape.of(slot.tensor)
    if given != wanted:
        problems.others.append(f"{name} is {given} and not {wanted}")
        if given.sizes == wanted.sizes:
            problems.types.add(given.dtype)
            return
        problems.types.add(None)


def _read(slot: _Slot, names: Sequence[str], source: Source, problems: _Problems) -> torch.Tensor | None:
    """The tensor, where it goes. Of several names for one tensor, all that are there have the same numbers."""
    found: torch.Tensor | None = None
    for name in names:
        try:
            value = source.read(name, slot.home)
        except torch.OutOfMemoryError as error:
            size = in_units(slot.tensor.numel() * slot.tensor.element_size())
            raise WeightsError(
                f"there is no room for {name} ({size}) on {slot.home}, where stage {slot.stage} is",
                remedy="more stages, or fewer layers in this one: Plan(balance=...) or Plan(device_map=...)",
            ) from error
        if value is None:
            continue
        _compare(slot, name, Shape.of(value), problems)
        if found is None:
            found = value
        elif not equal(found, value):
            problems.others.append(f"{' and '.join(slot.names)}, which are one tensor, have two values")
    if found is None and slot.stored:
        problems.missing.append(_TIED.join(slot.names))
    return found


def _computed(model: nn.Module, slots: Sequence[_Slot], problems: _Problems) -> dict[_Slot, torch.Tensor]:
    """Buffers that no checkpoint holds."""
    found: dict[_Slot, torch.Tensor] = {}
    for slot in slots:
        if slot.stored:
            continue
        module, kind, name = slot.places[0]
        own = computed(model, module, [name]) if kind == "_buffers" else {}
        if name in own:
            found[slot] = own[name].to(slot.home)
        else:
            problems.missing.append(
                f"{' = '.join(slot.names)} (in no checkpoint, and not computed by the model's code)"
            )
    return found


def _put(slot: _Slot, value: torch.Tensor) -> None:
    """The tensor in place of the one that was there; a parameter that has values stays the same object."""
    old = slot.tensor
    if isinstance(old, nn.Parameter):
        if not old.is_meta:
            old.data = value
            return
        value = like(old, value)
        value.__dict__.update(old.__dict__)
        replaced(old)
    for module, kind, name in slot.places:
        getattr(module, kind)[name] = value


def _with_bar(slots: Iterable[_Slot], total: int) -> Iterator[_Slot]:
    """The slots; with a bar of bytes where it takes long and somebody looks."""
    if total < _LONG or not sys.stderr.isatty():
        yield from slots
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield from slots
        return
    with tqdm(total=total, unit="B", unit_scale=True, desc="weights", leave=False) as bar:
        for slot in slots:
            bar.set_postfix_str(f"stage {slot.stage}" if slot.stage >= 0 else "", refresh=False)
            yield slot
            bar.update(slot.tensor.numel() * slot.tensor.element_size())
