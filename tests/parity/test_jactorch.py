"""jactorch's replication callback and the synchronised normalisation that is built on it: tests/test_sync_batchnorm.py."""

import copy
import threading

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import Plan


class Exchange:
    """What the copies of one module share: each gives its sums, and gets those of all."""

    def __init__(self):
        self.copies, self.sums = 0, []
        self.lock, self.all_here = threading.Lock(), None

    def total(self, value):
        with self.lock:
            self.all_here = self.all_here or threading.Barrier(self.copies)
            self.sums.append(value)
        self.all_here.wait()
        total = sum(self.sums[-self.copies :])
        self.all_here.wait()
        return total


class SynchronizedBatchNorm1d(nn.BatchNorm1d):
    """Statistics over all copies, by the callback. In eval mode, or alone, what it is made from."""

    exchange = None

    def __data_parallel_replicate__(self, ctx, copy_id):
        if copy_id == 0:
            ctx.exchange = Exchange()
        self.exchange = ctx.exchange
        self.exchange.copies += 1

    def forward(self, x):
        if not self.training or self.exchange is None:
            return super().forward(x)
        ones = x.new_full((1,), x.shape[0])
        sums = self.exchange.total(torch.cat([ones, x.sum(0), x.square().sum(0)]))
        count, total, squares = sums[0], sums[1 : 1 + x.shape[1]], sums[1 + x.shape[1] :]
        mean = total / count
        var = squares / count - mean.square()
        return (x - mean) / (var + self.eps).sqrt()


def same(norm, synchronised, model, x, training):
    norm.train(training)
    model.train(training)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = synchronised(mine), norm(other)
    torch.testing.assert_close(out, expected)
    weights = torch.rand(out.shape, generator=torch.Generator().manual_seed(0))
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("training", [True, False])
def test_sync_batch_norm_normal(training):
    """`testSyncBatchNormNormalTrain`, `…Eval`: without copies it is the plain layer."""
    norm, model = nn.BatchNorm1d(10), nn.Sequential(SynchronizedBatchNorm1d(10))
    same(norm, model, model, torch.rand(16, 10), training)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_sync_batch_norm_sync(training, replicas):
    """`testSyncBatchNormSyncTrain`: copies that talk to each other normalise the whole batch, forward and backward."""
    norm = nn.BatchNorm1d(10, affine=False)
    model, x = nn.Sequential(SynchronizedBatchNorm1d(10, affine=False)), torch.rand(16, 10)
    pipe = fxsplit.compile(model, Plan(replicas=replicas), example_args=(x,))
    same(norm, pipe, pipe, x, training)


def test_callbacks():
    """The master first, one context a module, each copy told once, from one context to the copies of that module only."""
    told = []

    class Told(nn.Linear):
        def __data_parallel_replicate__(self, ctx, copy_id):
            told.append((self.out_features, copy_id, ctx))

    model, x = nn.Sequential(Told(4, 5), nn.ReLU(), Told(5, 6)), torch.rand(6, 4)
    pipe = fxsplit.compile(model, Plan(replicas=3), example_args=(x,))
    pipe(x)
    assert [row[1] for row in told if row[0] == 5] == [row[1] for row in told if row[0] == 6] == [0, 1, 2]
    contexts = {features: {id(ctx) for f, _, ctx in told if f == features} for features in (5, 6)}
    assert len(contexts[5]) == len(contexts[6]) == 1 and contexts[5] != contexts[6]


def test_patch_replication_callback():
    """Differs: nothing is patched; a module that is not yours is told by `fxsplit.on_replicate`."""
    told, model, x = [], nn.Sequential(nn.Linear(4, 4)), torch.rand(4, 4)
    fxsplit.on_replicate(model[0], lambda copy, ctx, copy_id: told.append((type(copy), copy_id)))
    fxsplit.compile(copy.copy(model), Plan(replicas=2), example_args=(x,))(x)
    assert told == [(nn.Linear, 0), (nn.Linear, 1)]
