"""The second half of a backward in two."""

from __future__ import annotations

from ...schedules.tape import Instruction
from ..call import Call


def weights(call: Call, instruction: Instruction) -> None:
    """The gradients of weights that are still to be computed; where nothing was put off, there are none."""
    (i,) = instruction.micro_batches
    rest = call.put_off.pop((instruction.stage, i), None)
    if rest is not None:
        call.add(instruction.stage, i, rest())
