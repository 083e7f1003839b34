"""Arguments of other kinds than dense tensors, sizes in arithmetic, and parameters that are frozen on the way."""

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import Plan
from fxsplit.errors import ArgumentError

X = torch.randn(8, 4)


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x[0] if isinstance(x, (tuple, list)) else x)


def packed():
    lengths = torch.tensor([5, 3, 2])
    return nn.utils.rnn.pack_padded_sequence(torch.randn(3, 5, 4), lengths, batch_first=True)


@pytest.mark.parametrize(
    ("make", "what", "instead"),
    [
        (packed, "PackedSequence", "pack them in forward"),
        (lambda: [packed()], "PackedSequence", "pack them in forward"),
        (X.to_sparse, "sparse_coo", "to_dense"),
        (X.to_sparse_csr, "sparse_csr", "to_dense"),
        (lambda: torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged), "nested", "to_padded_tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*[Ss]parse:UserWarning", "ignore:.*nested:UserWarning")
def test_what_is_no_dense_tensor_is_refused(make, what, instead):
    with pytest.raises(ArgumentError, match=what) as caught:
        fxsplit.compile(First(), Plan(), example_args=(make(),))
    assert instead in str(caught.value)


def test_a_size_divided_with_remainder():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            half, rest = divmod(x.size(0), 2)
            twice, more = divmod(100, x.size(0))
            return self.a(x) * half + rest + twice * more

    model = Halves()
    pipe = fxsplit.compile(model, Plan(), example_args=(X,))
    for rows in (3, 8, 9):
        x = torch.randn(rows, 4)
        assert torch.equal(pipe(x), model(x))


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_a_parameter_that_is_frozen_between_forward_and_backward(schedule):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=2, schedule=schedule), example_args=(X,))
    out = pipe(X)
    model[0].weight.requires_grad_(False)
    out.square().sum().backward()
    expected = torch.autograd.grad(model(X).square().sum(), [model[0].bias, model[2].weight])
    assert model[0].weight.grad is None
    torch.testing.assert_close(model[0].bias.grad, expected[0])
    torch.testing.assert_close(model[2].weight.grad, expected[1])
