"""`fxsplit.testing` finds what differs, however little."""

import copy

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.errors import VerifyError
from fxsplit.testing import assert_equivalent, compare


class Counted(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("unread", torch.zeros(()))


def test_what_differs_is_named():
    model, x = Counted(), torch.randn(4, 3)
    pipe = fxsplit.compile(copy.deepcopy(model), fxsplit.Plan(micro_batches=2), example_args=(x,))
    assert_equivalent(model, pipe, x)
    model.unread.add_(1)
    assert list(compare(model, pipe, x).differences) == ["buffer unread"]
    with torch.no_grad():
        model.unread.zero_(), model.bias.add_(1e-5)
    assert list(compare(model, pipe, x).differences) == ["output 0"]
    assert not compare(model, pipe, x, atol=1e-3).differences
    with pytest.raises(VerifyError, match="output 0 differs"):
        assert_equivalent(model, pipe, x)
