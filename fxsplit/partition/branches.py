"""Orders in which parallel branches fill up what each leaves free in a stage."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter

from .orders import Order
from .problem import Problem, Slot


def latest_first(before: Sequence[Sequence[int]]) -> Order:
    """Of the units that are ready always the last one: of parallel branches the last one comes first."""
    after: list[list[int]] = [[] for _ in before]
    for unit, earlier in enumerate(before):
        for other in earlier:
            after[other].append(unit)
    waiting = [len(earlier) for earlier in before]
    ready = [-u for u, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        unit = -heapq.heappop(ready)
        order.append(unit)
        for other in after[unit]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, -other)
    return tuple(order)


def filled(
    problem: Problem,
    slots: Sequence[Slot],
    orders: tuple[Order, Order],
    bound: float,
    sparing: int,
    spare: float,
) -> Order:
    """Stage by stage the beginnings of two orders, of what is left, that together weigh about most within `bound`.

    So the small units of one branch fill up what the large ones of another leave free. The load of both is taken for
    the sum of the loads of each; what comes out is an order that is cut exactly afterwards.

    Args:
        sparing: which of the orders to take as little from as possible, so that it lasts for later stages.
        spare: what part of a stage may be left free for that.
    """
    count = problem.units
    touching: list[list[int]] = [[] for _ in range(count)]
    for number, value in enumerate(problem.values):
        for unit in value.units:
            touching[unit].append(number)
    done = [False] * count
    found: list[int] = []
    for slot in slots[:-1]:
        left = [[u for u in order if not done[u]] for order in orders]
        first, second = (_beginnings(problem, slot, units, touching, bound) for units in left)
        by_load = sorted((load, score, n) for n, (load, score) in enumerate(second))
        loads = [load for load, _, _ in by_load]
        best_of: list[tuple[float, int]] = []
        for _, score, n in by_load:
            best_of.append(max(best_of[-1], (score, n)) if best_of else (score, n))
        pairs = []
        for n, (load, score) in enumerate(first):
            at = bisect_right(loads, bound - load) - 1
            if at >= 0 and n + best_of[at][1] > 0:
                pairs.append((score + best_of[at][0], n, best_of[at][1]))
        enough = max((score for score, *_ in pairs), default=0.0) - spare * bound
        choice = min((p[1:] for p in pairs if p[0] >= enough), key=itemgetter(sparing), default=(1, 0))
        for units, n in zip(left, choice, strict=True):
            for unit in units[:n]:
                if not done[unit]:
                    done[unit] = True
                    found.append(unit)
    return (*found, *(u for u in orders[0] if not done[u]))


def _beginnings(
    problem: Problem, slot: Slot, units: Sequence[int], touching: Sequence[Sequence[int]], bound: float
) -> list[tuple[float, float]]:
    """For none of the units, the first one, the first two, …: their load, and their work without what they hand on."""
    values, work = problem.values, problem.work[slot.row]
    inside: dict[int, int] = {}
    made: set[int] = set()
    done = traffic = out = 0.0
    found = [(0.0, 0.0)]
    for unit in units:
        done += slot.load.work * work[unit]
        if done > bound:
            break
        for number in touching[unit]:
            value = values[number]
            weight = slot.load.traffic * value.nbytes
            count = inside.get(number, 0) + 1
            inside[number] = count
            if value.units[0] == unit:
                made.add(number)
                out += weight
            if count == 1:
                traffic += weight
            if count == len(value.units):
                traffic -= weight
                if number in made:
                    out -= weight
        found.append((traffic + done, done - out))
    return found
