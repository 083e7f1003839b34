"""Run the user's model without leaving a trace on it."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def state_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that a forward may write to: buffers, and plain tensor attributes; by path, ties once."""
    found = dict(model.named_buffers())
    seen = {id(t) for t in found.values()}
    for path, module in model.named_modules():
        for key, value in module.__dict__.items():
            if isinstance(value, torch.Tensor) and id(value) not in seen:
                seen.add(id(value))
                found[f"{path}.{key}" if path else key] = value
    return found


def python_random_state() -> tuple[Any, ...]:
    """The state of Python's `random`, and of NumPy's global generator where NumPy has been imported."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state(legacy=True)


def restore_python_random(state: tuple[Any, ...]) -> None:
    """Put back what `python_random_state` returned."""
    own, numpy = state
    random.setstate(own)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)


def same_python_random(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether nothing was drawn between two states."""
    if a[0] != b[0] or a[1] is None or b[1] is None:
        return bool(a[0] == b[0])
    return bool(a[1][2] == b[1][2] and (a[1][1] == b[1][1]).all())


@contextlib.contextmanager
def preserved(model: nn.Module, *, parameters: bool = False) -> Iterator[None]:
    """The model and the random number generators end as they were, also when the body raises: buffers and
    tensor attributes (values and objects), gradients, modes, hooks and plain attributes of every module.

    Args:
        parameters: also the values of the parameters; costs a copy of them.
    """
    modules = list(model.modules())
    attributes = [attributes_of(module) for module in modules]
    written = [*state_tensors(model).values(), *(model.parameters() if parameters else ())]
    values = [(t, t.detach().clone()) for t in written if t.layout is torch.strided]
    grads = [(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in model.parameters()]
    devices = sorted(
        {t.device.index for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"}
    )
    drawn = python_random_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            restore_python_random(drawn)
            for module, before in zip(modules, attributes, strict=True):
                restore_attributes(module, before)
            with torch.no_grad():
                for tensor, value in values:
                    tensor.data.copy_(value)  # .data: autograd graphs of the user may have saved the tensor
                for parameter, grad, kept in grads:
                    parameter.grad = grad
                    if grad is not None and kept is not None:
                        grad.data.copy_(kept)


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """A copy of the attributes of `module`, to compare or restore later.

    One level deeper than `__dict__`: `_parameters`, `_buffers`, `_modules` and the hooks are dicts, and a
    forward may append to a list.
    """
    return {k: v.copy() if isinstance(v, dict | list | set) else v for k, v in module.__dict__.items()}


def changed_attributes(module: nn.Module, before: dict[str, Any]) -> list[str]:
    """Names of the attributes of `module` that were set, deleted or extended since `attributes_of`."""
    now = module.__dict__
    changed = []
    for key in [*before, *(k for k in now if k not in before)]:
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            inner = [*old, *(k for k in new if k not in old)]
            changed += [str(k) for k in inner if old.get(k) is not new.get(k)]
        elif _differs(new, old):
            changed.append(key)
    return changed


def restore_attributes(module: nn.Module, before: dict[str, Any]) -> None:
    """Put the attributes of `module` back to what `attributes_of` returned."""
    now = module.__dict__
    for key in [k for k in now if k not in before]:
        del now[key]
    for key, value in before.items():
        present = now.get(key)
        if isinstance(present, dict | list | set) and type(present) is type(value):
            if _differs(present, value):
                present.clear()  # in place: others may hold the container itself
                present.extend(value) if isinstance(value, list) else present.update(value)  # type: ignore[union-attr]
        elif present is not value:
            now[key] = value


def _differs(now: Any, before: Any) -> bool:
    if type(now) is not type(before):
        return True
    if isinstance(before, dict):
        return list(now) != list(before) or any(now[k] is not before[k] for k in before)
    if isinstance(before, list):
        return len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True))
    return bool(now != before) if isinstance(before, set) else now is not before
