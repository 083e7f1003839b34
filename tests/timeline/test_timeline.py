"""What a timeline holds: every instruction once, who waited for whom, and what the plan predicts."""

import gc
import itertools
import weakref

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import Plan, errors
from fxsplit.schedules.catalog import NAMES as SCHEDULES
from tests.helpers import LOSS, TiedBlocks, compiled, plan_for, two_norms

X, TARGET = torch.randn(8, 4), torch.randint(0, 3, (8,))


def recorded(plan, steps=1):
    pipe = fxsplit.compile(TiedBlocks(), plan, example_args=(X,))
    with pipe.timeline() as timeline:
        for _ in range(steps):
            pipe.step(X, target=TARGET, **LOSS)
    return pipe, timeline


def check(step, tape):
    """Every instruction once, in the order of each worker's list, one after the other, and after what it needs."""
    assert sorted(e.instruction.number for e in step.events) == [x.number for x in tape.order]
    done = {e.instruction.number: e for e in step.events}
    for name, row in zip(tape.names, tape.workers, strict=True):
        mine = step.of(name)
        assert [e.instruction for e in mine] == list(row)
        assert all(a.end <= b.begin for a, b in itertools.pairwise(mine))
    for event in step.events:
        assert event.begin <= event.end
        assert all(done[n].end <= event.begin for n in event.instruction.after if n in done)
    for wait in step.waits:
        assert wait.needed and wait.begin < wait.end == wait.before.begin
        assert not any(
            e.begin < wait.end and e.end > wait.begin for e in step.of(wait.worker) if e is not wait.before
        )
    assert all(0 < share <= 1 for share in step.busy.values()) and 0 <= step.bubble < 1


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_instruction_of_a_step(schedule):
    pipe, timeline = recorded(plan_for(schedule, micro_batches=4), steps=2)
    assert len(timeline) == 2 and len(timeline.events) == sum(len(step.events) for step in timeline)
    for step in timeline:
        check(step, pipe.tape)
        assert (step.outside is None) == any(e.kind == "loss" for e in step.events)
        assert step.predicted is not None and 0 <= step.predicted.bubble < 1
    assert timeline[0].begin < timeline[1].begin
    assert "after steps of" in str(timeline) and "bubble" in str(timeline)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(stages=3, micro_batches=1),
        Plan(stages=2, micro_batches=3, schedule="zb_h1"),
        Plan(stages=3, micro_batches=6, replicas=[2, 3, 1]),
        Plan(stages=1, micro_batches=2, schedule="1f1b"),
        Plan(stages=3, micro_batches=4, schedule="1f1b", checkpoint="except_last", replicas=2),
    ],
    ids=str,
)
def test_other_plans(plan):
    pipe, timeline = recorded(plan)
    check(timeline[0], pipe.tape)


def test_micro_batches_that_meet():
    x = torch.randn(8, 4).double()
    pipe = compiled(two_norms(), (x,), stages=2, micro_batches=4, sync_batch_norm=True)
    with pipe.timeline() as timeline:
        pipe.step(x, target=TARGET, **LOSS)
    joint = [e for e in timeline[0].events if len(e.micro_batches) == 4]
    assert joint and str(joint[-1]).endswith("B0+1+2+3")
    assert len(timeline[0].events) == len(timeline[0].tape.order)


def test_a_call_and_its_backward_are_one_step():
    pipe = compiled(TiedBlocks(), (X,), stages=3, micro_batches=2)
    with pipe.timeline() as timeline:
        first, second = pipe(X), pipe(X)
        (first.sum() + second.sum()).backward()
        with torch.no_grad():
            pipe(X)
    assert len(timeline) == 3
    for step in timeline.steps[:2]:
        check(step, pipe.tape)
        assert step.outside is not None and step.goes_backward
    check(timeline[2], pipe.tape.forward)
    assert not timeline[2].goes_backward and timeline[2].outside is None
    assert {e.kind for e in timeline[2].predicted.events} == {"forward"}


def test_nested_recorders_and_what_is_outside():
    pipe = compiled(TiedBlocks(), (X,), stages=2, micro_batches=2)
    pipe(X)
    with pipe.timeline() as outer:
        pipe(X)
        with pipe.timeline() as inner:
            pipe(X)
    pipe(X)
    assert (len(outer), len(inner)) == (2, 1) and not pipe._begun.common.listeners


def test_a_failing_step_leaves_no_hook_behind():
    pipe = compiled(TiedBlocks(), (X,), stages=3, micro_batches=4, schedule="1f1b")
    calls = []

    def loss(output, target):
        calls.append(1)
        if len(calls) == 2:
            raise LookupError("as asked")
        return nn.functional.cross_entropy(output, target)

    with pytest.raises(LookupError), pipe.timeline() as timeline:
        pipe.step(X, target=TARGET, loss_fn=loss, reduction="mean")
    assert not pipe._begun.common.listeners
    assert 0 < len(timeline.events) < len(pipe.tape.order) and str(timeline)
    pipe.step(X, target=TARGET, **LOSS)
    assert len(timeline) == 1


def test_a_timeline_keeps_no_tensor_of_a_call():
    pipe = compiled(TiedBlocks(), (X,), stages=2, micro_batches=2)
    with pipe.timeline() as timeline:
        output = pipe(X)
    gone = weakref.ref(output.grad_fn)
    del output
    gc.collect()
    assert gone() is None and timeline.events


def test_hooks_of_actions_are_beside_it():
    pipe = compiled(TiedBlocks(), (X,), stages=2, micro_batches=2, schedule="1f1b")
    seen = []
    with pipe.register_action_hook(seen.append), pipe.timeline() as timeline:
        pipe.step(X, target=TARGET, **LOSS)
    played = {a for e in timeline.events for a in e.instruction.actions}
    assert played == {e.action for e in seen}
    assert sum(e.kind == "loss" for e in timeline.events) == 2


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("replicas", [1, [2, 1, 1, 1]], ids=str)
def test_what_is_predicted_is_what_the_report_says(schedule, replicas):
    more = {} if schedule == "zb_h1" else {"replicas": replicas}
    pipe = fxsplit.compile(TiedBlocks(), plan_for(schedule, micro_batches=4, **more), example_args=(X,))
    (step,) = pipe.simulated_timeline()
    check(step, pipe.tape)
    assert step.bubble == pytest.approx(pipe.assignment.forecast.bubble, abs=1e-9)
    assert step.predicted is None and "units" in str(step)


def test_simulated_with_costs():
    pipe = compiled(TiedBlocks(), (X,), stages=3, micro_batches=5)
    seconds = {"forward": 1e-3, "backward": 2e-3}
    (step,) = pipe.simulated_timeline(lambda x: seconds[x.kind])
    assert step.duration == pytest.approx(3e-3 * (3 + 5 - 1))
    assert step.bubble == pytest.approx(2 / 7)
    assert "21.00 ms" in str(step)
    with pytest.raises(errors.ArgumentError, match=r"instead: pipe.simulated_timeline\("):
        pipe.simulated_timeline(3)


@pytest.mark.parametrize(
    ("schedule", "checkpoint"), [("gpipe", "never"), ("1f1b", "never"), ("1f1b", "except_last")]
)
def test_what_is_kept_is_what_memory_says(schedule, checkpoint):
    pipe, timeline = recorded(plan_for(schedule, micro_batches=4, checkpoint=checkpoint))
    rows = timeline[0].kept(pipe._measure_kept(pipe.active))
    most = sum(max(size for _, size in row) for row in rows.values())
    assert round(most) == pipe.memory()[torch.device("cpu")].kept
    assert all(abs(row[-1][1]) < 1e-6 and min(size for _, size in row) > -1e-6 for row in rows.values())
    with torch.no_grad(), pipe.timeline() as without:
        pipe(X)
    assert without[0].kept(pipe._measure_kept(pipe.active)) == {}


def test_calls_of_another_kind(tmp_path):
    """They are recorded with the program that they played."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = compiled(model, (X,), stages=2)
    with pipe.in_place(), pipe.timeline() as timeline:
        model(torch.randn(3, 5, 4))
    assert timeline.events and pipe._measure_kept(timeline[-1].compiled) is None
    timeline.save(tmp_path / "page.html")
