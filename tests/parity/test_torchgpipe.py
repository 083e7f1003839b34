"""torchgpipe, past what fairscale took over: tests/{test_transparency,test_deferred_batch_norm,test_inplace,test_balance}.py."""

import copy
import itertools

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import Plan

CHUNKS = 4


def tilted(seed=0):
    """Channels of other variances, rows of other means: where sums of squares round badly."""
    x = torch.rand(16, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    x = x * torch.tensor([1.0, 10.0, 100.0]).reshape(1, 3, 1, 1)
    return x + 2.0 ** torch.arange(16).reshape(16, 1, 1, 1)


def deferred(model, x, chunks=CHUNKS):
    plan = Plan(stages=1, micro_batches=chunks, deferred_batch_norm=True)
    return fxsplit.compile(model, plan, example_args=(x,))


def test_transparency():
    """A pipeline gives the gradients of the model, and bit for bit those of the model on the same micro-batches."""
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 4), nn.Linear(4, 2), nn.Linear(2, 1))
    twin, x = copy.deepcopy(model), torch.rand(16, 1, requires_grad=True)
    plan = Plan(balance=[2, 2], devices=["cpu", "cpu"], micro_batches=4, checkpoint="always")
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    pipe(x).norm().backward()
    y = x.detach().clone().requires_grad_()
    twin(y).norm().backward()
    torch.testing.assert_close(x.grad, y.grad)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    fxsplit.testing.assert_equivalent(twin, pipe, x.detach())


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("input_requires_grad", [True, False])
def test_deferred_transparency(chunks, input_requires_grad):
    """Each micro-batch is normalised by itself, as the plain layer does on the same micro-batches."""
    norm = nn.BatchNorm2d(3)
    plain, x = copy.deepcopy(norm), tilted().requires_grad_(input_requires_grad)
    y = x.detach().clone().requires_grad_(input_requires_grad)
    out = deferred(nn.Sequential(norm), x, chunks)(x)
    expected = torch.cat([plain(part) for part in y.chunk(chunks)])
    assert torch.equal(out, expected)
    out.mean().backward()
    expected.mean().backward()
    torch.testing.assert_close(norm.weight.grad, plain.weight.grad)
    assert not input_requires_grad or torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_stats(momentum):
    """Differs: the variance is the unbiased one of the whole batch, as the plain layer keeps it."""
    norm = nn.BatchNorm2d(3, momentum=momentum)
    plain, x = copy.deepcopy(norm), tilted()
    deferred(nn.Sequential(norm), x)(x)
    plain(x)
    torch.testing.assert_close(norm.running_mean, plain.running_mean)
    torch.testing.assert_close(norm.running_var, plain.running_var)
    assert norm.num_batches_tracked == plain.num_batches_tracked == 1


def test_convert_deferred_batch_norm():
    """Differs: no module is converted: the layer stays the one it is. One without running statistics has none to defer."""
    x = tilted()
    norm, without = nn.BatchNorm2d(3), nn.BatchNorm2d(3, track_running_stats=False)
    assert deferred(nn.Sequential(norm), x).unsplit()[0] is norm and type(norm) is nn.BatchNorm2d
    with pytest.warns(UserWarning, match="normalised by the statistics of the batch"):
        deferred(nn.Sequential(without), x)


def test_eval():
    norm = nn.BatchNorm2d(3)
    plain, x = copy.deepcopy(norm), tilted()
    pipe = deferred(nn.Sequential(norm), x)
    plain(x)
    pipe(x)
    torch.testing.assert_close(pipe.eval()(x), plain.eval()(x))


def test_optimize():
    norm = nn.BatchNorm2d(3)
    plain = copy.deepcopy(norm)
    pipe = deferred(nn.Sequential(norm), tilted())
    mine, other = (torch.optim.SGD(m.parameters(), 1.0) for m in (norm, plain))
    for i in range(5):
        x = tilted(i)
        for model, optimizer in ((pipe.train(), mine), (plain.train(), other)):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        torch.testing.assert_close(norm.running_mean, plain.running_mean)
        torch.testing.assert_close(norm.running_var, plain.running_var)


def test_conv_bn():
    """Outputs are by micro-batch and so differ from the whole batch's; the first running statistics do not."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    plain, x = copy.deepcopy(model), tilted()
    out, expected = deferred(model, x)(x), plain(x)
    assert not torch.allclose(out, expected)
    torch.testing.assert_close(model[1].running_mean, plain[1].running_mean)
    torch.testing.assert_close(model[1].running_var, plain[1].running_var)


def test_input_requiring_grad():
    norm, x = nn.BatchNorm2d(3), tilted().requires_grad_()
    deferred(nn.Sequential(norm), x)(x)
    assert not norm.running_mean.requires_grad and norm.running_mean.grad_fn is None


def test_inplace_on_requires_grad():
    """Differs: right in one stage, where recomputation works on a copy; a cut before the write is refused by name.

    (torchgpipe takes the cut, and its backward is torch's error.)
    """
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(inplace=True))
    twin, x = copy.deepcopy(model), torch.rand(2, 1)
    with pytest.raises(ValueError, match="writes in place"):
        fxsplit.compile(model, Plan(balance=[1, 1], checkpoint="always"), example_args=(x,))
    fxsplit.compile(model, Plan(balance=[2], checkpoint="always"), example_args=(x,))(x).sum().backward()
    twin(x).sum().backward()
    assert torch.equal(model[0].weight.grad, twin[0].weight.grad)


def test_inplace_incorrect_grad():
    """Differs: right, where torchgpipe's own test expects to fail: an addition in place is not recomputed onto itself."""

    class M(nn.Module):
        def forward(self, pair):
            foo, bar = pair
            bar = bar * 1
            bar.add_(1)
            return foo * bar

    foo, bar = torch.ones(1, requires_grad=True), torch.ones(1)
    plan = Plan(stages=1, checkpoint="always")
    fxsplit.compile(nn.Sequential(M()), plan, example_args=((foo, bar),))((foo, bar)).backward()
    assert foo.grad.item() == 2 and bar.item() == 1


@pytest.mark.parametrize(
    ("costs", "stages", "blocks"), [([1, 2, 3, 4, 5, 6], 2, [4, 2]), ([6, 5, 4, 3, 2, 1], 2, [2, 4])]
)
def test_blockpartition(costs, stages, blocks):
    """The cut of a list of costs, by seconds of one's own. Differs: seconds that are all zero are refused."""
    model, x = nn.Sequential(*[nn.Linear(1, 1) for _ in costs]), torch.rand(2, 1)
    names = fxsplit.compile(model, Plan(stages=1), example_args=(x,)).assignment.stages[0]
    seconds = {name: float(cost) for name, cost in zip(names, costs, strict=True)}
    pipe = fxsplit.compile(model, Plan(stages=stages, cost=seconds), example_args=(x,))
    assert [sum(1 for _ in stage.named_parameters()) // 2 for stage in pipe.stages] == blocks


@pytest.mark.parametrize("partitions", [0, -1])
def test_blockpartition_non_positive_partitions(partitions):
    with pytest.raises(ValueError, match="stages"):
        Plan(stages=partitions)


def test_blockpartition_short_sequence():
    """Differs: more stages than there is to compute are an error that says how many there can be."""
    with pytest.raises(ValueError, match="1"):
        fxsplit.compile(nn.Sequential(nn.Linear(1, 1)), Plan(stages=2), example_args=(torch.rand(2, 1),))


@pytest.mark.parametrize(
    ("sizes", "blocks"), [([1, 2, 3, 4, 5, 6, 7], [4, 2]), ([7, 6, 5, 4, 3, 2, 1], [2, 4])]
)
def test_balance_by_size_param(sizes, blocks):
    model = nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])
    pipe = fxsplit.compile(model, Plan(stages=2, cost="params"), example_args=(torch.rand(7, sizes[0]),))
    assert [
        sum(name.endswith("weight") for name, _ in stage.named_parameters()) for stage in pipe.stages
    ] == blocks


@pytest.mark.parametrize("training", [True, False])
def test_sandbox_during_profiling(training):
    """Measuring changes no buffer, no mode and no gradient (where there are some already too, which torchgpipe refuses)."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).train(training)
    x = torch.rand(2, 3, 8, 8)
    model(x).norm().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters()]
    fxsplit.compile(model, Plan(stages=2, cost="time"), example_args=(x,))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
    assert all(module.training is training for module in model.modules())


def test_balance_by_time_tuple():
    class Twin(nn.Module):
        def forward(self, x):
            return x * 1, x.detach()

    class Add(nn.Module):
        def forward(self, pair):
            return pair[0] + pair[1]

    x = torch.rand(2, 1)
    pipe = fxsplit.compile(nn.Sequential(Twin(), Add()), Plan(stages=2, cost="time"), example_args=(x,))
    assert torch.equal(pipe(x), x + x)
