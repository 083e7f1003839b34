"""What ranks are told to do with torch.distributed.pipelining."""

import copy
import functools

import torch
from torch import nn

import fxsplit
import fxsplit.distributed as fd
from fxsplit.errors import FxsplitError
from tests import models

NO_EVAL = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")  # eval() of these fails in torch 2.13
RATE = {"lr": 0.01, "momentum": 0.9}


class Skips(nn.Module):
    """A mask and numbers go past stages, as does an output that is made early; one layer reads the numbers alone."""

    def __init__(self, rate=0.0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.table = nn.Embedding(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.drop = nn.Dropout(rate)

    def forward(self, x, mask, classes):
        early = x = torch.tanh(self.layers[0](x))
        x = self.drop(torch.tanh(self.layers[1](x))) * mask
        beside = self.table(classes)
        x = torch.tanh(self.layers[2](x)) * self.scale.exp()
        x = self.layers[3](x.t().contiguous().t()).t()
        return self.layers[4](x.t()) * mask + beside + early, early


def rows_of_8(rows):
    return (torch.randn(rows, 8),)


def untied():
    model, batch = models.build("gpt")
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model, batch


def mlp():
    return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(8, 8), nn.Tanh()))), lambda n: (
        torch.randn(n, 8),
    )


def skips():
    return Skips(), lambda n: (torch.randn(n, 8), torch.rand(n, 8) > 0.3, torch.randint(8, (n,)))


def same():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model[2].weight = model[0].weight
    return model, rows_of_8


def frozen():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model[:2].requires_grad_(False)
    return model, rows_of_8


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(torch.tanh(self.layers(x))).square().mean()


class Matrix(Mean):
    def forward(self, x, w):
        return self.last(torch.tanh(self.layers(x)) @ w[:8])


MADE = {
    "matrix": lambda: (Matrix(), lambda rows: (torch.randn(rows, 8), torch.randn(16, 8))),
    "gpt": untied,
    "mlp": mlp,
    "skips": skips,
    "same": same,
    "frozen": frozen,
    "scalar": lambda: (Mean(), rows_of_8),
}


def built(name):
    torch.manual_seed(0)
    return MADE[name]() if name in MADE else models.build(name)


def loss_of(out, target):
    return sum(
        (o - target.view(-1, *[1] * (o.dim() - 1))).square().mean()
        for o in torch.utils._pytree.tree_leaves(out)
    )


def example(name, rows):
    model, batch = built(name)
    torch.manual_seed(1)
    return model, batch(rows)


def equals_one_process(name, plan, schedule, rows=8, count=3, over_ranks=False, exactly=True):
    """Losses, outputs, parameters and buffers are those of fxsplit in one process."""
    mesh = fd.init(pp=2)
    model, args = example(name, rows)
    target = torch.linspace(-1, 1, rows)
    one = fxsplit.compile(copy.deepcopy(model), plan, example_args=args)
    if over_ranks:
        make = functools.partial(lambda n: built(n)[0], name)
        pipe = fd.compile(make, plan, mesh, example_args=args, weights=model.state_dict())
    else:
        pipe = fxsplit.compile(copy.deepcopy(model), plan, example_args=args)
    stages, played = fd.torch_pipelining(pipe, mesh, schedule, loss_fn=loss_of)
    close = {"rtol": 0, "atol": 0} if exactly else {"rtol": 1e-4, "atol": 1e-6}
    opt = torch.optim.SGD([p for s in stages for p in s.submod.parameters()], **RATE)
    optim = torch.optim.SGD(one.parameters(), **RATE)
    first, last = any(s.is_first for s in stages), any(s.is_last for s in stages)
    for _ in range(count):
        opt.zero_grad(), optim.zero_grad()
        expected = one.step(*args, target=target, loss_fn=loss_of, reduction="mean")
        losses = []
        played.step(
            *(args if first else ()), target=target if last else None, losses=losses if last else None
        )
        if last:
            torch.testing.assert_close(torch.stack(losses).mean(), expected, rtol=1e-5, atol=1e-7)
        opt.step(), optim.step()
    whole, found, worst = one.state_dict(), {}, 0.0
    grads = dict(one.named_parameters())
    for stage in stages:
        found |= stage.submod.state_dict()
        for key, p in stage.submod.named_parameters():
            assert (p.grad is None) == (grads[key].grad is None), key
    for key, value in found.items():
        worst = max(worst, (value.double() - whole[key].double()).abs().max().item())
        torch.testing.assert_close(value, whole[key], **close, msg=lambda m, key=key: f"{key}: {m}")
    if played.__class__.__name__ not in NO_EVAL:
        same_in_eval(one, stages, played, args, target, close)
    if over_ranks:
        pipe.close()
    return worst, sorted(found)


def same_in_eval(one, stages, played, args, target, close):
    first, last = any(s.is_first for s in stages), any(s.is_last for s in stages)
    one.eval()
    for stage in stages:
        stage.submod.eval()
    with torch.no_grad():
        expected = one(*args)
        outputs = played.eval(*(args if first else ()), target=target if last else None)
    if last:
        torch.testing.assert_close(outputs, expected, **close)


def refuses(name, plan, schedule, over_ranks=False):
    """What it says."""
    mesh = fd.init(pp=2)
    model, args = example(name, 8)
    if over_ranks:
        pipe = fd.compile(functools.partial(lambda n: built(n)[0], name), plan, mesh, example_args=args)
    else:
        pipe = fxsplit.compile(model, plan, example_args=args)
    try:
        fd.torch_pipelining(pipe, mesh, schedule, loss_fn=loss_of)
    except FxsplitError as error:
        return type(error).__name__, str(error)
    finally:
        if over_ranks:
            pipe.close()
    return "no error", ""
