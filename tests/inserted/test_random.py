"""Random numbers: masks follow from the caller's seed and the cut, whatever the schedule, recomputation and timing."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxsplit
from fxsplit import Plan
from fxsplit.inserted.random import BaseSeed, Stream, draw_base_seed
from fxsplit.schedules.catalog import NAMES as SCHEDULES
from fxsplit.schedules.catalog import SHARED as SHARED_WORKERS
from fxsplit.schedules.catalog import usual_workers


def plan_for(schedule, stages=2, **more):
    workers = usual_workers(schedule, stages) if schedule in SHARED_WORKERS else None
    return fxsplit.Plan(stages=stages, schedule=schedule, workers=workers, micro_batches=4, **more)


class Own(nn.Module):
    """Recomputes by itself, with dropout inside."""

    def __init__(self, reentrant):
        super().__init__()
        self.a, self.reentrant = nn.Linear(6, 6), reentrant

    def inner(self, x):
        return F.dropout(torch.tanh(self.a(x)), 0.5, self.training)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Around(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.i, self.b, self.o = nn.Linear(6, 6), Own(reentrant), nn.Linear(6, 3)

    def forward(self, x):
        return self.o(self.b(self.i(x)))


@pytest.mark.parametrize("reentrant", [False])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_checkpoint_of_the_users_sees_its_masks_again(schedule, reentrant):
    torch.manual_seed(0)
    model, x = Around(reentrant).double(), torch.randn(8, 6).double()
    pipe = fxsplit.compile(model, plan_for(schedule), example_args=(x,))

    def loss():
        torch.manual_seed(7)
        return pipe.step(x, loss_fn=lambda y: y.square().sum(), reduction="sum")

    loss()
    wanted, bias = model.b.a.bias.grad.clone(), model.b.a.bias
    for k in range(6):
        moved = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                bias[k] += step
            moved.append(loss())
            with torch.no_grad():
                bias[k] -= step
        torch.testing.assert_close((moved[0] - moved[1]) / 2e-6, wanted[k], rtol=1e-4, atol=1e-4)


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_several_steps_draw_the_same_and_leave_the_same_state(schedule, checkpoint):
    torch.manual_seed(0)
    model, x = Drops(), torch.randn(8, 6)
    seen = []
    for plan in (plan_for("gpipe"), plan_for(schedule, checkpoint=checkpoint)):
        pipe = fxsplit.compile(copy.deepcopy(model), plan, example_args=(x,))
        torch.manual_seed(5)
        rows = [
            pipe.step_with_output(x, loss_fn=lambda y: y.square().mean(), reduction="mean")[1]
            for _ in range(3)
        ]
        seen.append((rows, torch.get_rng_state()))
    (rows, state), (rows_2, state_2) = seen
    assert all(torch.equal(a, b) for a, b in zip(rows, rows_2, strict=True))
    assert not torch.equal(rows[0], rows[1])
    assert torch.equal(state, state_2)


def test_a_step_without_random_numbers_leaves_the_generator_alone():
    x = torch.randn(8, 6)
    pipe = fxsplit.compile(
        nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), plan_for("1f1b"), example_args=(x,)
    )
    before = torch.get_rng_state()
    pipe.step(x, loss_fn=lambda y: y.square().mean(), reduction="mean")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_a_pipeline_inside_of_another_and_one_in_a_loss():
    """Both draw; neither waits for the other."""
    x = torch.randn(8, 6)
    inner = fxsplit.compile(Drops(), plan_for("gpipe"), example_args=(x,))
    outer = fxsplit.compile(
        nn.Sequential(nn.Linear(6, 6), inner, nn.Dropout(0.1)), plan_for("gpipe"), example_args=(x,)
    )
    torch.manual_seed(1)
    first = outer(x)
    torch.manual_seed(1)
    assert torch.equal(first, outer(x))
    teacher = fxsplit.compile(Drops(), plan_for("gpipe"), example_args=(x,))
    student = fxsplit.compile(Drops(), plan_for("1f1b"), example_args=(x,))
    losses = []
    for _ in range(2):
        torch.manual_seed(2)
        losses.append(
            student.step(x, target=x, loss_fn=lambda y, t: F.mse_loss(y, teacher(t)), reduction="mean")
        )
    assert torch.equal(*losses)


def test_a_base_seed_is_never_drawn_from_a_state_that_is_lent():
    torch.manual_seed(3)
    expected = {draw_base_seed() for _ in range(300)}
    torch.manual_seed(3)
    stop, seen = threading.Event(), set()

    def draw():
        with Stream(lambda: 1):
            while not stop.is_set():
                torch.rand(2000)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        seen = {draw_base_seed() for _ in range(300)}
    finally:
        stop.set()
        thread.join()
    assert seen == expected


def test_what_draws_and_what_does_not():
    with Stream(lambda: 4):
        own = torch.rand(3)
        user = torch.rand(3, generator=torch.Generator().manual_seed(9))
        dropped = F.scaled_dot_product_attention(*(torch.ones(1, 1, 2, 2) for _ in range(3)), dropout_p=0.0)
    assert torch.equal(own, torch.rand(3, generator=torch.Generator().manual_seed(4)))
    assert torch.equal(user, torch.rand(3, generator=torch.Generator().manual_seed(9)))
    assert torch.equal(dropped, torch.ones(1, 1, 2, 2))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.GRU(6, 6, batch_first=True) for _ in range(2))

    def forward(self, x):
        return self.second(self.first(x)[0])[0]


def test_autocast_and_recomputation_do_not_depend_on_timing():
    """What leaves the outermost autocast empties a cache of cast weights that all threads share."""
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(16, 5, 6)
    pipe = fxsplit.compile(
        model, plan_for("1f1b", checkpoint="always").replace(micro_batches=8), example_args=(x,)
    )
    found = set()
    for _ in range(8):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            pipe.step(x, loss_fn=lambda y: y.float().square().mean(), reduction="mean")
        found.add(tuple(float(p.grad.double().sum()) for p in model.parameters()))
    assert len(found) == 1


class Sampled(nn.Module):
    """Draws in the middle of four stages of unequal weight."""

    def __init__(self):
        super().__init__()
        self.encode, self.mean, self.spread = nn.Linear(6, 16), nn.Linear(16, 3), nn.Linear(16, 3)
        self.decode = nn.Sequential(nn.Linear(3, 32), nn.Dropout(0.2), nn.Linear(32, 6))

    def forward(self, x):
        h = self.encode(x).relu()
        return self.decode(self.mean(h) + torch.randn(x.shape[0], 3) * self.spread(h))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_one_cut_every_plan_draws_the_same(schedule, replicas):
    """An automatic cut may follow from the schedule; this one does not."""
    torch.manual_seed(0)
    model, x = Sampled(), torch.randn(10, 6)
    seen = []
    for plan in (plan_for("gpipe"), plan_for(schedule, 4, replicas=replicas, checkpoint="except_last")):
        plan = plan.replace(stages=None, cut=["mean", "decode", "decode.2"])
        pipe = fxsplit.compile(copy.deepcopy(model), plan, example_args=(x,))
        torch.manual_seed(5)
        seen.append(pipe.step_with_output(x, loss_fn=lambda y: y.square().mean(), reduction="mean")[1])
    assert torch.equal(*seen)


class Norm(nn.BatchNorm1d):
    """A class of somebody's: nobody knows what it draws."""


class Attends(nn.Module):
    """A module, attention and a custom operation, all of which may draw, and do not."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), Norm(4)

    def forward(self, x):
        h = self.a(x)
        h = nn.functional.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None])[:, 0]
        h = self.norm(self.b(h))
        return h + torch.ops.fxsplit_tests.doubled(h.detach())


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("training", [True, False])
def test_what_may_draw_and_does_not_leaves_the_generator(training, micro_batches):
    library = torch.library.Library("fxsplit_tests", "DEF")
    library.define("doubled(Tensor x) -> Tensor", tags=[torch.Tag.pt2_compliant_tag])
    library.impl("doubled", lambda x: x * 2, "CompositeExplicitAutograd")
    try:
        model, x = Attends().train(training), torch.randn(4, 4, 8)
        plan = fxsplit.Plan(stages=2, micro_batches=micro_batches)
        pipe = fxsplit.compile(model, plan, example_args=(x,))
        before = torch.get_rng_state()
        pipe(x).sum().backward()
        assert torch.equal(torch.get_rng_state(), before)
    finally:
        library._destroy()


class Masks(nn.Module):
    """Gives the masks of three dropouts, two of them in one stage."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Dropout(0.5) for _ in range(3))
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        one, two = self.a(x), self.b(x)
        x = x + 0 * self.first(one)
        return one, two, self.c(x) + 0 * self.second(x)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_every_draw_of_every_micro_batch_and_stage_has_a_mask_of_its_own(schedule):
    x = torch.ones(6, 64)
    plan = Plan(cut=["c"], micro_batches=3, schedule=schedule)
    pipe = fxsplit.compile(Masks(), plan, example_args=(x,))
    assert len(pipe) == 2
    masks = [part for out in pipe(x) for part in out.split(2)] + [
        part for out in pipe(x) for part in out.split(2)
    ]
    assert len(masks) == 2 * 3 * 3
    for i, mask in enumerate(masks):
        assert 0.3 < (mask != 0).float().mean() < 0.7
        assert all(not torch.equal(mask, other) for other in masks[:i])


def test_who_has_drawn_meanwhile_keeps_what_he_has_drawn():
    before = torch.get_rng_state()
    BaseSeed().settle()
    assert torch.equal(torch.get_rng_state(), before)  # nobody drew with it
    seed = BaseSeed()
    torch.rand(1)
    after = torch.get_rng_state()
    seed.settle()
    assert torch.equal(torch.get_rng_state(), after)


class DrawsInForward(nn.Module):
    def forward(self, x):
        return x * torch.rand_like(x)


def test_what_has_no_rate_may_always_draw():
    """A call draws one number from the caller's generator, and nothing else, however often its stages draw."""
    x = torch.randn(6, 4)
    pipe = fxsplit.compile(
        nn.Sequential(DrawsInForward(), nn.Linear(4, 4)), Plan(micro_batches=3), example_args=(x,)
    )
    torch.manual_seed(3)
    pipe(x)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    draw_base_seed()
    assert torch.equal(torch.get_rng_state(), after)
