"""Batch normalisation that is put off to the end of a step: the running statistics of the whole batch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxsplit
from fxsplit.schedules.catalog import NAMES as SCHEDULES
from tests.helpers import LOSS, plan_for, two_norms


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4])
def test_running_statistics_are_those_of_the_whole_batch(schedule, checkpoint, micro_batches):
    model, eager = two_norms(), two_norms()
    x, target = 1e4 + torch.randn(11, 4).double(), torch.randint(0, 3, (11,))
    plan = plan_for(schedule, 2, micro_batches=micro_batches, checkpoint=checkpoint, deferred_batch_norm=True)
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    for _ in range(3):
        pipe.step(x, target=target, **LOSS)
        F.cross_entropy(eager(x), target).backward()
    torch.testing.assert_close(model[0].running_mean, eager[0].running_mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(model[0].running_var, eager[0].running_var, rtol=1e-9, atol=0)
    assert model[0].num_batches_tracked == model[3].num_batches_tracked == 3
    pipe.eval()
    before = copy.deepcopy(model.state_dict())
    pipe(x)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_cumulative_average_and_calls_outside_of_a_step():
    model, eager = two_norms(momentum=None), two_norms(momentum=None)
    x = torch.randn(9, 4).double()
    plan = fxsplit.Plan(stages=2, micro_batches=3, deferred_batch_norm=True)
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    for i in range(3):
        with torch.no_grad():
            pipe(x + i), eager(x + i)
    torch.testing.assert_close(model[0].running_mean, eager[0].running_mean)
    torch.testing.assert_close(model[0].running_var, eager[0].running_var)


def test_a_failed_step_commits_nothing():
    model = two_norms()
    x = torch.randn(9, 4).double()
    for schedule in ("gpipe", "1f1b"):
        plan = fxsplit.Plan(stages=2, micro_batches=3, schedule=schedule, deferred_batch_norm=True)
        pipe = fxsplit.compile(model, plan, example_args=(x,))
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ZeroDivisionError):
            pipe.step(x, loss_fn=lambda y: y.sum() * (1 // 0), reduction="sum")
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def _low(function):
    return lambda x, mean, var, training: function(x, None, None, mean, var, training, 0.2, 1e-5, False)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, mean, var, training: F.batch_norm(x, mean, var, None, None, training, 0.2),
        _low(torch.batch_norm),
        _low(torch.ops.aten.batch_norm.default),
    ],
    ids=["functional", "torch", "aten"],
)
def test_functions_of_batch_norm_are_put_off_too(function):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("var", torch.ones(4))
            self.l = nn.Linear(4, 3)

        def forward(self, x):
            return self.l(function(x, self.mean, self.var, self.training))

    model = Own()
    eager, x = copy.deepcopy(model), torch.randn(10, 4) + 3
    pipe = fxsplit.compile(model, fxsplit.Plan(micro_batches=4, deferred_batch_norm=True), example_args=(x,))
    pipe(x), eager(x)
    torch.testing.assert_close(model.mean, eager.mean)
    torch.testing.assert_close(model.var, eager.var)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_norm_that_is_called_twice(momentum):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.n = nn.BatchNorm1d(4, momentum=momentum)

        def forward(self, x):
            return self.n(x) + self.n(3 * x)

    model, x = Twice().double(), torch.randn(9, 4).double() + 5
    eager = copy.deepcopy(model)
    pipe = fxsplit.compile(model, fxsplit.Plan(micro_batches=3, deferred_batch_norm=True), example_args=(x,))
    for _ in range(2):
        pipe(x), eager(x)
    for a, b in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_layer_that_is_computed_again_has_seen_a_micro_batch_once():
    found = []
    for checkpoint in ("never", "always"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        x = torch.randn(12, 4)
        plan = fxsplit.Plan(
            stages=2, micro_batches=3, schedule="1f1b", checkpoint=checkpoint, deferred_batch_norm=True
        )
        pipe = fxsplit.compile(model, plan, example_args=(x,))
        pipe.step(x, target=x, loss_fn=nn.functional.mse_loss)
        found.append([model[1].running_mean, model[1].running_var, model[1].num_batches_tracked])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
