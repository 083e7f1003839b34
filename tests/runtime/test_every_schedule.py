"""What every schedule has to do alike: the same bits, and the gradients of an accumulating loop."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import fxsplit
from fxsplit.batch.merge import sizes
from fxsplit.schedules.catalog import IN_V
from fxsplit.schedules.catalog import NAMES as SCHEDULES
from fxsplit.schedules.catalog import SHARED as SHARED_WORKERS
from tests.helpers import LOSS, TiedBlocks, of_all, oracle, plan_for
from tests.models import build
from tests.strategies import EXAMPLES, batches, compiled_with_fewer, modules, weighed_plans


def a_step(model, plan, seed=3, rows=9):
    """The loss and what a step leaves behind, of a fresh copy of the model."""
    model = copy.deepcopy(model)
    x, target = torch.randn(rows, 4), torch.randint(0, 3, (rows,))
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    torch.manual_seed(seed)
    loss, output = pipe.step_with_output(x, target=target, **LOSS)
    return loss, output, [p.grad for p in model.parameters()], list(model.buffers()), torch.get_rng_state()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
def test_masks_and_gradients_depend_on_neither_schedule_nor_checkpoint(schedule, checkpoint):
    torch.manual_seed(0)
    model = TiedBlocks()
    results = []
    for plan in (
        plan_for("gpipe", micro_batches=4),
        plan_for(schedule, micro_batches=4, checkpoint=checkpoint),
    ):
        torch.manual_seed(1)
        results.append(a_step(model, plan))
    (loss, output, gradients, _, _), (loss_2, output_2, gradients_2, _, _) = results
    torch.testing.assert_close(loss, loss_2)
    assert torch.equal(output, output_2)
    # The loss of the whole batch and the sum of weighted parts round in another way.
    exact = plan_for(schedule).loss_inside is False
    for a, b in zip(gradients, gradients_2, strict=True):
        assert torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
def test_workers_and_one_thread_give_the_same_bits(schedule, checkpoint):
    torch.manual_seed(0)
    model, x, target = TiedBlocks(), torch.randn(9, 4), torch.randint(0, 3, (9,))
    pipe = fxsplit.compile(
        model, plan_for(schedule, micro_batches=4, checkpoint=checkpoint), example_args=(x,)
    )
    found = []
    for serial in (False, True, False):
        pipe._begun.common.serial = serial
        model.zero_grad()
        torch.manual_seed(5)
        loss = pipe.step(x, target=target, **LOSS)
        outside = F.cross_entropy(pipe(x), target)
        outside.backward()
        found.append([loss, outside.detach(), *(p.grad.clone() for p in model.parameters())])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize(
    ("schedule", "checkpoint"),
    [(name, "never") for name in ("zb_h1", "interleaved_zero_bubble", "zb_v", "dual_pipe_v")]
    + [("zb_h1", "always")],  # what is recomputed for the inputs is there for the weights too
)
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.12, of one cycle too
def test_weights_get_their_gradients_later_and_nothing_is_computed_twice(schedule, checkpoint):
    """The backward of every operation runs at most once for inputs, and once for weights."""
    x, target = torch.randn(8, 4), torch.randint(0, 3, (8,))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)), nn.Linear(4, 3))
    plan = plan_for(schedule, micro_batches=4, checkpoint=checkpoint)
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    twin = fxsplit.compile(
        copy.deepcopy(model), plan.replace(schedule="1f1b", workers=None), example_args=(x,)
    )
    with torch.profiler.profile() as halves:
        pipe._begun.common.serial = True
        pipe.step(x, target=target, **LOSS)
    with torch.profiler.profile() as whole:
        twin._begun.common.serial = True
        twin.step(x, target=target, **LOSS)

    def products(profile):
        return sum(
            event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm")
        )

    assert products(halves) == products(whole)
    for a, b in zip(pipe.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(torch.tanh(self.a(x)))


def test_a_weight_that_is_reached_in_two_ways_gets_its_gradient_with_the_inputs():
    model, x = nn.Sequential(nn.Linear(4, 4), Reused(), nn.Linear(4, 3)), torch.randn(8, 4)
    plan = fxsplit.Plan(cut=["1"], micro_batches=2, schedule="zb_h1")
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    found = torch.autograd.grad(pipe(x).square().sum(), list(model.parameters()))
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    torch.testing.assert_close(found, expected)


class Scaled(torch.autograd.Function):
    """Its backward is the user's own."""

    calls = 0

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        Scaled.calls += 1
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))
        self.l = nn.Linear(4, 4)

    def forward(self, x):
        y = self.l(x)
        if y.requires_grad:
            y.register_hook(lambda g: g * 2)
        return Scaled.apply(y, self.w)


def test_a_backward_or_hook_of_the_users_runs_once():
    torch.manual_seed(0)
    model = nn.Sequential(*(Custom() for _ in range(4)), nn.Linear(4, 3))
    x, target = torch.randn(8, 4), torch.randint(0, 3, (8,))
    eager = copy.deepcopy(model)
    pipe = fxsplit.compile(
        model, fxsplit.Plan(stages=2, micro_batches=4, schedule="zb_h1"), example_args=(x,)
    )
    Scaled.calls = 0
    pipe.step(x, target=target, **LOSS)
    assert Scaled.calls == 4 * 4
    F.cross_entropy(eager(x), target).backward()
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@st.composite
def pipelined(draw, schedule):
    """Plans of a schedule with the loss inside; cuts, often orders, and replicas as they come."""
    plan = draw(weighed_plans())
    workers = None
    if schedule in IN_V:
        workers = draw(st.integers(1, 2))
        fields = {"stages": 2 * workers, "replicas": draw(st.integers(1, 2)), "devices": None}
        return plan.replace(schedule=schedule, workers=workers, **fields)
    if schedule in SHARED_WORKERS:
        workers = draw(st.integers(1, 3))
        plan = plan.replace(replicas=draw(st.integers(1, 2)), devices=None)
    return plan.replace(schedule=schedule, workers=workers)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s not in ("gpipe", "breadth_first")])
@settings(max_examples=EXAMPLES)
@given(model=modules(), inputs=st.integers(1, 2), data=st.data())
def test_every_schedule_is_bit_equal_to_accumulation(schedule, model, inputs, data):
    plan = data.draw(pipelined(schedule))
    assume(not model.recipe.has("view_add_"))
    args = tuple(x.detach() for x in data.draw(batches(inputs, least=2 * plan.micro_batches)))
    eager = copy.deepcopy(model)
    try:
        expected = oracle(eager, args, sizes(len(args[0]), plan.micro_batches), of_all)
    except RuntimeError:  # in-place writes may destroy what backward needs
        assume(False)
    assume(any(p.grad is not None for p in eager.parameters()))
    pipe = compiled_with_fewer(model, plan, args, check=False)
    torch.testing.assert_close(pipe.step(*args, loss_fn=of_all, reduction="mean"), expected)
    for (name, a), b in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad), name
    for (name, a), b in zip(model.named_buffers(), eager.buffers(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_gradient_scaler_and_clipping(schedule):
    model, eager = (build("gpt")[0] for _ in range(2))
    eager.load_state_dict(model.state_dict())
    args = build("gpt")[1](8)
    pipe = fxsplit.compile(model, plan_for(schedule, 2, micro_batches=2), example_args=args)
    runs = []
    for m, run in ((model, pipe), (eager, eager)):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(3):
            optimizer.zero_grad()

            def scaled(output, scaler=scaler):
                return scaler.scale(of_all(output))

            if run is pipe:
                pipe.step(*args, loss_fn=scaled, reduction="mean")
            else:
                scaled(run(*args)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        runs.append([p.detach() for p in m.parameters()])
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
