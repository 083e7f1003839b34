"""Proof that a schedule plays every action once and ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..actions import Action, Kind, Needs, Schedule
from ..errors import ScheduleError
from .needs import members


def serial_order(
    workers: Sequence[Sequence[Action]], needs: Needs, rounds: Mapping[int, int] | None = None
) -> Iterator[Action]:
    """One order in which a single worker can play all lists.

    Args:
        rounds: stage → how many of its micro-batches go forward at the same time, each in a worker of its own: they
            follow each other in the order, and none begins before all can.

    Raises:
        ScheduleError: the lists wait for each other for ever, or need an action that nobody plays.
    """
    everything = {action for actions in workers for action in actions}
    done: set[Action] = set()
    arrived: set[Action] = set()  # wait for those that they meet
    position = [0] * len(workers)
    while True:
        moved = False
        for w, actions in enumerate(workers):
            while position[w] < len(actions):
                action = actions[position[w]]
                if any(a not in done for a in needs(action) if a in everything or a.kind == action.kind):
                    break
                if action not in done:
                    moved |= action not in arrived
                    arrived.add(action)
                    everybody = members(action, rounds or {}) if action.kind == "F" else [action]
                    if not arrived.issuperset(everybody):
                        break
                    yield from everybody
                    done.update(everybody)
                position[w] += 1
                moved = True
        if len(done) == len(everything):
            return
        if not moved:
            stuck = next(
                actions[position[w]] for w, actions in enumerate(workers) if position[w] < len(actions)
            )
            missing = [
                str(a) for a in [*needs(stuck), *members(stuck, rounds or {})] if a not in done | {stuck}
            ]
            raise ScheduleError(
                f"the schedule can never finish: {stuck} waits for {', '.join(missing)}", where=str(stuck)
            )


def check_schedule(
    schedule: Schedule, stages: int, micro_batches: int, needs: Needs, rounds: Mapping[int, int] | None = None
) -> None:
    """Prove that the schedule plays every action exactly once and ends.

    Every stage goes forward with every micro-batch, and, unless there is no backward at all, backward: in one (B) or
    in two (I and W).

    Raises:
        ScheduleError: names the action that is repeated, missing, unknown or stuck.
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
    for _ in serial_order(schedule.workers, needs, rounds):
        pass
