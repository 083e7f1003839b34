"""Computing a region of a stage again: on what it saw first, or not at all.

A region reads more than its inputs: parameters, buffers, flags and rates of its modules. What it writes itself is kept
as it was, and a later computation is given copies of that, so that the model's own buffers are not touched, and what
autograd has saved of them neither. Everything else has to be as it was; autograd says the same of what it saves.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from ..compat import storage_key
from ..errors import EffectError, GradientError
from ..modules.attributes import attributes_of, changed_attributes
from ..modules.reach import reach
from .random import Stream

Around = Callable[[], contextlib.AbstractContextManager[Any]]

_CALLED: weakref.WeakKeyDictionary[nn.Module, threading.Lock] = weakref.WeakKeyDictionary()
_MAKING = threading.Lock()


def turn(module: nn.Module) -> threading.Lock:
    """Who has it may call the module with other parameters than its own."""
    with _MAKING:
        return _CALLED.setdefault(module, threading.Lock())


@contextlib.contextmanager
def _own_parameters(modules: Sequence[nn.Module]) -> Iterator[None]:
    """The modules have parameters of their own, and not what another worker's `call_with` has put there."""
    with contextlib.ExitStack() as turns:
        with _MAKING:
            locks = [_CALLED[m] for m in modules if m in _CALLED] if len(_CALLED) else []
        for lock in locks:
            turns.enter_context(lock)
        yield


def _key(tensor: torch.Tensor) -> int:
    return storage_key(tensor) if tensor.layout is torch.strided else id(tensor)


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies that share memory with each other where the tensors do."""
    made: dict[int, Any] = {}
    count = [_key(t) for t in tensors]
    copies = []
    for tensor, key in zip(tensors, count, strict=True):
        if count.count(key) == 1:
            copies.append(tensor.detach().clone())
            continue
        if key not in made:
            made[key] = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copies.append(copy.set_(made[key], tensor.storage_offset(), tensor.size(), tensor.stride()))
    return copies


class Surroundings:
    """What the modules of a region are and hold, as it is now.

    Args:
        region: a `GraphModule`: a region of a stage, or a stage.
        written: keys of the storages that the region is known to write.
        paths: name in its code → FQN in the model.
    """

    def __init__(self, region: nn.Module, written: frozenset[int], paths: Mapping[str, str]) -> None:
        self._region, self._modules, self._paths = region, list(region.modules()), paths
        self._own = [m for m in self._modules if not is_torchs(m)]
        with _own_parameters(self._modules):
            self._tables = [(m, *_tables_of(m)) for m in self._modules]
            self._attributes = [(m, attributes_of(m)) for m in self._own]
            tensors = self._tensors()
        self._versions = [
            (t, t._version) for t in tensors if not ((written and _key(t) in written) or t.is_inference())
        ]
        self._flags = [(v, v.training) for v in vars(region).values() if hasattr(type(v), "training")]

    def _tensors(self) -> list[torch.Tensor]:
        values = [v for _, *tables in self._tables for table in tables for v in table.values()]
        found = {id(t): t for t in values if isinstance(t, torch.Tensor)}
        found.update((id(v), v) for v in vars(self._region).values() if isinstance(v, torch.Tensor))
        for module in self._own:
            found.update(reach(module).tensors)
        return list(found.values())

    def difference(self) -> str | None:
        """What is not as it was, in words; None if all is."""
        if any(v.training != mode for v, mode in self._flags):
            return "the mode was changed (train() or eval() was called)"
        with _own_parameters(self._modules):
            for module, parameters, buffers, attributes in self._tables:
                if attributes and not _equal(module.__dict__, attributes):
                    name = next(
                        (
                            k
                            for k, v in attributes.items()
                            if k not in _CACHES and not _alike(module.__dict__.get(k), v)
                        ),
                        None,
                    )
                    if name == "training":
                        return "the mode was changed (train() or eval() was called)"
                    if name is not None or module.__dict__.keys() != attributes.keys():
                        return self._said(module, name, attributes)
                own = {} if is_sharded(module) else module._parameters
                if not (_equal(own, parameters) and _equal(module._buffers, buffers)):
                    return f"{self._path(module)} was given another parameter or buffer"
        for module, attributes in self._attributes:
            names = changed_attributes(module, attributes)
            if names:
                return f"{self._path(module)}.{names[0]} was changed"
        tensor = next((t for t, version in self._versions if t._version != version), None)
        return None if tensor is None else f"{self._name(tensor)} was changed"

    def _said(self, module: nn.Module, name: str | None, attributes: dict[str, Any]) -> str:
        if name is None:
            name = next(iter(module.__dict__.keys() ^ attributes.keys()))
            return f"{self._path(module)}.{name} was set"
        return f"{self._path(module)}.{name} was {attributes[name]!r}, and is {module.__dict__.get(name)!r}"

    def _path(self, module: nn.Module) -> str:
        return self._users_name(next((n for n, m in self._region.named_modules() if m is module), ""))

    def _name(self, tensor: torch.Tensor) -> str:
        named = [*self._region.named_parameters(), *self._region.named_buffers(), *vars(self._region).items()]
        named += [(f"{n}.{k}", v) for n, m in self._region.named_modules() if n for k, v in vars(m).items()]
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "tensor"
        name = next((n for n, t in named if t is tensor), None)
        if name is None:
            owner = next(m for m in self._own if id(tensor) in reach(m).tensors)
            return f"a {kind} that {self._path(owner)} can get hold of"
        return f"a {kind}, {self._users_name(name)},"

    def _users_name(self, name: str) -> str:
        first, dot, rest = name.partition(".")
        return f"{self._paths.get(first, first)}{dot}{rest}"


# What recurrent layers make anew of their parameters, whenever these are others.
_CACHES = ("_flat_weights", "_flat_weight_refs")


def _tables_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Its parameters, its buffers, and its attributes, where it is not generated code."""
    attributes = {} if isinstance(module, GraphModule) else module.__dict__.copy()
    parameters = {} if is_sharded(module) else module._parameters.copy()
    return parameters, module._buffers.copy(), attributes


def is_sharded(module: nn.Module) -> bool:
    """Whether torch's FSDP has its parameters: brings them together for a forward or backward, and takes them apart."""
    return type(module).__module__.startswith("torch.distributed.fsdp")


def is_torchs(module: nn.Module) -> bool:
    """Whether its class is torch's, or made by it for generated code: it has no state beside tensors and plain values."""
    return isinstance(module, GraphModule) or type(module).__module__.startswith("torch.")


def storages_of(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """What tells the memory of these tensors."""
    return frozenset(map(_key, tensors))


def _equal(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether two tables hold the same; most values are the same objects, which is seen at once."""
    try:
        return bool(now == before)
    except Exception:  # tensors, or anything else that has no single answer
        return False


def _alike(now: Any, before: Any) -> bool:
    return now is before or (
        type(now) is type(before) and isinstance(now, bool | int | float | str | tuple) and now == before
    )


class Replay:
    """Around a region's first computation, and, by `later`, around each later one."""

    def __init__(self, region: nn.Module, stream: Stream | None, around: Around) -> None:
        self.region, self.around = region, around
        self.stream = None if stream is None else stream.copy()
        meta: Any = region.meta
        names: list[str] = meta["writes"]
        self._written = storages_of(_attribute(region, name) for name in names)
        self._places = list(self._holding()) if names else []
        self._seen = copies_of([table[key] for table, key in self._places])
        self._surroundings = Surroundings(region, self._written, meta.get("paths", {}))

    def _holding(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Where the modules of the region hold what it writes, and other views of that."""
        for module in self.region.modules():
            for table in (module._buffers, module.__dict__):
                for key, value in table.items():
                    if isinstance(value, torch.Tensor) and _key(value) in self._written:
                        yield table, key

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """What the region does now is what it was said to do.

        Raises:
            EffectError: it changes something else, and would do so again.
        """
        yield
        changed = self._surroundings.difference()
        if changed is not None:
            raise EffectError(
                f"while a checkpointed region was computed, {changed}: it would be recomputed with other values, and "
                "change them again",
                remedy="compile with an example on which the model does this too, or Plan(checkpoint='never')",
            )

    @contextlib.contextmanager
    def later(self) -> Iterator[None]:
        """The region computes what it computed first.

        Raises:
            GradientError: not as things are now.
        """
        changed = self._surroundings.difference()
        if changed is not None:
            raise GradientError(
                f"{changed} between forward and backward, so a checkpointed region would be recomputed with other values",
                remedy="call backward before changing it (before optimizer.step(), say), or Plan(checkpoint='never')",
            )
        now = [table[key] for table, key in self._places]
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.around())
            if self.stream is not None:
                stack.enter_context(self.stream.copy())  # it may be computed again once more
            try:
                for (table, key), copy in zip(self._places, copies_of(self._seen), strict=True):
                    table[key] = copy
                yield
            finally:
                for (table, key), value in zip(self._places, now, strict=True):
                    table[key] = value


def _attribute(region: nn.Module, path: str) -> torch.Tensor:
    owner: Any = region
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner  # type: ignore[no-any-return]
