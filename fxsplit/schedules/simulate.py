"""Costs in, timeline, bubble and pictures out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..actions import Action, Needs, Schedule
from .proof import serial_order


def timeline(
    schedule: Schedule, needs: Needs, cost: Callable[[Action], float]
) -> dict[Action, tuple[float, float]]:
    """Start and end of every action, when each starts as soon as its worker is free and its needs are done.

    Args:
        cost: units of time of an action.
    """
    worker_of = {a: w for w, actions in enumerate(schedule.workers) for a in actions}
    free = [0.0] * len(schedule.workers)
    times: dict[Action, tuple[float, float]] = {}
    for action in serial_order(schedule.workers, needs):
        w = worker_of[action]
        start = max([free[w], *(times[a][1] for a in needs(action))])
        free[w] = start + cost(action)
        times[action] = (start, free[w])
    return times


def bubble(schedule: Schedule, needs: Needs, loads: Sequence[float]) -> float:
    """Idle share of the workers, for stages whose forward and backward of the whole batch take `loads`.

    A backward is taken to be twice as long as a forward, each of its two halves as long. Transfers take no time. Equal stages under GPipe
    give (p - 1) / (m + p - 1).
    """
    weights = list(loads) if any(loads) else [1.0] * len(loads)
    times = timeline(schedule, needs, lambda a: weights[a.stage] * (2 if a.kind == "B" else 1))
    busy = sum(end - start for start, end in times.values())
    return 1 - busy / (len(schedule.workers) * max(end for _, end in times.values()))


def staircase(schedule: Schedule, needs: Needs) -> str:
    """The schedule as a picture: one row a worker, one column for each action of equal length."""
    times = timeline(schedule, needs, lambda _: 1)
    width = max(len(f"{a.kind}{a.micro_batch}") for a in times)
    length = int(max(end for _, end in times.values()))
    lines = []
    for (stage, replica), actions in zip(schedule.labels, schedule.workers, strict=True):
        cells = ["·"] * length
        for action in actions:
            cells[int(times[action][0])] = f"{action.kind}{action.micro_batch}"
        lines.append(f"stage {stage}.{replica} │ {' '.join(c.ljust(width) for c in cells).rstrip()}")
    return "\n".join(lines)
