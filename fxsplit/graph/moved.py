"""A model that was moved or converted since it was compiled, and the example that it was compiled with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import MoveError
from .assumptions import attribute_tensors


class Example:
    """The flat inputs that a pipeline was compiled with.

    Attributes:
        inputs: as they were.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        self.inputs = list(inputs)
        self._kind = floating_type(model)

    def for_model(self, model: nn.Module) -> list[torch.Tensor]:
        """Converted as the model was since: a floating point type that it had to the one that it has."""
        before, now = self._kind, floating_type(model)
        if before is None or now is None or before == now:
            return self.inputs
        return [x.to(now) if x.dtype == before else x for x in self.inputs]

    def beside(self, model: nn.Module) -> nn.Module:
        """The model if it is on the device of these inputs, else a copy of it that is."""
        homes = dict.fromkeys(x.device for x in self.inputs)
        owned = [*model.parameters(), *model.buffers()]
        owned += [t for _, t in attribute_tensors(model) if t.dim()]
        if not homes or all(t.device in homes for t in owned):
            return model
        home, memo = next(iter(homes)), dict[int, Any]()
        for tensor in owned:
            moved = tensor.detach().to(home, copy=True)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
        return copy.deepcopy(model, memo)


def floating_type(model: nn.Module) -> torch.dtype | None:
    """That of the parameters, where they have one."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return kinds.pop() if len(kinds) == 1 else None


def refuse_to_move(model: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Refuse what would move tensors of a pipeline's model to another device.

    Raises:
        MoveError: it would.
    """
    for device in {t.device for t in (*model.parameters(), *model.buffers())}:
        try:
            moves = fn(torch.empty(0, device=device)).device != device
        except (RuntimeError, AssertionError):  # a device that is not there
            moves = True
        if moves:
            raise MoveError(
                "a pipeline is not moved: the plan owns the placement of every stage",
                remedy="fxsplit.compile(pipe.unsplit(), pipe.plan.replace(devices=...), example_args=...)",
            )
