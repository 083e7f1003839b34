"""Pipelines over ranks are pipelines in one process: losses, parameters and buffers, bit for bit."""

import pytest

from fxsplit import Plan, Schedule
from tests.distributed import tasks
from tests.distributed.ranks import Ranks
from tests.models import build

pytestmark = pytest.mark.slow
NAMES = ["gpt", "resnet", "unet", "tied_head", "two_tower", "masked"]
SCHEDULES = [
    {"schedule": "gpipe"},
    {"schedule": "1f1b"},
    {"schedule": "zb_h1"},
    {"schedule": "interleaved_1f1b", "workers": 2},
    {"schedule": "breadth_first", "workers": 2},
    {"schedule": "interleaved_zero_bubble", "workers": 2},
    {"schedule": "zb_v", "workers": 2},
    {"schedule": "dual_pipe_v", "workers": 2},
]


@pytest.mark.parametrize("name", NAMES)
def test_of_two_ranks(two, name):
    for schedule in SCHEDULES:
        two.run(tasks.equals_one_process, name, Plan(stages=4, micro_batches=3, **schedule))


@pytest.mark.parametrize("name", ["gpt", "resnet", "unet", "masked"])
def test_of_four_ranks(four, name):
    for schedule in SCHEDULES[:3]:
        found = four.run(tasks.equals_one_process, name, Plan(stages=4, micro_batches=3, **schedule), pp=4)
        assert len({tuple(keys) for _, keys, _ in found}) > 1  # each has its own


@pytest.mark.parametrize(
    "plan",
    [
        {"checkpoint": "always"},
        {"checkpoint": "except_last", "schedule": "gpipe"},
        {"deferred_batch_norm": True},
        {"micro_batches": 3},
    ],
    ids=str,
)
def test_of_other_plans(two, plan):
    two.run(
        tasks.equals_one_process,
        "masked",
        Plan(**{"stages": 3, "micro_batches": 2, "schedule": "1f1b", **plan}),
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_of_one_micro_batch(two, schedule):
    two.run(tasks.equals_one_process, "resnet", Plan(stages=2, schedule=schedule))


def test_a_schedule_of_the_users_own(two):
    text = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    two.run(
        tasks.equals_one_process, "masked", Plan(stages=2, micro_batches=2, schedule=Schedule.from_csv(text))
    )


@pytest.mark.parametrize("name", ["gpt", "resnet", "masked"])
def test_replicas_average_their_gradients(four, name):
    four.run(tasks.averages, name, Plan(stages=2, micro_batches=2, schedule="1f1b"))


def test_weights_are_those_that_the_constructor_makes(two):
    names = two.run(tasks.with_own_weights, Plan(stages=2))
    assert names[0] != names[1] and {*names[0], *names[1]} >= {
        "scale",
        "steps",
        "head.weight",
        "layers.2.bias",
    }


def test_the_norm_of_all_gradients(two):
    two.run(tasks.norms, Plan(stages=2, micro_batches=2))


def test_all_models_are_there():
    assert all(build(name) for name in NAMES if name != "masked")


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_what_travels_may_change_from_step_to_step(two, schedule):
    two.run(tasks.changes_between_steps, Plan(stages=4, micro_batches=3, schedule=schedule))


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("plan", ["plan", "micro_batches=4) on rank 1", "micro_batches=2) on rank 0"]),
        ("model", ["on rank 1", "on rank 0"]),
        ("rows", ["do not do the same", "(3, 4)", "(4, 4)"]),
    ],
)
def test_what_is_not_the_same_on_all_ranks_is_named_on_all(tmp_path, what, named):
    ranks = Ranks(2, tmp_path)
    try:
        errors = ranks.run(tasks.differs, what)
        ranks.close()
    finally:
        ranks.kill()
    assert errors[0].split("\n")[0] == errors[1].split("\n")[0]
    assert all(word in errors[0] for word in named), errors[0]


def test_more_ranks_than_stages(tmp_path):
    ranks = Ranks(2, tmp_path)
    try:
        (kind, text), _ = ranks.run(tasks.too_few_stages)
    finally:
        ranks.kill()
    assert kind == "PlanError" and "1 stages for 2 ranks" in text and "init(pp=1)" in text
