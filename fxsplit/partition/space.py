"""The cost of every interval of one order, in constant time apart from the few values that pass over its start.

A stage is an interval ``[a, b)`` of the order. What it counts once, such as the bytes of its parameters or of the
values that enter it, is a difference of two prefix sums and a correction for the items that are needed on both sides
of ``a``. For fixed ``a`` the correction is a step function of ``b`` with a step for each of them::

    order    u0  u1  u2  u3  u4  u5            p is read by u1, u3 and u4, and counts in a stage once
    p             p ······ p   p
    [0, 3)   └────1────┘                       sum of first readers in [0, 3): 1
    [2, 5)           └───────1────┘            no first reader in [2, 5): + 1, from b = 4 on, where u3 is inside
    [2, 3)           └0┘                       nothing yet: the step has not come
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from operator import itemgetter

from .problem import Item, Problem, Slot, Weights

Step = tuple[
    int, float, float, float
]  # index, and bytes of traffic, parameters and saved that are added there
Segment = tuple[int, int, int, Slot, int, int, Sequence[float], float]


class Space:
    """One order of the units, and the positions in it where a cut may be.

    Attributes:
        order: the units.
        positions: increasing; the first is 0 and the last the number of units. Everything below is by index in it.
        crossing: bytes of the distinct values that live across a cut there.
    """

    def __init__(self, problem: Problem, order: Sequence[int]) -> None:
        self.problem, self.order = problem, tuple(order)
        count = len(order)
        where = [0] * count
        for position, unit in enumerate(order):
            where[unit] = position
        kinds = (problem.values, problem.parameters, problem.saved)
        self._items = [_placed(items, where if where != list(range(count)) else None) for items in kinds]
        self._sums = [_prefix([row[u] for u in order]) for row in problem.work]
        self._crossing = _crossing(self._items[0], count)
        self._first_parameters = _firsts(self._items[1], count)
        self._first_saved = _firsts(self._items[2], count)
        self.only(range(count + 1))

    def only(self, positions: Sequence[int]) -> Space:
        """Allow cuts at these positions only."""
        self.positions = positions
        self.sums = [[row[p] for p in positions] for row in self._sums]
        self.crossing = [self._crossing[p] for p in positions]
        self._index = [0] * (positions[-1] + 2)
        index = 0
        for p in range(positions[-1] + 1):  # the first index at or after p
            if p > positions[index]:
                index += 1
            self._index[p] = index
        self._index[-1] = index + 1
        self._rows: dict[tuple[int, Weights], list[float]] = {}
        return self

    def row(self, kind: int, weights: Weights) -> list[float]:
        """Prefix sums of a weighted cost: the cost of ``[a, b)`` is entry b - entry a + the steps between."""
        key = kind, weights
        if key not in self._rows:
            firsts = [
                (weights.parameters, self._first_parameters),
                (weights.saved, self._first_saved),
            ]
            total = [weights.work * w for w in self.sums[kind]]
            if weights.traffic:
                total = [t + weights.traffic * c for t, c in zip(total, self.crossing, strict=True)]
            for factor, first in firsts:
                if factor:
                    total = [t + factor * first[p] for t, p in zip(total, self.positions, strict=True)]
            self._rows[key] = total
        return self._rows[key]

    def steps(self, *, shared: bool) -> Iterator[list[Step]]:
        """For each index but the last, the steps of the intervals that begin there, in order.

        The list is the same one each time, as it is at that index.

        Args:
            shared: whether parameters and what is kept for backward count too.
        """
        index = self._index
        new: dict[
            int, list[Step]
        ] = {}  # by the first index at which they count; they do until the one where they are
        for places, nbytes in self._items[0]:
            if len(places) == 2:  # the two steps of most values are in one place
                start, at = index[places[0] + 1], index[places[1] + 1]
                if start < at:
                    new.setdefault(start, []).append((at, 2 * nbytes, 0.0, 0.0))
                continue
            for here, after in (*itertools.pairwise(places), (places[0], places[-1])):
                start, at = index[here + 1], index[after + 1]
                if start < at:
                    new.setdefault(start, []).append((at, nbytes, 0.0, 0.0))
        for kind in (1, 2) if shared else ():
            for places, nbytes in self._items[kind]:
                for here, after in itertools.pairwise(places):
                    start, at = index[here + 1], index[after + 1]
                    if start < at:
                        step = (at, 0.0, nbytes, 0.0) if kind == 1 else (at, 0.0, 0.0, nbytes)
                        new.setdefault(start, []).append(step)
        found: list[Step] = []
        for a in range(len(self.positions) - 1):
            for step in new.get(a, ()):
                insort(found, step)
            while found and found[0][0] <= a:
                del found[0]
            yield found

    def segments(
        self,
        rows: Sequence[Sequence[float]],
        ceiling: float,
        bound: float,
        walls: Sequence[int] = (),
    ) -> Iterator[Segment]:
        """Every interval that may be a stage of a plan whose stages all weigh at most `bound`, in order of its start.

        Yields ``(a, layer, target, slot, first, stop, row, constant)``: from index a in `layer`, a stage may end at
        any b in ``range(first, stop)`` and costs ``row[b] + constant``.

        Args:
            rows: per layer, what is known at each index. It is looked at when the index is reached; only entries
                below `ceiling` are gone on from.
            bound: also what windows are found by: the work of a stage alone must not exceed it, nor that of the
                stages that are still to come.
            walls: indices that no stage may lie across.
        """
        problem, sums = self.problem, self.sums
        last = len(self.positions) - 1
        shared = any(s.load.parameters or s.load.saved or s.memory != float("inf") for s in problem.slots())
        earliest = self._earliest(bound)
        kinds = range(1, 4 if shared else 2)
        for a, steps in enumerate(self.steps(shared=shared)):
            wall = next((w for w in walls if w > a), last)
            wanted = []
            for layer, moves in enumerate(problem.moves):
                if not rows[layer][a] < ceiling:
                    continue
                for target, slot in moves:
                    first = max(a + 1, earliest[target])
                    stop = min(wall, last) + 1
                    if slot.load.work:
                        work = sums[slot.row]
                        stop = min(stop, bisect_right(work, work[a] + bound / slot.load.work * (1 + 1e-12)))
                    if first < stop:
                        wanted.append((layer, target, slot, first, stop))
            if not wanted:
                continue
            near = steps[: bisect_left(steps, (max(stop for *_, stop in wanted),))]
            places = [step[0] for step in near]
            sums_at = [
                dict(zip(places, itertools.accumulate(map(itemgetter(k), near)), strict=True)) for k in kinds
            ]
            changes = list(sums_at[0])
            added = [(0.0, *one.values()) for one in sums_at]  # before the first change, and from each one on
            for layer, target, slot, first, stop in wanted:
                row = self.row(slot.row, slot.load)
                for start, end, constant in self._pieces(a, first, stop, slot, row, changes, added):
                    yield a, layer, target, slot, start, end, row, constant

    def _pieces(
        self,
        a: int,
        first: int,
        stop: int,
        slot: Slot,
        row: Sequence[float],
        changes: Sequence[int],
        added: Sequence[Sequence[float]],
    ) -> Iterator[tuple[int, int, float]]:
        """``range(first, stop)`` in pieces with one constant each, without the ends at which memory does not suffice.

        Args:
            changes: where steps are.
            added: what they add up to, of traffic and, where they count, of parameters and what is kept for backward.
        """
        load, room = slot.load, slot.room
        limited = slot.memory != float("inf")
        needs = self.row(slot.row, room) if limited else row
        begin, at = first, bisect_right(changes, first)
        for number, end in enumerate((*changes[at : bisect_left(changes, stop)], stop), at):
            cost = load.fixed - row[a] + load.traffic * added[0][number]
            if len(added) > 1:
                cost += load.parameters * added[1][number] + load.saved * added[2][number]
            if limited:
                need = room.traffic * added[0][number] + room.parameters * added[1][number]
                need += room.fixed - needs[a] + room.saved * added[2][number]
                yield from _fitting(begin, end, needs, slot.memory - need, cost)
            else:
                yield begin, end, cost
            begin = end

    def _earliest(self, bound: float) -> list[int]:
        """Per layer the first index from which the rest can be done within `bound`, by work alone."""
        last = len(self.positions) - 1
        found = [last + 1] * len(self.problem.moves)
        for end in self.problem.ends:
            found[end] = last
        for layer in reversed(range(len(found))):
            for target, slot in self.problem.moves[layer]:
                if found[target] > last:
                    continue
                if not slot.load.work:
                    found[layer] = 0
                    continue
                work = self.sums[slot.row]
                least = work[found[target]] - bound / slot.load.work * (1 + 1e-12)
                found[layer] = min(found[layer], bisect_left(work, least))
        return found

    def pairs(self, bound: float) -> float:
        """About how many intervals `segments` would give."""
        earliest, last = self._earliest(bound), len(self.positions) - 1
        latest = [0] * len(earliest)
        total = 0.0
        for layer, moves in enumerate(self.problem.moves):
            for target, slot in moves:
                work, reach = self.sums[slot.row], last
                if slot.load.work:
                    reach = bisect_right(work, work[latest[layer]] + bound / slot.load.work * (1 + 1e-12)) - 1
                latest[target] = max(latest[target], reach)
                width = max(latest[layer] - earliest[layer] + 1, 1) if layer else 1
                total += width * max(reach - earliest[target] + 1, 0)
        return total


def thinned(space: Space, count: int) -> list[int]:
    """About `count` positions, spread evenly over the work, each the one that fewest bytes cross near it."""
    last = len(space.order)
    if last <= count:
        return list(range(last + 1))
    sums = space._sums[0]
    total = sums[-1] or 1.0
    best: dict[int, int] = {}
    for p in range(1, last):
        bucket = int(sums[p] / total * count / 2)
        if bucket not in best or space._crossing[p] < space._crossing[best[bucket]]:
            best[bucket] = p
    plain = range(0, last, max(1, 2 * last // count))  # work may be in few units only
    return sorted({0, last, *best.values(), *plain})


def _fitting(
    begin: int, end: int, needs: Sequence[float], limit: float, cost: float
) -> Iterator[tuple[int, int, float]]:
    limit += 1e-9 * abs(limit)
    start = begin
    for i in range(begin, end):
        if needs[i] > limit:
            if start < i:
                yield start, i, cost
            start = i + 1
    if start < end:
        yield start, end, cost


def _placed(items: Sequence[Item], where: Sequence[int] | None) -> list[tuple[Sequence[int], float]]:
    """The positions of each item's units, increasing; `where` is None where units are in program order."""
    if where is None:
        return [(item.units, item.nbytes) for item in items if item.nbytes]
    return [(sorted([where[u] for u in item.units]), item.nbytes) for item in items if item.nbytes]


def _prefix(values: Sequence[float]) -> list[float]:
    total, found = 0.0, [0.0]
    for value in values:
        total += value
        found.append(total)
    return found


def _crossing(values: Sequence[tuple[Sequence[int], float]], count: int) -> list[float]:
    change = [0.0] * (count + 2)
    for places, nbytes in values:
        change[places[0] + 1] += nbytes
        change[places[-1] + 1] -= nbytes
    return _prefix(change)[1 : count + 2]


def _firsts(items: Sequence[tuple[Sequence[int], float]], count: int) -> list[float]:
    new = [0.0] * count
    for places, nbytes in items:
        new[places[0]] += nbytes
    return _prefix(new)
