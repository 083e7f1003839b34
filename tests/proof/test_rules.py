"""Each rule by itself, on programs that break it in the least way."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import Plan
from fxsplit.graph.nodes import compute_nodes, region_modules
from fxsplit.inserted.ops import transfer
from fxsplit.proof.structure import RULES
from fxsplit.trace.front import trace

CHECKS = {rule.name: rule.check for rule in RULES}


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        h = self.a(x)
        h.add_(1.0)
        g = h * 2
        h.mul_(3.0)
        return h + g


@pytest.fixture(scope="module")
def traced():
    return trace(Writes(), (torch.randn(2, 4),), {})


def stage(index, nodes, **fields):
    words = {"parameters": (), "writes": (), "stateful": False, "random": False, "rng_state": False}
    return SimpleNamespace(
        index=index, nodes=tuple(nodes), rates=(), device=torch.device("cpu"), **{**words, **fields}
    )


def found(rule, traced, *stages):
    program = SimpleNamespace(stages=stages)
    return [v.what for v in CHECKS[rule](None, traced, program)]


def test_the_last_write_is_where_the_first_is(traced):
    names = [n.name for n in compute_nodes(traced.graph)]
    last = names.index("mul_") if "mul_" in names else len(names) - 2
    for cut, whole in ((last, False), (last + 1, True), (1, False)):
        what = found("effects-together", traced, stage(0, names[:cut]), stage(1, names[cut:]))
        assert bool(what) is not whole, what


def test_every_operation_is_in_one_stage(traced):
    names = [n.name for n in compute_nodes(traced.graph)]
    assert not found("complete", traced, stage(0, names[:2]), stage(1, names[2:]))
    for first, second in ((names[:3], names[2:]), (names[:1], names[2:]), (names, ["ghost"])):
        assert len(found("complete", traced, stage(0, first), stage(1, second))) == 1


def test_a_stage_reads_from_stages_before_it(traced):
    names = [n.name for n in compute_nodes(traced.graph)]
    assert not found("acyclic", traced, stage(0, names[:1]), stage(1, names[1:]))
    assert found("acyclic", traced, stage(0, names[1:]), stage(1, names[:1]))


def test_what_a_stage_is_said_to_do_is_what_it_does(traced):
    names, own = [n.name for n in compute_nodes(traced.graph)], ("a.weight", "a.bias")
    assert not found("effects-known", traced, stage(0, names, parameters=own))
    for fields in (
        {"parameters": own[:1]},
        {"parameters": (*own, "ghost")},
        {"parameters": own, "stateful": True},
        {"parameters": own, "writes": ("ghost",)},
    ):
        assert len(found("effects-known", traced, stage(0, names, **fields))) == 1


@pytest.mark.parametrize("field", ["parameters", "writes"])
def test_what_is_used_has_one_home(traced, field):
    here, there = stage(0, (), **{field: ("a",)}), stage(1, (), **{field: ("a",)})
    assert not found("one-home", traced, here, there)
    there.device = torch.device("meta")
    assert found("one-home", traced, here, there)


def test_a_region_that_draws_says_so_and_has_the_models_modules():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4))
    pipe = fxsplit.compile(model, Plan(checkpoint="always"), example_args=(torch.randn(2, 4),))
    (only,) = pipe.stages
    (region,) = region_modules(only.module)
    for rule, damage in (
        ("repeatable", lambda: region.meta.update(random=False)),
        (
            "own-objects",
            lambda: (setattr(only.module, "layer_0", model[0]), setattr(region, "layer_0", model[2])),
        ),
    ):
        assert not list(CHECKS[rule](model, pipe.traced, pipe.program))
        damage()
        assert list(CHECKS[rule](model, pipe.traced, pipe.program))


def test_what_crosses_is_moved_once_and_to_the_stage():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = Plan(stages=2, devices=["cpu", "cpu:1"])
    for damaged in (False, "read past it", "another of the kind"):
        pipe = fxsplit.compile(model, plan, example_args=(torch.randn(2, 4),), check=False)
        graph = pipe.stages[1].module.graph
        (moved,) = [n for n in graph.nodes if n.target is transfer]
        if damaged == "read past it":
            with graph.inserting_after(moved):
                graph.call_function(torch.relu, (moved.args[0],))
        elif damaged:
            moved.args = (moved.args[0], torch.device("cpu:2"))
        what = list(CHECKS["minimal-transfers"](model, pipe.traced, pipe.program))
        assert bool(what) is bool(damaged), what
