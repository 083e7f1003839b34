"""Schedules as exact tables; the proof that a schedule ends."""

import pytest

import fxsplit
from fxsplit.errors import ScheduleError
from fxsplit.schedules.actions import Action, Schedule
from fxsplit.schedules.catalog import gpipe
from fxsplit.schedules.needs import dependencies
from fxsplit.schedules.proof import check_schedule, serial_order
from fxsplit.schedules.simulate import bubble, staircase, timeline
from tests.models import build


@pytest.fixture(scope="module")
def program():
    model, batch = build("gpt")
    return fxsplit.compile(model, fxsplit.Plan(stages=3), example_args=batch(2)).program


@pytest.fixture
def needs(program):
    return dependencies(program, in_turn=frozenset())


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


def test_gpipe_staircase(needs):
    assert staircase(gpipe(3, 4), needs).splitlines() == [
        "stage 0.0 │ F0 F1 F2 F3 ·  ·  ·  ·  B0 B1 B2 B3",
        "stage 1.0 │ ·  F0 F1 F2 F3 ·  ·  B0 B1 B2 B3 ·",
        "stage 2.0 │ ·  ·  F0 F1 F2 F3 B0 B1 B2 B3 ·  ·",
    ]


@pytest.mark.parametrize("m", [1, 2, 3, 8, 33])
def test_gpipe_bubble_is_the_published_formula(needs, m):
    assert bubble(gpipe(3, m), needs, [1.0, 1.0, 1.0]) == pytest.approx(2 / (m + 2))
    assert bubble(gpipe(3, m), needs, [0, 0, 0]) == pytest.approx(2 / (m + 2))


def test_timeline_waits_for_the_heaviest_stage(needs):
    times = timeline(gpipe(3, 2), needs, lambda a: 5 if a.stage == 1 else 1)
    assert times[Action("F", 2, 1)] == (11, 12)


def test_dependencies_follow_the_chain_of_readers(program, needs):
    # the embedding's weight is read by stage 0 and by stage 2 (the tied head): its gradient goes 2 → 0
    assert program.stages[0].parameters[0] == program.stages[2].parameters[-1] == "wte.weight"
    assert needs(Action("F", 1, 3)) == [Action("F", 0, 3)]
    assert needs(Action("B", 1, 3)) == [Action("F", 1, 3), Action("B", 2, 3)]
    assert needs(Action("B", 0, 0)) == [Action("F", 0, 0), Action("B", 1, 0), Action("B", 2, 0)]
    in_turn = dependencies(program, in_turn=frozenset({1}))
    assert in_turn(Action("F", 1, 3)) == [Action("F", 0, 3), Action("F", 1, 2)]


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
def test_a_broken_schedule_is_refused(needs, rows, said):
    with pytest.raises(ScheduleError, match=said):
        check_schedule(broken(*rows), 3, 1, needs)


def test_the_proof_accepts_what_ends(needs):
    for replicas in (1, 2, 3):
        for m in (1, 2, 7):
            check_schedule(gpipe(3, m, [replicas] * 3), 3, m, needs)
    order = list(serial_order(gpipe(3, 2).workers, needs))
    assert len(order) == 12 and order[0] == Action("F", 0, 0)
