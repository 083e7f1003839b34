"""Schedules as exact tables; the proof that a schedule ends."""

from dataclasses import replace

import pytest

import fxsplit
from fxsplit.errors import ScheduleError
from fxsplit.graph.flow import flow_of
from fxsplit.plan.checkpoint import Checkpoint
from fxsplit.schedules.catalog import (
    breadth_first,
    dual_pipe_v,
    forward_only,
    gpipe,
    in_flight,
    interleaved_1f1b,
    interleaved_zero_bubble,
    most_kept,
    one_f_one_b,
    schedule_of,
    zb_h1,
    zb_v,
)
from fxsplit.schedules.check import check_schedule
from fxsplit.schedules.lower import Flow, lower
from fxsplit.schedules.schedule import Action, Schedule
from fxsplit.schedules.simulate import bubble, staircase, timeline
from tests.models import build


@pytest.fixture(scope="module")
def program():
    model, batch = build("gpt")
    return fxsplit.compile(model, fxsplit.Plan(stages=3), example_args=batch(2)).program


@pytest.fixture
def flow(program):
    return flow_of(program, Checkpoint.of("never"))


def proven(schedule, stages, micro_batches, flow):
    """Its tape: it plays everything once, and ends."""
    check_schedule(schedule, stages, micro_batches)
    return lower(schedule, flow)


def actions(text):
    return tuple(Action(word[1], int(word[0]), int(word[2:])) for word in text.split())


def test_gpipe():
    assert gpipe(2, 3).workers == (actions("0F0 0F1 0F2 0B0 0B1 0B2"), actions("1F0 1F1 1F2 1B0 1B1 1B2"))
    assert gpipe(2, 3, replicas=[2, 2]).workers == (
        actions("0F0 0F2 0B0 0B2"),
        actions("0F1 0B1"),
        actions("1F0 1F2 1B0 1B2"),
        actions("1F1 1B1"),
    )
    assert gpipe(2, 3, replicas=[2, 2]).labels == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert str(gpipe(2, 1)) == "stage 0.0: 0F0 0B0\nstage 1.0: 1F0 1B0"


def test_gpipe_staircase(flow):
    assert staircase(lower(gpipe(3, 4), flow)).splitlines() == [
        "stage 0.0 │ F0 F1 F2 F3 ·  ·  ·  ·  B0 B1 B2 B3",
        "stage 1.0 │ ·  F0 F1 F2 F3 ·  ·  B0 B1 B2 B3 ·",
        "stage 2.0 │ ·  ·  F0 F1 F2 F3 B0 B1 B2 B3 ·  ·",
    ]


@pytest.mark.parametrize("m", [1, 2, 3, 8, 33])
def test_gpipe_bubble_is_the_published_formula(flow, m):
    assert bubble(lower(gpipe(3, m), flow), [1.0, 1.0, 1.0]) == pytest.approx(2 / (m + 2))
    assert bubble(lower(gpipe(3, m), flow), [0, 0, 0]) == pytest.approx(2 / (m + 2))


def test_timeline_waits_for_the_heaviest_stage(flow):
    tape = lower(gpipe(3, 2), flow)
    times = timeline(tape, lambda x: 5 if x.stage == 1 else 1)
    assert times[number_of(tape, Action("F", 2, 1))] == (11, 12)


def number_of(tape, action):
    return next(x.number for x in tape.instructions if action in x.actions)


def test_gradients_follow_the_chain_of_readers(program, flow):
    # the embedding's weight is read by stage 0 and by stage 2 (the tied head): its gradient goes 2 → 0
    assert program.stages[0].parameters[0] == program.stages[2].parameters[-1] == "wte.weight"

    def before(tape, kind, stage, i):
        after = tape.instructions[number_of(tape, Action(kind, stage, i))].after
        return {a for n in after for a in tape.instructions[n].actions}

    tape = lower(gpipe(3, 4), flow)
    assert before(tape, "F", 1, 3) == {Action("F", 0, 3)}
    assert before(tape, "B", 1, 3) == {Action("F", 1, 3), Action("B", 2, 3)}
    assert before(tape, "B", 0, 0) == {Action("F", 0, 0), Action("B", 1, 0), Action("B", 2, 0)}
    in_turn = lower(gpipe(3, 4), replace(flow, in_turn=frozenset({1})))
    assert before(in_turn, "F", 1, 3) == {Action("F", 0, 3), Action("F", 1, 2)}


def broken(*rows):
    rows = [actions(row) for row in rows]
    return Schedule("broken", tuple(rows), tuple((i, 0) for i in range(len(rows))))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (("0F0 0F0 0B0", "1F0 1B0", "2F0 2B0"), "0F0 twice"),
        (("0F0 0B0", "1F0 1B0", "2F0"), "never plays 2B0"),
        (("0F0 0B0", "1F0 1B0", "2F0 2B0 2F1"), "plays 2F1, but there are 3 stages and 1 micro-batches"),
        (("0F0 0B0", "1B0 1F0", "2F0 2B0"), "can never finish"),
        (("0F0 0B0 2F0 2B0", "1F0 1B0"), "can never finish"),
    ],
)
def test_a_broken_schedule_is_refused(flow, rows, said):
    with pytest.raises(ScheduleError, match=said):
        proven(broken(*rows), 3, 1, flow)


def test_the_proof_accepts_what_ends(flow):
    for replicas in (1, 2, 3):
        for m in (1, 2, 7):
            proven(gpipe(3, m, [replicas] * 3), 3, m, flow)
    order = lower(gpipe(3, 2), flow).order
    assert len(order) == 12 and order[0].actions == (Action("F", 0, 0),)


# -- the catalog: exact tables, published formulas, memory ------------------------------------------------------------


def test_1f1b():
    assert str(one_f_one_b(3, 4)).splitlines() == [
        "stage 0.0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "stage 1.0: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "stage 2.0: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    assert one_f_one_b(2, 3, [2, 1]).workers == (
        actions("0F0 0B0 0F2 0B2"),
        actions("0F1 0B1"),
        actions("1F0 1B0 1F1 1B1 1F2 1B2"),
    )


def test_interleaved_1f1b():
    assert str(interleaved_1f1b(4, 4, 2)).splitlines() == [
        "stage 0.0: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "stage 1.0: 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_breadth_first():
    assert breadth_first(4, 2, 2).workers == (
        actions("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"),
        actions("1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"),
    )


def test_zb_h1():
    assert str(zb_h1(3, 4)).splitlines() == [
        "stage 0.0: 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "stage 1.0: 1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "stage 2.0: 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


def test_zb_v(flow):
    assert str(zb_v(4, 4, 2)).splitlines() == [
        "stage 0.0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3",
        "stage 1.0: 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3",
    ]
    assert staircase(lower(zb_v(4, 4, 2), chain_of(4))).splitlines() == [
        "stage 0.0 │ F0 F1 F2 F0 I0 W0 F1 I1 W1 F3 I0 W0 F2 I2 W2 I1 W1 F3 I3 W3 I2 W2 I3 W3 ·",
        "stage 1.0 │ ·  F0 F0 F1 F1 I0 W0 F2 I0 W0 F2 I1 W1 F3 I1 W1 F3 I2 W2 I2 I3 I3 W2 W3 W3",
    ]


def test_dual_pipe_v():
    assert str(dual_pipe_v(4, 4, 2)).splitlines() == [
        "stage 0.0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3I1 3W1 3F2 0I0 0W0 3I2 3W2 3F3 0I1 0W1 3I3 3W3 0I2 0W2 0I3 0W3",
        "stage 1.0: 1F0 2F0 1F1 2F1 1F2 2I0 2W0 2F2 1I0 1W0 1F3 2I1 2W1 2F3 1I1 1W1 2I2 2W2 1I2 1W2 2I3 1I3 2W3 1W3",
    ]
    assert staircase(lower(dual_pipe_v(4, 4, 2), chain_of(4))).splitlines() == [
        "stage 0.0 │ F0 F1 F2 F0 I0 W0 F1 F3 I1 W1 F2 I0 W0 I2 W2 F3 I1 W1 I3 W3 I2 W2 ·  I3 W3",
        "stage 1.0 │ ·  F0 F0 F1 F1 F2 I0 W0 F2 I0 W0 F3 I1 W1 F3 I1 W1 I2 W2 I2 W2 I3 I3 W3 W3",
    ]


def chain_of(stages):
    return Flow(stages, [(s, s + 1) for s in range(stages - 1)])


def length(schedule, stages, m):
    """Of a step, in forwards of one stage; it is proven first."""
    tape = proven(schedule, stages, m, chain_of(stages))
    return max(end for _, end in timeline(tape, lambda x: 2 if x.kind == "backward" else 1))


@pytest.mark.parametrize("p", [2, 3, 4, *(pytest.param(p, marks=pytest.mark.slow) for p in range(5, 17))])
def test_bubbles_are_the_published_formulas(p):
    """The time beyond 3 v m forwards: 3 (p - 1) for all that keep backward in one, (p - 1) for those in two."""
    for m in range(1, 65):
        assert length(gpipe(p, m), p, m) == 3 * (m + p - 1)
        assert length(one_f_one_b(p, m), p, m) == 3 * (m + p - 1)
        assert length(forward_only(p, m), p, m) == m + p - 1
        if m >= p:
            assert length(zb_h1(p, m), p, m) == 3 * m + p - 1
        else:
            proven(zb_h1(p, m), p, m, chain_of(p))


@pytest.mark.parametrize(("p", "v"), [(2, 2), (2, 3), (3, 2), (4, 2), (4, 4), (5, 3), (8, 2)])
def test_bubbles_of_several_stages_on_a_worker(p, v):
    for m in (1, 2, 3, 5, 7, 8, 16, 30, 64):
        stages = p * v
        for make in (interleaved_1f1b, breadth_first, interleaved_zero_bubble):
            took = length(make(stages, m, p), stages, m)
            assert took >= 3 * v * m
            if m % p == 0:
                bubble_time = p - 1 if make is interleaved_zero_bubble else 3 * (p - 1)
                assert took == 3 * v * m + bubble_time, (make.__name__, m)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5])
def test_two_stages_on_each_worker_in_a_v(p):
    """The time beyond 6 m forwards, and what is kept, of any number of micro-batches."""
    for m in (*range(1, 13), 40):
        first, other = zb_v(2 * p, m, p), dual_pipe_v(2 * p, m, p)
        assert first.worker_of == other.worker_of == (*range(p), *reversed(range(p)))
        assert length(first, 2 * p, m) == 6 * m + max(p - 1, 4 * p - 2 * m - 2)
        assert max(in_flight(first)) == min(2 * m, 2 * p)
        took = length(other, 2 * p, m)
        assert took == 6 * m + p - 1 if m >= 2 * p else took <= 6 * m + 4 * (p - 1)
        assert max(in_flight(other)) == min(2 * m, 2 * p + 1)


@pytest.mark.parametrize("p", [2, 3, 4, 5])
def test_zb_v_never_waits_between_first_and_last(p):
    for m in (2 * p - 1, 2 * p, 12):
        tape = lower(zb_v(2 * p, m, p), chain_of(2 * p))
        times = timeline(tape, lambda _: 1)
        for row in tape.workers:
            assert times[row[-1].number][1] - times[row[0].number][0] == 6 * m


@pytest.mark.parametrize("make", [zb_v, dual_pipe_v])
def test_a_v_has_two_stages_on_each_worker(make):
    with pytest.raises(ScheduleError, match=r"4 stages on 3 workers\n.*workers=2"):
        make(4, 4, 3)
    with pytest.raises(ScheduleError, match=r"5 stages on 2 workers\n.*4 stages, or"):
        make(5, 4, 2)
    with pytest.raises(ScheduleError, match="0 workers play nothing"):
        make(4, 4, 0)


@pytest.mark.parametrize("name", ["zb_v", "dual_pipe_v"])
def test_replicas_of_a_v(name):
    for m in (1, 2, 5, 12):
        schedule = schedule_of(name, 4, m, 2, [2, 3, 3, 2])
        proven(schedule, 4, m, chain_of(4))
        assert schedule.labels == ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2))
    with pytest.raises(ScheduleError, match=r"stages 0, 3 share a worker, but have \[1, 2\] replicas"):
        schedule_of(name, 4, 2, 2, [1, 1, 1, 2])


def test_micro_batches_that_are_kept():
    for p in (2, 3, 8):
        for m in (1, 2, 8, 20):
            assert in_flight(gpipe(p, m)) == (m,) * p
            assert in_flight(one_f_one_b(p, m)) == tuple(min(p - s, m) for s in range(p))
            assert max(in_flight(zb_h1(p, m))) <= p
            assert in_flight(breadth_first(2 * p, m, p)) == (2 * m,) * p
            for r, kept in enumerate(in_flight(interleaved_1f1b(2 * p, m, p))):
                assert kept <= 2 * (p - r - 1) + p + 1
            assert max(in_flight(interleaved_zero_bubble(2 * p, m, p))) <= 2 * p + p - 1


def test_what_is_kept_ends_with_a_half_of_the_backward():
    row = actions("0F0 0I0 0F1 0I1 0W0 0W1")
    assert most_kept(row, lambda _: 3.0) == 6
    assert most_kept(row, lambda _: 3.0, lambda _: False) == 3


def test_interleaved_zero_bubble():
    assert interleaved_zero_bubble(4, 4, 2).workers == (
        actions(
            "0F0 0F1 2F0 2F1 0F2 2I0 2W0 0I0 2I1 0F3 0I1 0W0 2F2 2W1 2F3 2I2 0W1 0I2 2W2 2I3 0W2 0I3 2W3 0W3"
        ),
        actions(
            "1F0 1F1 3F0 3I0 3F1 1I0 3I1 1F2 1I1 3W0 1F3 1W0 3F2 3I2 3W1 1I2 3F3 3I3 1W1 1I3 3W2 1W2 3W3 1W3"
        ),
    )


@pytest.mark.parametrize("replicas", [[1, 2, 3], [3, 1, 1], [2, 2, 2]])
@pytest.mark.parametrize("make", [gpipe, one_f_one_b, forward_only])
def test_replicas_deal_micro_batches_out(make, replicas):
    for m in (1, 2, 5, 12):
        schedule = make(3, m, replicas)
        proven(schedule, 3, m, chain_of(3))
        for (stage, replica), row in zip(schedule.labels, schedule.workers, strict=True):
            assert all(a.stage == stage and a.micro_batch % replicas[stage] == replica for a in row)


def test_csv():
    for schedule in (gpipe(2, 3), one_f_one_b(3, 4, [1, 2, 1]), zb_h1(3, 4), zb_v(6, 4, 3)):
        again = Schedule.from_csv(schedule.to_csv(), schedule.name)
        assert again == schedule
    torch_like = "0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1,\n"
    assert Schedule.from_csv(torch_like).workers == (actions("0F0 0F1 0B0 0B1"), actions("1F0 1B0 1F1 1B1"))
    for wrong in ("0F0,B", "0X0", "F0"):
        with pytest.raises(ScheduleError, match="is no action"):
            Schedule.from_csv(wrong)


def test_backward_is_in_one_or_in_two():
    flow = chain_of(1)
    with pytest.raises(ScheduleError, match="in one"):
        proven(broken("0F0 0B0 0F1 0I1 0W1"), 1, 2, flow)
    with pytest.raises(ScheduleError, match="never plays 0W1"):
        proven(broken("0F0 0I0 0W0 0F1 0I1"), 1, 2, flow)
    with pytest.raises(ScheduleError, match="can never finish"):
        proven(broken("0F0 0W0 0I0"), 1, 1, flow)


def test_odd_numbers_of_stages_and_workers():
    for make in (interleaved_1f1b, breadth_first, interleaved_zero_bubble):
        with pytest.raises(ScheduleError, match="0 workers play nothing"):
            make(5, 4, 0)
        for workers in (2, 3, 4):
            schedule = make(5, 4, workers)
            assert [row[0].stage for row in schedule.workers] == list(range(workers))
            proven(schedule, 5, 4, chain_of(5))
    with pytest.raises(ScheduleError, match="replicas lists 2 numbers for 3 stages"):
        gpipe(3, 2, [2, 1])
    for replicas in ([3, 1], [1, 3]):
        idle = gpipe(2, 2, replicas)
        assert Schedule.from_csv(idle.to_csv(), "gpipe") == idle
