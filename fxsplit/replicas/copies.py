"""Replicas with modules of their own: the model's tree again, over copies of its tensors on another device.

The structure is copied, nothing else: a module of a replica has the class, the hooks and the attributes of the model's,
and tables of its own. The copies of parameters and buffers follow the model's by their version counters. (PyTorch's
`DataParallel` makes such replicas anew in every forward; here they stay.)
"""

from __future__ import annotations

import functools
import itertools
import types
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ..compat import storage_key
from ..errors import PlanError

_TABLES = ("_parameters", "_buffers", "_modules")


# Parameter that is copied somewhere → steps that optimizers have taken with it: fused ones change it without a trace in
# its version counter.
_STEPS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def steps_of(tensor: torch.Tensor) -> int:
    """How many steps optimizers have taken with a parameter since it was first asked for."""
    if tensor not in _STEPS:
        _STEPS[tensor] = 0
    return int(_STEPS[tensor])


@functools.cache
def _count_steps() -> None:
    """Begin to, once."""

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups if _STEPS else ():
            for parameter in group["params"]:
                if parameter in _STEPS:
                    _STEPS[parameter] += 1

    register_optimizer_step_post_hook(count)


@dataclass
class _Copy:
    """A tensor on another device, and what is known of the one that it follows.

    Attributes:
        memory: of the original, as it was; while this lives, its address is nobody else's.
        seen: version, steps of optimizers, shape and type.
    """

    tensor: torch.Tensor
    original: torch.Tensor
    memory: torch.Tensor
    seen: tuple[Any, ...]


class Tree:
    """The modules of a model again, for the replicas of one number on one device.

    Args:
        among: ids of the modules that are made again; all others are the model's own. By default all are.

    Attributes:
        root: the model's counterpart.
    """

    def __init__(self, model: nn.Module, device: torch.device, among: Container[int] | None = None) -> None:
        self.device = device
        made = [m for m in model.modules() if among is None or id(m) in among]
        self._pairs = [(module, _bare(module)) for module in made]
        self._shells = {id(module): shell for module, shell in self._pairs}
        self._children = [(module, dict(module._modules)) for module, _ in self._pairs]
        for module, shell in self._pairs:
            children = module._modules.items()
            shell.__dict__["_modules"] = {n: None if c is None else self.counterpart(c) for n, c in children}
        self._seen: dict[int, dict[str, Any]] = {id(module): {} for module, _ in self._pairs}
        self._copies: dict[int, _Copy] = {}
        self._apart: dict[tuple[int, str, str], nn.Module] = {}
        _count_steps()
        self.root = self.counterpart(model)
        self._follow_attributes()

    def put_apart(self, holder: nn.Module, kind: str, key: str) -> None:
        """From now on a copy on this device stands for a parameter or buffer."""
        shell = self._shells[id(holder)]
        if getattr(shell, kind) is getattr(holder, kind):
            shell.__dict__[kind] = dict(getattr(holder, kind))
        self._apart[id(holder), kind, key] = holder

    def counterpart(self, module: nn.Module) -> nn.Module:
        """The module of this tree that stands for one of the model's."""
        return self._shells.get(id(module), module)

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a parameter or buffer of the model here: a copy, or itself."""
        known = self._copies.get(id(tensor))
        return tensor if known is None else known.tensor

    def stands_for(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """What else than a copy that follows it stands for a parameter here."""
        return None

    def is_current(self) -> bool:
        """Whether the model has the modules that it had."""
        return all(
            module._modules.keys() == children.keys()
            and all(module._modules[name] is child for name, child in children.items())
            for module, children in self._children
        )

    def forget(self) -> None:
        """Everything is copied anew the next time, whether it seems to have changed or not."""
        for known in self._copies.values():
            known.seen = (-1, *known.seen[1:])

    def refresh(self, always: Sequence[torch.Tensor] = ()) -> None:
        """Follow the model: its attributes and modes, and the tensors that have changed.

        Args:
            always: copied in any case: what some kernels write without a trace in the version counter.
        """
        for module, shell in self._pairs:
            for kind in ("_parameters", "_buffers"):
                if getattr(shell, kind) is not getattr(module, kind):
                    getattr(shell, kind).update(getattr(module, kind))
        every = {id(t) for t in always}
        now: dict[int, _Copy] = {}
        with torch.inference_mode(False), torch.no_grad():
            for (_, kind, key), holder in self._apart.items():
                tensor, table = getattr(holder, kind)[key], getattr(self.counterpart(holder), kind)
                if (
                    tensor is not None
                    and kind == "_parameters"
                    and (shown := self.stands_for(tensor)) is not None
                ):
                    table[key] = shown
                elif tensor is not None:
                    if id(tensor) not in now:
                        now[id(tensor)] = self._followed(tensor, anyway=id(tensor) in every)
                    table[key] = now[id(tensor)].tensor
                else:
                    table[key] = None
            for module, _ in self._pairs:
                for value in vars(module).values():
                    if self._is_elsewhere(value) and id(value) not in now:
                        now[id(value)] = self._followed(value, anyway=False)
        self._copies = now
        self._follow_attributes()

    def _is_elsewhere(self, value: Any) -> bool:
        """Whether an attribute is a tensor of a module's own on another device; numbers may be anywhere."""
        plain = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
        return plain and bool(value.dim()) and value.device != self.device

    def _followed(self, tensor: torch.Tensor, *, anyway: bool) -> _Copy:
        known = self._copies.get(id(tensor))
        seen = (tensor._version, steps_of(tensor), tensor.shape, tensor.dtype)
        if known is not None and known.original is tensor and known.seen[2:] == seen[2:]:
            if known.seen != seen or storage_key(known.memory) != storage_key(tensor):
                known.tensor.copy_(tensor)  # a backward that still needs the old values says so
                known.seen, known.memory = seen, tensor.detach()
            elif anyway:
                known.tensor.data.copy_(tensor.data)
            known.tensor.requires_grad_(tensor.requires_grad)
            return known
        copy = tensor.detach().to(self.device, copy=True)
        if isinstance(tensor, nn.Parameter):
            copy = nn.Parameter(copy, tensor.requires_grad)
        else:
            copy.requires_grad_(tensor.requires_grad)
        return _Copy(copy, tensor, tensor.detach(), seen)

    def _follow_attributes(self) -> None:
        for module, shell in self._pairs:
            seen = self._seen[id(module)]
            for name, value in _attributes(module):
                if name in seen and seen[name] is value and not isinstance(value, _LOOKED_INTO):
                    continue
                mapped = self._mapped(value)
                if name not in seen or seen[name] is not value or mapped is not value:
                    _set(shell, name, mapped)
                seen[name] = value
            for name in [n for n in seen if n not in module.__dict__ and not hasattr(type(module), n)]:
                del seen[name]
                shell.__dict__.pop(name, None)

    def _mapped(self, value: Any) -> Any:
        """An attribute with the modules and tensors of this tree in the place of the model's; else the same object."""
        if isinstance(value, nn.Module):
            return self.counterpart(value)
        if isinstance(value, torch.Tensor):
            return self.copy_of(value)
        if isinstance(value, types.MethodType) and id(value.__self__) in self._shells:
            return types.MethodType(value.__func__, self._shells[id(value.__self__)])
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            func, args, keywords = mapped = tuple(map(self._mapped, parts))
            changed = any(m is not p for m, p in zip(mapped, parts, strict=True))
            return functools.partial(func, *args, **keywords) if changed else value
        if type(value) in (list, tuple):
            items = [self._mapped(item) for item in value]
            return type(value)(items) if any(m is not v for m, v in zip(items, value, strict=True)) else value
        if type(value) in (dict, OrderedDict):
            entries = {key: self._mapped(item) for key, item in value.items()}
            return type(value)(entries) if any(entries[key] is not value[key] for key in value) else value
        return value


# What may hold other modules or tensors than before, and still be the same object.
_LOOKED_INTO = (list, dict, torch.Tensor)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """All but the tables; also those that a class keeps in slots."""
    slots = itertools.chain.from_iterable(
        (kind.__dict__["__slots__"],)
        if isinstance(kind.__dict__.get("__slots__"), str)
        else kind.__dict__.get("__slots__", ())
        for kind in type(module).__mro__
    )
    for name in slots:
        if name not in ("__dict__", "__weakref__") and hasattr(module, name):
            yield name, getattr(module, name)
    for name, value in list(module.__dict__.items()):
        if name not in _TABLES:
            yield name, value


def _set(shell: nn.Module, name: str, value: Any) -> None:
    if isinstance(getattr(type(shell), name, None), types.MemberDescriptorType):
        object.__setattr__(shell, name, value)  # a slot
    else:
        shell.__dict__[name] = value


def _bare(module: nn.Module) -> nn.Module:
    """Another module of the same class, over the same tensors, without attributes so far."""
    if isinstance(module, torch.jit.ScriptModule):
        raise PlanError(
            f"a {type(module).__name__} has no copies, but replicas need some: they are on several devices, or have "
            "replication callbacks",
            remedy="replicas of that stage on one device, or the module without torch.jit",
        )
    shell: nn.Module = object.__new__(type(module))
    # A call may lend a module other parameters, so the table is its own; buffers are shared, as long as none differs.
    tables = {
        "_parameters": dict(module._parameters),
        "_buffers": module._buffers,
        "_modules": module._modules,
    }
    shell.__dict__.update(tables)
    return shell
