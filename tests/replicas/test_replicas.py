"""Data parallelism: replicas of stages, against the whole batch and against accumulation over its parts."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import fxsplit
from fxsplit import Plan, errors
from fxsplit.batch.merge import sizes
from fxsplit.schedules.catalog import IN_V
from fxsplit.schedules.catalog import NAMES as SCHEDULES
from fxsplit.schedules.catalog import SHARED as SHARED_WORKERS
from tests.helpers import of_all, oracle
from tests.strategies import EXAMPLES, batches, compiled_with_fewer, modules


@st.composite
def replicated(draw):
    """Every schedule, with replicas for each stage where it has a worker for each."""
    schedule = draw(st.sampled_from(SCHEDULES))
    workers = draw(st.integers(1, 2 if schedule in IN_V else 3)) if schedule in SHARED_WORKERS else None
    stages = 2 * workers if schedule in IN_V else draw(st.integers(1, 4))
    one = st.integers(1, 3)
    each = (
        one if schedule in SHARED_WORKERS else st.one_of(one, st.lists(one, min_size=stages, max_size=stages))
    )
    return Plan(
        stages=stages,
        schedule=schedule,
        workers=workers,
        replicas=draw(each),
        micro_batches=draw(st.one_of(st.none(), st.integers(1, 6))),
        checkpoint=draw(st.sampled_from(["never", "always", "except_last"])),
        gather=draw(st.booleans()),
    )


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
@given(modules(), replicated(), st.integers(1, 2), st.data())
def test_replicas_are_bit_equal_to_accumulation(model, plan, inputs, data):
    assume(not model.recipe.has("view_add_"))
    args = tuple(x.detach() for x in data.draw(batches(inputs)))
    eager, twin = copy.deepcopy(model), copy.deepcopy(model)
    # With the loss inside: what accumulation adds up are the same weighed parts.
    inside = plan if plan.loss_inside else plan.replace(schedule="1f1b", workers=None)
    pipe = compiled_with_fewer(model, inside, args, check=False)
    try:
        oracle(eager, args, sizes(len(args[0]), pipe.plan.micro_batches), of_all)
    except (RuntimeError, ValueError):  # in-place writes destroy what backward needs, or a norm of one row
        assume(False)
    assume(any(p.grad is not None for p in eager.parameters()))
    pipe.step(*args, loss_fn=of_all, reduction="mean")
    for (name, a), b in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad), name
    for (name, a), b in zip(model.named_buffers(), eager.buffers(), strict=True):
        assert torch.equal(a, b), name
    # And a call, whatever comes of its output.
    pipe = compiled_with_fewer(twin, plan, args, check=False)
    fxsplit.testing.assert_equivalent(copy.deepcopy(twin), pipe, *args)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize(("rows", "replicas"), [(5, 2), (9, 4), (1, 4)])
@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(ignore_index=1),
        nn.CrossEntropyLoss(weight=torch.tensor([0.2, 3.0, 1.0, 0.5]).double()),
    ],
    ids=["mean", "sum", "ignore_index", "weight"],
)
def test_loss_and_gradients_are_those_of_the_whole_batch(rows, replicas, loss_fn, schedule):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x, target = torch.randn(rows, 6).double(), torch.randint(0, 4, (rows,))
    target[-1] = 0
    twin = copy.deepcopy(model)
    expected = loss_fn(twin(x), target)
    expected.backward()
    plan = Plan(stages=2, replicas=replicas, schedule=schedule)
    assert plan.micro_batches == replicas
    pipe = fxsplit.compile(model, plan, example_args=(torch.randn(8, 6).double(),))

    def same(loss):
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=1e-12)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)
        model.zero_grad()

    same(pipe.step(x, target=target, loss_fn=loss_fn))
    loss = loss_fn(pipe(x), target)
    loss.backward()
    same(loss)
    apart = fxsplit.compile(model, plan.replace(gather=False), example_args=(torch.randn(8, 6).double(),))
    loss = apart.criterion(loss_fn)(apart(x), target)
    loss.backward()
    same(loss)


def test_every_replica_works():
    """Micro-batch i of a stage runs on replica i mod r, and the default number of micro-batches gives all of them work."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    pipe = fxsplit.compile(model, Plan(stages=3, replicas=[2, 1, 3]), example_args=(torch.randn(12, 4),))
    assert len(pipe.micro_batches([torch.randn(12, 4)])[1]) == 6
    found = {
        label: {a.micro_batch for a in row}
        for label, row in zip(pipe.schedule.labels, pipe.schedule.workers, strict=True)
    }
    assert found == {
        (0, 0): {0, 2, 4},
        (0, 1): {1, 3, 5},
        (1, 0): {0, 1, 2, 3, 4, 5},
        (2, 0): {0, 3},
        (2, 1): {1, 4},
        (2, 2): {2, 5},
    }


def test_a_device_that_is_not_there_is_named_before_anything_has_changed():
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(errors.PlanError, match="stage 0 is placed on cuda:1, which is not there"):
        fxsplit.compile(model, Plan(devices=[["cpu", "cuda:1"]]), example_args=(torch.randn(4, 4),))
    assert model[0].weight.device.type == "cpu"


def test_rows_of_devices_are_saved_and_loaded(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    plan = Plan(stages=2, devices=[["cpu", "cpu"], ["cpu"]], gather=False)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    x = torch.randn(6, 4)
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    pipe.save_code(tmp_path / "split")
    again = fxsplit.load(tmp_path / "split", model)
    assert again.assignment.rows == pipe.assignment.rows and again.plan == plan
    assert torch.equal(again(x).gather(), pipe(x).gather())
    torch.testing.assert_close(F.relu(again(x).gather()), F.relu(model(x)))
