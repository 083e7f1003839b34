"""Where a graph begins to compute something else than the model."""

import copy

import torch
from torch import nn

from fxsplit.proof.locate import first_other_module
from fxsplit.trace.front import trace


def test_the_first_module_that_computes_something_else_is_named():
    model, x = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))), torch.randn(2, 3)
    other = copy.deepcopy(model)
    assert first_other_module(model, trace(other, (x,), {}), [x]) is None
    with torch.no_grad():
        other[1].bias.add_(1.0)
    assert "first seen in the output of '1'" in first_other_module(model, trace(other, (x,), {}), [x])
    assert not model[0]._forward_hooks
