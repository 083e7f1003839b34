"""Run the user's model without leaving a trace on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """The model and the random number generators end as they were: buffers (values and objects), gradients,
    modes, hooks and plain attributes of every module, also when the body raises."""
    modules = list(model.modules())
    attributes = [attributes_of(module) for module in modules]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    grads = [(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in model.parameters()]
    devices = sorted(
        {t.device.index for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"}
    )
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for module, before in zip(modules, attributes, strict=True):
                restore_attributes(module, before)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.data.copy_(value)  # .data: autograd graphs of the user may have saved the buffer
                for parameter, grad, kept in grads:
                    parameter.grad = grad
                    if grad is not None and kept is not None:
                        grad.data.copy_(kept)


def changed_attributes(module: nn.Module, before: dict[str, Any]) -> list[str]:
    """Names of the attributes of `module` that were set or deleted since `before` (see `attributes_of`)."""
    now = attributes_of(module)
    changed = []
    for key in [*before, *(k for k in now if k not in before)]:
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            inner = [*old, *(k for k in new if k not in old)]
            changed += [str(k) for k in inner if old.get(k) is not new.get(k)]
        elif old is not new:
            changed.append(key)
    return changed


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """A copy of the attributes of `module`, to compare or restore later.

    One level deeper than `__dict__`, because `_parameters`, `_buffers`, `_modules` and the hooks are dicts.
    """
    return {k: v.copy() if isinstance(v, dict) else v for k, v in module.__dict__.items()}


def restore_attributes(module: nn.Module, before: dict[str, Any]) -> None:
    """Put the attributes of `module` back to what `attributes_of` returned."""
    now = module.__dict__
    for key in [k for k in now if k not in before]:
        del now[key]
    for key, value in before.items():
        if isinstance(value, dict) and isinstance(now.get(key), dict):
            if _differs(now[key], value):
                now[key].clear()  # in place: others may hold the dict itself
                now[key].update(value)
        elif now.get(key) is not value:
            now[key] = value


def _differs(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return list(now) != list(before) or any(now[k] is not before[k] for k in before)
