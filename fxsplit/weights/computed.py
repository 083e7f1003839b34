"""Buffers that no checkpoint holds, such as rotary frequencies and causal masks: computed by the model's own code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..compare import equal
from ..modules.state import preserved

_LARGEST = 2**28  # bytes of parameters that a module may have beside such buffers, for these to be computed


def computed(model: nn.Module, module: nn.Module, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Those of `names` that the model's code gives the same values whatever was there before.

    What is asked is what initializes modules after they were made on ``meta``: ``module.reset_buffers()``,
    ``module.reset_parameters()`` (torch's convention), and ``model._init_weights(module)`` (transformers'). It is called
    on a copy of the module, once with each of two contents; who leaves a number as it was, or draws it, does not know it.

    Returns:
        Name in the module → value, on the CPU.
    """
    found: dict[str, torch.Tensor] = {}
    size = sum(p.numel() * p.element_size() for p in module._parameters.values() if p is not None)
    if size > _LARGEST:
        return found
    for initialize in _ways(model):
        left = [name for name in names if name not in found]
        if not left:
            break
        with preserved(module, parameters=True), torch.no_grad():
            try:
                first, second = (_filled(module, number, initialize) for number in (0, 1))
            except Exception:  # whatever code of the user's makes of a module without weights
                continue
        for name in left:
            value = first.get(name)
            if value is not None and not value.is_meta and equal(value, second.get(name)):
                found[name] = value
    return found


def _ways(model: nn.Module) -> list[Callable[[Any], object]]:
    ways: list[Callable[[Any], object]] = [
        lambda module: module.reset_buffers(),
        lambda module: module.reset_parameters(),
    ]
    of_model = getattr(model, "_init_weights", None)
    return [*ways, of_model] if callable(of_model) else ways


def _filled(
    module: nn.Module, number: int, initialize: Callable[[Any], object]
) -> Mapping[str, torch.Tensor | None]:
    """The buffers of a copy of the module, which held a number everywhere."""
    shell = copy.copy(module)
    shell.__dict__ = dict(module.__dict__)
    shell._buffers = {
        n: None if t is None else torch.full(t.shape, number, dtype=t.dtype, device="cpu")
        for n, t in module._buffers.items()
    }
    shell._parameters = {
        n: None
        if p is None
        else nn.Parameter(torch.zeros(p.shape, dtype=p.dtype, device="cpu"), requires_grad=p.requires_grad)
        for n, p in module._parameters.items()
    }
    initialize(shell)
    return shell._buffers
