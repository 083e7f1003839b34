"""Stages of torch.distributed.pipelining's training loop give what one process gives, or are refused by name."""

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import Plan
from fxsplit.distributed import bridge
from fxsplit.errors import ArgumentError
from tests.distributed import bridge_tasks as tasks

pytestmark = pytest.mark.slow
FOUR = Plan(stages=4, micro_batches=4, schedule="1f1b")
# One layer in the third stage reads what has no gradient: its own does not come by way of what came over the cut.
BESIDE = Plan(cut=["layers.1", "table", "layers.2"], micro_batches=4, schedule="1f1b")


@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleGPipe"])
@pytest.mark.parametrize("name", ["mlp", "gpt", "unet", "resnet", "skips"])
def test_of_one_stage_on_each_rank(two, name, schedule):
    two.run(tasks.equals_one_process, name, Plan(stages=2, micro_batches=4, schedule="1f1b"), schedule)


@pytest.mark.parametrize(
    "schedule",
    [
        "ScheduleInterleaved1F1B",
        "ScheduleInterleavedZeroBubble",
        "ScheduleZBVZeroBubble",
        "ScheduleDualPipeV",
    ],
)
@pytest.mark.parametrize(
    ("name", "plan"), [("gpt", FOUR), ("unet", FOUR), ("resnet", FOUR), ("skips", BESIDE)]
)
def test_of_several_stages_on_each_rank(two, name, plan, schedule):
    two.run(tasks.equals_one_process, name, plan, schedule)


def test_of_backwards_in_another_order(two):
    two.run(tasks.equals_one_process, "resnet", FOUR, "ScheduleLoopedBFS", exactly=False)


def test_of_a_number_of_micro_batches_that_rounds(two):
    plan = Plan(stages=2, micro_batches=3, schedule="1f1b")
    two.run(tasks.equals_one_process, "skips", plan, "1f1b", rows=9, exactly=False)


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_of_a_pipeline_over_ranks(two, name):
    plan = Plan(stages=4, micro_batches=4, schedule="interleaved_1f1b", workers=2)
    found = two.run(tasks.equals_one_process, name, plan, "Interleaved1F1B", over_ranks=True)
    model, _ = tasks.built(name)
    assert {key for _, keys in found for key in keys} == model.state_dict().keys()  # the model's FQNs


@pytest.mark.parametrize(
    ("name", "plan", "schedule", "said"),
    [
        ("tied_head", {}, "1f1b", "stages 0, 1 share embed.weight"),
        ("same", {"stages": 4}, "Interleaved1F1B", "stages 0, 2 share 0.weight"),
        ("frozen", {"stages": 4}, "InterleavedZeroBubble", "would give its parameters none"),
        ("two_tower", {}, "1f1b", "it gives dict"),
        ("mlp", {"micro_batches": 3}, "1f1b", "8 rows do not make 3 micro-batches"),
        ("mlp", {"checkpoint": "always"}, "1f1b", "nothing is computed again"),
        ("resnet", {"deferred_batch_norm": True}, "1f1b", "deferred_batch_norm= is not kept"),
        ("mlp", {"detect_anomaly": "nan"}, "1f1b", "detect_anomaly= is not kept"),
        ("mlp", {"replicas": [2, 1]}, "1f1b", "replicas= are not played"),
        ("matrix", {}, "1f1b", "w is not split"),
        ("scalar", {}, "1f1b", "no tensor with rows in dimension 0"),
        ("experts", {}, "1f1b", "are not known without values"),
        ("mlp", {"stages": 4}, "1f1b", "4 stages do not go on 2 ranks"),
        ("mlp", {"stages": 3}, "Interleaved1F1B", "3 stages do not go on 2 ranks"),
        ("mlp", {}, "1b1f", "is none of torch.distributed.pipelining's"),
    ],
)
def test_refused_by_name(two, name, plan, schedule, said):
    plan = Plan(**{"stages": 2, "micro_batches": 4, "schedule": "1f1b", **plan})
    for kind, message in two.run(tasks.refuses, name, plan, schedule):
        assert kind == "PlanError" and said in message and "instead: " in message, message


def test_stages_of_ranks_are_where_the_schedule_wants_them(two):
    found = two.run(tasks.refuses, "mlp", FOUR, "Interleaved1F1B", over_ranks=True)
    assert all("wants stages on ranks [0, 1, 0, 1]" in message for _, message in found)


def relay_of(model, rows=8):
    x = torch.randn(rows, 8)
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=4), example_args=(x,))
    known = bridge._sizes(pipe)
    first, second, _ = bridge._cuts(pipe.program, known)
    return pipe, bridge.Relay(pipe.stages[0], pipe, known, first, second), x


def test_what_buffers_were_not_made_for_is_refused():
    _, relay, x = relay_of(tasks.mlp()[0])
    assert [tuple(v.shape) for v in relay(x[:2])] == [(2, 8)]
    with pytest.raises(ArgumentError, match="batches as large as the example"):
        relay(x[:1])


def test_a_gradient_that_was_not_needed_before_is_refused():
    model = tasks.mlp()[0].requires_grad_(False)
    model[-2].requires_grad_(True)
    _, relay, x = relay_of(model)
    relay(x[:2])
    model.requires_grad_(True)
    with pytest.raises(ArgumentError, match="needs a gradient"):
        relay(x[:2])


def test_sizes_are_found_without_a_forward():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 8))
    before, state = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    pipe, relay, _ = relay_of(model)
    torch.set_rng_state(before)
    bridge._sizes(pipe)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert state.keys() >= relay.state_dict().keys() and not any(p.is_meta for p in model.parameters())
