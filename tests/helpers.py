"""What tests of several rooms need: losses, the oracle of a step, scripts in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree

import fxsplit
from fxsplit.schedules.catalog import SHARED as SHARED_WORKERS
from fxsplit.schedules.catalog import usual_workers

ROOT = Path(__file__).parent.parent


class Pair(NamedTuple):
    """An argument or output that is a namedtuple."""

    left: torch.Tensor
    right: torch.Tensor


def ramp(t):
    """Gradients that are no two alike."""
    return torch.linspace(-1, 1, t.numel()).reshape(t.shape)


def of_all(output):
    """A loss that depends on every floating-point tensor of an output."""
    leaves = _pytree.tree_leaves(output)
    return sum(leaf.square().mean() for leaf in leaves if leaf.is_floating_point())


def compiled(model, args, **fields):
    return fxsplit.compile(model, fxsplit.Plan(**fields), example_args=args)


def run_python(script, *args, timeout=300, **variables):
    """What a script prints that runs in an interpreter of its own, at the root, with these environment variables."""
    command = [sys.executable, "-W", "ignore", "-c", script, *map(str, args)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


LOSS = {"loss_fn": F.cross_entropy}


class DropoutBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 8), nn.Linear(8, width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class TiedBlocks(nn.Module):
    """Six blocks; the weight of the first layer is used again in the last, which is another stage."""

    def __init__(self, width=4):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(DropoutBlock(width) for _ in range(6))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x + F.linear(x, self.first.weight.t()))


def plan_for(schedule, stages=4, **more):
    workers = usual_workers(schedule, stages) if schedule in SHARED_WORKERS else None
    return fxsplit.Plan(stages=stages, schedule=schedule, workers=workers, **more)


def oracle(model, args, rows, loss_fn):
    """The loss of micro-batch after micro-batch, with its backward, as an accumulating loop would do it."""
    total = start = 0
    for n in rows:
        loss = loss_fn(model(*(a[start : start + n] for a in args))) * (n / sum(rows))
        if loss.requires_grad:
            loss.backward()
        total, start = total + loss.detach(), start + n
    return total


def two_norms(momentum=0.1):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm1d(4, momentum=momentum), nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 3)
    ).double()


class TwoLayers(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=bias), nn.Linear(4, 4, bias=bias)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def two_layers_with(forward, **attributes):
    """A `TwoLayers` with another forward and some attributes."""
    model = type("Model", (TwoLayers,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def compiled_on_rows(model, *args, **fields):
    return fxsplit.compile(model, fxsplit.Plan(**fields), example_args=args or (torch.randn(6, 4),))


SIX_ROWS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Wide(nn.Module):
    """What crosses has a shape that nothing else has."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 37), nn.Linear(37, 4)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))
