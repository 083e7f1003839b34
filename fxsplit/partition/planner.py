"""`Problem` → the stages whose heaviest is lightest, and what may be claimed of them.

The bottleneck is exact over the contiguous cuts of each order that is tried (PipeDream's dynamic programming, Narayanan
et al., 2019, with traffic counted per distinct value, and intervals skipped that no plan better than the best so far can
have). In a program of thousands of units in which nearly everything could be within the bound, cuts are allowed at
thinned positions first and then near the cuts that were found; `Planned.exact` says so.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .branches import filled, latest_first
from .cuts import lightest, tidiest
from .orders import orders
from .problem import Cut, Problem, Simulate, Slot, StageFigures, Weights, figures, lower_bound, travels
from .search import improved
from .space import Space, thinned

# Among cuts whose heaviest stage is within this factor of the lightest, the shortest step wins, then fewest bytes.
SLACK = 1.005
# Another order than the program's has to be better by more than that: the generated code reads like the model.
WORTH_REORDERING = 0.995
FILLED = "branches filled up"
_COARSE = 96  # positions of the first, coarse pass
_PAIRS = 4_000_000  # intervals that an exact pass may look at: less than half a second
_FILLINGS = 20  # orders in which branches fill up stages, that are tried at most
_FILLED_UNITS = 30_000  # and at most so many units of them together
_MIXED_UNITS = 1500  # where branches fill each other up, a local search of so many is worth its time
_HEATS = (0.2, 0.05, 0.01)  # of the local searches, one from what the other found
_NEAR = 24  # positions on each side of a cut that the second pass looks at
_TIES = 400  # positions among which ties are broken


@dataclass(frozen=True)
class Fewer:
    """A cut into fewer stages that is better."""

    stages: int
    bottleneck: float
    step: float


@dataclass(frozen=True)
class Planned:
    """The stages, and what is known of them.

    Attributes:
        cut: units → stages.
        stages: the figures of each stage.
        bound: no partition into these stages, in any order, has a lighter heaviest stage.
        lightest: the lightest heaviest stage that was found; the one that was chosen is within `SLACK` of it, and of
            `WORTH_REORDERING` where that is of another order.
        exact: whether there is surely no lighter one over all contiguous cuts of the orders that were tried.
        order: the name of the order.
        tried: how many orders were tried.
        step: simulated seconds of a step.
        fewer: a cut into fewer stages with a shorter step, if there is one.
    """

    cut: Cut
    stages: tuple[StageFigures, ...]
    bound: float
    lightest: float
    exact: bool
    order: str
    tried: int
    step: float
    fewer: Fewer | None

    @property
    def bottleneck(self) -> float:
        """The load of the heaviest stage."""
        return max(s.load for s in self.stages)


@dataclass(frozen=True)
class _Found:
    name: str
    space: Space
    bottleneck: float
    cut: Cut


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Planning makes many small lists and no cycles: to look for garbage among them takes as long again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_collection()
def plan_stages(problem: Problem, simulate: Simulate, *, search: bool = False) -> Planned | None:
    """The best stages of a problem, or None where the memory of no plan suffices.

    Smallest heaviest load first; within `SLACK` of it the shortest simulated step, then the fewest bytes across cuts,
    then cuts between whole modules, then the earliest.

    Args:
        simulate: loads, chains of stages that a value passes through, and replicas → seconds of a step.
        search: also move units between stages by a seeded local search, where there is more than one order.
    """
    found: list[_Found] = []
    exact, tried, best = True, 0, math.inf
    bound = lower_bound(problem)
    for name, order in orders(problem.before, problem.values):
        attempt, complete = _best_of_order(Space(problem, order), name, best, bound)
        exact, tried = exact and complete, tried + 1
        if attempt is not None:
            found.append(attempt)
            best = attempt.bottleneck
        if problem.fixed_order or best <= bound * (1 + 1e-9):
            break
    if not found:  # by thinned positions, perhaps: what needs least memory may still fit
        cut = roomiest(problem)
        loads = figures(problem, cut, travels(problem, cut))
        if any(f.memory > slot.memory for f, slot in zip(loads, cut.slots, strict=True)):
            return None
        best, exact = max(f.load for f in loads), False
        found.append(_Found("program order", Space(problem, cut.order), best, cut))
    if tried > 1 and all(len(moves) <= 1 for moves in problem.moves):
        for attempt in _filled_up(problem, found[-1], bound):
            found.append(attempt)
            best = attempt.bottleneck
    mixed = found[-1].name == FILLED and problem.units <= _MIXED_UNITS
    heats = _HEATS if search and tried > 1 else _HEATS[:1] if mixed else ()
    for seed, heat in enumerate(heats):
        order = improved(problem, found[-1].cut, seed, heat)
        attempt, _ = _best_of_order(Space(problem, order), "local search", best, bound)
        if attempt is not None:
            found.append(attempt)
            best = attempt.bottleneck
    chosen = found[0]
    if chosen.name != "program order" or best < chosen.bottleneck * WORTH_REORDERING:
        chosen = found[-1]  # each is better than the one before
    cut = _among_equals(problem, chosen, simulate)
    stages, step = _assess(problem, cut, simulate)
    return Planned(
        cut,
        stages,
        bound,
        best,
        exact,
        chosen.name,
        tried,
        step,
        _fewer(chosen.space, len(cut.starts), step, simulate),
    )


def roomiest(problem: Problem) -> Cut:
    """The stages that need the smallest part of their memory, whatever their load."""

    def as_load(slot: Slot) -> Slot:
        room = slot.room
        part = 1 / slot.memory if slot.memory != math.inf else 0.0
        load = Weights(
            work=max(room.work * part, 1e-30),  # for the windows; where memory has no work it decides nothing
            traffic=room.traffic * part,
            parameters=room.parameters * part,
            saved=room.saved * part,
            fixed=room.fixed * part,
        )
        return replace(slot, load=load, memory=math.inf)

    relaxed = replace(
        problem, moves=tuple(tuple((t, as_load(slot)) for t, slot in moves) for moves in problem.moves)
    )
    space = Space(relaxed, range(problem.units))
    space.only(thinned(space, max(300, 4 * len(problem.moves))))
    found = lightest(space)
    _, cut = min((found[end] for end in problem.ends if end in found), key=lambda pair: pair[0])
    names = {as_load(slot): slot for slot in problem.slots()}
    return replace(cut, slots=tuple(names[slot] for slot in cut.slots))


def _filled_up(problem: Problem, start: _Found, bound: float) -> Iterator[_Found]:
    """Better cuts, each than the one before, in which parallel branches fill up each other's stages."""
    both = tuple(range(problem.units)), latest_first(problem.before)
    best = start.bottleneck
    kinds = list(itertools.product((0.003, 0.02), (0, 1)))
    low = [bound] * len(kinds)
    turns = min(_FILLINGS, _FILLED_UNITS // problem.units)
    for turn in range(turns if turns >= len(kinds) else 0):
        spare, sparing = kinds[turn % len(kinds)]
        aim = (low[turn % len(kinds)] + best) / 2
        order = filled(problem, start.cut.slots, both, aim, sparing, spare)
        attempt, _ = _best_of_order(Space(problem, order), FILLED, best, bound)
        if attempt is not None:
            best = attempt.bottleneck
            yield attempt
        else:
            low[turn % len(kinds)] = aim


def _best_of_order(space: Space, name: str, best: float, least: float) -> tuple[_Found | None, bool]:
    """The lightest bottleneck of one order, if it is below `best`, and whether there is surely none below that.

    Args:
        least: no order has a lighter one.
    """

    def result(found: tuple[float, Cut] | None, exact: bool) -> tuple[_Found | None, bool]:
        return (_Found(name, space, *found) if found is not None and found[0] < best else None), exact

    ends = space.problem.ends
    coarse = thinned(space, max(_COARSE, 4 * len(space.problem.moves)))
    everywhere = len(coarse) == len(space.positions)
    found = _lightest_at(space.only(coarse), ends, math.inf if everywhere else best * 1.05)
    if everywhere or (found is not None and found[0] <= least * (1 + 1e-9)):
        return result(found, True)
    bound = min(best, found[0] * (1 + 1e-12) if found is not None else math.inf)
    count = len(space.order)
    space.only(range(count + 1))
    pairs = space.pairs(bound)
    if pairs <= _PAIRS * (1 if found is not None else 2):
        return result(_lighter(found, _lightest_at(space, ends, bound)), True)
    share = math.sqrt(_PAIRS / pairs)
    fine = thinned(space, max(int(count * share), len(coarse)))
    found = _lighter(found, _lightest_at(space.only(fine), ends, bound))
    if found is not None:
        near = {q for s in found[1].starts for q in range(s - _NEAR, s + _NEAR + 1) if 0 <= q <= count}
        space.only(sorted({*coarse, *near, count}))
        found = _lighter(found, _lightest_at(space, ends, found[0]))
    return result(found, False)


def _lighter(a: tuple[float, Cut] | None, b: tuple[float, Cut] | None) -> tuple[float, Cut] | None:
    if a is None or b is None:
        return a or b
    return b if b[0] < a[0] else a


def _lightest_at(space: Space, ends: Sequence[int], bound: float) -> tuple[float, Cut] | None:
    found = lightest(space, bound)
    return min((found[end] for end in ends if end in found), key=lambda pair: pair[0], default=None)


def _among_equals(problem: Problem, chosen: _Found, simulate: Simulate) -> Cut:
    """Of the cuts within `SLACK`, the one with the shortest step, then the fewest bytes, then between whole modules."""
    space = chosen.space
    near = {q for s in chosen.cut.starts for q in range(s - _NEAR, s + _NEAR + 1)}
    inside = range(len(space.order) + 1)
    positions = sorted({*thinned(space, _TIES), *(q for q in near if q in inside)})
    space.only(positions)
    limit = chosen.bottleneck * SLACK
    penalties = [
        c + _depth(problem, space.order, p) / 1024 for c, p in zip(space.crossing, positions, strict=True)
    ]
    candidates = []
    for walls in [(), *_branches(problem, space)]:
        cut = tidiest(space, penalties, limit, problem.ends, walls)
        if cut is not None and cut not in candidates:
            candidates.append(cut)
    if chosen.cut not in candidates:
        candidates.append(chosen.cut)
    steps = [_assess(problem, cut, simulate)[1] for cut in candidates]
    shortest = min(steps) * (1 + 1e-3)  # the first ones have the fewest bytes
    return next(c for c, step in zip(candidates, steps, strict=True) if step <= shortest)


def _branches(problem: Problem, space: Space) -> list[tuple[int, ...]]:
    """Where branches begin that could have begun earlier: cuts there make a pipeline less deep.

    Returns indices, as walls for `tidiest`: each of the three that gain most, and all of them together.
    """
    begin = [0.0] * problem.units
    work = problem.work[0]
    total = math.fsum(work)
    gains = []
    position_of = {p: i for i, p in enumerate(space.positions)}
    previous = 0.0
    for position, unit in enumerate(space.order):
        begin[unit] = max((begin[u] + work[u] for u in problem.before[unit]), default=0.0)
        gain = previous - begin[unit]
        if gain > 0.05 * total and position in position_of:
            gains.append((-gain, position_of[position]))
        if work[unit]:
            previous = begin[unit] + work[unit]
    top = [index for _, index in sorted(gains)[:3]]
    return [(i,) for i in top] + ([tuple(sorted(top))] if len(top) > 1 else [])


def _depth(problem: Problem, order: Sequence[int], position: int) -> int:
    """How many module levels a cut there would go through: whole modules read better."""
    if not problem.scopes or not 0 < position < len(order):
        return 0
    before = problem.scopes[order[position - 1]][1].split(".")
    after = problem.scopes[order[position]][0].split(".")
    shared = 0
    for a, b in zip(before, after, strict=False):
        if a != b:
            break
        shared += 1
    return shared


def _assess(problem: Problem, cut: Cut, simulate: Simulate) -> tuple[tuple[StageFigures, ...], float]:
    """The figures of the stages, and the simulated seconds of a step."""
    moving = travels(problem, cut)
    stages = figures(problem, cut, moving)
    chains = list(dict.fromkeys((home, *readers) for home, readers, _ in moving))
    return stages, simulate([s.load for s in stages], chains, [len(slot.devices) for slot in cut.slots])


def _fewer(space: Space, stages: int, step: float, simulate: Simulate) -> Fewer | None:
    """A coarse look at fewer stages, one on each device."""
    problem = space.problem
    if any(len(moves) > 1 for moves in problem.moves):
        return None  # devices that are shared out to stages and replicas have been looked at in any number
    space.only(thinned(space, max(_COARSE, 4 * len(problem.moves))))
    best: Fewer | None = None
    for layer, (bottleneck, cut) in lightest(space).items():
        if layer not in problem.ends and len(cut.starts) < stages:
            _, took = _assess(problem, cut, simulate)
            if took < (best.step if best else step * 0.995):
                best = Fewer(len(cut.starts), bottleneck, took)
    return best
