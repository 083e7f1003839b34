"""Schedules are pure data: for every worker, the list of what it does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..errors import ScheduleError
from ..ir import Program

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


def gpipe(stages: int, micro_batches: int, replicas: int = 1) -> Schedule:
    """All forwards, then all backwards, each in micro-batch order (Huang et al., GPipe, 2019).

    Bubble of p equal stages with m micro-batches: (p - 1) / (m + p - 1) of the time of each worker.
    Memory: every stage keeps all m micro-batches. Micro-batch i of a stage with r replicas runs on worker
    i mod r.
    """
    labels = [(s, r) for s in range(stages) for r in range(replicas)]
    workers = []
    for stage, replica in labels:
        mine = range(replica, micro_batches, replicas)
        workers.append(tuple([Action("F", stage, i) for i in mine] + [Action("B", stage, i) for i in mine]))
    return Schedule("gpipe", tuple(workers), tuple(labels))


def dependencies(program: Program, *, in_turn: frozenset[int]) -> Needs:
    """What has to be done before an action may start.

    A forward needs the stages that give its inputs. Gradients of a value travel from its last reader to the
    one before and so on to the stage that gave it, so that they are added in the order in which autograd adds
    them in the unsplit model; the same holds for a parameter that several stages read. A backward therefore
    needs its own forward and, for every value and shared parameter, the next stage in that chain.

    Args:
        in_turn: stages that have to compute their micro-batches one after the other, in order.
    """
    made_by, readers = program.producers(), program.readers()
    forward: dict[int, set[int]] = {
        s.index: {made_by[v] for v in s.inputs if made_by[v] >= 0} for s in program.stages
    }
    backward: dict[int, set[int]] = {s.index: set() for s in program.stages}
    chains = [[*([made_by[v]] if made_by[v] >= 0 else []), *readers[v]] for v in made_by]
    chains += list(parameter_chains(program).values())
    for chain in chains:
        for earlier, later in itertools.pairwise(chain):
            backward[earlier].add(later)

    def needs(action: Action) -> list[Action]:
        kind, stage, i = action
        before = [Action("F", stage, i)] if kind == "B" else []
        before += [Action(kind, s, i) for s in sorted(forward[stage] if kind == "F" else backward[stage])]
        if stage in in_turn and i > 0:
            before.append(Action(kind, stage, i - 1))
        return before

    return needs


def parameter_chains(program: Program) -> dict[str, list[int]]:
    """Parameter FQN → the stages that read it, in execution order; the first one owns its gradient."""
    chains: dict[str, list[int]] = {}
    for stage in program.stages:
        for fqn in stage.parameters:
            chains.setdefault(fqn, []).append(stage.index)
    return chains


def serial_order(workers: Sequence[Sequence[Action]], needs: Needs) -> Iterator[Action]:
    """One order in which a single worker can play all lists.

    Raises:
        ScheduleError: the lists wait for each other for ever, or need an action that nobody plays.
    """
    everything = {action for actions in workers for action in actions}
    done: set[Action] = set()
    position = [0] * len(workers)
    while True:
        moved = False
        for w, actions in enumerate(workers):
            while position[w] < len(actions):
                action = actions[position[w]]
                if any(a not in done for a in needs(action) if a in everything or a.kind == action.kind):
                    break
                yield action
                done.add(action)
                position[w] += 1
                moved = True
        if len(done) == len(everything):
            return
        if not moved:
            stuck = next(
                actions[position[w]] for w, actions in enumerate(workers) if position[w] < len(actions)
            )
            missing = [str(a) for a in needs(stuck) if a not in done]
            raise ScheduleError(
                f"the schedule can never finish: {stuck} waits for {', '.join(missing)}", where=str(stuck)
            )


def check_schedule(schedule: Schedule, stages: int, micro_batches: int, needs: Needs) -> None:
    """Prove that the schedule plays every action exactly once and ends.

    Raises:
        ScheduleError: names the action that is repeated, missing, unknown or stuck.
    """
    expected = {Action(k, s, i) for k in KINDS for s in range(stages) for i in range(micro_batches)}
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
    for _ in serial_order(schedule.workers, needs):
        pass


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

    A backward is taken to be twice as long as a forward. Transfers take no time. Equal stages under GPipe
    give (p - 1) / (m + p - 1).
    """
    weights = list(loads) if any(loads) else [1.0] * len(loads)
    times = timeline(schedule, needs, lambda a: weights[a.stage] * (1 if a.kind == "F" else 2))
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
