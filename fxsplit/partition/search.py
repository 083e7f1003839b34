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
    placing = _Placing(problem, start)
    free = _Free(placing)
    best, lowest = list(placing.stage_of), max(placing.loads)
    choose = random.Random(seed)
    now = placing.energy()
    moves = min(_MOVES, 500 * len(best)) if free.units else 0
    for move in range(moves):
        unit = free.units[int(choose.random() * len(free.units))]
        here = placing.stage_of[unit]
        if placing.counts[here] == 1:
            continue
        low, high = placing.bounds(unit)
        there = low + int(choose.random() * (high - low))
        there += there >= here
        placing.shift(unit, there)
        then = placing.energy()
        warmth = heat * now * (1 - move / moves) ** 2
        if then > now and (not warmth or choose.random() >= math.exp((now - then) / warmth)):
            placing.shift(unit, here)
            continue
        now = then
        free.look((*placing.before[unit], *placing.after[unit]))
        if now < len(placing.loads) and max(placing.loads) < lowest:
            best, lowest = list(placing.stage_of), max(placing.loads)
    return _ordered(problem, best)


class _Placing:
    """Units on stages, and what the stages then have to do.

    Attributes:
        stage_of, counts, loads: of each unit; of each stage how many it has, and their work with what travels.
        before, after: the units that each one has to come after, and before.
    """

    def __init__(self, problem: Problem, start: Cut) -> None:
        self._problem, self._slots = problem, start.slots
        self.stage_of = start.stage_of()
        self.counts = [self.stage_of.count(s) for s in range(len(start.slots))]
        self.before = problem.before
        self.after: list[list[int]] = [[] for _ in self.stage_of]
        for unit, earlier in enumerate(problem.before):
            for other in earlier:
                self.after[other].append(unit)
        self._touching: list[list[int]] = [[] for _ in self.stage_of]
        for number, value in enumerate(problem.values):
            for unit in value.units:
                self._touching[unit].append(number)
        self.loads = [0.0] * len(self._slots)
        for unit, stage in enumerate(self.stage_of):
            self.loads[stage] += self._work(unit, stage)
        for number in range(len(problem.values)):
            self._traffic(number, 1)
        self._scale = max(self.loads) or 1.0

    def energy(self) -> float:
        """What is made small."""
        scale = self._scale
        return sum([(load / scale) ** _POWER for load in self.loads])

    def bounds(self, unit: int) -> tuple[int, int]:
        """The first and the last stage where a unit may be, with all others where they are."""
        low = max([self.stage_of[u] for u in self.before[unit]], default=0)
        return low, min([self.stage_of[u] for u in self.after[unit]], default=len(self._slots) - 1)

    def shift(self, unit: int, there: int) -> None:
        """Put a unit on another stage."""
        here = self.stage_of[unit]
        for number in self._touching[unit]:
            self._traffic(number, -1)
        self.loads[here] -= self._work(unit, here)
        self.loads[there] += self._work(unit, there)
        self.stage_of[unit] = there
        self.counts[here] -= 1
        self.counts[there] += 1
        for number in self._touching[unit]:
            self._traffic(number, 1)

    def _work(self, unit: int, stage: int) -> float:
        slot = self._slots[stage]
        return slot.load.work * self._problem.work[slot.row][unit]

    def _traffic(self, number: int, sign: float) -> None:
        value, stage_of = self._problem.values[number], self.stage_of
        home = stage_of[value.units[0]]
        for unit in value.units:
            if stage_of[unit] != home:
                break
        else:
            return
        for stage in {stage_of[u] for u in value.units}:
            self.loads[stage] += sign * self._slots[stage].load.traffic * value.nbytes


class _Free:
    """The units that may go somewhere, in any order; one comes and goes in the same time, however many there are."""

    def __init__(self, placing: _Placing) -> None:
        self._placing = placing
        self.units: list[int] = []
        self._place = [-1] * len(placing.stage_of)
        self.look(range(len(self._place)))

    def look(self, units: Iterable[int]) -> None:
        """Whether these may, as things are now."""
        place = self._place
        for unit in units:
            low, high = self._placing.bounds(unit)
            if low < high and place[unit] < 0:
                place[unit] = len(self.units)
                self.units.append(unit)
            elif low == high and place[unit] >= 0:
                moved = self.units.pop()
                if moved != unit:
                    self.units[place[unit]] = moved
                    place[moved] = place[unit]
                place[unit] = -1


def _ordered(problem: Problem, stage_of: list[int]) -> tuple[int, ...]:
    """By stage, and within a stage by the program; that is an order that the program allows."""
    return tuple(sorted(range(problem.units), key=lambda unit: (stage_of[unit], unit)))
