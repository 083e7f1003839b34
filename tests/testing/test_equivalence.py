"""`fxsplit.testing.assert_equivalent`: what it compares, and what it says where something differs."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxsplit
from fxsplit import Plan
from fxsplit.errors import ArgumentError, NotEquivalentError, VerifyError
from fxsplit.testing import assert_equivalent, compare

X = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(rate)
        self.rate = rate

    def forward(self, x):
        y = self.drop(self.norm(self.fc(x)))
        return x + F.dropout(y, self.rate, self.training)


class Model(nn.Module):
    def __init__(self, rate=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(Block(rate) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return torch.tanh(self.head(x))


def split(model=None, **plan):
    torch.manual_seed(0)
    model = model or Model()
    pipe = fxsplit.compile(
        copy.deepcopy(model), Plan(**{"stages": 3, "micro_batches": 3} | plan), example_args=(X,)
    )
    return model, pipe


def test_it_says_what_was_compared():
    model, pipe = split()
    found = assert_equivalent(model, pipe, X.clone().requires_grad_())
    assert str(found) == (
        "compared on 3 micro-batches, bit for bit: "
        "1 output, 1 gradient of inputs, 14 gradients of parameters, 9 buffers"
    )
    assert not found.differences and not found.left_out and found.first == ""
    whole = assert_equivalent(*split(micro_batches=1), X, atol=1e-6)
    assert str(whole).startswith("compared on the batch as a whole, within atol=1e-06, rtol=0: ")


@pytest.mark.parametrize(
    "plan",
    [
        {"micro_batches": 1},
        {},
        {"micro_batches": 5},
        {"schedule": "1f1b", "checkpoint": "always"},
        {"replicas": 2, "micro_batches": 4, "checkpoint": ["blocks.1"]},
        {"gather": False},
    ],
    ids=str,
)
def test_masks_are_compared_too(plan):
    """The model is given the random numbers that the stages draw, draw by draw."""
    model, pipe = split(Model(0.4), **plan)
    for seed in range(3):
        torch.manual_seed(seed)
        assert not assert_equivalent(model, pipe, X).left_out
    other = compare(model, pipe.train(False), X)  # and eval is another thing than train
    assert "output 0" in other.differences


def test_nothing_changes():
    model, pipe = split(Model(0.4))
    before = copy.deepcopy((model.state_dict(), pipe.state_dict(), torch.get_rng_state()))
    assert_equivalent(model, pipe, X)
    after = (model.state_dict(), pipe.state_dict(), torch.get_rng_state())
    for a, b in zip(before[:2], after[:2], strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert torch.equal(before[2], after[2])
    assert all(p.grad is None for p in (*model.parameters(), *pipe.parameters()))


def failure(model, pipe, *args, **bounds):
    with pytest.raises(AssertionError) as caught:
        assert_equivalent(model, pipe, *args, **bounds)
    assert isinstance(caught.value, NotEquivalentError) and isinstance(caught.value, VerifyError)
    return str(caught.value)


def edited(pipe, stage, change):
    """Somebody changes what a stage computes after its linear layer."""
    module = pipe[stage].module
    (layer, *_) = (n for n in module.graph.nodes if n.op == "call_module" and str(n.target).endswith("fc"))
    with module.graph.inserting_after(layer):
        node = module.graph.call_function(change, (layer, -0.5))
    layer.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)
    module.recompile()


def test_a_stage_that_was_edited_by_hand():
    model, pipe = split(Model(0.4), micro_batches=2)
    edited(pipe, 1, torch.add)
    text = failure(model, pipe.train(), X)
    assert re.match(r"output 0 differs: off by \S+, of \S+ at most, and \d+ others", text)
    for part in (
        "micro-batch 0 of 2, stage 1, in blocks.1.norm: node blocks_1_norm is off by",
        "test_equivalence.py:",
        "y = self.drop(self.norm(self.fc(x)))",
        "of stage 1, which the graph of the model has not",
        "Plan(stages=3, micro_batches=2)",
    ):
        assert part in text, text


def test_a_difference_in_a_later_micro_batch():
    """A batch whose last rows meet another branch of an operation."""
    model, pipe = split(micro_batches=3)
    edited(pipe, 2, _for_large)
    x = X.clone()
    x[8:] *= 1e6
    assert "micro-batch 2 of 3, stage 2, in blocks.2.norm" in failure(model.eval(), pipe.eval(), x)


def _for_large(x, factor):
    return torch.where(x.abs() > 1e3, x * factor, x)


def test_other_weights():
    model, pipe = split()
    with torch.no_grad():
        model.blocks[1].fc.bias[2] += 0.5
    text = failure(model, pipe, X)
    assert "differ before anything is run: blocks.1.fc.bias is off by 0.5" in text


def test_another_plan_than_the_model_allows():
    """What is told of how outputs merge is wrong: here nothing is, and the batch dimension is."""

    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x, mask):
            return self.fc(x) * mask

    model = Centred()
    mask = torch.linspace(0, 1, 12)[:, None]
    with pytest.raises(fxsplit.errors.FxsplitError):
        fxsplit.compile(
            copy.deepcopy(model),
            Plan(micro_batches=2, batch_dims={"mask": None}),
            example_args=(X, mask),
        )
    pipe = fxsplit.compile(copy.deepcopy(model), Plan(micro_batches=2), example_args=(X, mask))
    assert_equivalent(model, pipe, X, mask)


def test_bounds():
    model, pipe = split(micro_batches=1)
    with torch.no_grad():
        pipe.model.head.bias += 1e-4
    assert "head.bias" in failure(model, pipe, X)
    assert assert_equivalent(model, pipe, X, atol=1e-2).bound == "within atol=0.01, rtol=0"


def test_a_backward_that_differs():
    model, pipe = split(micro_batches=2)
    edited(pipe, 2, _doubled)
    assert "the difference comes about in backward" in failure(model, pipe, X)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def _doubled(x, _):
    return _Doubled.apply(x)


def test_synchronised_statistics_are_compared_within_a_bound():
    model, pipe = split(sync_batch_norm=True)
    found = assert_equivalent(model, pipe, X)
    assert "sync_batch_norm=True sums in another order" in found.bound and found.micro_batches == 1
    with pytest.raises(ArgumentError, match="nothing else computes the same"):
        assert_equivalent(*split(Model(0.4), sync_batch_norm=True), X)
    pipe.eval(), model.eval()  # nothing meets: bit for bit, by micro-batch
    assert assert_equivalent(model, pipe, X).bound == "bit for bit"


def test_synchronised_statistics_of_a_type_that_is_less_precise():
    """In bfloat16 a whole batch rounds in another way than its parts, and more so (found by the fuzz, case 300090)."""

    class Half(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.a, self.norm = nn.Linear(8, 8), norm

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.norm(self.a(x))

    for norm, bound in ((nn.BatchNorm1d(8), "sums in another order"), (nn.Identity(), "bit for bit")):
        torch.manual_seed(0)
        model = Half(norm)
        pipe = fxsplit.compile(model, Plan(micro_batches=2, sync_batch_norm=True), example_args=(X,))
        assert bound in assert_equivalent(copy.deepcopy(model), pipe, X).bound


def test_what_is_left_out_is_said():
    model, pipe = split(deferred_batch_norm=True)
    found = assert_equivalent(model, pipe, X)
    assert "not compared: running statistics: deferred_batch_norm=True" in str(found)
    assert not any("running_mean" in name for name in found.compared)


def test_a_checkpoint_of_the_models_own_hides_its_masks():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
            self.drop = nn.Dropout(0.3)

        def forward(self, x):
            return self.head(checkpoint(lambda y: self.drop(self.block(y)), x, use_reentrant=False))

    model, pipe = split(Again(), stages=2)
    found = assert_equivalent(model, pipe, X.clone().requires_grad_())
    assert found.compared == ("output 0",) and "draws again in backward" in found.left_out["gradients"]


def test_arguments():
    model, pipe = split(micro_batches=1)
    with pytest.raises(ArgumentError, match="and not Model and Model"):
        assert_equivalent(model, model, X)
    with torch.device("meta"):
        bare = Model()
    with pytest.raises(ArgumentError, match="meta"):
        assert_equivalent(bare, pipe, X)


@pytest.mark.parametrize(
    "plan", [{}, {"micro_batches": 1}, {"stages": 1}, {"threads": 2}, {"threads": 1, "stages": 1}], ids=str
)
def test_the_model_computes_with_as_many_threads_as_a_worker(plan):
    """A layer of which the kernel depends on their number, whatever the caller's is."""
    torch.set_num_threads(2)
    try:
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        x = torch.randn(9, 8)
        pipe = fxsplit.compile(model, Plan(**{"stages": 2, "micro_batches": 2, **plan}), example_args=(x,))
        assert_equivalent(model, pipe, x)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
