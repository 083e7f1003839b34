"""`Compiled`: what the compiler makes of a model for one mode, train or eval; or for both, where one program does."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .batch.dims import BatchDims
from .batch.merge import Merges
from .graph.ir import Assignment, Program, Stage, Traced
from .plan.plan import Plan


@dataclass(frozen=True, eq=False)
class Compiled:
    """A program, and what it was made of; nothing of a call.

    Attributes:
        plan: as it was asked for; of the second program of a model, with the devices that follow from the first.
        traced, assignment, program: what the compiler made, in order.
        dims: how its inputs are cut into micro-batches.
        merges: how its flat outputs are put together.
    """

    plan: Plan
    traced: Traced
    assignment: Assignment
    program: Program
    dims: BatchDims
    merges: Merges

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, in execution order."""
        return self.program.stages

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each stage."""
        return self.assignment.devices

    def __repr__(self) -> str:
        words = " and ".join("train()" if mode else "eval()" for mode in self.traced.modes)
        return f"Compiled({len(self.stages)} stages, for {words})"


def by_mode(first: Compiled, other: Compiled | None = None) -> dict[bool, Compiled]:
    """Mode → what is right in it: the first one, wherever it is."""
    found = dict.fromkeys(first.traced.modes, first)
    if other is not None:
        found |= {mode: other for mode in other.traced.modes if mode not in found}
    return found
