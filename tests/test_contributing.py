"""The worked examples of CONTRIBUTING.md do what it says."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.testing import assert_equivalent

TEXT = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"```python\n# fxsplit/([a-z_/]+)\.py\n(.*?)```", TEXT, re.S))


@pytest.fixture
def added(monkeypatch):
    """Runs a block where it says that it goes, for the length of a test."""

    def add(path):
        module = importlib.import_module(f"fxsplit.{path.replace('/', '.')}")
        before = {name: value for name, value in vars(module).items() if isinstance(value, dict | tuple)}
        for name, value in before.items():
            monkeypatch.setattr(module, name, value)  # to be put back
        tables = {name: dict(value) for name, value in before.items() if type(value) is dict}
        names = dict(vars(module))
        exec(compile(BLOCKS[path], path, "exec"), names)
        for name, value in names.items():
            if value is not before.get(name) and not name.startswith("__"):
                monkeypatch.setattr(module, name, value, raising=False)
        put_back.extend((before[name], table) for name, table in tables.items())

    put_back = []
    yield add
    for table, content in put_back:
        table.clear()
        table.update(content)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))), torch.randn(8, 6)


def compiled(**plan):
    model, x = layers()
    return model, x, fxsplit.compile(model, fxsplit.Plan(stages=2, **plan), example_args=(x,))


def test_every_block_is_one_of_these():
    assert sorted(BLOCKS) == [
        "merging/shape_rules",
        "plan/checkpoint",
        "plan/costs",
        "proof/structure",
        "schedules/catalog",
    ]


def test_a_schedule(added):
    added("schedules/catalog")
    from fxsplit.schedules import catalog

    assert str(catalog.one_by_one(2, 2)) == "stage 0.0: 0F0 0B0 0F1 0B1\nstage 1.0: 1F0 1B0 1F1 1B1"
    schedule = catalog.one_by_one(2, 4)
    model, x, pipe = compiled(micro_batches=4, schedule=schedule)
    assert_equivalent(model, pipe, x)
    assert pipe.plan.loss_inside


def test_a_cost(added):
    with pytest.raises(fxsplit.errors.PlanError):
        fxsplit.Plan(cost="moved")
    added("plan/costs")
    model, x, pipe = compiled(cost="moved")
    assert fxsplit.Plan(cost="moved").cost == "moved" and "moved" in pipe.report()
    assert all(load > 0 for load in pipe.assignment.loads)
    assert_equivalent(model, pipe, x)


def test_a_checkpoint_policy(added):
    added("plan/checkpoint")
    model, x, pipe = compiled(checkpoint="every_other", micro_batches=4)
    assert pipe.plan.checkpoint == "every_other" and "checkpoint every_other" in pipe.report()
    assert_equivalent(model, pipe, x)


def test_a_rule_of_the_proof(added):
    added("proof/structure")
    from fxsplit.proof import structure

    model, _, pipe = compiled()
    structure.verify_structure(model, pipe.traced, pipe.program)
    rule = next(rule for rule in structure.RULES if rule.name == "identifiers")
    node = SimpleNamespace(name="no name")
    module = SimpleNamespace(graph=SimpleNamespace(nodes=[node]))
    broken = SimpleNamespace(stages=[SimpleNamespace(index=0, module=module)])
    assert [v.node for v in rule.check(model, pipe.traced, broken)] == [node]


@pytest.mark.parametrize("dim", [0, 1])
def test_a_way_to_merge(added, dim):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.b(torch.renorm(self.a(x), 2, dim, 0.5))

    from fxsplit.merging.rules import RULES

    RULES.pop("renorm")
    added("merging/shape_rules")
    assert "renorm" in RULES
    model, x = Normed(), torch.randn(7, 6)
    plan = fxsplit.Plan(stages=2, micro_batches=3)
    if dim == 1:
        with pytest.raises(fxsplit.errors.BatchError, match="other rows"):
            fxsplit.compile(model, plan, example_args=(x,))
    else:
        torch.testing.assert_close(fxsplit.compile(model, plan, example_args=(x,))(x), model(x))
