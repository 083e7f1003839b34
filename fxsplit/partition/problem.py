"""What the planner sees of a model: units, what they cost and share, and the devices that stages may run on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

# For each stage its seconds for a batch, per value that travels the stages that it passes through, and per stage its
# replicas → seconds of one step.
Simulate = Callable[[Sequence[float], Sequence[Sequence[int]], Sequence[int]], float]


@dataclass(frozen=True)
class Item:
    """Something that several units have to do with, and that counts once in a stage.

    Attributes:
        units: increasing. Of a value, the unit that makes it and those that read it; of a parameter or of something
            that is kept for backward, the units that need it.
        nbytes: its size.
    """

    units: tuple[int, ...]
    nbytes: float


@dataclass(frozen=True)
class Weights:
    """What a stage's figures count for in one sum: the load of a stage, or the memory that it needs.

    Attributes:
        work: one unit of the stage's work.
        traffic: one byte of a value that enters or leaves the stage, each value once.
        parameters: one byte of its parameters, each parameter once.
        saved: one byte that is kept for backward, each storage once.
        fixed: what every stage has.
    """

    work: float = 0.0
    traffic: float = 0.0
    parameters: float = 0.0
    saved: float = 0.0
    fixed: float = 0.0


@dataclass(frozen=True)
class Slot:
    """What a stage may run on: one device, or several that replicate it.

    Attributes:
        row: which row of `Problem.work` holds for its device.
        load: weights of the load that is to be small.
        room: weights of the memory that it needs.
        memory: how much of that there is.
        devices: numbers of the devices.
    """

    row: int
    load: Weights
    room: Weights = Weights()
    memory: float = math.inf
    devices: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Problem:
    """A model and devices as figures.

    A plan is a path through *layers*: it begins in layer 0, each stage is a move to a later layer on one slot, and it
    ends in one of `ends`. For k stages on k devices layer j means that j stages are placed; with replicas, that j
    devices are used.

    Attributes:
        work: per kind of device, the work of each unit in program order.
        values, parameters, saved: what units share.
        before: for each unit the units that have to come before it.
        moves: per layer the layers that a stage may lead to, and the slot that it runs on.
        ends: layers that a plan may end in.
        scopes: module paths of the first and the last node of each unit.
        fixed_order: why no other order than the program's may be tried; empty if it may.
    """

    work: tuple[tuple[float, ...], ...]
    values: tuple[Item, ...]
    parameters: tuple[Item, ...]
    saved: tuple[Item, ...]
    before: tuple[tuple[int, ...], ...]
    moves: tuple[tuple[tuple[int, Slot], ...], ...]
    ends: tuple[int, ...]
    scopes: tuple[tuple[str, str], ...] = ()
    fixed_order: str = ""

    @property
    def units(self) -> int:
        """How many units there are."""
        return len(self.work[0])

    def slots(self) -> tuple[Slot, ...]:
        """Every slot that a stage may run on, each once."""
        return tuple(dict.fromkeys(slot for moves in self.moves for _, slot in moves))


@dataclass(frozen=True)
class Cut:
    """Stages of one problem.

    Attributes:
        order: the units in the order of execution.
        starts: where in `order` each stage begins; the first one at 0.
        slots: what each stage runs on.
    """

    order: tuple[int, ...]
    starts: tuple[int, ...]
    slots: tuple[Slot, ...]

    def stage_of(self) -> list[int]:
        """Unit → stage."""
        found, stage = [0] * len(self.order), -1
        begins = set(self.starts)
        for position, unit in enumerate(self.order):
            stage += position in begins
            found[unit] = stage
        return found


@dataclass(frozen=True)
class StageFigures:
    """What one stage comes to: its load, bytes in and out, of parameters and kept for backward, and memory needed."""

    load: float
    bytes_in: float
    bytes_out: float
    parameters: float
    saved: float
    memory: float


Travel = tuple[
    int, tuple[int, ...], float
]  # the stage that makes a value, the others that read it, and its bytes


def travels(problem: Problem, cut: Cut) -> list[Travel]:
    """The values that leave the stage that makes them."""
    stage_of = cut.stage_of()
    found = []
    for value in problem.values:
        home = stage_of[value.units[0]]
        for unit in value.units:
            if stage_of[unit] != home:
                readers = {stage_of[u] for u in value.units}
                found.append((home, tuple(sorted(readers - {home})), value.nbytes))
                break
    return found


def figures(problem: Problem, cut: Cut, moving: Sequence[Travel]) -> tuple[StageFigures, ...]:
    """The figures of each stage, added up from the definition.

    Args:
        moving: `travels` of this cut.
    """
    stage_of = cut.stage_of()
    count = len(cut.starts)
    works: list[list[float]] = [[] for _ in range(count)]
    for unit, stage in enumerate(stage_of):
        works[stage].append(problem.work[cut.slots[stage].row][unit])
    inward, outward, parameters, saved = ([0.0] * count for _ in range(4))
    for home, readers, nbytes in moving:
        for stage in readers:
            inward[stage] += nbytes
        outward[home] += nbytes
    for items, totals in ((problem.parameters, parameters), (problem.saved, saved)):
        for item in items:
            for stage in {stage_of[u] for u in item.units}:
                totals[stage] += item.nbytes
    found = []
    for stage, slot in enumerate(cut.slots):
        parts = (
            math.fsum(works[stage]),
            inward[stage] + outward[stage],
            parameters[stage],
            saved[stage],
        )
        found.append(
            StageFigures(
                weigh(slot.load, *parts),
                inward[stage],
                outward[stage],
                parameters[stage],
                saved[stage],
                weigh(slot.room, *parts),
            )
        )
    return tuple(found)


def weigh(weights: Weights, work: float, traffic: float, parameters: float, saved: float) -> float:
    """The weighted sum of a stage's figures."""
    return (
        weights.work * work
        + weights.traffic * traffic
        + weights.parameters * parameters
        + weights.saved * saved
        + weights.fixed
    )


def lower_bound(problem: Problem) -> float:
    """No partition has a lighter heaviest stage, whatever its order: work alone, divided as if it could be.

    For any shares λ of the devices that add up to 1, the heaviest load is at least Σ_d λ_d · load_d. A unit on a slot
    adds its work there times the λ of the slot's devices to that sum, so the sum is at least the smallest such product
    of each unit (a dual solution of scheduling on unrelated machines). λ is taken proportional to the speeds. Nor can
    the heaviest stage be lighter than the heaviest unit on its best slot.
    """
    slots = problem.slots()
    totals: dict[int, float] = {}
    for slot in slots:
        whole = slot.load.work * len(slot.devices) * math.fsum(problem.work[slot.row])
        for device in slot.devices:
            totals[device] = min(totals.get(device, math.inf), whole)
    spread = 0.0
    if all(total > 0 for total in totals.values()):
        speeds = math.fsum(1 / total for total in totals.values())
        share = {device: 1 / total / speeds for device, total in totals.items()}
        spread = _least(
            problem, [(s.row, s.load.work * math.fsum(share[d] for d in s.devices)) for s in slots], math.fsum
        )
    return max(spread, _least(problem, [(s.row, s.load.work) for s in slots], max))


def _least(
    problem: Problem, kinds: Sequence[tuple[int, float]], together: Callable[[Iterable[float]], float]
) -> float:
    """The smallest product of each unit's work and a factor, over the rows and factors, added up or the largest."""
    smallest: dict[int, float] = {}
    for row, factor in kinds:
        smallest[row] = min(smallest.get(row, math.inf), factor)
    scaled = [[factor * w for w in problem.work[row]] for row, factor in smallest.items()]
    return together(map(min, zip(*scaled, strict=True)))
