"""Backward in two: what can wait, waits."""

import torch
from torch import nn

from fxsplit.runtime.halves import input_half


def test_weights_that_are_reached_in_one_way_wait():
    a, b, x = nn.Linear(3, 3), nn.Linear(3, 3), torch.randn(4, 3, requires_grad=True)
    weights = [a.weight, b.weight, a.bias]
    found, seed = [], torch.ones(4, 3)
    for reused in (False, True):
        y = b(torch.tanh(a(x)))
        y = y + torch.tanh(a(y)) if reused else y
        expected = torch.autograd.grad(y, [x, *weights], seed, retain_graph=True)
        (of_x,), early, rest = input_half([y], [seed], [x], weights)
        late = rest()
        found.append([g is not None for g in early])
        for one, other, whole in zip(early, late, expected[1:], strict=True):
            assert (one is None) != (other is None)
            torch.testing.assert_close(whole, other if one is None else one)
        assert torch.equal(of_x, expected[0])
    assert found == [[False, False, False], [True, False, True]]
