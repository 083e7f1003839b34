"""Schedules of the user's own."""

import copy

import pytest
import torch

import fxsplit
from tests.helpers import LOSS, TiedBlocks, of_all, two_norms


def test_a_schedule_of_the_users_own_from_csv(tmp_path):
    text = "0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"
    own = fxsplit.Schedule.from_csv(text, name="mine")
    plan = fxsplit.Plan(stages=2, micro_batches=2, schedule=own)
    plan.save(tmp_path / "plan.json")
    assert fxsplit.Plan.load(tmp_path / "plan.json") == plan
    model, x, target = TiedBlocks(), torch.randn(6, 4), torch.randint(0, 3, (6,))
    twin = copy.deepcopy(model)
    for m, p in ((model, plan), (twin, plan.replace(schedule="1f1b"))):
        torch.manual_seed(2)
        pipe = fxsplit.compile(m.eval(), p, example_args=(x,))
        pipe.step(x, target=target, **LOSS)
    assert "mine with 2 micro-batches" in fxsplit.compile(model, plan, example_args=(x,)).report()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    pipe.step(x[:1], target=target[:1], **LOSS)  # fewer micro-batches: the others are left out


def test_a_schedule_that_deadlocks_is_refused_before_anything_runs():
    own = fxsplit.Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    plan = fxsplit.Plan(stages=2, micro_batches=2, schedule=own)
    with pytest.raises(fxsplit.errors.ScheduleError, match="can never finish"):
        fxsplit.compile(TiedBlocks(), plan, example_args=(torch.randn(4, 4),))


def test_a_schedule_of_forwards_only_is_refused():
    own = fxsplit.Schedule.from_csv("0F0,0F1\n1F0,1F1\n")
    with pytest.raises(fxsplit.errors.PlanError, match="never goes backward"):
        fxsplit.Plan(stages=2, micro_batches=2, schedule=own)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_backward_in_another_order_than_forward(checkpoint):
    """A buffer orders the forwards; backward is free, unless it goes forward again."""
    own = fxsplit.Schedule.from_csv("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n", name="lifo")
    model, x = two_norms(), torch.randn(6, 4).double()
    plan = fxsplit.Plan(stages=2, micro_batches=2, schedule=own, checkpoint=checkpoint)
    if checkpoint == "always":
        with pytest.raises(fxsplit.errors.ScheduleError, match="can never finish"):
            fxsplit.compile(model, plan, example_args=(x,))
        return
    eager = copy.deepcopy(model)
    fxsplit.compile(model, plan, example_args=(x,)).step(x, loss_fn=of_all)
    fxsplit.compile(eager, plan.replace(schedule="gpipe"), example_args=(x,)).step(x, loss_fn=of_all)
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
