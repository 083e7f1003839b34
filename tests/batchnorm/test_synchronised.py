"""Batch normalisation by the statistics of the whole batch, across micro-batches and replicas."""

import contextlib
import copy
import sys
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxsplit
from fxsplit import Plan, errors
from fxsplit.batchnorm import synchronised as syncnorm
from fxsplit.replicas.meeting import Meetings, StoppedError

X = torch.randn(8, 4)


class Convs(nn.Module):
    """Layers one after the other, in a residual branch, without parameters, without statistics, and called twice."""

    def __init__(self):
        super().__init__()
        self.c1, self.n1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.c2, self.n2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, affine=False)
        self.n3 = nn.BatchNorm2d(4, track_running_stats=False, momentum=None)
        self.head, self.n4 = nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=0.3)

    def forward(self, x):
        h = torch.relu(self.n1(self.c1(x)))
        h = h + self.n3(F.avg_pool2d(self.n2(self.c2(h)), 3, 1, 1))
        return self.n4(self.n4(self.head(h.mean((2, 3)))) ** 2)


def made(seed=0):
    torch.manual_seed(seed)
    model = Convs().double()
    return model, torch.randn(7, 3, 5, 5).double(), torch.randn(7, 5).double()


def close(a, b, what):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last", ["n1", "c2", "n2"]])
@pytest.mark.parametrize(
    ("stages", "micro_batches", "replicas"), [(1, 3, 1), (2, 7, 1), (2, 4, [2, 1]), (3, 2, 2)]
)
def test_a_step_is_that_of_the_whole_batch(checkpoint, stages, micro_batches, replicas):
    model, x, t = made()
    twin = copy.deepcopy(model)
    plan = Plan(
        stages=stages,
        micro_batches=micro_batches,
        replicas=replicas,
        checkpoint=checkpoint,
        sync_batch_norm=True,
    )
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    rates = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin)]
    for step in range(3):
        xs = [x.clone().requires_grad_() for _ in range(2)]
        for rate in rates:
            rate.zero_grad()
        expected = F.mse_loss(twin(xs[1]), t)
        expected.backward()
        if step == 1:
            found = pipe.step(xs[0], target=t, loss_fn=F.mse_loss)
        else:
            found = F.mse_loss(pipe(xs[0]), t)
            found.backward()
        close(found.detach(), expected.detach(), "loss")
        close(xs[0].grad, xs[1].grad, "input")
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            close(p.grad, q.grad, name)
        for (name, b), c in zip(model.named_buffers(), twin.buffers(), strict=True):
            close(b, c, name)
        for rate in rates:
            rate.step()
    with torch.no_grad():
        close(pipe(x), twin(x), "training without gradients")
    model.eval(), twin.eval()
    close(pipe(x), twin(x), "eval")


def test_fewer_rows_than_micro_batches_and_backward_twice():
    model, x, t = made()
    twin = copy.deepcopy(model)
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=4, sync_batch_norm=True), example_args=(x,))
    for rows in (3, 2):
        close(pipe(x[:rows]), twin(x[:rows]), rows)
    loss, expected = (F.mse_loss(m(x), t) for m in (pipe, twin))
    for _ in range(2):
        loss.backward(retain_graph=True), expected.backward(retain_graph=True)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        close(p.grad, q.grad, "twice")


class Fails(nn.Module):
    def forward(self, x):
        if bool((x == 77).any()):
            raise ValueError("mine")
        return x


def test_a_micro_batch_that_fails_does_not_keep_the_others_waiting():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Fails(), nn.BatchNorm1d(4), nn.Linear(4, 2))
    x = torch.randn(8, 4)
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=4, sync_batch_norm=True), example_args=(x,))
    first = fxsplit.compile(
        nn.Sequential(Fails(), nn.BatchNorm1d(4)),
        Plan(micro_batches=4, sync_batch_norm=True),
        example_args=(x,),
    )
    before = pipe(x)
    state = {name: b.clone() for name, b in first.named_buffers()}
    x[5, 1] = 77
    with pytest.raises(ValueError, match="mine") as caught:
        first(x)
    assert "micro-batch 2 of 4" in caught.value.__notes__[-1]
    assert not [t for t in threading.enumerate() if t.name.startswith("fxsplit")]
    assert all(torch.equal(b, state[name]) for name, b in first.named_buffers())
    x[5, 1] = 0.5
    torch.testing.assert_close(first(x), copy.deepcopy(first.unsplit())(x))
    assert before.shape == (8, 2)


def test_half_precision_and_autocast():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    x = torch.randn(8, 4)
    pipe = fxsplit.compile(model, Plan(micro_batches=4, sync_batch_norm=True), example_args=(x,))
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = pipe(x), twin(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_what_would_not_be_right_is_refused():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen.add_(x.detach().sum())
            return self.norm(x)

    x = torch.randn(4, 4)
    with pytest.raises(errors.PlanError, match="writes to 'seen', but its micro-batches meet"):
        fxsplit.compile(Counts(), Plan(micro_batches=2, sync_batch_norm=True), example_args=(x,))


def test_stages_without_such_layers_go_their_own_way():
    """Each stage that normalises has a worker for each micro-batch; the others keep their schedule."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 2))
    plan = Plan(cut=["2", "3"], micro_batches=4, sync_batch_norm=True)
    pipe = fxsplit.compile(model, plan, example_args=(torch.randn(8, 4),))
    assert list(pipe.schedule.labels) == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0)]


def test_in_eval_nobody_waits_for_anybody():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    x = torch.randn(8, 4)
    pipe = fxsplit.compile(model, Plan(micro_batches=4, sync_batch_norm=True), example_args=(x,))
    assert len(pipe.schedule.workers) == 4
    pipe.eval()
    assert len(pipe.schedule.workers) == 1
    with torch.overrides.BaseTorchFunctionMode():
        torch.testing.assert_close(pipe(x), model(x))


def test_gradients_do_not_depend_on_who_comes_last():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32)]
    model = nn.Sequential(*layers, nn.Linear(32, 2))
    x, t = torch.randn(64, 16), torch.randn(64, 2)
    pipe = fxsplit.compile(model, Plan(micro_batches=8, sync_batch_norm=True), example_args=(x,))
    seen = set()
    for _ in range(40):
        model.zero_grad()
        F.mse_loss(pipe(x), t).backward()
        seen.add(tuple(p.grad.numpy().tobytes() for p in model.parameters()))
    assert len(seen) == 1


def test_a_merge_that_fails_stops_the_others(monkeypatch):
    def fails(terms):
        raise ValueError("mine")

    pipe = fxsplit.compile(
        nn.Sequential(nn.BatchNorm1d(4)), Plan(micro_batches=4, sync_batch_norm=True), example_args=(X,)
    )
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="mine"):
        patch.setattr(syncnorm, "_sum", fails)
        pipe(X)
    assert not [t for t in threading.enumerate() if t.name.startswith("fxsplit")]


def test_of_those_who_meet_all_get_in_or_none():
    """However a stop falls in with the last one's coming: one that got in alone would wait for the others for ever."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    mixed = 0
    try:
        for _ in range(800):
            meetings, entered = Meetings(), []

            def enter(i, meetings=meetings, entered=entered):
                with contextlib.suppress(StoppedError):
                    meetings.enter((0, 1, 2))
                    entered.append(i)

            threads = [threading.Thread(target=enter, args=(i,)) for i in range(3)]
            threads.append(threading.Thread(target=meetings.close))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            mixed += len(entered) not in (0, 3)
    finally:
        sys.setswitchinterval(interval)
    assert not mixed


class Late(nn.Module):
    """The micro-batch with a 7 in it comes last, or first to none."""

    def forward(self, x):
        if bool((x == 7).any()):
            time.sleep(0.05)
        return x


class Twice(nn.Module):
    """A cumulative average, called twice."""

    def __init__(self):
        super().__init__()
        self.late, self.norm, self.once = Late(), nn.BatchNorm1d(4, momentum=None), nn.BatchNorm1d(4)

    def forward(self, x):
        x = self.late(x)
        return self.norm(x) + self.norm(x * x) + self.once(x)


@pytest.mark.slow
@pytest.mark.parametrize("row", [0, 2, 7])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("way", ["sync", "deferred", "deferred, in turn"])
def test_a_cumulative_average(way, checkpoint, row):
    """Counts once for each call of the layer in a forward, whichever micro-batch comes first."""
    torch.manual_seed(0)
    model, x = Twice().double(), torch.randn(8, 4).double()
    x[row, 0] = 7
    twin = copy.deepcopy(model)
    if way == "deferred":
        fxsplit.on_replicate(model.late, lambda module, ctx, copy_id: None)
    plan = (
        Plan(replicas=4, sync_batch_norm=True)
        if way == "sync"
        else Plan(replicas=4, deferred_batch_norm=True)
    )
    pipe = fxsplit.compile(model, plan.replace(checkpoint=checkpoint), example_args=(x,))
    for _ in range(3):
        found, expected = pipe(x), twin(x)
        found.sum().backward(), expected.sum().backward()
        for (name, b), c in zip(model.named_buffers(), twin.named_buffers(), strict=True):
            close(b, c[1], name)
    assert model.norm.num_batches_tracked == 6 and model.once.num_batches_tracked == 3
    if way == "sync":
        close(found, expected, "output")


class Branch(nn.Module):
    """Takes one of two ways, by what is in the data."""

    def __init__(self, positive, negative):
        super().__init__()
        self.ways = nn.ModuleList([positive, negative])

    def forward(self, x):
        return self.ways[0 if bool(x[0, 0] > 0) else 1](x)


def unequal(positive, negative, micro_batches=4):
    x = torch.randn(8, 4).abs()
    x[4:, 0] *= -1
    model = nn.Sequential(Branch(positive, negative), nn.Linear(4, 2))
    plan = Plan(micro_batches=micro_batches, sync_batch_norm=True)
    return fxsplit.compile(model, plan, example_args=(x,), check=False), x


@pytest.mark.filterwarnings("ignore:.*than for the whole batch")
@pytest.mark.parametrize("swapped", [False, True])
def test_micro_batches_that_normalise_unequally_often(swapped):
    both = nn.BatchNorm1d(4)
    ways = [nn.Sequential(both, nn.BatchNorm1d(4)), both]
    pipe, x = unequal(*(reversed(ways) if swapped else ways))
    with pytest.raises(
        errors.ModelError, match=r"stage 0 .* comes to the layers 2 times or more, .* 1 times"
    ):
        pipe(x)
    assert not [t for t in threading.enumerate() if t.name.startswith("fxsplit")]
    assert pipe(x.abs()).shape == pipe(-x.abs()).shape == (8, 2)


@pytest.mark.filterwarnings("ignore:.*than for the whole batch")
@pytest.mark.parametrize(
    ("other", "what"),
    [
        (nn.BatchNorm1d(4, affine=False), "4 with eps"),
        (nn.BatchNorm1d(4, track_running_stats=False), "4 with eps"),
        (nn.BatchNorm1d(4, eps=0.25), "eps=0.25"),
        (nn.Sequential(nn.Unflatten(1, (2, 2)), nn.BatchNorm1d(2), nn.Flatten()), "2 with eps"),
    ],
)
def test_micro_batches_that_meet_in_different_layers(other, what):
    for layer in (nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False)):
        pipe, x = unequal(layer, other)
        with pytest.raises(
            errors.ModelError, match=f"micro-batches 0 and 2 of stage 0 meet in different .*{what}"
        ):
            pipe(x)
        pipe(x.abs())


@pytest.mark.filterwarnings("ignore:.*than for the whole batch")
def test_what_is_computed_anew_is_no_other_layer():
    class Computed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4))

        def forward(self, x):
            assert bool(x[0, 0] == x[0, 0])
            mean, variance = x.new_zeros(4), x.new_ones(4)
            return F.batch_norm(x, mean, variance, self.weight * 2, training=True)

    model, plan = nn.Sequential(Computed()), Plan(micro_batches=4, sync_batch_norm=True)
    pipe = fxsplit.compile(model, plan, example_args=(X,), check=False)
    torch.testing.assert_close(pipe(X), model(X))


class Mean(nn.Module):
    """Writes to a buffer that is called like a layer's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(4))

    def forward(self, x):
        self.running_mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.running_mean


class Own(nn.BatchNorm1d):
    def forward(self, x):
        self.running_mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return super().forward(x)


@pytest.mark.parametrize("way", ["sync_batch_norm", "deferred_batch_norm"])
@pytest.mark.parametrize(
    "layer",
    [Mean(), Own(4), nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True))],
)
def test_what_is_only_called_like_a_running_statistic_is_refused(layer, way):
    model = nn.Sequential(nn.Identity(), layer, nn.Flatten(), nn.BatchNorm1d(4))
    fxsplit.on_replicate(model[0], lambda module, ctx, copy_id: None)
    with pytest.raises(
        errors.PlanError, match=r"writes to '1\.(1\.)?running_mean', but its micro-batches meet"
    ):
        fxsplit.compile(model, Plan(replicas=2, **{way: True}), example_args=(X,), check=False)


def test_a_layer_of_the_users_that_leaves_its_forward_as_it_is():
    class Named(nn.BatchNorm1d):
        pass

    model = nn.Sequential(Named(4))
    pipe = fxsplit.compile(model, Plan(micro_batches=4, sync_batch_norm=True), example_args=(X,))
    torch.testing.assert_close(pipe(X), model(X))
