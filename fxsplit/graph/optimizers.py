"""Optimizers that were made before a pipeline: their states follow parameters that have been moved.

    optimizer.state[p]["exp_avg"]   on the CPU, from steps before compile
    p                               on cuda:1 since compile: the next step brings the state there, once

A parameter that had no values, and was replaced by one that has, is an optimizer's no more: its step says so.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ..compat import tree_map
from ..errors import ArgumentError

_MOVED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # parameter → how many had been moved then
_REPLACED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_SEEN: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
_changes = 0


def moved(parameter: nn.Parameter) -> None:
    """Let the states of a parameter follow it to the device where it is now."""
    _note(_MOVED, parameter)


def replaced(parameter: nn.Parameter) -> None:
    """Let a step with a parameter that another one has taken the place of be an error."""
    _note(_REPLACED, parameter)


def _note(table: WeakTensorKeyDictionary, parameter: nn.Parameter) -> None:
    global _changes
    _changes += 1
    table[parameter] = _changes
    _watch()


@functools.cache
def _watch() -> None:
    """Begin to, once."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if _SEEN.get(optimizer) == _changes:
        return
    groups = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    if any(p in _REPLACED for p, _ in groups):
        raise ArgumentError(
            f"{type(optimizer).__name__} was made of parameters without values, and others have taken their place since",
            remedy="make the optimizer after compile(weights=...) or pipe.load_weights(...)",
        )
    for parameter, group in groups:
        if parameter in _MOVED:
            _follow(optimizer.state.get(parameter, {}), group, parameter.device)
    _SEEN[optimizer] = _changes


def _follow(state: dict[str, Any], group: dict[str, Any], device: torch.device) -> None:
    """As `Optimizer.load_state_dict` places states: the count of steps is on the device only where a kernel reads it."""
    counts_there = bool(group.get("capturable") or group.get("fused"))
    for key, value in state.items():
        if key != "step" or counts_there:
            state[key] = tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, value)
