"""What is recomputed, and how much memory that leaves: policies, budgets, and the simulation against measured bytes."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fxsplit
from fxsplit import Budget, errors
from fxsplit.demo.gpt import GPT
from fxsplit.schedules.schedule import Action
from fxsplit.testing import assert_equivalent
from tests.helpers import compiled

IDS = torch.randint(0, 32, (8, 32), generator=torch.Generator().manual_seed(0))


def deep():
    torch.manual_seed(0)
    return GPT(32, width=32, layers=24, heads=4, context=32)


POLICIES = {
    "never": "never",
    "always": "always",
    "except_last": "except_last",
    "list": [f"h.{i}" for i in range(0, 24, 2)],
    "predicate": lambda path, module: path.endswith("mlp"),
    "budget of half": Budget("6 MiB"),
    "budget of a quarter": Budget(3 * 2**20),
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_deep_model_keeps_what_the_simulation_predicts(policy):
    pipe = compiled(deep(), (IDS,), stages=3, micro_batches=2, checkpoint=policy)
    pipe._begun.common.serial = True  # the profiler counts the calling thread
    pipe(IDS)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        output = pipe(IDS)
    events = seen.profiler.kineto_results.events()
    measured = sum(e.nbytes() for e in events if e.name() == "[memory]") - output.untyped_storage().nbytes()
    (live,) = pipe.memory().values()
    assert abs(measured - live.kept) <= 0.05 * live.kept
    assert live.peak >= live.kept
    if isinstance(policy, Budget):
        assert live.peak <= policy.nbytes


class Odd(nn.Module):
    """Dropout, batch normalisation, and two blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)) for _ in range(3)
        )
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [["blocks.0"], ["blocks.1", "blocks.2.0"], lambda p, m: isinstance(m, nn.BatchNorm1d), Budget(2600)],
)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_every_policy_computes_the_same(policy, stages):
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    model = Odd()
    pipe = compiled(model, (x,), stages=stages, checkpoint=policy)
    for mode in (True, False):
        pipe.train(mode)
        assert_equivalent(model, pipe, x)
        assert_equivalent(model, copy.deepcopy(pipe), x[:5])
    assert any("checkpoint(self.checkpoint_0" in stage.code for stage in pipe)
    assert "same-graph: holds" in pipe.verify()


def test_a_listed_module_is_a_region_of_its_own():
    pipe = compiled(Odd(), (torch.randn(8, 8),), checkpoint=["blocks.0", "blocks.2"])
    regions = pipe[0].code.split("recomputed in backward")
    assert len(regions) == 3
    assert "self.blocks_0_0" in regions[1] and "self.blocks_1_0" not in regions[1] + regions[2]
    assert "self.blocks_1_0" in regions[0]


class Mixed(nn.Module):
    """As mixed precision is written: all of it inside of autocast."""

    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)
        )
        self.o = nn.Linear(16, 6)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for block in self.h:
                x = x + block(x)
            return self.o(x)


@pytest.mark.parametrize("policy", [["h.0"], lambda path, module: path.startswith("h."), Budget("24KiB")])
@pytest.mark.parametrize("stages", [1, 2])
def test_regions_inside_of_autocast(policy, stages):
    model, x = Mixed(), torch.randn(32, 16)
    pipe = compiled(model, (x,), stages=stages, checkpoint=policy)
    assert "checkpoint(self.checkpoint_0" in "".join(stage.code for stage in pipe)
    assert_equivalent(model, pipe, x)


def test_what_cannot_be_done_is_said():
    x = torch.randn(8, 8)
    for policy, kind, said in (
        (["block.0"], errors.PartitionError, "did you mean"),
        (["blocks"], errors.PartitionError, None),
        ([""], errors.PartitionError, "does not have"),
        (Budget(100), errors.PartitionError, "however much is recomputed"),
        ("sometimes", errors.PlanError, "sometimes"),
        (3, errors.PlanError, "is no policy"),
    ):
        if said is None:  # a ModuleList is not called, but what is in it runs
            compiled(Odd(), (x,), checkpoint=policy)
            continue
        with pytest.raises(kind, match=said):
            compiled(Odd(), (x,), checkpoint=policy)
    for size in ("2 GiX", "-1MB", 0, 1.5, True):
        with pytest.raises(errors.PlanError, match="is not a size"):
            Budget(size)
    assert Budget("1.5 kb").nbytes == 1500 and Budget("2GiB").nbytes == 2**31


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.n = nn.Linear(8, 8), 0

    def forward(self, x):
        self.n += 1
        return self.inner(x)


def test_state_is_never_in_a_region():
    model = nn.Sequential(Counting(), nn.Linear(8, 8))
    with pytest.raises(errors.PartitionError, match="changes state"):
        compiled(model, (torch.randn(4, 8),), checkpoint=["0"])


def test_policies_in_files(tmp_path):
    for policy in (["h.1"], Budget("1MB"), "always"):
        plan = fxsplit.Plan(stages=2, checkpoint=policy)
        plan.save(tmp_path / "plan.json")
        assert fxsplit.Plan.load(tmp_path / "plan.json") == plan
    with pytest.raises(errors.PlanError, match="is a function"):
        fxsplit.Plan(checkpoint=lambda path, module: True).to_dict()


def test_a_budget_for_each_device():
    """Placement is planned without the devices; the budget holds on each of them."""
    with torch.device("cpu"):
        model, args = Odd(), (torch.randn(8, 8),)
    roomy = compiled(model, args, stages=3, checkpoint=Budget("1MB"))
    assert not any("checkpoint(" in stage.code for stage in roomy)
    tight = compiled(
        model, args, stages=3, checkpoint=Budget(roomy.memory()[torch.device("cpu")].kept * 3 // 4)
    )
    assert any("checkpoint(" in stage.code for stage in tight)
    assert "within" in tight.report()


def test_a_context_that_is_interrupted_is_around_its_regions():
    class Interrupted(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.count, self.b = nn.Linear(8, 8), Counting(), nn.Linear(8, 8)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = torch.tanh(self.a(x))
                h = self.count(h)
                h = torch.tanh(self.b(h))
            return h.float()

    model, x = Interrupted(), torch.randn(4, 8)
    pipe = fxsplit.compile(model, fxsplit.Plan(checkpoint="always"), example_args=(x,))
    assert pipe.stages[0].code.count("checkpoint(") == 3  # before and after the count, and float()
    found = torch.autograd.grad(pipe(x).sum(), list(model.parameters()))
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    torch.testing.assert_close(found, expected)


def test_what_is_kept_whole_is_kept_to_the_end_of_its_backward():
    plan = fxsplit.Plan(micro_batches=2, schedule="zb_h1", checkpoint="except_last")
    pipe = fxsplit.compile(nn.Linear(8, 8), plan, example_args=(torch.randn(4, 8),))
    kept = pipe._measure_kept(pipe.active)
    assert [kept.to_the_end(Action("F", 0, i)) for i in (0, 1)] == [True, False]
