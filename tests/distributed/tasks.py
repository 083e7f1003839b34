"""What ranks are told to do: each compares its part with a pipeline in its own process."""

import copy
import functools
import gc
import os
import pathlib
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import fxsplit
import fxsplit.distributed as fd
from fxsplit import Plan
from tests import models

RATE = {"lr": 0.01, "momentum": 0.9}


class Masked(nn.Module):
    """Every stage reads the mask; dropout, batch normalisation, None and a number over the cuts."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.2)

    def forward(self, x, mask):
        skip = x
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(x))) * mask
        return self.norm(x) + skip, x.sum(1)


def built(name):
    torch.manual_seed(0)
    if name == "masked":
        return Masked(), lambda n: (torch.randn(n, 8), (torch.rand(n, 8) > 0.3).float())
    return models.build(name)


def made(name):
    return built(name)[0]


def loss_of(name):
    if name == "masked":
        return lambda out, t: F.mse_loss(out[0], t) + out[1].square().mean() * 0.1
    return lambda out, t: torch.tanh(torch.utils._pytree.tree_leaves(out)[0]).square().mean()


def example(batch, rows, seed=1):
    torch.manual_seed(seed)
    args = batch(rows)
    return args if isinstance(args, tuple) else (args,)


def steps(pipe, opt, name, args, target, count):
    """Losses of some steps; from the same random numbers wherever it is called."""
    torch.manual_seed(7)
    losses = []
    for _ in range(count):
        losses.append(pipe.step(*args, target=target, loss_fn=loss_of(name), reduction="mean"))
        opt.step()
        opt.zero_grad()
    return losses


def equals_one_process(name, plan, pp=2, rows=7, count=4):
    """Losses, parameters, buffers and outputs are those of one process (which is proven elsewhere)."""
    mesh = fd.init(pp=pp)
    model, batch = built(name)
    args = example(batch, rows)
    target = args[0] if name == "masked" else torch.zeros(rows)
    alone = copy.deepcopy(model)
    one = fxsplit.compile(alone, plan, example_args=args, check=False)
    pipe = fd.compile(
        functools.partial(made, name), plan, mesh, example_args=args, weights=model.state_dict()
    )
    expected = steps(one, torch.optim.SGD(one.parameters(), **RATE), name, args, target, count)
    found = steps(pipe, torch.optim.SGD(pipe.parameters(), **RATE), name, args, target, count)
    assert all(map(torch.equal, found, expected)), (found, expected)
    whole = one.state_dict()
    for key, value in pipe.state_dict().items():
        assert torch.equal(value, whole[key]), key
    one.eval(), pipe.eval()
    with torch.no_grad():
        outputs = zip(*(torch.utils._pytree.tree_leaves(p(*args)) for p in (one, pipe)), strict=True)
    assert all(torch.equal(a, b) for a, b in outputs)
    pipe.close()
    return [pipe.rank_of, sorted(pipe.state_dict()), pipe._channel.sent]


def averages(name, plan, rows=8, count=3):
    """Two pipelines beside each other: gradients are the mean of both, buffers those of the first."""
    mesh = fd.init(pp=2, dp=2)
    replica = mesh["dp"].get_local_rank()
    model, batch = built(name)
    both = [example(batch, rows, seed) for seed in (1, 2)]
    pipe = fd.compile(
        functools.partial(made, name), plan, mesh, example_args=both[0], weights=model.state_dict()
    )
    ones = [fxsplit.compile(copy.deepcopy(model), plan, example_args=both[0]) for _ in both]
    target = torch.zeros(rows)
    opts = [torch.optim.SGD(p.parameters(), **RATE) for p in (*ones, pipe)]
    for n in range(count):
        losses = []
        buffers = dict(ones[0].named_buffers())
        for key, buffer in ones[1].named_buffers():
            buffer.copy_(buffers[key])
        for one, args, opt in zip(ones, both, opts, strict=False):
            torch.manual_seed(n)
            opt.zero_grad()
            mine = (args[0],) if name == "masked" else (target,)
            losses.append(one.step(*args, target=mine[0], loss_fn=loss_of(name), reduction="mean"))
        for a, b in zip(*(one.parameters() for one in ones), strict=True):
            a.grad = b.grad = (a.grad + b.grad) / 2
        torch.manual_seed(n)
        opts[2].zero_grad()
        mine = both[replica][0] if name == "masked" else target
        found = pipe.step(*both[replica], target=mine, loss_fn=loss_of(name), reduction="mean")
        assert torch.equal(found, sum(losses) / 2), (found, losses)
        for opt in opts:
            opt.step()
    whole = ones[replica].state_dict()
    for key, value in pipe.state_dict().items():
        assert torch.equal(value, whole[key]), key
    pipe.close()


class Initialized(nn.Module):
    """Its constructor initializes weights in its own ways; some are drawn twice, cut out, or made of others."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False)
        self.scale = nn.Parameter(torch.randn(8).abs() + 0.5)
        self.register_buffer("steps", 1.0 / 10 ** (torch.arange(0, 8) / 8), persistent=False)
        for k, layer in enumerate(self.layers):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.orthogonal_(layer.weight) if k == 1 else None
            with torch.no_grad():
                layer.bias[2:4] = k
        self.head.weight = self.layers[0].weight

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale * self.steps
        return self.head(self.norm(x))


def with_own_weights(plan):
    """Without weights=: what the constructor makes in one process; the generator is then where it is then."""
    mesh = fd.init(pp=2)
    x = torch.zeros(4, 8)
    torch.manual_seed(5)
    pipe = fd.compile(Initialized, plan, mesh, example_args=(x,))
    after = torch.rand(3)
    torch.manual_seed(5)
    model = Initialized()
    assert torch.equal(torch.rand(3), after)
    whole = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    found = {**dict(pipe.named_parameters(remove_duplicate=False)), **dict(pipe.named_buffers())}
    assert all(torch.equal(found[name], whole[name]) for name in found)
    pipe.close()
    return sorted(found)


def norms(plan):
    """The norm of all gradients, tied ones once; clipped."""
    mesh = fd.init(pp=2)
    model, batch = built("tied_head")
    args = example(batch, 6)
    one = fxsplit.compile(copy.deepcopy(model), plan, example_args=args)
    pipe = fd.compile(
        functools.partial(made, "tied_head"), plan, mesh, example_args=args, weights=model.state_dict()
    )
    for p in (one, pipe):
        p.step(*args, target=torch.zeros(6), loss_fn=loss_of(""), reduction="mean")
    expected = nn.utils.clip_grad_norm_(one.parameters(), 0.01)
    torch.testing.assert_close(pipe.clip_grad_norm_(0.01), expected)
    whole = dict(one.named_parameters())
    for name, p in pipe.named_parameters():
        torch.testing.assert_close(p.grad, whole[name].grad)
    pipe.close()


def happens(kind, file):
    """The fault."""
    pathlib.Path(file).write_text(str(time.time()))
    if kind == "raises":
        raise ZeroDivisionError("this went wrong")
    if kind == "exits":
        sys.exit(3)
    if kind == "hangs":
        time.sleep(30)
    else:
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[kind])


def meets_a_fault(kind, stage, micro_batch, phase, schedule, file, pp):
    """What a rank hears of it, and when."""
    mesh = fd.init(pp=pp, patience=4.0)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    plan = Plan(cut=[str(k) for k in range(1, pp)], micro_batches=3, schedule=schedule)
    pipe = fd.compile(
        lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(pp))), plan, mesh, example_args=(x,)
    )
    pipe.step(x, target=x, loss_fn=F.mse_loss)

    def after(event):
        if event.action[1:] == (stage, micro_batch) and event.action.kind in phase:
            happens(kind, file)

    pipe.register_action_hook(after)
    try:
        for _ in range(3):
            pipe.step(x, target=x, loss_fn=F.mse_loss)
    except BaseException as error:
        return type(error).__name__, str(error), time.time()
    return "no error", "", 0.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(17, 16), nn.Linear(16, 17)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        h = self.emb(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return self.head(h)


def cross_entropy(out, target):
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def trained(pipe, opt, rows=slice(None), count=3, seed=9, clip=None):
    """Losses of some steps on drawn batches, of which this replica has some rows."""
    torch.manual_seed(seed)
    losses = []
    for _ in range(count):
        x, y = torch.randint(0, 17, (12, 6)), torch.randint(0, 17, (12, 6))
        losses.append(pipe.step(x[rows], target=y[rows], loss_fn=cross_entropy, reduction="mean"))
        if clip is not None:
            losses.append(pipe.clip_grad_norm_(clip))
        opt.step()
        opt.zero_grad()
    return losses


class Eager:
    """The plain model with the face of a pipeline."""

    def __init__(self, model):
        self.model = model

    def step(self, x, target, loss_fn, reduction):
        loss = loss_fn(self.model(x), target)
        loss.backward()
        return loss.detach()

    def clip_grad_norm_(self, norm):
        return nn.utils.clip_grad_norm_(self.model.parameters(), norm)


def by_block(module, mesh):
    """Layers are units of their own."""
    fully_shard([m for m in module.modules() if isinstance(m, nn.Linear)], mesh=mesh)
    fully_shard(module, mesh=mesh)


def is_sharded(plan, folder, blocks=False):
    """FSDP2: ten steps of AdamW with clipping, as eager on the whole batch; saved and loaded."""
    mesh = fd.init(pp=2, dp=2)
    replica = mesh["dp"].get_local_rank()
    rows = slice(6 * replica, 6 * replica + 6)
    torch.manual_seed(0)
    model = Net()
    example = torch.zeros(6, 6, dtype=torch.long)
    how = {"parallelize": by_block if blocks else fully_shard}

    def made():
        pipe = fd.compile(Net, plan, mesh, example_args=(example,), weights=model.state_dict(), **how)
        return pipe, torch.optim.AdamW(pipe.parameters(), 1e-2)

    pipe, opt = made()
    alone = Eager(copy.deepcopy(model))
    other = torch.optim.AdamW(alone.model.parameters(), 1e-2)
    found = trained(pipe, opt, rows, 10, clip=1.0)
    expected = trained(alone, other, slice(None), 10, clip=1.0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    whole = alone.model.state_dict()
    for name, p in pipe.named_parameters():
        assert p.to_local().numel() < p.numel()
        torch.testing.assert_close(p.detach().full_tensor(), whole[name], rtol=0, atol=1e-6)
    fd.save(folder, pipe, opt, step=10)
    dist.barrier()
    more = trained(pipe, opt, rows, 2, seed=3)
    pipe.close()
    again, opt = made()
    assert fd.load(folder, again, opt) == 10
    assert all(map(torch.equal, trained(again, opt, rows, 2, seed=3), more))
    again.close()


def saves(folder, pp, dp, plan):
    """Trains, saves, trains on; gives what the further steps gave, and all weights."""
    mesh = fd.init(pp=pp, dp=dp)
    torch.manual_seed(0)
    weights = Net().state_dict()
    example = torch.zeros(6, 6, dtype=torch.long)
    pipe = fd.compile(Net, plan, mesh, example_args=(example,), weights=weights)
    opt = torch.optim.AdamW(pipe.parameters(), 1e-2)
    trained(pipe, opt)
    fd.save(folder, pipe, opt, step=3)
    losses = trained(pipe, opt, seed=5)
    found = {name: p.detach() for name, p in pipe.named_parameters()}
    pipe.close()
    return losses, found


def goes_on(folder, pp, dp, plan):
    """Loads and trains on."""
    mesh = fd.init(pp=pp, dp=dp)
    pipe = fd.compile(Net, plan, mesh, example_args=(torch.zeros(6, 6, dtype=torch.long),))
    opt = torch.optim.AdamW(pipe.parameters(), 1.0)
    assert fd.load(folder, pipe, opt) == 3
    losses = trained(pipe, opt, seed=5)
    found = {name: p.detach() for name, p in pipe.named_parameters()}
    pipe.close()
    return losses, found


def changes_between_steps(plan):
    """Other batches, frozen layers, no gradient of inputs: what travels is other things, and all is as in one process."""
    mesh = fd.init(pp=2)
    model, batch = built("masked")
    args = example(batch, 8)
    one = fxsplit.compile(copy.deepcopy(model), plan, example_args=args)
    pipe = fd.compile(
        functools.partial(made, "masked"), plan, mesh, example_args=args, weights=model.state_dict()
    )
    opts = [torch.optim.SGD(p.parameters(), **RATE) for p in (one, pipe)]
    for rows, frozen in ((8, 0), (6, 0), (8, 2), (8, 3), (7, 3), (8, 0), (8, 0)):
        found = []
        for p, opt in zip((one, pipe), opts, strict=True):
            for k, layer in enumerate(p.model.layers):
                layer.requires_grad_(k >= frozen)
            x, mask = example(batch, rows, rows)
            torch.manual_seed(rows)
            loss = loss_of("masked")
            found.append(p.step_with_output(x, mask, target=x, loss_fn=loss, reduction="mean"))
            opt.step()
            opt.zero_grad()
        (a, (y, sums)), (b, (z, others)) = found
        assert torch.equal(a, b) and torch.equal(y, z) and torch.equal(sums, others)
    whole = one.state_dict()
    assert all(torch.equal(v, whole[n]) for n, v in pipe.state_dict().items())
    pipe.close()


def differs(what):
    """One rank has something else."""
    rank = int(os.environ["RANK"])
    mesh = fd.init(pp=2)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    width = 5 if what == "model" and rank else 4
    plan = Plan(stages=2, micro_batches=4 if what == "plan" and rank else 2)
    try:
        pipe = fd.compile(
            lambda: nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4)), plan, mesh, example_args=(x,)
        )
        rows = 6 if what == "rows" and rank else 8
        torch.manual_seed(rank)
        pipe.step(x[:rows], target=x[:rows], loss_fn=F.mse_loss)
    except fxsplit.errors.RankError as error:
        return str(error)
    return "nothing"


def too_few_stages():
    """One stage for two ranks."""
    mesh = fd.init(pp=2)
    x = torch.randn(8, 4)
    try:
        fd.compile(lambda: nn.Linear(4, 4), Plan(), mesh, example_args=(x,))
    except fxsplit.errors.FxsplitError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def has_the_face_of_a_pipeline(folder):
    """What people ask of a pipeline is answered, or refused with a way out; the ranks go on together after it."""
    mesh = fd.init(pp=2)
    rank = mesh["pp"].get_local_rank()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

    def make():
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    pipe = fd.compile(make, Plan(cut=["2"], micro_batches=2), mesh, example_args=(x,))
    torch.manual_seed(1)
    other = make()
    loaded = pipe.load_weights(other.state_dict())
    assert loaded.tensors == 2
    expected = fxsplit.compile(copy.deepcopy(other), pipe.plan, example_args=(x,))
    refused = {}
    for name, ask in (
        ("recompile", pipe.recompile),
        ("in_place", pipe.in_place),
        ("deepcopy", lambda: copy.deepcopy(pipe)),
        ("verify_micro_batches", lambda: pipe.verify_micro_batches([x])),
        ("run_whole", lambda: pipe.run_whole([x])),
        ("load_weights", lambda: pipe.load_weights({"0.weight": torch.zeros(4, 4)})),
        ("call", lambda: pipe(x)),
    ):
        try:
            ask()
        except fxsplit.errors.FxsplitError as error:
            refused[name] = str(error)
    assert "numbers: not compared" in pipe.verify()
    pipe.save_code(os.path.join(folder, str(rank)))
    pipe.compile_stages(backend="eager")
    with pipe.timeline() as timeline:
        found = pipe.step(x, target=x, loss_fn=F.mse_loss)
    (step,) = timeline
    assert step.workers == (f"stage {rank}.0",) and {e.stage for e in step.events if e.kind == "forward"} == {
        rank
    }
    assert {"send", "receive"} <= {e.kind for e in step.events} and step.predicted is None and str(timeline)
    for suffix in ("html", "json"):
        timeline.save(os.path.join(folder, f"{rank}.{suffix}"))
    assert torch.equal(found, expected.step(x, target=x, loss_fn=F.mse_loss))
    said = pipe.report(), repr(pipe), pipe.staircase(), str(pipe.memory()), sorted(pipe.state_dict())
    pipe.close()
    return refused, said


def autocasts(plan):
    """Under autocast, as in one process."""
    mesh = fd.init(pp=2)
    model, batch = built("gpt")
    args = example(batch, 6)
    with torch.autocast("cpu", torch.bfloat16):
        one = fxsplit.compile(copy.deepcopy(model), plan, example_args=args)
        pipe = fd.compile(
            functools.partial(made, "gpt"), plan, mesh, example_args=args, weights=model.state_dict()
        )
        expected = steps(one, torch.optim.SGD(one.parameters(), **RATE), "gpt", args, torch.zeros(6), 4)
        found = steps(pipe, torch.optim.SGD(pipe.parameters(), **RATE), "gpt", args, torch.zeros(6), 4)
    assert all(map(torch.equal, found, expected)), (found, expected)
    whole = one.state_dict()
    assert all(torch.equal(v, whole[n]) for n, v in pipe.state_dict().items())
    pipe.close()


class Sometimes(nn.Module):
    """Some parameters have no gradient, in every stage."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.unused = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        for k, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if k % 2:
                x = x + self.unused[k // 2](x).detach()
        return x


def reduces_what_is_there(plan):
    """Over replicas: parameters without a gradient have none, also where another replica has fewer micro-batches."""
    mesh = fd.init(pp=2, dp=2)
    replica = mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    model = Sometimes()
    whole = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    mine = whole[:8] if replica == 0 else whole[8:10]
    pipe = fd.compile(Sometimes, plan, mesh, example_args=(whole[:8],), weights=model.state_dict())
    loss = pipe.step(mine, target=mine, loss_fn=F.mse_loss)
    losses = [F.mse_loss(model(x), x) for x in (whole[:8], whole[8:10])]
    ((losses[0] + losses[1]) / 2).backward()
    torch.testing.assert_close(loss, (losses[0] + losses[1]).detach() / 2)
    expected = dict(model.named_parameters())
    for name, p in pipe.named_parameters():
        if expected[name].grad is None:
            assert p.grad is None, name
        else:
            torch.testing.assert_close(p.grad, expected[name].grad)
    pipe.close()


def threads_of_many():
    """How many threads this process has after the first pipeline, and after some more."""
    found = []
    for _ in range(4):
        mesh = fd.init(pp=2)
        x = torch.zeros(4, 4)
        pipe = fd.compile(
            lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Plan(stages=2), mesh, example_args=(x,)
        )
        pipe.step(x, target=x, loss_fn=F.mse_loss)
        pipe.close()
        time.sleep(0.1)
        found.append(len(os.listdir("/proc/self/task")))
    return found


def many_steps(count):
    """Memory of this process after a third of the steps, and at the end, in bytes."""
    mesh = fd.init(pp=2)
    model, batch = built("masked")
    args = example(batch, 6)
    pipe = fd.compile(
        functools.partial(made, "masked"),
        Plan(stages=4, micro_batches=3, schedule="1f1b"),
        mesh,
        example_args=args,
        weights=model.state_dict(),
    )
    opt, found = torch.optim.SGD(pipe.parameters(), **RATE), []
    for n in (count // 3, count - count // 3):
        steps(pipe, opt, "masked", args, args[0], n)
        gc.collect()
        resident = pathlib.Path("/proc/self/statm").read_text().split()[1]
        found.append(int(resident) * os.sysconf("SC_PAGE_SIZE"))
    pipe.close()
    return found
