"""Schedules are pure data: for every worker, the list of what it does."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, get_args

from ..arguments import explained
from ..errors import ScheduleError

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One stage computes one micro-batch. Written ``2F0``: stage 2, forward, micro-batch 0.

    F is forward and B backward; or, instead of B, the gradients of the inputs (I) and later those of the weights (W).
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """What each worker does, in order.

    Attributes:
        name: such as ``"gpipe"``.
        workers: per worker its actions.
        labels: per worker the (first stage, replica) that it is.
    """

    name: str
    workers: tuple[tuple[Action, ...], ...]
    labels: tuple[tuple[int, int], ...]

    @property
    def stages(self) -> int:
        """How many stages it plays."""
        return 1 + max((a.stage for actions in self.workers for a in actions), default=-1)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches it plays."""
        return 1 + max((a.micro_batch for actions in self.workers for a in actions), default=-1)

    @property
    def worker_of(self) -> tuple[int, ...]:
        """Per stage the first worker that plays any of it."""
        found: dict[int, int] = {}
        for w, actions in enumerate(self.workers):
            for action in actions:
                found.setdefault(action.stage, w)
        return tuple(found[stage] for stage in range(self.stages))

    @property
    def forward_first(self) -> bool:
        """Whether every worker has gone forward with everything before it goes backward."""
        kinds = ["".join(a.kind for a in actions).lstrip("F") for actions in self.workers]
        return not any("F" in rest for rest in kinds)

    def only(self, *, stages: int, micro_batches: int) -> Self:
        """The schedule without the actions of later stages and micro-batches; the others keep their order."""
        workers = tuple(
            tuple(a for a in actions if a.stage < stages and a.micro_batch < micro_batches)
            for actions in self.workers
        )
        return type(self)(self.name, workers, self.labels)

    def to_csv(self) -> str:
        """A line for each worker, its actions with commas between them."""
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.workers)

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> Self:
        """The schedule of such lines; empty fields, as for times in which a worker waits, are left out.

        Workers that begin with the same stage are its replicas, in the order of their lines.

        Raises:
            ScheduleError: a field is no action.
        """
        if not isinstance(text, str):
            raise ScheduleError(f"{text!r} is no text", remedy='Schedule.from_csv("0F0,0B0\\n")')
        rows = []
        for number, line in enumerate(text.splitlines(), start=1):
            fields = [field.strip() for field in line.split(",")]
            rows.append(tuple(_action(field, number) for field in fields if field))
        firsts: list[int] = []
        for row in rows:  # a worker without actions is a replica of the stage before
            firsts.append(row[0].stage if row else firsts[-1] if firsts else 0)
        copies = {stage: itertools.count() for stage in firsts}
        labels = tuple((stage, next(copies[stage])) for stage in firsts)
        return cls(name, tuple(rows), labels)

    def __str__(self) -> str:
        return "\n".join(
            f"stage {stage}.{replica}: {' '.join(map(str, actions))}"
            for (stage, replica), actions in zip(self.labels, self.workers, strict=True)
        )


Schedule.__init__ = explained(  # type: ignore[method-assign]
    ScheduleError, 'fxsplit.Schedule.from_csv("0F0,0B0\\n")'
)(Schedule.__init__)


def _action(text: str, line: int) -> Action:
    match = re.fullmatch(r"([0-9]{1,9})([A-Z])([0-9]{1,9})", text)
    kinds = {str(kind): kind for kind in get_args(Kind)}
    if match is None or match.group(2) not in kinds:
        raise ScheduleError(
            f"{text!r} is no action",
            where=f"line {line}",
            remedy="such as 2F0: stage 2, forward, micro-batch 0",
        )
    return Action(kinds[match.group(2)], int(match.group(1)), int(match.group(3)))
