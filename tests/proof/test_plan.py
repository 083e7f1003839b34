"""The proof of a compile is of what the plan will do: the micro-batches that it makes, element by element, on any devices."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxsplit
from fxsplit import Plan
from fxsplit.compare import agree_each
from fxsplit.errors import ArgumentError, BatchError, GuardError, ModelError, VerifyError


class OneRow(nn.Module):
    """Takes another path for a single row."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.a(x)
        if x.size(0) == 1:
            return self.b(h) * 2
        return self.b(h)


def normed():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def test_a_plan_that_refuses_its_own_example_is_refused():
    with pytest.raises(
        BatchError, match=r"micro-batches of 1 row of the example's 5 rows.*test_plan"
    ) as caught:
        fxsplit.compile(OneRow(), Plan(stages=2, micro_batches=4), example_args=(torch.randn(5, 4),))
    assert "micro_batches=2" in str(caught.value)  # and that works:
    fxsplit.compile(OneRow(), Plan(stages=2, micro_batches=2), example_args=(torch.randn(5, 4),))


def test_a_size_that_the_model_does_not_take_is_refused():
    with pytest.raises(BatchError, match=r"micro-batches of 1 row.*Expected more than 1 value") as caught:
        fxsplit.compile(normed(), Plan(stages=2, micro_batches=8), example_args=(torch.randn(10, 4),))
    assert "micro_batches=5" in str(caught.value)
    fxsplit.compile(normed(), Plan(stages=2, micro_batches=5), example_args=(torch.randn(10, 4),))


def test_a_short_last_batch_names_its_size_and_micro_batch():
    pipe = fxsplit.compile(OneRow(), Plan(stages=2, micro_batches=4), example_args=(torch.randn(8, 4),))
    with pytest.raises(GuardError, match="test_plan") as caught:
        pipe(torch.randn(5, 4))
    assert "micro-batch 1 of 4 (1 row)" in caught.value.__notes__[0]


def test_the_example_is_a_copy():
    model, x = nn.Linear(4, 4), torch.randn(6, 4)
    pipe = fxsplit.compile(model, Plan(micro_batches=2), example_args=(x,))
    before = [t.clone() for t in pipe.example]
    x.zero_()
    assert all(torch.equal(a, b) for a, b in zip(pipe.example, before, strict=True))


def test_elements_are_compared_with_those_beside_them():
    expected = torch.randn(6, 5) * torch.tensor([1.0, 1.0, 1.0, 1e-5, 1.0])
    found = expected.clone()
    assert agree_each(found + 1e-9, expected)
    found[:, 3] *= 9  # small beside the largest, and all wrong
    assert not agree_each(found, expected)
    assert agree_each(
        torch.tensor([1e-9, 0.0]), torch.tensor([-2e-9, 1e-10]), largest=1.0
    )  # nothing but rounding
    assert not agree_each(torch.tensor([float("nan")]), torch.tensor([1.0]))
    assert agree_each(torch.tensor([float("inf"), float("nan")]), torch.tensor([float("inf"), float("nan")]))
    assert not agree_each(torch.tensor([float("inf")]), torch.tensor([-float("inf")]))


def test_a_column_that_is_too_large_is_noticed():
    def wrong(model):
        graph = torch.fx.symbolic_trace(model)
        graph.register_buffer("factors", torch.tensor([1.0, 1.0, 1.0, 9.0]))
        (node,) = (n for n in graph.graph.nodes if n.op == "call_module")
        with graph.graph.inserting_after(node):
            factors = graph.graph.get_attr("factors")
        with graph.graph.inserting_after(factors):
            product = graph.graph.call_function(torch.mul, (node, factors))
        node.replace_all_uses_with(product, delete_user_cb=lambda user: user is not product)
        graph.recompile()
        return graph

    model = nn.Sequential(nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight[3] *= 1e-6
        model[0].bias[3] *= 1e-6
    with pytest.raises(VerifyError, match="computes another"):
        fxsplit.compile(model, Plan(), example_args=(torch.randn(6, 4),), tracer=wrong)


def test_verify_compares_micro_batches_too():
    pipe = fxsplit.compile(normed(), Plan(stages=2, micro_batches=3), example_args=(torch.randn(6, 4),))
    assert "micro-batches: the same" in fxsplit.verify(pipe)


def test_a_model_whose_call_is_its_own_is_refused():
    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x)

        def __call__(self, x):
            return super().__call__(x) * 2

    with pytest.raises(ModelError, match="__call__"):
        fxsplit.compile(Called(), Plan(), example_args=(torch.randn(6, 4),))


# -- what is said of a loss -----------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, x):
        return self.head(torch.tanh(self.words(x)))


def of_words(scores, target):
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_mean_over_what_counts_is_no_mean_over_rows(schedule):
    x = torch.randint(0, 9, (8, 5))
    model = Words()
    with torch.no_grad():
        model.head.weight.mul_(1e-3)  # as after a fresh start: every loss is the logarithm of the classes
        model.head.bias.zero_()
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=4, schedule=schedule), example_args=(x,))
    pipe.step(x, target=x, loss_fn=of_words, reduction="mean")  # as many words count in every row
    before = [p.grad.clone() for p in model.parameters()]
    padded = x.clone()
    padded[0, 1:] = -100
    with pytest.raises(ArgumentError, match="said to be a mean") as caught:
        pipe.step(x, target=padded, loss_fn=of_words, reduction="mean")
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
    assert 'reduction="sum"' in str(caught.value)
    pipe.step(x, target=x, loss_fn=of_words, reduction="mean")
    model.zero_grad()
    count = (padded != -100).sum()
    loss = pipe.step(
        x,
        target=padded,
        loss_fn=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="sum") / count,
        reduction="sum",
    )
    expected = of_words(model(x), padded)
    torch.testing.assert_close(loss, expected.detach())
    for p, g in zip(model.parameters(), torch.autograd.grad(expected, list(model.parameters())), strict=True):
        torch.testing.assert_close(p.grad, g)


def test_a_tensor_that_is_two_arguments_has_both_gradients():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x, y, w):
            return self.a(x) * y + x @ w

    model = Two()
    plan = Plan(stages=2, micro_batches=2, schedule="1f1b", batch_dims={"w": None})
    pipe = fxsplit.compile(
        model, plan, example_args=(torch.randn(6, 4), torch.randn(6, 4), torch.randn(4, 4))
    )
    x = torch.randn(6, 4, requires_grad=True)
    pipe.step(x, x, model.a.weight, target=torch.zeros(6, 4), loss_fn=F.mse_loss)
    wanted = [x, model.a.weight, model.a.bias]
    expected = torch.autograd.grad(F.mse_loss(model(x, x, model.a.weight), torch.zeros(6, 4)), wanted)
    for t, g in zip(wanted, expected, strict=True):
        torch.testing.assert_close(t.grad, g)


@pytest.mark.parametrize(
    ("rate", "training", "compared"), [(0.5, True, False), (0.5, False, True), (0.0, True, True)]
)
def test_micro_batches_that_draw_are_not_compared(rate, training, compared):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate), nn.Linear(4, 2)), torch.randn(6, 4)
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=2, micro_batches=3), example_args=(x,))
    assert pipe.train(training).verify_micro_batches([x]) is compared
