"""A packet goes to another rank, or is waited for."""

from __future__ import annotations

from ...schedules.tape import Instruction
from ..call import Call


def message(call: Call, instruction: Instruction) -> None:
    """Who knows where the stages are does it."""
    call.how.hub.message(call, instruction)
