"""Autocast and grad mode inside of forward hold in every stage that a region is cut into."""

import copy

import pytest
import torch
from torch import nn

from fxsplit.testing import assert_equivalent
from tests.helpers import SIX_ROWS, compiled_on_rows, two_layers_with


def test_autocast_that_is_switched_off_inside():
    def forward(self, x):
        h = self.a(x)
        with torch.autocast("cpu", enabled=False):
            return self.b(h.float())

    model = two_layers_with(forward)
    pipe = compiled_on_rows(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert pipe(SIX_ROWS).dtype == model(SIX_ROWS).dtype == torch.float32
        assert torch.equal(pipe(SIX_ROWS), model(SIX_ROWS))


def test_grad_mode_regions_hold_whatever_the_caller_has_on():
    def forward(self, x):
        with torch.enable_grad():
            h = self.a(x)
        with torch.no_grad():
            scale = self.b(x)
        return h * scale

    model = two_layers_with(forward)
    with torch.no_grad():
        pipe = compiled_on_rows(model, stages=2)
        assert pipe(SIX_ROWS).grad_fn is None and not torch.is_grad_enabled()
    assert_equivalent(model, pipe, SIX_ROWS)
    assert pipe.model.b.weight.grad is None


def loses_gradients_of_casts():
    """Before torch 2.10, a weight that was cast under no_grad had no gradient in the rest of the autocast."""
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            layer(x)
        return not layer(x).requires_grad


@pytest.mark.skipif(loses_gradients_of_casts(), reason="this torch computes no gradient to compare with")
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_region_that_is_cut_is_entered_again(checkpoint):
    def forward(self, x):
        h = self.a(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                y = self.b(h) * 2
                y = self.a(y) + 1
            with torch.set_grad_enabled(torch.is_grad_enabled()):
                z = self.b(y + h).relu()
            z = self.a(z)
        return x + z.float()

    model = two_layers_with(forward)
    for stages in range(2, 9):
        pipe = compiled_on_rows(model, stages=stages, checkpoint=checkpoint)
        assert_equivalent(model, pipe, SIX_ROWS)
        assert_equivalent(model, copy.deepcopy(pipe), SIX_ROWS)
        with torch.no_grad():
            assert torch.equal(pipe(SIX_ROWS), model(SIX_ROWS))
    assert sum("with torch.no_grad():" in stage.code for stage in pipe) > 1
    assert sum("with torch.autocast(" in stage.code for stage in pipe) > 2
