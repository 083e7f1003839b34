"""The schedules that fxsplit knows, by name."""

from __future__ import annotations

from collections.abc import Sequence

from .actions import Action, Schedule


def gpipe(stages: int, micro_batches: int, replicas: Sequence[int] | None = None) -> Schedule:
    """All forwards, then all backwards, each in micro-batch order (Huang et al., GPipe, 2019).

    Bubble of p equal stages with m micro-batches: (p - 1) / (m + p - 1) of the time of each worker.
    Memory: every stage keeps all m micro-batches. Micro-batch i of a stage with r replicas runs on worker
    i mod r.
    """
    counts = replicas or [1] * stages
    labels = [(s, r) for s in range(stages) for r in range(counts[s])]
    workers = []
    for stage, replica in labels:
        mine = range(replica, micro_batches, counts[stage])
        workers.append(tuple([Action("F", stage, i) for i in mine] + [Action("B", stage, i) for i in mine]))
    return Schedule("gpipe", tuple(workers), tuple(labels))


def in_flight(schedule: Schedule, stage: int) -> int:
    """The most micro-batches that one worker of `stage` has gone forward with and not yet backward."""
    most = 0
    for (owner, _), actions in zip(schedule.labels, schedule.workers, strict=True):
        open_now = 0
        for action in actions if owner == stage else ():
            open_now += 1 if action.kind == "F" else -1
            most = max(most, open_now)
    return most
