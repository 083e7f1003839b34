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


class WritesIt(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how

    def forward(self, x):
        return self.b(self.a(self.how(x)))


def zeroed(x):
    x[:, 0] = 0
    return x


def cloned(x):
    return x.clone().add_(1)


WRITES = {
    "add_": lambda x: x.add_(1),
    "relu_": torch.relu_,
    "a slice": zeroed,
    "ReLU(inplace=True)": nn.ReLU(inplace=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("how", WRITES.values(), ids=WRITES)
def test_an_argument_that_forward_writes_to(how, micro_batches, schedule):
    """Eagerly an intermediate result gets another history. A pipeline cannot give it one, and says so before it runs."""
    plan = Plan(stages=2, micro_batches=micro_batches, schedule=schedule)
    model, x = WritesIt(how), torch.randn(4, 4)
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    plain, expected = x.clone(), x.clone()
    assert torch.equal(pipe(plain), torch.cat([model(part) for part in expected.chunk(micro_batches)]))
    assert torch.equal(plain, expected)  # it was written to, as eagerly
    weight = torch.ones(4, requires_grad=True)
    wanted = x * weight
    before = wanted.detach().clone()
    for call in (pipe, lambda x: pipe.step(x, loss_fn=lambda y: y.sum(), reduction="sum")):
        with pytest.raises(
            ArgumentError, match=r"writes in place to argument 'x'(?s:.*)x = x.clone\(\)(?s:.*)x.detach"
        ):
            call(wanted)
    assert torch.equal(wanted.detach(), before)
    with torch.no_grad():
        assert torch.equal(pipe(wanted.clone()), pipe(before.clone()))
    pipe(wanted.detach()).sum().backward()
    with pytest.raises(ArgumentError, match=r"writes in place to an argument, and(?s:.*)x = x.clone\(\)"):
        fxsplit.compile(WritesIt(how), plan, example_args=(x * weight,))
    after = fxsplit.compile(WritesIt(cloned), plan, example_args=(x * weight,))
    after(x * weight).sum().backward()
    assert weight.grad.any()
