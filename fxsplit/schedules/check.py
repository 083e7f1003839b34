"""Proof that a schedule plays every action once. That it ends, `lower` shows."""

from __future__ import annotations

from ..errors import ScheduleError
from .schedule import Action, Kind, Schedule


def check_schedule(schedule: Schedule, stages: int, micro_batches: int) -> None:
    """Prove that the schedule plays every action exactly once.

    Every stage goes forward with every micro-batch, and, unless there is no backward at all, backward: in one (B) or
    in two (I and W).

    Raises:
        ScheduleError: names the action that is repeated, missing or unknown.
    """
    played = {action.kind for actions in schedule.workers for action in actions}
    kinds: set[Kind] = {"F"}
    if played - kinds:
        kinds |= {"I", "W"} if played & {"I", "W"} else {"B"}
    if played - kinds:
        raise ScheduleError("the schedule plays backward in one (B) and in two (I, W)", remedy="one of them")
    expected = {Action(k, s, i) for k in kinds for s in range(stages) for i in range(micro_batches)}
    seen: set[Action] = set()
    for action in (a for actions in schedule.workers for a in actions):
        if action in seen:
            raise ScheduleError(f"the schedule plays {action} twice", where=str(action))
        if action not in expected:
            raise ScheduleError(
                f"the schedule plays {action}, but there are {stages} stages and {micro_batches} micro-batches"
            )
        seen.add(action)
    if expected - seen:
        missing = min(expected - seen)
        raise ScheduleError(f"the schedule never plays {missing}", where=str(missing))
