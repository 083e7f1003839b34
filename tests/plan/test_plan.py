"""`Plan`: validated on construction, equal by value, round-trips through a dict and a file."""

import copy
import pickle

import pytest
import torch
from hypothesis import given

import fxsplit
from fxsplit.errors import PlanError
from tests.strategies import plans


@given(plans())
def test_round_trip(plan):
    assert fxsplit.Plan.from_dict(plan.to_dict()) == plan


def test_round_trip_through_a_file(tmp_path):
    for plan in (
        fxsplit.Plan(),
        fxsplit.Plan(cut=["h.1", "h.2"], devices=["cpu", "cuda:0", torch.device("cuda", 1)], micro_batches=8),
        fxsplit.Plan(device_map={"": "cpu", "head": ("cuda:0", "cpu")}, batch_dims={"mask": None}),
        fxsplit.Plan(balance=[1, 2], checkpoint="always", replicas=2, gather=False),
    ):
        plan.save(tmp_path / "plan.json")
        assert fxsplit.Plan.load(tmp_path / "plan.json") == plan
        assert eval(repr(plan), {"Plan": fxsplit.Plan}) == plan


def by_name(path, module):
    return path == "a"


def seconds(node):
    return float(node.flops)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"checkpoint": "always", "cost": "roofline", "hardware": "A100-80GB"},
        {"checkpoint": ["a", "b"], "cost": {"a": 1.0}},
        {"checkpoint": by_name, "cost": seconds},
        {"checkpoint": fxsplit.Budget("1MB")},
    ],
)
def test_a_plan_goes_to_other_processes(fields):
    plan = fxsplit.Plan(stages=2, **fields)
    for again in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan), plan.replace()):
        assert again == plan and repr(again) == repr(plan)
        for name, value in fields.items():
            chosen = getattr(again, name)
            if name in ("checkpoint", "cost"):
                assert chosen == value and (isinstance(value, dict | list) or hash(chosen) == hash(value))


def test_a_file_that_is_no_plan(tmp_path):
    path = tmp_path / "plan.json"
    for text in ("{", "[1]", '{"stage": 2}'):
        path.write_text(text)
        with pytest.raises(PlanError):
            fxsplit.Plan.load(path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stages": 0}, ["stages=0", "1 or more"]),
        ({"stages": True}, ["stages=True"]),
        ({"stages": 2, "balance": [1, 1]}, ["stages=", "balance=", "keep one"]),
        ({"cut": ["a"], "device_map": {"": "cpu"}}, ["cut=", "device_map="]),
        ({"balance": [1, 0]}, ["balance[1]=0"]),
        ({"balance": 3}, ["balance=3", "[2, 2]"]),
        ({"cut": "h.1"}, ["cut='h.1'", "list"]),
        ({"cut": ["h.1", "h.1"]}, ["'h.1' twice"]),
        ({"device_map": {}}, ["device_map"]),
        ({"device_map": {"a": "gpu7"}}, ["device_map['a']", "gpu7"]),
        ({"device_map": {"a": ["cpu"]}}, ["device_map['a']", "pair"]),
        ({"device_map": {"": "cpu"}, "devices": "cpu"}, ["device_map=", "devices="]),
        ({"stages": 3, "devices": ["cpu", "cpu"]}, ["stages=", "3", "devices=", "2"]),
        ({"balance": [1, 1], "devices": ["cpu"]}, ["balance=", "devices="]),
        ({"devices": "nonsense"}, ["devices", "nonsense"]),
        ({"devices": [["cpu"], ["cpu"]]}, ["asks for 1 stages", "devices= lists 2"]),
        ({"devices": [["cpu", "cpu"]], "replicas": 3}, ["devices[0]= is a row of 2", "replicas= says 3"]),
        ({"devices": [["cpu"], []], "stages": 2}, ["devices[1] is an empty row"]),
        ({"devices": [["cpu"]], "replicas": "auto"}, ["devices= has rows"]),
        ({"devices": ["cuda:0", "cuda:1"], "replicas": 2}, ["devices=[['cuda:0', 'cuda:1']]"]),
        ({"sync_batch_norm": 1}, ["sync_batch_norm=1"]),
        (
            {"sync_batch_norm": True, "deferred_batch_norm": True},
            ["sync_batch_norm=", "deferred_batch_norm="],
        ),
        ({"sync_batch_norm": True, "schedule": "1f1b"}, ["sync_batch_norm=", "'1f1b'"]),
        ({"cost": "parms"}, ["cost='parms'", "'params'"]),
        ({"cost": {"a": -1.0}}, ["cost['a']=-1.0"]),
        ({"cost": 3}, ["cost=3", "roofline"]),
        ({"cost": "roofline"}, ["hardware="]),
        ({"hardware": "A100"}, ["A100-80GB"]),
        ({"hardware": ["T4", "T4"], "stages": 3}, ["hardware= lists 2"]),
        ({"hardware": 3}, ["hardware=3"]),
        ({"optimizer_states": -1}, ["optimizer_states=-1"]),
        ({"effort": "serch"}, ["did you mean 'search'"]),
        ({"replicas": "auto"}, ["devices="]),
        ({"replicas": "auto", "devices": ["cpu"], "cut": ["a"]}, ["cut="]),
        ({"replicas": "auto", "devices": ["cpu"], "stages": 2}, ["list more devices"]),
        ({"replicas": [1, 0]}, ["replicas[1]=0"]),
        ({"replicas": [1, 2], "stages": 3}, ["replicas= lists 2"]),
        ({"schedule": "gpip"}, ["did you mean 'gpipe'"]),
        ({"checkpoint": True}, ["checkpoint=True", "always"]),
        ({"micro_batches": 0}, ["micro_batches=0"]),
        ({"gather": None}, ["gather=None", "gather=False"]),
        ({"replicas": -1}, ["replicas=-1"]),
        ({"batch_dims": {"x": -1}}, ["batch_dims"]),
    ],
)
def test_a_wrong_field_says_what_and_what_to_type(fields, said):
    with pytest.raises(PlanError) as caught:
        fxsplit.Plan(**fields)
    text = str(caught.value)
    assert all(part in text for part in said), text
    assert "instead:" in text
    assert isinstance(caught.value, ValueError)


def test_replace():
    plan = fxsplit.Plan(stages=2, micro_batches=4)
    assert plan.replace(stages=3) == fxsplit.Plan(stages=3, micro_batches=4)
    with pytest.raises(PlanError, match="did you mean 'stages'"):
        plan.replace(stage=3)


def test_a_plan_that_is_placed_keeps_its_replicas():
    plan = fxsplit.Plan(stages=2, replicas=2, cost="flops")
    assert plan.placed({"": "cpu"}) == fxsplit.Plan(device_map={"": "cpu"}, replicas=2)
    assert fxsplit.Plan(stages=2, replicas=[2, 1]).placed({"": "cpu"}).replicas == 1  # those of other stages


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, 1),
        ({"replicas": 3}, 3),
        ({"replicas": [2, 1, 3], "stages": 3}, 6),  # all replicas of a stage get equally many
        ({"replicas": 2, "micro_batches": 5}, 5),
        ({"replicas": "auto", "devices": ["cpu"] * 4}, 4),
        ({"devices": [["cpu", "cpu"], "cpu"], "stages": 2}, 2),
    ],
)
def test_there_are_enough_micro_batches_for_the_replicas(fields, count):
    plan = fxsplit.Plan(**fields)
    assert plan.micro_batches == count
    assert fxsplit.Plan.from_dict(plan.to_dict()) == plan
    assert eval(repr(plan), {"Plan": fxsplit.Plan}) == plan


def test_micro_batches_by_default_follow_the_replicas():
    assert fxsplit.Plan(replicas=2).replace(replicas=4).micro_batches == 4
    assert fxsplit.Plan(micro_batches=6).replace(replicas=4).micro_batches == 6
    assert fxsplit.Plan(devices=[["cpu", "cpu"], ["cpu"]], stages=2).replicas == (2, 1)


def test_other_rows_of_devices_are_counted_anew():
    plan = fxsplit.Plan(devices=[["cpu", "cpu"]])
    assert plan.replace(devices=[["cpu"] * 3]).replicas == (3,)
    assert plan.replace(devices="cpu").replicas == (2,)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"schedule": "interleaved_1f1b", "stages": 4}, "workers= is not set"),
        ({"schedule": "1f1b", "stages": 4, "workers": 2}, "a worker for each stage"),
        ({"schedule": 5}, "is no schedule"),
        ({"schedule": "pipedream"}, "is not known"),
        ({"schedule": "OWN", "stages": 3, "micro_batches": 2}, "asks for 3 stages, but schedule= plays 2"),
        ({"schedule": "OWN", "stages": 2, "micro_batches": 3}, "micro_batches=3, but schedule= plays 2"),
        ({"schedule": "OWN", "stages": 2, "micro_batches": 2, "replicas": 2}, "lists its own workers"),
        ({"schedule": "OWN", "stages": 2, "micro_batches": 2, "workers": 2}, "lists its own workers"),
        ({"detect_anomaly": "all"}, "detect_anomaly='all' is not known"),
        ({"deferred_batch_norm": 1}, "is not True or False"),
    ],
)
def test_what_a_plan_cannot_mean(fields, said):
    own = fxsplit.Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    with pytest.raises(fxsplit.errors.PlanError, match=said):
        fxsplit.Plan(**{k: own if v == "OWN" else v for k, v in fields.items()})


def test_devices_of_workers_are_those_of_their_stages():
    plan = fxsplit.Plan(stages=4, devices=["cuda:0", "cuda:1"], schedule="interleaved_1f1b")
    assert plan.workers == 2 and plan.devices == ("cuda:0", "cuda:1", "cuda:0", "cuda:1")
    assert fxsplit.Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize("schedule", ["zb_v", "dual_pipe_v"])
def test_a_v_goes_down_the_devices_and_up_again(schedule):
    plan = fxsplit.Plan(stages=4, devices=["cuda:0", "cuda:1"], schedule=schedule)
    assert plan.workers == 2 and plan.devices == ("cuda:0", "cuda:1", "cuda:1", "cuda:0")
    assert fxsplit.Plan.from_dict(plan.to_dict()) == plan and plan.loss_inside
    assert fxsplit.Plan(stages=6, devices=["cpu"] * 6, schedule=schedule).workers == 3
    assert plan.placed({"": "cpu"}).schedule == "interleaved_zero_bubble"  # for any number of stages


@pytest.mark.parametrize(
    ("fields", "said", "instead"),
    [
        ({"stages": 6}, "workers= is not set", {"workers": 3}),
        ({"stages": 4, "workers": 3}, "4 stages, but schedule='zb_v' has two on each of 3", {"workers": 2}),
        ({"stages": 5, "workers": 2}, "asks for 5 stages", {"stages": 4}),
        ({"balance": [1, 1, 1], "workers": 1}, "balance= asks", {"schedule": "interleaved_zero_bubble"}),
        ({"stages": 4, "devices": ["cpu:0"] * 3}, "list 2 devices", {"devices": ["cpu:0"] * 2}),
        ({"devices": ["cpu"] * 4, "replicas": "auto"}, "any number of stages", {"replicas": 1, "stages": 8}),
    ],
)
def test_a_v_of_other_stages(fields, said, instead):
    with pytest.raises(fxsplit.errors.PlanError, match=said):
        fxsplit.Plan(schedule="zb_v", **fields)
    fxsplit.Plan(**{"schedule": "zb_v", **fields, **instead})


@pytest.mark.parametrize("schedule", ["zb_v", "breadth_first"])
def test_a_plan_of_more_stages_than_there_are_costs_nothing(schedule):
    plan = fxsplit.Plan(stages=2 * 10**17, workers=10**17, schedule=schedule)
    assert plan.loss_inside == (schedule == "zb_v")


def test_one_device_for_each_worker_even_if_they_are_the_same():
    plan = fxsplit.Plan(stages=4, schedule="breadth_first", devices=["cpu", "cpu"])
    assert plan.workers == 2 and plan.devices == ("cpu",) * 4
