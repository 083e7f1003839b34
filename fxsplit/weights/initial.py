"""Weights of a model that is made anew: each module initializes itself, from a seed of its own."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..compare import equal
from .computed import ways_to_initialize
from .sources import Source, source_of


def initial(model: nn.Module, seed: int) -> Source:
    """A source of the weights that the modules of a model without values give themselves.

    Each module with tensors of its own is asked alone (``reset_parameters``, transformers' ``_init_weights``), with random
    numbers from `seed` and its path: whoever asks, and for how much of the model, gets the same. A tensor that has two
    names is its first module's. What nobody initializes is missing.
    """
    owners: dict[str, tuple[str, nn.Module]] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                owners[f"{path}.{name}" if path else name] = path, module
    known: dict[str, Mapping[str, torch.Tensor]] = {}

    def initialization(name: str) -> torch.Tensor | None:
        if name not in owners:
            return None
        path, module = owners[name]
        if path not in known:
            known.clear()  # one module at a time
            known[path] = _initialized(model, module, f"{seed}/{path}")
        return known[path].get(name.rpartition(".")[2])

    return source_of(initialization)


def _initialized(model: nn.Module, module: nn.Module, seed: str) -> dict[str, torch.Tensor]:
    """Tensors of a copy of the module, as far as initializing it writes them, whatever was there before."""
    number = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=8).digest(), "little") >> 1
    found: dict[str, torch.Tensor] = {}
    for initialize in ways_to_initialize(model):
        try:
            first, second = (_after(module, before, initialize, number) for before in (0, 1))
        except Exception:  # whatever code of the user's makes of a module without weights
            continue
        for name, value in first.items():
            if name not in found and not value.is_meta and equal(value, second[name]):
                found[name] = value
    return found


def _after(
    module: nn.Module, before: int, initialize: Callable[[Any], object], seed: int
) -> dict[str, torch.Tensor]:
    shell = copy.copy(module)
    shell.__dict__ = dict(module.__dict__)
    shell._parameters = {
        n: None if p is None else nn.Parameter(_full(p, before), p.requires_grad)
        for n, p in module._parameters.items()
    }
    shell._buffers = {n: None if b is None else _full(b, before) for n, b in module._buffers.items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        initialize(shell)
    tensors = (*shell._parameters.items(), *shell._buffers.items())
    return {name: t.detach() for name, t in tensors if t is not None}


def _full(tensor: torch.Tensor, number: int) -> torch.Tensor:
    return torch.full(tensor.shape, number, dtype=tensor.dtype, device="cpu")
