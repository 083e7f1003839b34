"""A step adds gradients past the forward of `DistributedDataParallel`, which then does not reduce them: say so."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from ..errors import ArgumentError

_MARK = "fxsplit"


class Reducers:
    """The `DistributedDataParallel` modules that wait for gradients of a pipeline's parameters."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[nn.Module]] = []

    def check(self, model: nn.Module) -> None:
        """Refuse a step that one of them would not notice.

        Raises:
            ArgumentError: it reduces gradients over several processes, outside of its ``no_sync()``.
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        held = {id(p) for p in model.parameters() if p.requires_grad and _is_held(p)}
        for wrapper in self._wrappers_of(held) if held else ():
            if wrapper.require_backward_grad_sync and wrapper.process_group.size() > 1:
                raise ArgumentError(
                    "pipe.step adds gradients past the forward of DistributedDataParallel, which would not reduce them: "
                    "each process would train a model of its own",
                    remedy="loss_fn(ddp(x), target).backward(); or pipe.step(...) inside of ddp.no_sync(), and "
                    "torch.distributed.all_reduce of each gradient after it",
                )

    def _wrappers_of(self, held: set[int]) -> list[Any]:
        known: list[Any] = [found for ref in self._known if (found := ref()) is not None]
        if not known:  # nothing leads from a parameter to it
            known = [o for o in gc.get_objects() if issubclass(type(o), nn.parallel.DistributedDataParallel)]
        mine = [w for w in known if any(id(p) in held for p in w.parameters())]
        self._known = [weakref.ref(w) for w in mine]
        return mine


def _is_held(parameter: nn.Parameter) -> bool:
    """Whether something keeps what adds up a parameter's gradient, as a reducer does; otherwise autograd makes it anew."""
    metadata: Any = get_gradient_edge(parameter).node.metadata
    metadata[_MARK] = True
    del metadata
    again: Any = get_gradient_edge(parameter).node.metadata
    return _MARK in again
