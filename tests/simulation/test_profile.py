"""`fxsplit.profile`: a step predicted from times of its instructions. On times that are made up, the prediction is exact."""

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.errors import ArgumentError
from fxsplit.schedules.schedule import Action
from fxsplit.schedules.simulate import timeline
from fxsplit.simulation.profile import _phases, _profile

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.5, "W": 0.5}
OWN, WAKE, LOSS, HEAD, MIDDLE, TAIL = 0.01, 0.1, 0.25, 3.0, 5.0, 7.0


def pipeline(schedule="gpipe", stages=2, micro_batches=4):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(stages)))
    plan = fxsplit.Plan(stages=stages, micro_batches=micro_batches, schedule=schedule)
    return fxsplit.compile(model, plan, example_args=(torch.randn(8, 4),))


def made_up(pipe):
    """The events of a step on a machine in which everything takes as long as said above; and the step."""
    now, times = HEAD, dict[Action, tuple[float, float]]()
    for number, tape in enumerate(_phases(pipe)):
        worker = tape.worker_of

        def cost(x):
            return (LOSS if x.kind == "loss" else SECONDS[x.actions[0].kind] + (x.stage + 1) / 8) + OWN * (
                x.kind != "loss"
            )

        def travel(made, read, worker=worker):
            apart = made.number in worker and worker[made.number] != worker[read.number]
            return WAKE - OWN if apart else 0.0

        now += MIDDLE * number
        played = timeline(tape, cost, travel)
        for x in tape.order:
            begin, end = played[x.number]
            for action in x.actions:
                times[action] = now + begin + OWN, now + end
        now += max(end for _, end in played)
    return (0.0, times, now + TAIL), now + TAIL


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_times_that_are_made_up_are_found(schedule):
    pipe = pipeline(schedule, stages=3)
    step, taken = made_up(pipe)
    found = _profile(pipe, [step, step], [taken, taken])
    kinds = "FB" if schedule != "zb_h1" else "FIW"
    wanted = {(kind, s): SECONDS[kind] + (s + 1) / 8 for kind in kinds for s in range(3)}
    assert found.instructions == pytest.approx(wanted)
    assert (found.own, found.wake) == pytest.approx((OWN, WAKE))
    assert found.loss == pytest.approx(0 if schedule == "gpipe" else LOSS)
    assert found.tail == pytest.approx(TAIL)
    assert found.ratio == pytest.approx(1, rel=0.01)
    assert found.spread == pytest.approx((found.ratio, found.ratio))
    assert found.costs.forward == pytest.approx([4 * wanted["F", s] for s in range(3)])
    assert "ratio" in str(found)


def test_another_schedule_is_predicted_from_the_same_instructions():
    first, second = pipeline("gpipe"), pipeline("1f1b")
    step, taken = made_up(first)
    found = _profile(first, [step, step], [taken, taken])
    other, wanted = made_up(second)
    # what is between forward and backward is the losses of all micro-batches here
    assert found.predict(second) == pytest.approx(wanted + MIDDLE - 4 * LOSS, rel=0.06)
    assert found.predict(pipeline("zb_h1")) > 0
    assert _profile(second, [other, other], [wanted, wanted]).predict(first) > 0


def test_nothing_is_left_of_it():
    pipe = pipeline("1f1b")
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    pipe.step(x, target=y, loss_fn=nn.functional.mse_loss)
    before = [p.grad.clone() for p in pipe.model.parameters()]
    found = fxsplit.profile(pipe, x, target=y, loss_fn=nn.functional.mse_loss, rounds=2)
    assert all(torch.equal(a, p.grad) for a, p in zip(before, pipe.model.parameters(), strict=True))
    assert set(found.instructions) == {(kind, s) for kind in "FB" for s in range(2)}
    assert len(found.steps) == 2
    assert fxsplit.simulate(found.costs, micro_batches=(2, 4)).best.seconds > 0
    seen = []
    handle = pipe.register_action_hook(seen.append)
    pipe(x)
    handle.remove()
    assert len(seen) == 8


def test_wrong_calls_are_refused():
    pipe, x = pipeline(), torch.randn(8, 4)
    with pytest.raises(ArgumentError, match="takes a pipeline, not Linear"):
        fxsplit.profile(nn.Linear(4, 4), x, loss_fn=nn.functional.mse_loss)
    with pytest.raises(ArgumentError, match="rounds=1"):
        fxsplit.profile(pipe, x, target=x, loss_fn=nn.functional.mse_loss, rounds=1)
    with pytest.raises(ArgumentError, match="missing"):
        fxsplit.profile(pipe, x)
