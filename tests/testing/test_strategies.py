"""Strategies that users of Hypothesis have: what they draw is valid, and plain when shrunk."""

import dataclasses
import warnings

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st
from torch import nn

import fxsplit
from fxsplit.errors import FxsplitError
from fxsplit.plan.plan import Plan
from fxsplit.schedules.lower import Flow, lower
from fxsplit.testing import assert_equivalent
from fxsplit.testing.fuzz import Case, check
from fxsplit.testing.plans import compiled_under, random_fields
from fxsplit.testing.programs import OPERATIONS, Program, Recipe, choices, random_recipe
from fxsplit.testing.strategies import batches, copied, fields_of_plans, modules, plans, schedules

from ..strategies import EXAMPLES

NET = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def test_all_fields_of_a_plan_are_drawn():
    seen = set()
    for seed in range(600):
        seen |= set(random_fields(choices(seed), NET, batch_dims={"input": 0}))
    assert seen == {field.name for field in dataclasses.fields(Plan)}


@given(plans(NET, stages=2))
def test_fields_that_are_said_are_kept(plan):
    assert plan.stages == 2


def test_plans_shrink_to_the_plain():
    assert find(plans(NET), lambda plan: plan.micro_batches > 1).micro_batches == 2
    small = find(modules(), lambda model: model.recipe.has("counter"), settings=settings(max_examples=2000))
    assert [name for name, _, _ in small.recipe.steps] == ["counter"]


@given(st.data())
def test_batches_are_like_the_example(data):
    class Takes(nn.Module):
        def forward(self, x, ids, mask, *, table, scale=1.0):
            return x

    example = (torch.randn(6, 3) * 5 + 100, torch.randint(3, 9, (6, 2)), torch.ones(6, 2, dtype=torch.bool))
    kwargs = {"table": torch.arange(4.0), "scale": 3.0}
    (x, ids, mask), named = data.draw(batches(Takes(), example, kwargs, rows=(2, 5)))
    assert x.shape[0] == ids.shape[0] == mask.shape[0] and 2 <= len(x) <= 5
    assert int(ids.min()) >= 3 and int(ids.max()) < 9 and mask.dtype == torch.bool
    assert 50 < x.mean() < 150 and torch.equal(named["table"], kwargs["table"]) and named["scale"] == 3.0


@pytest.mark.slow
@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_schedules_can_be_played(data, stages, micro_batches):
    schedule = data.draw(schedules(stages, micro_batches))
    tape = lower(
        schedule, Flow(stages, [(i, i + 1) for i in range(stages - 1)], outputs=frozenset({stages - 1}))
    )
    assert len(tape.workers) == stages
    pipe = fxsplit.compile(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(stages))),
        Plan(stages=stages, micro_batches=micro_batches, schedule=schedule),
        example_args=(torch.randn(8, 4),),
        check=False,
    )
    assert pipe.schedule.stages == stages


def test_every_operation_of_a_program_runs():
    for name in OPERATIONS:
        for form in ("tensor", "loss"):
            model = Program(Recipe(((name, 0, 1), (name, 1, 0)), inputs=3, form=form))
            args, kwargs = model.example(4)
            assert model(*args, **kwargs) is not None
    assert random_recipe(choices(7)) == random_recipe(choices(7))
    recipe = random_recipe(choices(7))
    assert Recipe.from_dict(recipe.to_dict()) == recipe


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 3)
@given(st.data(), modules())
def test_every_plan_of_every_program_is_the_model(data, model):
    """One property over all fields of a plan."""
    fields = data.draw(fields_of_plans(model))
    least = model.recipe.least_rows * Plan(**fields).micro_batches
    rows = st.integers(least, least + 8)
    case = Case(
        model.recipe,
        fields,
        data.draw(rows),
        max(4, data.draw(rows)),
        data.draw(st.booleans()),
        (data.draw(st.booleans()), False, False),
    )
    check(case)


def test_a_copy_of_a_batch_has_no_history():
    x = (torch.randn(2, 3, requires_grad=True) * 2,)
    (y,), _ = copied((x, {}))
    assert y.is_leaf and y.requires_grad and torch.equal(x[0], y)


def test_what_does_not_go_is_left_out():
    model = Program(Recipe((("linear", 0, 0),)))
    args, kwargs = model.example(6)
    pipe = compiled_under(model, {"stages": 4, "replicas": [1, 1, 1, 1]}, args, kwargs)
    assert len(pipe) < 4
    with pytest.raises(FxsplitError):
        compiled_under(model, {"stages": 9}, args, kwargs, keep=("stages",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_equivalent(model, pipe, *args, **kwargs)
