"""Hypothesis strategies: random small modules, plans and batches. Extend `OPERATIONS` with every new feature."""

import os
import warnings
import zlib

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

import fxsplit
from fxsplit.schedules.catalog import IN_V

WIDTH = 4
# Cases of each property; CI has some thousand in all. More of them: FXSPLIT_EXAMPLES=16000 pytest -k bit_equal tests
EXAMPLES = int(os.environ.get("FXSPLIT_EXAMPLES", "250"))


class Pack(nn.Module):
    """A submodule with a dict and a tuple as its output."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.lin(x)
        return {"a": y, "more": (y.sigmoid(), x)}


class Branchy(nn.Module):
    """Cannot be inlined: branches on the values of a tensor."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.lin(x) if x.sum() > 1e9 else self.lin(x) * 2


class Counter(nn.Module):
    """Writes a buffer in forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.calls.add_(1)
        self.mean.copy_(self.mean * 0.9 + x.detach().mean(0) * 0.1)
        return x - self.mean


OPERATIONS = {
    # name: (modules it makes, how it computes a list of values from the values so far)
    "linear": (lambda: nn.Linear(WIDTH, WIDTH), lambda m, shared, a, b: [m(a)]),
    "norm": (lambda: nn.LayerNorm(WIDTH), lambda m, shared, a, b: [m(a)]),
    "batchnorm": (lambda: nn.BatchNorm1d(WIDTH), lambda m, shared, a, b: [m(a)]),
    "shared": (None, lambda m, shared, a, b: [shared(a)]),
    "tied": (None, lambda m, shared, a, b: [F.linear(a, shared.weight.t())]),
    "add": (None, lambda m, shared, a, b: [a + b]),
    "mul": (None, lambda m, shared, a, b: [a * b.sigmoid()]),
    "gelu": (None, lambda m, shared, a, b: [F.gelu(a)]),
    "add_": (None, lambda m, shared, a, b: [a.add_(b)]),
    "inplace_relu": (lambda: nn.ReLU(inplace=True), lambda m, shared, a, b: [m(a)]),
    "view_add_": (None, lambda m, shared, a, b: [a.view(-1, 2).mul_(2).view(-1, WIDTH)]),
    "chunk": (None, lambda m, shared, a, b: [torch.cat(a.chunk(2, dim=1)[::-1], dim=1)]),
    "pack": (Pack, lambda m, shared, a, b: (lambda d: [d["a"] + d["more"][0], d["more"][1]])(m(a))),
    "counter": (Counter, lambda m, shared, a, b: [m(a)]),
    "branchy": (Branchy, lambda m, shared, a, b: [m(a)]),
    "no_grad_value": (None, lambda m, shared, a, b: [a.detach() + b]),
    "shape": (None, lambda m, shared, a, b: [a * (a.shape[1] - 3) + torch.ones(a.shape[0], 1) * b]),
    "iadd": (None, lambda m, shared, a, b: [_iadd(a * 1, b)]),
}


def _iadd(y, c):
    alias = y
    y += c
    return alias


class Random(nn.Module):
    """Plays a recipe: rows of (operation, index of the first operand, of the second), grouped in blocks."""

    def __init__(self, recipe, outputs):
        super().__init__()
        self.recipe, self.outputs = recipe, outputs
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.alias = nn.Linear(WIDTH, WIDTH, bias=False)
        self.alias.weight = self.shared.weight
        made = (OPERATIONS[name][0] for name, _, _ in recipe)
        self.steps = nn.ModuleList(nn.Identity() if make is None else make() for make in made)

    def forward(self, x, y=None):
        values = [x * 1.0] if y is None else [x * 1.0, y * 1.0]
        for module, (name, i, j) in zip(self.steps, self.recipe, strict=True):
            a, b = values[i % len(values)], values[j % len(values)]
            values += OPERATIONS[name][1](module, self.shared, a, b)
        values.append(self.alias(values[-1]))
        picked = [values[-1 - k % len(values)] for k in self.outputs]
        return picked[0] if len(picked) == 1 else {"first": picked[0], "rest": tuple(picked[1:])}


recipes = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 30), st.integers(0, 30)),
    min_size=1,
    max_size=8,
)


@st.composite
def modules(draw):
    recipe = draw(recipes)
    torch.manual_seed(draw(st.integers(0, 100)))
    return Random(tuple(recipe), draw(st.lists(st.integers(0, 10), min_size=1, max_size=3)))


def odd_seconds(node):
    """Seconds that follow from a node's name alone: a cost that no model has."""
    return float(zlib.crc32(node.name.encode()) % 7)


@st.composite
def plans(draw, micro_batches=None):
    return fxsplit.Plan(
        stages=draw(st.integers(1, 4)),
        micro_batches=micro_batches or draw(st.integers(1, 5)),
        checkpoint=draw(st.sampled_from(["never", "always", "except_last"])),
        replicas=draw(st.integers(1, 3)),
        gather=draw(st.booleans()),
    )


@st.composite
def weighed_plans(draw):
    """Plans whose cuts, and often the order of the program, follow from odd seconds and a slow link."""
    plan = draw(plans())
    if draw(st.booleans()):
        link = fxsplit.Device(link=draw(st.sampled_from([1.0, 30.0, 1000.0])))
        replicas = draw(st.sampled_from([plan.replicas, "auto"]))
        devices = ["cpu"] * draw(st.integers(plan.stages, 5)) if replicas == "auto" else None
        plan = plan.replace(cost=odd_seconds, hardware=link, replicas=replicas, devices=devices)
    return plan


@st.composite
def batches(draw, inputs, least=2):
    """Arguments of `Random`: rows × WIDTH, some of them requiring gradients."""
    rows = draw(st.integers(least, max(9, least + 3)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    return tuple(
        torch.randn(rows, WIDTH, generator=generator, requires_grad=draw(st.booleans()))
        for _ in range(inputs)
    )


def _narrower(plan):
    """A V of one worker less; one worker plays two stages at least."""
    if plan.workers == 1:
        return plan.replace(stages=1, schedule="zb_h1", workers=None)
    return plan.replace(stages=plan.stages - 2, workers=plan.workers - 1)


def compiled_with_fewer(model, plan, args, **options):
    """The plan may ask for more stages than there are units: then fewer."""
    while True:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*than for the whole batch")
                return fxsplit.compile(model, plan, example_args=args, **options)
        except fxsplit.errors.PartitionError:
            if plan.schedule in IN_V:
                plan = _narrower(plan)
                continue
            fewer = plan.stages - 1
            replicas = plan.replicas[:fewer] if isinstance(plan.replicas, tuple) else plan.replicas
            plan = plan.replace(stages=fewer, replicas=replicas)
