"""The planner against definitions that are written out: brute force, downsets, and the order of its preferences."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fxsplit
from fxsplit.partition.assign import weigh_nodes
from fxsplit.partition.cuts import lightest, tidiest
from fxsplit.partition.model import build_problem
from fxsplit.partition.orders import orders
from fxsplit.partition.planner import SLACK, WORTH_REORDERING, plan_stages, roomiest
from fxsplit.partition.problem import Cut, Item, Problem, Slot, Weights, figures, lower_bound, travels
from fxsplit.partition.search import improved
from fxsplit.partition.space import Space
from fxsplit.partition.units import find_units
from fxsplit.testing.plans import odd_seconds
from fxsplit.trace.front import trace
from tests.models import build

amounts = st.integers(0, 20).map(float)


@st.composite
def item_lists(draw, n, least):
    found = []
    for _ in range(draw(st.integers(0, 6))):
        units = draw(st.sets(st.integers(0, n - 1), min_size=min(least, n), max_size=4))
        if len(units) >= least:
            found.append(Item(tuple(sorted(units)), draw(amounts)))
    return tuple(found)


@st.composite
def weights(draw, least_work=0):
    def factor():
        return draw(st.sampled_from([0.0, 0.5, 1.0, 2.0]))

    return Weights(draw(st.sampled_from([0.5, 1.0, 3.0])), factor(), factor(), factor(), factor())


@st.composite
def problems(draw, kind=None):
    """Up to nine units; k unlike devices, or N like ones that may replicate stages."""
    n = draw(st.integers(1, 9))
    kind = kind or draw(
        st.sampled_from(["plain", "traffic", "memory", "unequal", "replicas", "replicas fixed"])
    )
    rows = draw(st.integers(1, 3)) if kind == "unequal" else 1
    work = tuple(tuple(draw(st.lists(amounts, min_size=n, max_size=n))) for _ in range(rows))
    values = () if kind == "plain" else draw(item_lists(n, 2))
    parameters, saved = draw(item_lists(n, 1)), draw(item_lists(n, 1))
    before = [set() for _ in range(n)]
    for value in values:
        for unit in value.units[1:]:
            before[unit].add(value.units[0])
    for _ in range(draw(st.integers(0, 4))):
        pair = sorted(draw(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))))
        if pair[0] < pair[1]:
            before[pair[1]].add(pair[0])
    count = draw(st.integers(1, min(n, 5)))
    traffic = draw(st.sampled_from([0.0, 0.25, 1.0]))
    if kind.startswith("replicas"):

        def slot(first, r):
            load = Weights(1 / r, traffic / r, 2 * (r - 1) / r * draw(st.sampled_from([0.0, 0.5])))
            return Slot(0, load, devices=tuple(range(first, first + r)))

        if kind == "replicas":
            moves = tuple(
                tuple((d + r, slot(d, r)) for r in range(1, count - d + 1)) for d in range(count + 1)
            )
            ends = tuple(range(1, count + 1))
        else:  # layer = (stages, devices): exactly `stages` of them on all devices
            stages = draw(st.integers(1, count))
            layers = [(s, d) for s in range(stages + 1) for d in range(count + 1)]
            place = {layer: i for i, layer in enumerate(layers)}
            moves = tuple(
                tuple((place[s + 1, d + r], slot(d, r)) for r in range(1, count - d + 1))
                if s < stages
                else ()
                for s, d in layers
            )
            ends = (place[stages, count],)
    else:
        slots = []
        for device in range(count):
            load = draw(weights()) if kind == "unequal" else Weights(1.0, traffic)
            room = draw(weights()) if kind == "memory" else Weights()
            memory = draw(st.sampled_from([10.0, 20.0, 40.0, math.inf])) if kind == "memory" else math.inf
            slots.append(Slot(draw(st.integers(0, rows - 1)), load, room, memory, (device,)))
        moves = (*(((j + 1, slots[j]),) for j in range(count)), ())
        ends = (count,)
    return Problem(work, values, parameters, saved, tuple(tuple(sorted(b)) for b in before), moves, ends)


def every_cut(problem, order):
    """All contiguous cuts with all slots that may follow each other."""
    n = problem.units

    def go(layer, start):
        if start == n:
            if layer in problem.ends:
                yield (), ()
            return
        for target, slot in problem.moves[layer]:
            for end in range(start + 1, n + 1):
                for starts, slots in go(target, end):
                    yield (start, *starts), (slot, *slots)

    for starts, slots in go(0, 0):
        yield Cut(tuple(order), starts, slots)


def plain_load(problem, cut, which):
    """The load (or memory) of each stage from its definition, without any code of the planner."""
    bounds = [*cut.starts, problem.units]
    found = []
    for stage, (a, b) in enumerate(itertools.pairwise(bounds)):
        inside, slot = set(cut.order[a:b]), cut.slots[stage]
        w = getattr(slot, which)
        total = w.fixed + w.work * sum(problem.work[slot.row][u] for u in inside)
        for value in problem.values:
            made, readers = value.units[0] in inside, set(value.units[1:])
            enters = not made and readers & inside
            leaves = made and readers - inside
            total += w.traffic * value.nbytes * (bool(enters) + bool(leaves))
        for factor, items in ((w.parameters, problem.parameters), (w.saved, problem.saved)):
            total += factor * sum(i.nbytes for i in items if inside & set(i.units))
        found.append(total)
    return found


def fits(problem, cut):
    needs = plain_load(problem, cut, "room")
    return all(n <= s.memory * (1 + 1e-9) for n, s in zip(needs, cut.slots, strict=True))


def best_by_force(problem, order):
    loads = [max(plain_load(problem, c, "load")) for c in every_cut(problem, order) if fits(problem, c)]
    return min(loads, default=None)


@pytest.mark.slow
@settings(max_examples=2500)
@given(problems())
def test_the_heaviest_stage_is_the_lightest_there_is(problem):
    expected = best_by_force(problem, range(problem.units))
    found = lightest(Space(problem, range(problem.units)))
    ends = [found[e] for e in problem.ends if e in found]
    if expected is None:
        assert not ends
        return
    value, cut = min(ends, key=lambda pair: pair[0])
    assert value == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert max(plain_load(problem, cut, "load")) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert [s.load for s in figures(problem, cut, travels(problem, cut))] == pytest.approx(
        plain_load(problem, cut, "load")
    )
    assert [s.memory for s in figures(problem, cut, travels(problem, cut))] == pytest.approx(
        plain_load(problem, cut, "room")
    )
    assert fits(problem, cut)
    # With a bound just above the best, what is skipped is not the best.
    again = lightest(Space(problem, range(problem.units)), expected * (1 + 1e-9) + 1e-9)
    assert min(again[e][0] for e in problem.ends if e in again) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.slow
@settings(max_examples=500)
@given(problems(), st.data())
def test_among_the_light_cuts_the_penalties_are_smallest(problem, data):
    n = problem.units
    order = tuple(range(n))
    best = best_by_force(problem, order)
    penalties = data.draw(st.lists(amounts, min_size=n + 1, max_size=n + 1))
    limit = (20.0 if best is None else best) * SLACK + 1e-9
    wall = data.draw(st.sampled_from([None, *range(1, n)]))
    walls = () if wall is None else (wall,)

    def penalty(cut):
        return sum(penalties[s] for s in cut.starts if s) + penalties[0]

    allowed = [
        c
        for c in every_cut(problem, order)
        if fits(problem, c)
        and max(plain_load(problem, c, "load")) <= limit + 1e-9
        and (wall is None or wall in c.starts)
    ]
    cut = tidiest(Space(problem, order), penalties, limit + 1e-9, problem.ends, walls)
    assert (cut is None) == (not allowed)
    if cut is not None:
        assert penalty(cut) == min(map(penalty, allowed))


def plain_step(loads, chains, replicas):
    return sum(loads)


@pytest.mark.slow
@settings(max_examples=500)
@given(problems())
def test_the_plan_is_within_the_slack_of_every_order_tried(problem):
    forced = [best_by_force(problem, order) for _, order in orders(problem.before, problem.values)]
    planned = plan_stages(problem, plain_step)
    if all(f is None for f in forced):
        assert planned is None
        cut = roomiest(problem)  # what is said about the memory then
        least = min(
            max(n / s.memory for n, s in zip(plain_load(problem, c, "room"), c.slots, strict=True))
            for c in every_cut(problem, range(problem.units))
        )
        assert max(
            n / s.memory for n, s in zip(plain_load(problem, cut, "room"), cut.slots, strict=True)
        ) == pytest.approx(least, rel=1e-6, abs=1e-6)
        return
    best = min(f for f in forced if f is not None)
    assert planned.bottleneck <= best * SLACK / WORTH_REORDERING + 1e-9 and planned.exact
    assert planned.bound <= best + 1e-9
    assert fits(problem, planned.cut)
    searched = plan_stages(problem, plain_step, search=True)
    assert searched.bottleneck <= best * SLACK / WORTH_REORDERING + 1e-9


def closed_sets(problem):
    """Every set of units that holds all that comes before its members."""
    needs = [sum(1 << u for u in before) for before in problem.before]
    seen, waiting = {0}, [0]
    while waiting:
        s = waiting.pop()
        for u, need in enumerate(needs):
            if not s >> u & 1 and need & ~s == 0 and s | 1 << u not in seen:
                seen.add(s | 1 << u)
                waiting.append(s | 1 << u)
    return sorted(seen, key=lambda s: (s.bit_count(), s))


def downset_best(problem, most=math.inf):
    """The lightest heaviest stage over all partitions into stages, whatever the order: DP over closed sets of units.

    Args:
        most: a load that is not exceeded by the best one; heavier stages are not looked at.
    """
    n = problem.units
    closed = closed_sets(problem)
    works = [[sum(w for u, w in enumerate(row) if s >> u & 1) for s in closed] for row in problem.work]

    def load(inside, work, w):
        total = w.fixed + w.work * work
        for value in problem.values:
            made = inside >> value.units[0] & 1
            here = sum(inside >> u & 1 for u in value.units[1:])
            total += (
                w.traffic * value.nbytes * ((not made and here > 0) + (made and here < len(value.units) - 1))
            )
        for factor, items in ((w.parameters, problem.parameters), (w.saved, problem.saved)):
            total += factor * sum(i.nbytes for i in items if factor and any(inside >> u & 1 for u in i.units))
        return total

    best = {0: {0: 0.0}}
    for layer, moves in enumerate(problem.moves):
        for target, slot in moves:
            for i, value in best.get(layer, {}).items():
                for j in range(i + 1, len(closed)):
                    work = works[slot.row][j] - works[slot.row][i]
                    if closed[i] & ~closed[j] == 0 and slot.load.work * work <= most * (1 + 1e-9):
                        cost = max(value, load(closed[j] & ~closed[i], work, slot.load))
                        row = best.setdefault(target, {})
                        row[j] = min(row.get(j, math.inf), cost)
    last = len(closed) - 1
    assert closed[last] == (1 << n) - 1
    return min((best[e][last] for e in problem.ends if last in best.get(e, {})), default=None)


@pytest.mark.slow
@settings(max_examples=150)
@given(problems("traffic"))
def test_no_partition_is_below_the_bound(problem):
    least = downset_best(problem)
    assert lower_bound(problem) <= least + 1e-9
    planned = plan_stages(problem, plain_step, search=True)
    assert planned.bottleneck >= least - 1e-9


@pytest.mark.slow
@settings(max_examples=300)
@given(problems())
def test_every_order_is_one_that_the_program_allows(problem):
    names = []
    for name, order in orders(problem.before, problem.values):
        names.append(name)
        assert sorted(order) == list(range(problem.units))
        place = {unit: i for i, unit in enumerate(order)}
        assert all(place[b] < place[u] for u, before in enumerate(problem.before) for b in before)
    assert names[0] == "program order"
    if not fits(problem, next(every_cut(problem, range(problem.units)))):
        return
    cut = next(every_cut(problem, range(problem.units)))
    place = {unit: i for i, unit in enumerate(improved(problem, cut))}
    assert all(place[b] < place[u] for u, before in enumerate(problem.before) for b in before)


@pytest.mark.slow
@pytest.mark.parametrize("link", [30.0, 1000.0])
@pytest.mark.parametrize("name", ["resnet", "unet", "two_tower"])
def test_real_graphs_against_all_partitions(name, link):
    """Not only contiguous cuts of the orders that are tried: every partition that the program allows."""
    model, batch = build(name)
    plan = fxsplit.Plan(stages=3, cost=odd_seconds, hardware=fxsplit.Device(link=link))
    traced = trace(model, batch(4), {})
    inputs = traced.signature.flatten(batch(4), {})
    figures_ = weigh_nodes(model, traced, plan, find_units(traced), inputs)
    problem = build_problem(model, traced, plan, figures_, ["cpu"] * 3)
    planned = plan_stages(problem, plain_step, search=True)
    least = downset_best(problem, planned.bottleneck)
    assert least * (1 - 1e-9) <= planned.bottleneck <= least * SLACK / WORTH_REORDERING


@pytest.mark.slow
@settings(max_examples=600)
@given(problems())
def test_the_bound_is_one_for_every_kind_of_problem(problem):
    least = best_by_force(problem, range(problem.units))
    assert least is None or lower_bound(problem) <= least * (1 + 1e-9) + 1e-9


def layered(works, slots):
    """A chain of layers with one parameter each, whose memory is that."""
    n = len(works[0])
    before = tuple((u - 1,) if u else () for u in range(n))
    parameters = tuple(Item((u,), 10.0 + u % 7) for u in range(n))
    values = tuple(Item((u, u + 1), 1.0) for u in range(n - 1))
    moves = (*(((j + 1, slot),) for j, slot in enumerate(slots)), ())
    return Problem(works, values, parameters, (), before, moves, (len(slots),))


@pytest.mark.slow
@pytest.mark.parametrize("n", [97, 200, 400, 3000])
@pytest.mark.parametrize("place", [0.3, 0.5, 0.71])
def test_what_fits_barely_is_found(n, place):
    """Two stages whose limits leave one place for the cut."""
    cut = int(n * place)
    sizes = [10.0 + u % 7 for u in range(n)]
    room = Weights(parameters=1.0)
    slots = [
        Slot(0, Weights(1.0), room, sum(part) * (1 + 1e-4), (i,))
        for i, part in enumerate((sizes[:cut], sizes[cut:]))
    ]
    planned = plan_stages(layered(((1.0,) * n,), slots), plain_step)
    assert planned is not None and planned.cut.starts == (0, cut)


@pytest.mark.slow
def test_replicas_on_unequal_devices_are_bounded_and_exact():
    """Where the bound was too high, the search ended too early, and said that it was exact."""
    n, kinds = 120, ((1.0, 4.0), (4.0, 1.0), (1.0, 1.0, 3.0))
    for kind in kinds:
        count = len(kind)
        works = tuple(tuple(f * (1 + u * 37 % 11) for u in range(n)) for f in sorted(set(kind)))
        row_of = {f: i for i, f in enumerate(sorted(set(kind)))}

        def slot(first, r, kind=kind, row_of=row_of):
            slowest = max(kind[first : first + r])
            return Slot(row_of[slowest], Weights(1 / r, 0.0), devices=tuple(range(first, first + r)))

        moves = tuple(tuple((d + r, slot(d, r)) for r in range(1, count - d + 1)) for d in range(count + 1))
        values = tuple(Item((u, u + 1), 1.0) for u in range(n - 1))
        before = tuple((u - 1,) if u else () for u in range(n))
        problem = Problem(works, values, (), (), before, moves, (count,))
        least = best_by_force(problem, range(n))
        planned = plan_stages(problem, plain_step)
        assert lower_bound(problem) <= least * (1 + 1e-9)
        assert planned.exact and planned.lightest == pytest.approx(least)
        assert planned.bottleneck <= least * SLACK * (1 + 1e-9)


def chain_of_units(works, *slots):
    """Units one after the other, a stage on each slot."""
    moves = (*(((i + 1, slot),) for i, slot in enumerate(slots)), ())
    before = tuple((u - 1,) if u else () for u in range(len(works[0])))
    return Problem(works, (), (), (), before, moves, (len(slots),))


@pytest.mark.parametrize(
    ("problem", "bound"),
    [
        (chain_of_units(((1.0,) * 8,), *(Slot(0, Weights(1.0), devices=(d,)) for d in range(4))), 2.0),
        (
            chain_of_units(((1.0, 1.0, 5.0, 1.0),), *(Slot(0, Weights(1.0), devices=(d,)) for d in range(4))),
            5.0,
        ),
        (
            chain_of_units(
                ((1.0,) * 8, (3.0,) * 8), *(Slot(d, Weights(1.0), devices=(d,)) for d in range(2))
            ),
            6.0,
        ),
        (
            chain_of_units(
                ((4.0,) * 6,), Slot(0, Weights(0.5), devices=(0, 1)), Slot(0, Weights(1.0), devices=(2,))
            ),
            8.0,
        ),
    ],
    ids=["shared evenly", "the heaviest unit", "unequal devices", "replicas"],
)
def test_the_bound_of_the_planner_is_as_high_as_work_alone_says(problem, bound):
    assert lower_bound(problem) == pytest.approx(bound)
