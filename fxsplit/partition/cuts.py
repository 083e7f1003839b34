"""Exact dynamic programming over the contiguous cuts of one order."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .problem import Cut, Slot
from .space import Space

_Origin = tuple[int, int, Slot] | None  # where the last stage began, in which layer, and what it runs on


def lightest(space: Space, bound: float = math.inf) -> dict[int, tuple[float, Cut]]:
    """Per layer that a plan can end in the smallest heaviest load below `bound`, and a cut that has it.

    One entry for each layer in which all units are placed, also for layers that are no end of the problem. Without
    a `bound` every interval is looked at; with one, only those that a plan below it can have.
    """
    last = len(space.positions) - 1
    rows = [[bound] * (last + 1) for _ in space.problem.moves]
    origins: list[list[_Origin]] = [[None] * (last + 1) for _ in rows]
    rows[0][0] = -math.inf
    for a, layer, target, slot, first, stop, row, constant in space.segments(rows, bound, bound):
        here, there, origin = rows[layer][a], rows[target], origins[target]
        for b in range(first, stop):
            cost = row[b] + constant
            if cost < here:
                cost = here
            if cost < there[b]:
                there[b] = cost
                origin[b] = (a, layer, slot)
    return {
        layer: (rows[layer][last], _trace(space, origins, layer))
        for layer in range(1, len(rows))
        if origins[layer][last] is not None
    }


def tidiest(
    space: Space, penalties: Sequence[float], limit: float, ends: Sequence[int], walls: Sequence[int] = ()
) -> Cut | None:
    """Among the cuts whose stages all weigh at most `limit`, one with the smallest sum of penalties.

    Args:
        penalties: by index, what a cut there costs.
        ends: layers to end in.
        walls: indices that no stage may lie across.
    """
    last = len(space.positions) - 1
    rows = [[math.inf] * (last + 1) for _ in space.problem.moves]
    origins: list[list[_Origin]] = [[None] * (last + 1) for _ in rows]
    rows[0][0] = 0.0
    priced = [*penalties[:last], 0.0]
    for a, layer, target, slot, first, stop, row, constant in space.segments(rows, math.inf, limit, walls):
        here, there, origin = rows[layer][a], rows[target], origins[target]
        most = limit - constant
        for b in range(first, stop):
            if row[b] <= most:
                total = here + priced[b]
                if total < there[b]:
                    there[b] = total
                    origin[b] = (a, layer, slot)
    end = min(ends, key=lambda layer: rows[layer][last])
    return _trace(space, origins, end) if origins[end][last] is not None else None


def _trace(space: Space, origins: Sequence[Sequence[_Origin]], layer: int) -> Cut:
    at = len(space.positions) - 1
    starts: list[int] = []
    slots: list[Slot] = []
    while (origin := origins[layer][at]) is not None and at:
        at, layer, slot = origin
        starts.append(space.positions[at])
        slots.append(slot)
    return Cut(space.order, tuple(reversed(starts)), tuple(reversed(slots)))
