"""encoding.parallel and encoding.nn's synchronised batch normalisation: tests/unit_test/test_module.py, on any device."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxsplit
from fxsplit import Plan


@pytest.mark.parametrize("training", [True, False])
def test_sync_bn(training):
    """`testSyncBN`: outputs, gradients and running statistics are those of one layer on the whole batch, in float64."""
    norm = nn.BatchNorm2d(10).double().train(training)
    model = nn.Sequential(copy.deepcopy(norm))
    x = torch.rand(16, 10, 8, 8, dtype=torch.float64)
    pipe = fxsplit.compile(model, Plan(replicas=2, sync_batch_norm=True), example_args=(x,))
    for _ in range(3):
        mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        out, expected = pipe(mine), norm(other)
        torch.testing.assert_close(out, expected)
        out.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(mine.grad, other.grad)
        for p, q in zip(model.parameters(), norm.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        for name, value in norm.state_dict().items():
            torch.testing.assert_close(model[0].state_dict()[name], value)


def test_abn():
    """`testABN`: normalisation and an activation in place in one module of one's own."""

    class NormAct(nn.BatchNorm2d):
        def forward(self, x):
            return F.leaky_relu_(super().forward(x), 0.01)

    norm = NormAct(10).double()
    model, x = nn.Sequential(copy.deepcopy(norm)), torch.rand(16, 10, 4, 4, dtype=torch.float64)
    out = fxsplit.compile(model, Plan(stages=1), example_args=(x,))(x)
    expected = norm(x)
    assert torch.equal(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    for p, q in zip(model.parameters(), norm.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_data_parallel_model(replicas):
    """`DataParallelModel` leaves outputs apart. Differs: of one type, a `Scattered`, whatever the number of replicas."""
    model, x = nn.Linear(4, 3), torch.rand(7, 4)
    out = fxsplit.compile(model, Plan(replicas=replicas, gather=False), example_args=(x,))(x)
    assert isinstance(out, fxsplit.Scattered) and len(out.parts) == replicas
    torch.testing.assert_close(out.gather(), model(x))


@pytest.mark.parametrize("rows", [5, 6])
def test_data_parallel_criterion(rows):
    """`DataParallelCriterion`. Differs: the loss is the whole batch's, also where the shares are uneven."""
    model, x, target = nn.Linear(4, 3), torch.rand(rows, 4), torch.arange(rows) % 3
    twin = copy.deepcopy(model)
    pipe = fxsplit.compile(model, Plan(replicas=2, gather=False), example_args=(x,))
    loss = pipe.criterion(nn.CrossEntropyLoss())(pipe(x), target)
    loss.backward()
    expected = F.cross_entropy(twin(x), target)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model.weight.grad, twin.weight.grad)
