"""Recomputation sees what the first computation saw, and refuses what is no longer as it was."""

import contextlib

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import errors
from fxsplit.inserted.ops import Computing, transfer
from tests.helpers import SIX_ROWS, TwoLayers, compiled_on_rows


def test_checkpoints_refuse_what_changed_before_backward():
    pipe = compiled_on_rows(TwoLayers(), stages=2, checkpoint="always")
    output = pipe(SIX_ROWS)
    with torch.no_grad():
        pipe.model.a.weight.mul_(2)
    with pytest.raises(errors.GradientError, match=r"optimizer\.step"):
        output.sum().backward()
    output = pipe(SIX_ROWS)
    pipe.eval()
    with pytest.raises(errors.GradientError, match="mode"):
        output.sum().backward()


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        self.n.add_(1)
        return (x * self.n).sin()


def test_a_region_may_be_computed_again_and_again():
    x = torch.randn(4, 3, requires_grad=True)
    pipe = fxsplit.compile(
        nn.Sequential(Counted(), nn.Tanh()), fxsplit.Plan(checkpoint="always"), example_args=(x,)
    )
    output = pipe(x).sum()
    first, again = (torch.autograd.grad(output, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again) and pipe.model[0].n == 1


@pytest.mark.parametrize("error", [None, KeyError])
def test_a_stage_leaves_nothing_to_the_thread_that_computed_it(error):
    x, cpu = torch.ones(2, requires_grad=True), torch.device("cpu")
    computing = Computing(lambda t, d: t.to(d), recompute=False, again=None, own_numbers=False)
    with contextlib.suppress(KeyError), computing as crossings:
        assert transfer(x, cpu) is not x and len(crossings) == 1
        if error is not None:
            raise error
    assert transfer(x, cpu) is x and len(crossings) == 1


def test_regions_that_draw_nothing_now_leave_the_generator_to_others(monkeypatch):
    """Several threads compute such regions: none of them may lend the default generator a state."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 3), nn.Dropout()).eval()
    plan = fxsplit.Plan(stages=2, micro_batches=2, checkpoint="always")
    pipe = fxsplit.compile(model, plan, example_args=(torch.randn(4, 3),))
    asked, original = [], torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: asked.append(1) or original())
    pipe(torch.randn(4, 3)).sum().backward()
    assert not asked
