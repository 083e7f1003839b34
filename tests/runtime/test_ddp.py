"""DistributedDataParallel around a pipeline, over two gloo processes: the same as around the model."""

import copy
import datetime
import traceback

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, multiprocessing, nn

import fxsplit
from fxsplit import Plan, errors

pytestmark = [
    pytest.mark.slow,  # two processes
    pytest.mark.skipif(
        not distributed.is_available() or not distributed.is_gloo_available(), reason="torch without gloo"
    ),
]


# Two processes --------------------------------------------------------------------------------------------------------


class Pair:
    """Two processes that run functions of this file; made anew after one has failed."""

    def __init__(self, folder):
        self.folder, self.ends, self.processes, self.made = folder, [], [], 0

    def __call__(self, function, *args):
        """What ``function(rank, *args)`` gives in both."""
        if not self.processes:
            self.start()
        for end in self.ends:
            end.send((function, args))
        answers = [end.recv() if end.poll(120) else "no answer" for end in self.ends]
        failed = [answer for answer in answers if isinstance(answer, str)]
        if failed:
            self.close(kill=True)
        assert not failed, "\n".join(failed)
        return [answer for (answer,) in answers]

    def start(self):
        context = multiprocessing.get_context("spawn")
        self.made += 1
        for rank in range(2):
            here, there = context.Pipe()
            store = f"file://{self.folder}/store{self.made}"
            process = context.Process(target=serve, args=(rank, store, there), daemon=True)
            process.start()
            self.ends.append(here)
            self.processes.append(process)

    def close(self, kill=False):
        for end, process in zip(self.ends, self.processes, strict=True):
            process.kill() if kill else end.send(None)
            process.join()
            end.close()
        self.ends, self.processes = [], []


def serve(rank, store, end):
    """One process: what `Pair` asks for, until the end."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=120)
    )
    while (asked := end.recv()) is not None:
        function, args = asked
        try:
            end.send((function(rank, *args),))
        except BaseException:
            end.send(f"rank {rank}: {traceback.format_exc()}")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    found = Pair(tmp_path_factory.mktemp("ddp"))
    yield found
    found.close()


# Models and steps -----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A branch and a norm."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.a, self.norm, self.b, self.c = nn.Linear(4, 6), norm(6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = torch.relu(self.norm(self.a(x)))
        return self.c(h + torch.tanh(self.b(h)))


class Around(nn.Module):
    """Parameters before and after an inner model, of which some processes make no use."""

    def __init__(self, inner, skipped_by=()):
        super().__init__()
        self.stem, self.inner, self.head, self.skipped_by = (
            nn.Linear(4, 4).double(),
            inner,
            nn.Linear(3, 3).double(),
            skipped_by,
        )

    def forward(self, x):
        h = torch.tanh(self.stem(x))
        return self.head(h[:, :3] if distributed.get_rank() in self.skipped_by else self.inner(h))


def batch(rank, rows=8):
    made = torch.Generator().manual_seed(rank)
    return torch.randn(rows, 4, generator=made).double(), torch.randn(rows, 3, generator=made).double()


def net(rank, norm=nn.LayerNorm):
    """Other weights in each process: those of the first are broadcast."""
    torch.manual_seed(rank)
    return Net(norm).double()


def wrap(module, **options):
    return nn.parallel.DistributedDataParallel(module, **options)


def assert_same(model, twin):
    """Parameters, gradients and buffers."""
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12, msg=f"gradient of {name}")
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12, msg=name)
    for (name, b), c in zip(model.named_buffers(), twin.named_buffers(), strict=True):
        torch.testing.assert_close(b, c[1], rtol=1e-12, atol=1e-12, msg=name)


def assert_trains(rank, made, twin, ddp, other, loss_of=F.mse_loss, steps=3):
    """A few steps of the same optimizer. The weights then have seen what both processes have."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (made, twin)]
    for step in range(steps):
        x, target = batch(rank + 2 * step, rows=8 - rank)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(ddp(x), target).backward()
        F.mse_loss(other(x), target).backward()
        assert_same(made, twin)
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach().clone() for p in made.parameters()]


def trains(rank, fields, norm=nn.LayerNorm, **options):
    model = net(rank, norm)
    twin = copy.deepcopy(model)
    pipe = fxsplit.compile(model, Plan(**fields), example_args=(batch(0)[0],))
    loss_of = F.mse_loss if pipe.plan.gather else pipe.criterion(F.mse_loss)
    return assert_trains(rank, model, twin, wrap(pipe, **options), wrap(twin, **options), loss_of)


PLANS = {
    "stages": {"stages": 3},
    "always": {"stages": 2, "micro_batches": 4, "checkpoint": "always"},
    "except_last": {"stages": 2, "micro_batches": 3, "checkpoint": "except_last", "schedule": "1f1b"},
    "zb_h1": {"stages": 2, "micro_batches": 4, "schedule": "zb_h1"},
    "interleaved": {"stages": 3, "micro_batches": 4, "schedule": "interleaved_1f1b", "workers": 2},
    "replicas": {"stages": 2, "micro_batches": 4, "replicas": 2},
    "uneven replicas": {"stages": 2, "micro_batches": 4, "replicas": [2, 1], "checkpoint": "always"},
    "parts": {"stages": 2, "micro_batches": 3, "gather": False},
}


@pytest.mark.parametrize("name", PLANS)
def test_a_pipeline_trains_as_the_model_does(pair, name):
    mine, theirs = pair(trains, PLANS[name])
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def trains_with(rank, options, fields):
    return trains(rank, {"stages": 2, "micro_batches": 3, **fields}, **options)


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph", "gradient_as_bucket_view"])
def test_options_of_ddp(pair, option, gather):
    """Parts too: it has to find the tensors in a `Scattered`, or takes every parameter for unused."""
    pair(trains_with, {option: True}, {"gather": gather})


def norms(rank):
    """The running statistics of the first process are broadcast before each forward."""
    fields = {"stages": 2, "micro_batches": 4, "replicas": 2, "sync_batch_norm": True}
    trains(rank, fields, nn.BatchNorm1d)
    model = net(rank, nn.BatchNorm1d)
    ddp = wrap(fxsplit.compile(model, Plan(**fields), example_args=(batch(0)[0],)))
    ddp(batch(rank)[0])
    mine = model.norm.running_mean.clone()
    with torch.no_grad():
        ddp.eval()(batch(rank)[0])
    return mine, model.norm.running_mean.clone()


def test_buffers_are_broadcast(pair):
    (mine, after), (other, of_first) = pair(norms)
    assert not torch.equal(mine, other)
    assert torch.equal(after, mine) and torch.equal(of_first, mine)


# Parts of it ----------------------------------------------------------------------------------------------------------


def accumulates(rank):
    model = net(rank)
    twin = copy.deepcopy(model)
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=4), example_args=(batch(0)[0],))
    ddp, other = wrap(pipe), wrap(twin)
    found = []
    for _ in range(2):
        model.zero_grad()
        twin.zero_grad()
        for module in (ddp, other):
            with module.no_sync():
                for i in range(2):
                    x, target = batch(rank + 2 * i)
                    F.mse_loss(module(x), target).backward()
        assert_same(model, twin)
        found.append(model.a.weight.grad.clone())
        for module in (ddp, other):
            x, target = batch(rank + 4)
            F.mse_loss(module(x), target).backward()
        assert_same(model, twin)
        found.append(model.a.weight.grad.clone())
    return found


def test_no_sync(pair):
    mine, theirs = pair(accumulates)
    same = [torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)]
    assert same == [False, True, False, True]


def inside_of_a_larger_one(rank, options, skipped_by):
    inner = net(rank)
    pipe = fxsplit.compile(
        inner, Plan(stages=2, micro_batches=3, checkpoint="always"), example_args=(batch(0)[0],)
    )
    whole = Around(pipe, skipped_by)
    twin = Around(copy.deepcopy(inner), skipped_by)
    twin.stem, twin.head = copy.deepcopy(whole.stem), copy.deepcopy(whole.head)
    assert [n for n, _ in whole.named_parameters()] == [n for n, _ in twin.named_parameters()]
    return assert_trains(rank, whole, twin, wrap(whole, **options), wrap(twin, **options))


@pytest.mark.parametrize("skipped_by", [(), (1,), (0, 1)])
def test_a_pipeline_in_a_larger_module(pair, skipped_by):
    options = {"find_unused_parameters": bool(skipped_by)}
    mine, theirs = pair(inside_of_a_larger_one, options, skipped_by)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


class Two(nn.Module):
    """One output is not used by the loss, one module is not called, one weight is frozen."""

    def __init__(self):
        super().__init__()
        self.net, self.other, self.never = Net(), nn.Linear(4, 3), nn.Linear(2, 2)
        self.net.b.weight.requires_grad_(False)

    def forward(self, x):
        return {"used": self.net(x), "unused": self.other(x)}


def unused(rank):
    torch.manual_seed(rank)
    model = Two().double()
    twin = copy.deepcopy(model)
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=3), example_args=(batch(0)[0],))
    options = {"find_unused_parameters": True}
    for found in (wrap(pipe, **options), wrap(twin, **options)):
        for step in range(2):
            x, target = batch(rank + 2 * step)
            F.mse_loss(found(x)["used"], target).backward()
    assert model.never.weight.grad is None and model.other.weight.grad is None
    assert_same(model, twin)


def test_unused_parameters(pair):
    pair(unused)


# What goes past it ----------------------------------------------------------------------------------------------------


def steps(rank, schedule):
    model = net(rank)
    twin = copy.deepcopy(model)
    pipe = fxsplit.compile(
        model, Plan(stages=2, micro_batches=4, schedule=schedule), example_args=(batch(0)[0],)
    )
    x, target = batch(rank)
    pipe.step(x, target=target, loss_fn=F.mse_loss)  # nobody reduces: a process on its own
    ddp, other = wrap(pipe), wrap(twin)
    model.zero_grad()
    message = ""
    try:
        pipe.step(x, target=target, loss_fn=F.mse_loss)
    except errors.ArgumentError as error:
        message = str(error)
    assert all(p.grad is None for p in model.parameters())
    with ddp.no_sync():
        pipe.step(x, target=target, loss_fn=F.mse_loss)
    for p in model.parameters():
        distributed.all_reduce(p.grad)
        p.grad /= distributed.get_world_size()
    F.mse_loss(other(x), target).backward()
    assert_same(model, twin)
    del ddp, other
    pipe.step(x, target=target, loss_fn=F.mse_loss)  # no wrapper is left
    return message


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_step_that_would_not_be_reduced_is_refused(pair, schedule):
    for message in pair(steps, schedule):
        assert "would not reduce" in message and "loss_fn(ddp(x), target).backward()" in message


def wrapped_inside(rank):
    messages = []
    for model in (wrap(net(rank)), nn.Sequential(nn.Linear(4, 4).double(), wrap(net(rank)))):
        try:
            fxsplit.compile(model, Plan(stages=2), example_args=(batch(0)[0],))
        except errors.ModelError as error:
            messages.append(str(error))
    return messages


def test_ddp_inside_of_a_pipeline_is_refused(pair):
    """Its forward broadcasts buffers: from stages in threads in any order, which ends the process."""
    for whole, child in pair(wrapped_inside):
        assert "is a DistributedDataParallel" in whole and "has '1', which is" in child
        assert "wrap the pipeline" in whole
