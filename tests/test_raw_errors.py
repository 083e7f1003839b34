"""Public callables that are given nothing, something of another type, or too much: an error that says what to type."""

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import Plan
from fxsplit.errors import FxsplitError, StageIndexError

NOTHING_USEFUL = [None, 3.5, -7, 10**12, [], {}, object(), b"x"]


@pytest.fixture(scope="module")
def pipe():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return fxsplit.compile(model, Plan(stages=2, micro_batches=2), example_args=(torch.randn(4, 4),))


CALLS = {
    "schedule_for": lambda pipe, bad: pipe.schedule_for(bad),
    "pipe[...]": lambda pipe, bad: pipe[bad],
    "Plan.load": lambda pipe, bad: Plan.load(bad),
    "Plan.save": lambda pipe, bad: Plan().save(bad),
    "measure_link": lambda pipe, bad: fxsplit.measure_link(bad),
    "measure_link from": lambda pipe, bad: fxsplit.measure_link(bad, "cpu"),
    "measure_link to": lambda pipe, bad: fxsplit.measure_link("cpu", bad),
    "measure_link bytes": lambda pipe, bad: fxsplit.measure_link(
        "cpu", "cpu", nbytes=bad if bad != 10**12 else None
    ),
    "micro_batches": lambda pipe, bad: pipe.micro_batches(bad),
    "run_whole": lambda pipe, bad: pipe.run_whole(bad),
    "verify_micro_batches": lambda pipe, bad: pipe.verify_micro_batches(bad),
    "register_action_hook": lambda pipe, bad: pipe.register_action_hook(bad),
    "verify": lambda pipe, bad: fxsplit.verify(bad),
    "criterion": lambda pipe, bad: pipe.criterion(bad),
    "from_csv": lambda pipe, bad: fxsplit.Schedule.from_csv(bad),
    "Schedule": lambda pipe, bad: fxsplit.Schedule(bad),
    "recompile": lambda pipe, bad: pipe.recompile(bad),
    "step": lambda pipe, bad: pipe.step(bad, loss_fn=nn.MSELoss()),
    "preview": lambda pipe, bad: fxsplit.preview(bad),
    "assert_equivalent": lambda pipe, bad: fxsplit.testing.assert_equivalent(bad, pipe, torch.randn(4, 4)),
    "assert_equivalent to": lambda pipe, bad: fxsplit.testing.assert_equivalent(
        pipe.model, bad, torch.randn(4, 4)
    ),
}


@pytest.mark.parametrize("bad", NOTHING_USEFUL, ids=lambda bad: type(bad).__name__)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_argument_of_another_kind_says_what_to_type(pipe, call, bad):
    with pytest.raises(FxsplitError, match="instead: "):
        call(pipe, bad)


def test_a_stage_that_is_not_there(pipe):
    for index in (2, -3, "0"):
        with pytest.raises(StageIndexError, match=r"the pipeline has 2 stages(?s:.*)pipe\[0\] … pipe\[1\]"):
            pipe[index]
    with pytest.raises(IndexError):
        pipe[7]
    assert (
        pipe[-1] is pipe.stages[1] and list(reversed(pipe)) == [pipe[1], pipe[0]] and pipe[:1] == (pipe[0],)
    )


def test_files_of_plans_that_are_not_there(tmp_path):
    with pytest.raises(fxsplit.errors.PlanError, match=r"No such file(?s:.*)plan.save"):
        Plan.load(tmp_path / "nothing.json")
    with pytest.raises(fxsplit.errors.PlanError, match="written"):
        Plan().save(tmp_path / "no" / "folder.json")
    Plan(stages=2).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == Plan(stages=2)
