"""Micro-batch sizes, batch dimensions, and how outputs are merged."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fxsplit
from fxsplit import Plan
from fxsplit.batch.merge import Merge, sizes
from fxsplit.errors import BatchError


@pytest.mark.parametrize(
    ("batch", "micro_batches", "expected"),
    [
        (5, 4, [2, 1, 1, 1]),
        (3, 8, [1, 1, 1]),
        (1, 4, [1]),
        (0, 4, [0]),
        (9, 4, [3, 2, 2, 2]),
        (8, 4, [2, 2, 2, 2]),
    ],
)
def test_sizes(batch, micro_batches, expected):
    assert sizes(batch, micro_batches) == expected


@given(st.integers(0, 200), st.integers(1, 70))
def test_sizes_properties(batch, micro_batches):
    rows = sizes(batch, micro_batches)
    assert sum(rows) == batch
    assert len(rows) == max(1, min(batch, micro_batches))
    assert max(rows) - min(rows) <= 1
    assert rows == sorted(rows, reverse=True)


class Reports(nn.Module):
    """Outputs of every kind: rows, rows along dimension 1, numbers, constants."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x, table):
        y = self.lin(x)
        return {
            "rows": y,
            "columns": y.t(),
            "mean": y.mean(),
            "sum": y.sum(),
            "count": (y > 0).sum(),
            "table": table * 2,
            "argument": x,
            "none": None,
            "size": x.shape[0],
            "width": x.shape[1],
            "again": y,
        }


def test_every_kind_of_output_is_merged():
    torch.manual_seed(0)
    model, table = Reports(), torch.randn(4, 4)
    plan = fxsplit.Plan(stages=1, micro_batches=3, batch_dims={"table": None})
    pipe = fxsplit.compile(model, plan, example_args=(torch.randn(4, 3), table))
    assert [m.how for m in pipe.merges] == [
        "rows", "rows", "mean", "sum", "sum", "same", "rows", "same", "sum", "same", "rows",
    ]  # fmt: skip
    x = torch.randn(7, 3, requires_grad=True)
    expected, output = model(x, table), pipe(x, table)
    assert output["argument"] is x
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(output[name], value)
        else:
            assert output[name] == value
    names = ["rows", "columns", "mean", "sum", "again"]
    grads = torch.autograd.grad([expected[n].square().sum() for n in names], [x, model.lin.weight])
    found = torch.autograd.grad([output[n].square().sum() for n in names], [x, model.lin.weight])
    for a, b in zip(grads, found, strict=True):
        torch.testing.assert_close(a, b)


class Median(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x):
        return self.lin(x).std()


def test_an_output_that_no_rule_reproduces():
    with pytest.raises(BatchError, match="output cannot be put together") as caught:
        fxsplit.compile(Median(), fxsplit.Plan(micro_batches=2), example_args=(torch.randn(4, 3),))
    assert "micro_batches=1" in str(caught.value)


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x):
        y = self.lin(x)
        return y - y.mean(0)


def test_an_output_that_mixes_rows_is_refused():
    with pytest.raises(BatchError, match="made of all rows of the batch"):
        fxsplit.compile(Centred(), fxsplit.Plan(micro_batches=2), example_args=(torch.randn(4, 3),))


def test_an_example_of_one_row_is_enough():
    class Mean(nn.Module):
        def forward(self, x):
            return x.exp().mean()

    pipe = fxsplit.compile(Mean(), fxsplit.Plan(micro_batches=2), example_args=(torch.randn(1, 3),))
    assert pipe.merges == [Merge("mean")]
    pipe = fxsplit.compile(nn.Linear(3, 3), fxsplit.Plan(micro_batches=2), example_args=(torch.randn(1, 3),))
    assert pipe(torch.randn(5, 3)).shape == (5, 3)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 10])
def test_any_batch_size_runs_without_padding(rows):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=2, micro_batches=4), example_args=(torch.randn(4, 3),))
    x = torch.randn(rows, 3)
    output = pipe(x)
    assert output.shape == (rows, 2)
    torch.testing.assert_close(output, model(x))
    output.sum().backward()


def test_merge_weights_a_mean_by_rows():
    values = [torch.tensor(1.0), torch.tensor(4.0)]
    assert Merge("mean").merge(values, [3, 1]).item() == pytest.approx(1.75)
    assert [g.item() for g in Merge("mean").split_gradient(torch.tensor(2.0), values, [3, 1])] == [1.5, 0.5]
    assert Merge("same").split_gradient(torch.tensor(2.0), values, [3, 1])[1] is None


class LengthFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)  # (length, batch, width)

    def forward(self, q):
        return self.attention(q, q, q)


def test_an_argument_of_another_length_is_not_split():
    class Product(nn.Module):
        def forward(self, x, w):
            return x @ w

    x, w = torch.randn(6, 4), torch.randn(4, 2)
    pipe = fxsplit.compile(Product(), fxsplit.Plan(micro_batches=3), example_args=(x, w))
    torch.testing.assert_close(pipe(x[:5], w), x[:5] @ w)


def test_batch_dims_along_another_dimension():
    model = LengthFirst()
    plan = fxsplit.Plan(micro_batches=3, batch_dims={"q": 1})
    pipe = fxsplit.compile(model, plan, example_args=(torch.randn(3, 6, 4),))
    assert pipe.merges == [Merge("rows", 1), Merge("rows", 0)]
    q = torch.randn(3, 5, 4)
    for a, b in zip(pipe(q), model(q), strict=True):
        torch.testing.assert_close(a, b)


class Hinge(nn.Module):
    """Zero on the example by chance, a flag that is true by chance, and a batch that broadcasts."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x):
        return torch.relu(0 * self.lin(x) + x - 100).sum(), self.lin(x).isfinite().all(), x.shape[0]


def test_what_holds_on_the_example_by_chance_is_not_taken_for_a_rule():
    pipe = fxsplit.compile(Hinge(), fxsplit.Plan(micro_batches=3), example_args=(torch.full((4, 3), -50.0),))
    assert [m.how for m in pipe.merges] == ["sum", "same", "sum"]
    x = torch.full((6, 3), 101.0)
    loss, fine, rows = pipe(x)
    assert (loss.item(), fine.item(), rows) == (18.0, True, 6)
    with pytest.raises(BatchError, match="is not so for this batch"):
        pipe(torch.tensor([[1.0] * 3] * 5 + [[float("nan")] * 3]))


def test_an_argument_that_is_split_by_mistake_is_named():
    class Shifted(nn.Module):
        def forward(self, x, position):
            return (x + position).exp()

    with pytest.raises(BatchError, match="does not run on a part of the batch") as caught:
        fxsplit.compile(
            Shifted(), fxsplit.Plan(micro_batches=2), example_args=(torch.randn(4, 4), torch.randn(4))
        )
    assert "position" in str(caught.value) and "batch_dims" in str(caught.value)


def test_random_numbers_in_eval_mode_are_not_taken_for_mixing():
    class Sampler(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = nn.Linear(3, 4), nn.Linear(2, 3)

        def forward(self, x):
            mean, scale = self.encode(x).chunk(2, -1)
            return self.decode(mean + torch.randn_like(mean) * scale.exp()), mean

    x = torch.randn(6, 3)
    plan = fxsplit.Plan(stages=2, micro_batches=3, checkpoint="always")
    pipe = fxsplit.compile(Sampler(), plan, example_args=(x,))
    torch.manual_seed(1)
    output, mean = pipe(x)
    torch.manual_seed(1)
    assert torch.equal(pipe(x)[0], output)
    torch.testing.assert_close(mean, pipe.unsplit()(x)[1])
    output.sum().backward()


class Unnamed(dict):
    """An output whose class some library has registered without names for its parts."""


torch.utils._pytree.register_pytree_node(
    Unnamed,
    lambda d: (list(d.values()), list(d)),
    lambda values, keys: Unnamed(zip(keys, values, strict=True)),
)


def test_outputs_without_names_are_merged_too():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return Unnamed(sample=self.linear(x))

    model, x = Model(), torch.randn(6, 4)
    pipe = fxsplit.compile(model, fxsplit.Plan(micro_batches=3), example_args=(x,))
    assert type(pipe(x)) is Unnamed
    torch.testing.assert_close(pipe(x)["sample"], model(x)["sample"])


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
