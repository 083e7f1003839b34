"""Hypothesis strategies: random small modules, plans and batches, over those that users have (`fxsplit.testing`)."""

import os
import warnings

import torch
from hypothesis import strategies as st

import fxsplit
from fxsplit.schedules.catalog import IN_V
from fxsplit.testing.plans import odd_seconds
from fxsplit.testing.programs import OPERATIONS, WIDTH, Program, Recipe

# Cases of each property. More: FXSPLIT_EXAMPLES=16000 pytest -k bit_equal tests, or python -m fxsplit.testing.fuzz
EXAMPLES = int(os.environ.get("FXSPLIT_EXAMPLES", "160"))


# Those whose numbers do not depend on the order of draws: the oracles of these tests are written without fxsplit.
PLAIN = sorted(set(OPERATIONS) - {"dropout", "f_dropout", "checkpointed", "autocast", "scaled", "twice"})


@st.composite
def modules(draw):
    step = st.tuples(st.sampled_from(PLAIN), st.integers(0, 30), st.integers(0, 30))
    steps = draw(st.lists(step, min_size=1, max_size=8))
    outputs = draw(st.lists(st.integers(0, 10), min_size=1, max_size=3))
    return Program(Recipe(tuple(steps), tuple(outputs), seed=draw(st.integers(0, 100))))


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
