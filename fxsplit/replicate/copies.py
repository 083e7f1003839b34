"""Replicas with modules of their own: the model's tree again, over copies of its tensors on another device.

The structure is copied, nothing else: a module of a replica has the class, the hooks and the attributes of the model's,
and tables of its own. The copies of parameters and buffers follow the model's by their version counters. (PyTorch's
`DataParallel` makes such replicas anew in every forward; here they stay.)
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..compat import storage_key
from ..errors import PlanError


@dataclass
class _Copy:
    """A tensor on another device, and what is known of the one that it follows."""

    tensor: torch.Tensor
    original: torch.Tensor
    seen: tuple[Any, ...]


class Tree:
    """The modules of a model again, for the replicas of one number on one device.

    Attributes:
        root: the model's counterpart.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self._pairs = [(module, _bare(module)) for module in model.modules()]
        self._shells = {id(module): shell for module, shell in self._pairs}
        for module, shell in self._pairs:
            children = module._modules.items()
            shell.__dict__["_modules"] = {
                name: c if c is None else self._shells[id(c)] for name, c in children
            }
        self._seen: dict[int, dict[str, Any]] = {id(module): {} for module, _ in self._pairs}
        self._copies: dict[int, _Copy] = {}
        self._apart: list[tuple[nn.Module, nn.Module, str, str]] = []
        self.root = self._shells[id(model)]
        self._follow_attributes()

    def put_apart(self, holder: nn.Module, kind: str, key: str) -> None:
        """From now on a copy on this device stands for a parameter or buffer."""
        shell = self._shells[id(holder)]
        if getattr(shell, kind) is getattr(holder, kind):
            shell.__dict__[kind] = dict(getattr(holder, kind))
        entry = (holder, shell, kind, key)
        if not any(known[1:] == entry[1:] for known in self._apart):
            self._apart.append(entry)

    def counterpart(self, module: nn.Module) -> nn.Module:
        """The module of this tree that stands for one of the model's."""
        return self._shells[id(module)]

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a parameter or buffer of the model here: a copy, or itself."""
        known = self._copies.get(id(tensor))
        return tensor if known is None else known.tensor

    def refresh(self, always: Sequence[torch.Tensor] = ()) -> None:
        """Follow the model: its attributes and modes, and the tensors that have changed.

        Args:
            always: copied in any case: what some kernels write without a trace in the version counter.
        """
        self._follow_attributes()
        for module, shell in self._pairs:
            for kind in ("_parameters", "_buffers"):
                if getattr(shell, kind) is not getattr(module, kind):
                    getattr(shell, kind).update(getattr(module, kind))
        every = {id(t) for t in always}
        now: dict[int, _Copy] = {}
        for holder, shell, kind, key in self._apart:
            tensor, table = getattr(holder, kind)[key], getattr(shell, kind)
            if tensor is not None:
                if id(tensor) not in now:
                    known = self._copies.get(id(tensor))
                    now[id(tensor)] = _followed(known, tensor, self.device, id(tensor) in every)
                table[key] = now[id(tensor)].tensor
            else:
                table[key] = None
        self._copies = now

    def _follow_attributes(self) -> None:
        for module, shell in self._pairs:
            seen = self._seen[id(module)]
            for name, value in module.__dict__.items():
                if name in _TABLES or (name in seen and seen[name] is value):
                    continue
                seen[name] = value
                shell.__dict__[name] = self._mapped(value)
            for name in [n for n in seen if n not in module.__dict__]:
                del seen[name]
                shell.__dict__.pop(name, None)

    def _mapped(self, value: Any) -> Any:
        """An attribute with the modules of this tree in the place of the model's; the same object if it has none."""
        if isinstance(value, nn.Module):
            return self._shells.get(id(value), value)
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
        if type(value) is dict:
            entries = {key: self._mapped(item) for key, item in value.items()}
            return entries if any(entries[key] is not value[key] for key in value) else value
        return value


_TABLES = ("_parameters", "_buffers", "_modules")


def _bare(module: nn.Module) -> nn.Module:
    """Another module of the same class, over the same tensors, without attributes so far."""
    if isinstance(module, torch.jit.ScriptModule):
        raise PlanError(
            f"a {type(module).__name__} has no copies, but replicas need some: they are on several devices, or have "
            "replication callbacks",
            remedy="replicas of that stage on one device, or the module without torch.jit",
        )
    shell = module.__new__(type(module))
    # A call may lend a module other parameters, so the table is its own; buffers are shared, as long as none differs.
    tables = {
        "_parameters": dict(module._parameters),
        "_buffers": module._buffers,
        "_modules": module._modules,
    }
    shell.__dict__.update(tables)
    return shell


def _followed(known: _Copy | None, tensor: torch.Tensor, device: torch.device, anyway: bool) -> _Copy:
    seen = (tensor._version, storage_key(tensor), tensor.shape, tensor.dtype)
    if known is not None and known.original is tensor:
        same_kind = known.seen[2:] == seen[2:]
        if known.seen != seen and same_kind:
            with torch.no_grad():
                known.tensor.copy_(tensor)  # a backward that still needs the old values says so
        elif anyway and same_kind:
            known.tensor.data.copy_(tensor.data)
        if same_kind:
            known.tensor.requires_grad_(tensor.requires_grad)
            known.seen = seen
            return known
    copy = tensor.detach().to(device, copy=True)
    if isinstance(tensor, nn.Parameter):
        return _Copy(nn.Parameter(copy, tensor.requires_grad), tensor, seen)
    return _Copy(copy.requires_grad_(tensor.requires_grad), tensor, seen)
