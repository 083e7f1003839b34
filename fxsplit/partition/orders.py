"""Orders of execution that the program allows: every partition into stages is contiguous in one of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

from .problem import Item

Order = tuple[int, ...]


def orders(before: Sequence[Sequence[int]], values: Sequence[Item]) -> Iterator[tuple[str, Order]]:
    """The program's own order, then others that it allows, each once.

    Args:
        before: for each unit the units that have to come before it.
        values: what they hand to each other.
    """
    seen = set()
    after: list[list[int]] = [[] for _ in before]
    for unit, earlier in enumerate(before):
        for other in earlier:
            after[other].append(unit)
    if all(unit in after[unit - 1] for unit in range(1, len(before))):
        yield "program order", tuple(range(len(before)))  # a chain has no other
        return
    made: list[tuple[str, Callable[[], Order]]] = [
        ("program order", lambda: tuple(range(len(before)))),
        ("breadth first", lambda: _ready_first(before, after, newest=False)),
        ("depth first", lambda: _ready_first(before, after, newest=True)),
        ("post-order", lambda: _post_order(before, after)),
        ("post-order from the last branch", lambda: _post_order([b[::-1] for b in before], after)),
        ("least alive", lambda: _least_alive(before, after, values)),
    ]
    for name, make in made:
        order = make()
        if order not in seen:
            seen.add(order)
            yield name, order


def _ready_first(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], *, newest: bool) -> Order:
    """Kahn's algorithm: of the units that are ready, the oldest or the newest first."""
    waiting = [len(earlier) for earlier in before]
    ready = [u for u, count in enumerate(waiting) if not count]
    if newest:
        ready.reverse()
    order: list[int] = []
    at = 0
    while at < len(ready) if not newest else ready:
        if newest:
            unit = ready.pop()
        else:
            unit = ready[at]
            at += 1
        order.append(unit)
        found = []
        for other in after[unit]:
            waiting[other] -= 1
            if not waiting[other]:
                found.append(other)
        ready.extend(reversed(found) if newest else found)
    return tuple(order)


def _post_order(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> Order:
    """From the last units back: each unit right after all that it needs, one branch after the other."""
    order: list[int] = []
    done = [False] * len(before)
    for sink in (u for u, later in enumerate(after) if not later):
        stack = [(sink, iter(before[sink]))]
        while stack:
            unit, rest = stack[-1]
            for other in rest:
                if not done[other]:
                    stack.append((other, iter(before[other])))
                    break
            else:
                stack.pop()
                if not done[unit]:
                    done[unit] = True
                    order.append(unit)
    return tuple(order)


def _least_alive(
    before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], values: Sequence[Item]
) -> Order:
    """Greedy: next the unit that makes least and frees most bytes."""
    made: list[list[int]] = [[] for _ in before]
    read: list[list[int]] = [[] for _ in before]
    unread = []
    for number, value in enumerate(values):
        made[value.units[0]].append(number)
        for unit in value.units[1:]:
            read[unit].append(number)
        unread.append(len(value.units) - 1)

    def growth(unit: int) -> float:
        freed = sum(values[v].nbytes for v in read[unit] if unread[v] == 1)
        return sum(values[v].nbytes for v in made[unit]) - freed

    waiting = [len(earlier) for earlier in before]
    ready = [(growth(u), u) for u, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        known, unit = heapq.heappop(ready)
        now = growth(unit)
        if now < known:  # others have run since; look again where it stands now
            heapq.heappush(ready, (now, unit))
            continue
        order.append(unit)
        for number in read[unit]:
            unread[number] -= 1
        for other in after[unit]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, (growth(other), other))
    return tuple(order)
