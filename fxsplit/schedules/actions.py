"""Schedules are pure data: for every worker, the list of what it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "B"]
KINDS: tuple[Kind, ...] = ("F", "B")


class Action(NamedTuple):
    """One stage computes one micro-batch, forward (F) or backward (B). Written ``2F0``: stage 2, micro-batch 0."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Needs = Callable[[Action], Sequence[Action]]


@dataclass(frozen=True)
class Schedule:
    """What each worker does, in order.

    Attributes:
        name: such as ``"gpipe"``.
        workers: per worker its actions.
        labels: per worker the (stage, replica) that it is.
    """

    name: str
    workers: tuple[tuple[Action, ...], ...]
    labels: tuple[tuple[int, int], ...]

    def half(self, kind: Kind) -> tuple[tuple[Action, ...], ...]:
        """The forward or the backward actions of each worker, in order."""
        return tuple(tuple(a for a in actions if a.kind == kind) for actions in self.workers)

    def __str__(self) -> str:
        return "\n".join(
            f"stage {stage}.{replica}: {' '.join(map(str, actions))}"
            for (stage, replica), actions in zip(self.labels, self.workers, strict=True)
        )
