"""The loss of one micro-batch, and the gradients of the outputs."""

from __future__ import annotations

from typing import Any

import torch

from ...compat import tree_leaves, tree_map
from ...schedules.tape import Instruction
from ..call import Call
from ..values import handed_over


def loss(call: Call, instruction: Instruction) -> None:
    """Compute it where the last stage is."""
    assert call.loss is not None
    (i,), taken = instruction.micro_batches, {}
    for v in sorted(call.wiring.results):
        value = call.values.take(v, i)
        if call.lanes.has_queues:
            call.lanes.uses(instruction.stage, i, tree_leaves(value))
        taken[v] = _at_home(call, v, value)
    gradients = call.loss.gradients(i, len(call.wiring.roles), taken)
    for v, row in gradients.items():
        call.values.receive(v, i, row)


def _at_home(call: Call, name: str, value: Any) -> Any:
    """A leaf where the device map sends it, or the first replica of its stage is: the loss is computed there."""
    maker, homes = call.wiring.made_by[name], call.wiring.program.homes
    if maker < 0 or not (name in homes or call.wiring.roles[maker].stage.is_apart):
        return value
    home = homes.get(name, call.wiring.roles[maker].stage.device)

    def moved(leaf: Any) -> Any:
        return handed_over(call.lanes.move(leaf, home)) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(moved, value)
