"""Where the stages of a pipeline are, and how what they hand over gets there: the one seam between one process and several.

In one process everything is here (`Here`). A rank of several plays its own part of the tape, in which what goes to other
ranks and comes from them are instructions, too (`fxsplit.distributed.hub`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..inserted.random import BaseSeed
from ..schedules.tape import Instruction, Tape
from .wiring import Wiring

if TYPE_CHECKING:
    from .call import Call

Act = Callable[[Instruction], None]


class Here:
    """All stages are in this process.

    Attributes:
        everything: whether they are.
    """

    everything = True

    def has(self, stage: int) -> bool:
        """Whether this process has a stage."""
        return True

    def tape(self, tape: Tape, wiring: Wiring) -> Tape:
        """What this process plays of a tape."""
        return tape

    def readers(self, wiring: Wiring, tape: Tape) -> Mapping[str, int]:
        """Value → how often it is read in this process, where it is at all."""
        return wiring.readers

    def seed(self, *, several: bool) -> BaseSeed | None:
        """The base of the random numbers of a call that may draw; None for the caller's own, where it has one micro-batch."""
        return BaseSeed() if several else None

    def begins(self, call: Call, tape: Tape, act: Act) -> Act:
        """A tape, or half of one, is about to be played. Returns `act`, so that whoever wants to know hears of it."""
        return act

    def accumulates(self, call: Call, stage: int, micro_batch: int) -> bool:
        """Whether somebody else manages the parameters of a stage that is about to go backward, and adds up its gradients."""
        return False

    def message(self, call: Call, instruction: Instruction) -> None:
        """A packet goes, or is waited for."""
        raise AssertionError(f"{instruction} in a pipeline of one process")
