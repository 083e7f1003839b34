"""A seeded local search over all legal partitions: units move between stages, worse steps are taken at first."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

from .problem import Cut, Problem

_MOVES = 40_000  # at most; 500 for each unit
_POWER = 16  # the sum of the loads to this power stands in for the largest: every stage counts a little


def improved(problem: Problem, start: Cut, seed: int = 0, heat: float = 0.05) -> tuple[int, ...]:
    """The units in an order in which a better cut than `start` may be contiguous: annealing with a fixed seed.

    A unit may go to any stage between those of the units before it and those after it (Kirkpatrick et al., 1983).
    Memory is not looked at; the exact cut of the order that comes out is.

    Args:
        heat: how much worse a step may be at first, as a part of what is made small.
    """
    stage_of = start.stage_of()
    best = list(stage_of)
    before = problem.before
    after: list[list[int]] = [[] for _ in stage_of]
    for unit, earlier in enumerate(before):
        for other in earlier:
            after[other].append(unit)
    touching: list[list[int]] = [[] for _ in stage_of]
    for number, value in enumerate(problem.values):
        for unit in value.units:
            touching[unit].append(number)
    slots, last = start.slots, len(start.slots) - 1
    loads = [0.0] * len(slots)
    for unit, stage in enumerate(stage_of):
        loads[stage] += slots[stage].load.work * problem.work[slots[stage].row][unit]

    def traffic(number: int, sign: float) -> None:
        value = problem.values[number]
        units = value.units
        home = stage_of[units[0]]
        for unit in units:
            if stage_of[unit] != home:
                break
        else:
            return
        for stage in {stage_of[u] for u in units}:
            loads[stage] += sign * slots[stage].load.traffic * value.nbytes

    for number in range(len(problem.values)):
        traffic(number, 1)
    scale = max(loads) or 1.0

    def energy() -> float:
        return sum([(load / scale) ** _POWER for load in loads])

    def shift(unit: int, there: int) -> None:
        here = stage_of[unit]
        for number in touching[unit]:
            traffic(number, -1)
        loads[here] -= slots[here].load.work * problem.work[slots[here].row][unit]
        loads[there] += slots[there].load.work * problem.work[slots[there].row][unit]
        stage_of[unit] = there
        for number in touching[unit]:
            traffic(number, 1)

    free: list[int] = []  # the units that may go somewhere, in any order
    place = [-1] * len(stage_of)

    def look(units: Iterable[int]) -> None:
        for unit in units:
            low = max([stage_of[u] for u in before[unit]], default=0)
            high = min([stage_of[u] for u in after[unit]], default=last)
            if low < high and place[unit] < 0:
                place[unit] = len(free)
                free.append(unit)
            elif low == high and place[unit] >= 0:
                moved = free.pop()
                if moved != unit:
                    free[place[unit]] = moved
                    place[moved] = place[unit]
                place[unit] = -1

    look(range(len(stage_of)))
    choose = random.Random(seed)
    counts = [stage_of.count(s) for s in range(len(slots))]
    now = energy()
    lowest = max(loads)
    moves = min(_MOVES, 500 * len(stage_of)) if free else 0
    for move in range(moves):
        unit = free[int(choose.random() * len(free))]
        here = stage_of[unit]
        if counts[here] == 1:
            continue
        low = max([stage_of[u] for u in before[unit]], default=0)
        high = min([stage_of[u] for u in after[unit]], default=last)
        there = low + int(choose.random() * (high - low))
        there += there >= here
        shift(unit, there)
        then = energy()
        warmth = heat * now * (1 - move / moves) ** 2
        if then > now and (not warmth or choose.random() >= math.exp((now - then) / warmth)):
            shift(unit, here)
            continue
        now = then
        counts[here] -= 1
        counts[there] += 1
        look((*before[unit], *after[unit]))
        if now < len(loads) and max(loads) < lowest:
            lowest, best = max(loads), list(stage_of)
    return _ordered(problem, best)


def _ordered(problem: Problem, stage_of: list[int]) -> tuple[int, ...]:
    """By stage, and within a stage by the program; that is an order that the program allows."""
    return tuple(sorted(range(problem.units), key=lambda unit: (stage_of[unit], unit)))
