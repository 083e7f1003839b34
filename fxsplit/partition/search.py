"""A seeded local search over all legal partitions: units move between stages, worse steps are taken at first."""

from __future__ import annotations

import math
import random

from .problem import Cut, Problem

_MOVES = 40_000  # at most
_POWER = 12  # the norm of this order stands in for the largest load: every stage counts a little
_HEAT = 0.1  # how much worse, as a part of the load, a step may well be at first


def improved(problem: Problem, start: Cut) -> tuple[int, ...]:
    """The units in an order in which a better cut than `start` may be contiguous: annealing with a fixed seed.

    A unit may go to any stage between those of the units before it and those after it (Kirkpatrick et al., 1983).
    Memory is not looked at; the exact cut of the order that comes out is.
    """
    stage_of = start.stage_of()
    best = list(stage_of)
    after: list[list[int]] = [[] for _ in stage_of]
    for unit, earlier in enumerate(problem.before):
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
        home = stage_of[value.units[0]]
        elsewhere = {stage_of[u] for u in value.units[1:]} - {home}
        for stage in elsewhere:
            loads[stage] += sign * slots[stage].load.traffic * value.nbytes
        if elsewhere:
            loads[home] += sign * slots[home].load.traffic * value.nbytes

    for number in range(len(problem.values)):
        traffic(number, 1)
    scale = max(loads) or 1.0

    def energy() -> float:
        return float(math.fsum((load / scale) ** _POWER for load in loads) ** (1 / _POWER))

    def shift(unit: int, there: int) -> None:
        here = stage_of[unit]
        for number in touching[unit]:
            traffic(number, -1)
        loads[here] -= slots[here].load.work * problem.work[slots[here].row][unit]
        loads[there] += slots[there].load.work * problem.work[slots[there].row][unit]
        stage_of[unit] = there
        for number in touching[unit]:
            traffic(number, 1)

    choose = random.Random(0)
    counts = [stage_of.count(s) for s in range(len(slots))]
    now = energy()
    lowest = max(loads)
    moves = min(_MOVES, max(5000, 500 * len(stage_of)))
    for move in range(moves):
        unit = choose.randrange(len(stage_of))
        here = stage_of[unit]
        low = max((stage_of[u] for u in problem.before[unit]), default=0)
        high = min((stage_of[u] for u in after[unit]), default=last)
        if low == high or counts[here] == 1:
            continue
        there = choose.randint(low, high)
        if there == here:
            continue
        shift(unit, there)
        then = energy()
        heat = _HEAT * now * (1 - move / moves) ** 2
        if then > now and (not heat or choose.random() >= math.exp((now - then) / heat)):
            shift(unit, here)
            continue
        now = then
        counts[here] -= 1
        counts[there] += 1
        if max(loads) < lowest:
            lowest, best = max(loads), list(stage_of)
    return _ordered(problem, best)


def _ordered(problem: Problem, stage_of: list[int]) -> tuple[int, ...]:
    """By stage, and within a stage by the program; that is an order that the program allows."""
    return tuple(sorted(range(problem.units), key=lambda unit: (stage_of[unit], unit)))
