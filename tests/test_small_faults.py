"""Small faults of a runtime that other tests would not notice: masks that repeat, parts that are forgotten."""

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import Plan
from fxsplit.errors import GradientError


class Masks(nn.Module):
    """Gives the masks of three dropouts, two of them in one stage."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Dropout(0.5) for _ in range(3))
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        one, two = self.a(x), self.b(x)
        x = x + 0 * self.first(one)
        return one, two, self.c(x) + 0 * self.second(x)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_every_draw_of_every_micro_batch_and_stage_has_a_mask_of_its_own(schedule):
    x = torch.ones(6, 64)
    plan = Plan(cut=["c"], micro_batches=3, schedule=schedule)
    pipe = fxsplit.compile(Masks(), plan, example_args=(x,))
    assert len(pipe) == 2
    masks = [part for out in pipe(x) for part in out.split(2)] + [
        part for out in pipe(x) for part in out.split(2)
    ]
    assert len(masks) == 2 * 3 * 3
    for i, mask in enumerate(masks):
        assert 0.3 < (mask != 0).float().mean() < 0.7
        assert all(not torch.equal(mask, other) for other in masks[:i])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_an_argument_that_is_not_split_gets_the_gradients_of_all_micro_batches(schedule):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, table):
            return self.b(torch.tanh(self.a(x) @ table)) * table.sum()

    model, x = Table().double(), torch.randn(6, 4).double()
    plan = Plan(stages=2, micro_batches=3, schedule=schedule, batch_dims={"table": None})
    pipe = fxsplit.compile(model, plan, example_args=(x, torch.randn(4, 4).double()))
    tables = [torch.randn(4, 4).double().requires_grad_() for _ in range(2)]
    tables[1].data.copy_(tables[0])

    def loss(y, t):
        return (y * t).sum()

    pipe.step(x, tables[0], target=x, loss_fn=loss, reduction="sum")
    loss(model(x, tables[1]), x).backward()
    torch.testing.assert_close(tables[0].grad, tables[1].grad)


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_hooks_of_modules_see_and_change_gradients(schedule):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double(), torch.randn(6, 4).double()
    seen = []
    model[2].register_full_backward_hook(
        lambda module, given, grads: seen.append(len(grads[0])) or (given[0] * 3,)
    )
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=3, schedule=schedule), example_args=(x,))
    seen.clear()
    found = torch.autograd.grad(pipe(x).square().sum(), list(model.parameters()))
    assert seen == [2, 2, 2]
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_backward_a_second_time_says_so():
    pipe = fxsplit.compile(nn.Linear(4, 4), Plan(micro_batches=2), example_args=(torch.randn(6, 4),))
    loss = (pipe(torch.randn(6, 4)) * 1.0).sum(dtype=torch.float64)
    out = pipe(torch.randn(6, 4))
    torch.autograd.grad(out, list(pipe.parameters()), torch.ones_like(out))
    with pytest.raises(GradientError, match="second time"):
        torch.autograd.grad(out, list(pipe.parameters()), torch.ones_like(out))
    loss.backward()
    out = pipe(torch.randn(6, 4))
    first = torch.autograd.grad(out, list(pipe.parameters()), torch.ones_like(out), retain_graph=True)
    again = torch.autograd.grad(out, list(pipe.parameters()), torch.ones_like(out))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
