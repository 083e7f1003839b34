"""`Plan(gather=False)`: the outputs of the micro-batches, one type for all of them, and the same gradients."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import fxsplit
from fxsplit.errors import GradientError
from fxsplit.testing import assert_equivalent
from tests.helpers import ramp
from tests.models import MODELS, build


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def made(model, rows=6, **fields):
    plan = fxsplit.Plan(**{"stages": 2, "micro_batches": 3, "gather": False, **fields})
    return fxsplit.compile(model, plan, example_args=(torch.randn(rows, 4),))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize(
    ("rows", "micro_batches", "sizes"),
    [(5, 2, (3, 2)), (9, 4, (3, 2, 2, 2)), (1, 4, (1,)), (0, 4, (0,)), (6, 1, (6,))],
)
def test_the_type_is_the_same_for_any_count(rows, micro_batches, sizes, replicas, grad):
    model, x = Net(), torch.randn(rows, 4)
    pipe = made(model, micro_batches=micro_batches, replicas=replicas).train(grad)
    with torch.set_grad_enabled(grad):
        out = pipe(x)
    assert type(out) is fxsplit.Scattered
    assert out.sizes == sizes == tuple(part.shape[0] for part in out)
    assert out.devices == (torch.device("cpu"),) * len(sizes)
    assert len(out) == len(out.parts) == len(sizes) and out[0] is out.parts[0] and out[-1:] == out.parts[-1:]
    assert all(part.requires_grad == grad for part in out)
    torch.testing.assert_close(out.gather(), model(x))
    assert out.gather().requires_grad == grad and not out.detach().gather().requires_grad
    assert out.detach().sizes == sizes


def test_repr():
    model = Net()
    assert (
        repr(made(model)(torch.randn(5, 4)))
        == "Scattered(3 parts: 2 rows on cpu, 2 rows on cpu, 1 row on cpu)"
    )
    assert repr(made(model)(torch.randn(1, 4))) == "Scattered(1 part: 1 row on cpu)"


def backward(tensors, gradients):
    pairs = [(t, g) for t, g in zip(tensors, gradients, strict=True) if t.requires_grad]
    torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_through_parts_are_those_through_the_gathered_output(name, count, checkpoint):
    model, batch = build(name)
    args = batch(7)
    found = {}
    for way in ("gather=True", "gather()", "parts"):
        twin = copy.deepcopy(model)
        plan = fxsplit.Plan(
            stages=3, micro_batches=count, replicas=2, checkpoint=checkpoint, gather=way == "gather=True"
        )
        pipe = fxsplit.compile(twin, plan, example_args=args)
        out = pipe(*args)
        if way == "parts":
            columns = list(zip(*map(tree_leaves, out), strict=True))
            merged = [torch.cat(values) for values in columns]
            pieces = [ramp(m).split(list(out.sizes)) for m in merged]
            flat = [v for values in columns for v in values]
            backward(flat, [p for row in pieces for p in row])
        else:
            merged = tree_leaves(out.gather() if way == "gather()" else out)
            backward(merged, [ramp(m) for m in merged])
        found[way] = [*merged, *(p.grad for p in twin.parameters()), *twin.buffers()]
    for way in ("gather()", "parts"):
        for a, b in zip(found[way], found["gather=True"], strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "interleaved_1f1b"])
def test_autograd_sees_ordinary_tensors(schedule):
    model, x = Net(), torch.randn(5, 4, requires_grad=True)
    pipe = made(model, schedule=schedule, workers=2 if schedule == "interleaved_1f1b" else None)
    seen = []
    model.a.weight.register_hook(lambda g: seen.append(g))
    out = pipe(x)
    out[1].register_hook(lambda g: seen.append(g.shape))
    loss = sum(part.square().sum() for part in out)
    weight, inputs = torch.autograd.grad(loss, [model.b.weight, x], retain_graph=True)
    expected = torch.autograd.grad(model(x).square().sum(), [model.b.weight, x])
    torch.testing.assert_close([weight, inputs], list(expected))
    assert seen == [(2, 3)]
    loss.backward()
    assert len(seen) == 3 and torch.equal(
        next(s for s in seen if isinstance(s, torch.Tensor)), model.a.weight.grad
    )
    with pytest.raises(GradientError, match="second time"):
        out[1].sum().backward()
    with pytest.raises(GradientError, match="no second derivative"):
        torch.autograd.grad(pipe(x)[0].sum(), x, create_graph=True)


def test_a_part_alone_goes_backward_alone():
    model, x = Net(), torch.randn(6, 4, requires_grad=True)
    made(model)(x)[1].sum().backward()
    assert x.grad[:2].eq(0).all() and x.grad[4:].eq(0).all() and x.grad[2:4].ne(0).all()
    gradient = model.a.weight.grad
    model.zero_grad()
    model(x[2:4]).sum().backward()
    torch.testing.assert_close(gradient, model.a.weight.grad)


@dataclass
class Answer:
    logits: torch.Tensor
    extra: tuple


class Odd(nn.Module):
    """Rows in a dataclass, the argument itself, a mean, a sum, a size, a constant; the same for all; and no tensor."""

    def __init__(self):
        super().__init__()
        self.lin, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        y = self.lin(x)
        extra = (x, y.square().mean(), y.square().sum(), x.shape[0], "text", None, self.scale * 2)
        return Answer(y, extra)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_outputs_of_every_kind(micro_batches):
    model, x = Odd(), torch.randn(5, 4, requires_grad=True)
    twins = [made(model, stages=1, micro_batches=micro_batches, gather=g) for g in (True, False)]
    merged, out = (pipe(x) for pipe in twins)
    assert all(type(part) is Answer for part in out)
    assert [part.extra[3] for part in out] == list(out.sizes)
    for part, rows in zip(out, x.split(out.sizes), strict=True):
        assert torch.equal(part.extra[0], rows) and part.extra[4:6] == ("text", None)
    gathered = out.gather()
    assert gathered.extra[3:6] == (5, "text", None)
    gradients = []
    for answer in (merged, gathered):
        tensors = [answer.logits, *(v for v in answer.extra if isinstance(v, torch.Tensor))]
        loss = sum((t * ramp(t + 0)).sum() * (i + 1) for i, t in enumerate(tensors) if t.dim()) + sum(
            t for t in tensors if not t.dim()
        )
        gradients.append([loss, *torch.autograd.grad(loss, [x, *model.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_parts_share_no_memory_with_each_other_or_the_argument(micro_batches):
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            y = self.lin(x)
            return y, y.view(-1, 2, 2), x[:, :2]

    model, x = Views(), torch.randn(6, 4)
    before = x.clone()
    for gather in (True, False):
        out = made(model, stages=1, micro_batches=micro_batches, gather=gather)(x)
        tensors = tree_leaves(out if gather else list(out))
        kept = [t.detach().clone() for t in tensors]
        for i, t in enumerate(tensors):
            t.detach().zero_()
            assert all(torch.equal(a, b) for a, b in zip(tensors[i + 1 :], kept[i + 1 :], strict=True))
        assert torch.equal(x, before)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_step_does_not_care(schedule):
    x, target = torch.randn(5, 4), torch.randn(5, 3)
    model = Net()
    found = []
    for gather in (True, False):
        twin, seen = copy.deepcopy(model), []
        pipe = made(twin, schedule=schedule, gather=gather)
        pipe.register_forward_hook(lambda m, args, y, seen=seen: seen.append(y.shape) or y * 2)
        loss, output = pipe.step_with_output(x, target=target, loss_fn=F.mse_loss)
        assert seen == [(5, 3)] and output.shape == (5, 3) and not output.requires_grad
        found.append([loss, output, *(p.grad for p in twin.parameters())])
        pipe = made(copy.deepcopy(model), schedule=schedule, gather=gather)
        found[-1] += pipe.step_with_output(x, target=target, loss_fn=F.mse_loss)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert type(pipe(x)) is fxsplit.Scattered


def test_hooks_of_the_model_get_what_the_call_gives():
    model, seen = Net(), []
    model.register_forward_hook(lambda m, args, y: seen.append(type(y)))
    pipe = made(model)
    pipe(torch.randn(5, 4))
    pipe.step(torch.randn(5, 4), loss_fn=lambda y: y.sum())
    assert seen[-2:] == [fxsplit.Scattered, torch.Tensor]


def test_a_failed_call_in_a_step_asks_for_nothing_afterwards():
    pipe = made(Net())
    with pytest.raises(fxsplit.errors.ArgumentError):
        pipe.step("no tensor", loss_fn=lambda y: y.sum())
    assert type(pipe(torch.randn(5, 4))) is fxsplit.Scattered


def test_verify_equivalence_and_saving(tmp_path):
    model = Net()
    pipe = made(model)
    assert "numbers" in fxsplit.verify(pipe)
    assert_equivalent(model, pipe, torch.randn(5, 4))
    pipe.save_code(tmp_path / "split")
    loaded = fxsplit.load(tmp_path / "split", copy.deepcopy(model))
    assert loaded.plan == pipe.plan and not loaded.plan.gather
    x = torch.randn(5, 4)
    assert all(torch.equal(a, b) for a, b in zip(loaded(x), pipe(x), strict=True))


def test_without_a_batch_there_is_one_part():
    class Total(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.w * x

    pipe = fxsplit.compile(Total(), fxsplit.Plan(gather=False), example_args=(torch.tensor(3.0),))
    out = pipe(torch.tensor(2.0))
    assert len(out) == 1 and out.sizes == (1,) and out.gather() == 2.0
    assert repr(out) == repr(out.detach()) == "Scattered(1 part: cpu)"
    assert pipe.criterion(nn.MSELoss())(out, torch.tensor(5.0)) == 9.0


def test_an_output_that_is_not_the_same_is_found_when_it_is_gathered():
    class Widest(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            return self.lin(x), (x > 100.0).any()

    pipe = made(Widest(), stages=1, micro_batches=2)
    x = torch.zeros(4, 4)
    assert not pipe(x).gather()[1]
    x[3] = 200.0
    out = pipe(x)
    assert [bool(part[1]) for part in out] == [False, True]
    with pytest.raises(fxsplit.errors.BatchError, match="same for all micro-batches"):
        out.gather()
