"""What every schedule has to do alike, deferred batch normalisation, anomalies, events, schedules of the user's own."""

import copy
import itertools
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import fxsplit
from fxsplit.batch.merge import sizes
from fxsplit.runtime import play
from fxsplit.schedules.catalog import NAMES as SCHEDULES
from fxsplit.schedules.catalog import SHARED as SHARED_WORKERS
from tests.models import build
from tests.strategies import EXAMPLES, batches, compiled_with_fewer, modules, weighed_plans

LOSS = {"loss_fn": F.cross_entropy}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 8), nn.Linear(8, width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Six blocks; the weight of the first layer is used again in the last, which is another stage."""

    def __init__(self, width=4):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(6))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x + F.linear(x, self.first.weight.t()))


def plan_for(schedule, stages=4, **more):
    workers = 2 if schedule in SHARED_WORKERS else None
    return fxsplit.Plan(stages=stages, schedule=schedule, workers=workers, **more)


def a_step(model, plan, seed=3, rows=9):
    """The loss and what a step leaves behind, of a fresh copy of the model."""
    model = copy.deepcopy(model)
    x, target = torch.randn(rows, 4), torch.randint(0, 3, (rows,))
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    torch.manual_seed(seed)
    loss, output = pipe.step_with_output(x, target=target, **LOSS)
    return loss, output, [p.grad for p in model.parameters()], list(model.buffers()), torch.get_rng_state()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
def test_masks_and_gradients_depend_on_neither_schedule_nor_checkpoint(schedule, checkpoint):
    torch.manual_seed(0)
    model = Net()
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


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
def test_workers_and_one_thread_give_the_same_bits(schedule, checkpoint):
    torch.manual_seed(0)
    model, x, target = Net(), torch.randn(9, 4), torch.randint(0, 3, (9,))
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


@pytest.mark.parametrize("schedule", ["zb_h1", "interleaved_zero_bubble"])
def test_weights_get_their_gradients_later_and_nothing_is_computed_twice(schedule):
    """The backward of every operation runs at most once for inputs, and once for weights."""
    x, target = torch.randn(8, 4), torch.randint(0, 3, (8,))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)), nn.Linear(4, 3))
    plan = plan_for(schedule, micro_batches=4)
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


def oracle(model, args, rows, loss_fn):
    """Micro-batch after micro-batch, as an accumulating loop would do it."""
    start = 0
    for n in rows:
        loss = loss_fn(model(*(a[start : start + n] for a in args))) * (n / sum(rows))
        if loss.requires_grad:
            loss.backward()
        start += n


def of_all(output):
    leaves = torch.utils._pytree.tree_leaves(output)
    return sum(leaf.square().mean() for leaf in leaves if leaf.is_floating_point())


@st.composite
def pipelined(draw):
    """Plans of every schedule with the loss inside; cuts, often orders, and replicas as they come."""
    plan = draw(weighed_plans())
    schedule = draw(st.sampled_from([s for s in SCHEDULES if s not in ("gpipe", "breadth_first")]))
    workers = None
    if schedule in SHARED_WORKERS:
        workers = draw(st.integers(1, 3))
        plan = plan.replace(replicas=draw(st.integers(1, 2)), devices=None)
    return plan.replace(schedule=schedule, workers=workers)


@settings(max_examples=7 * EXAMPLES)
@given(modules(), pipelined(), st.integers(1, 2), st.data())
def test_every_schedule_is_bit_equal_to_accumulation(model, plan, inputs, data):
    assume(not any(name == "view_add_" for name, _, _ in model.recipe))
    args = tuple(x.detach() for x in data.draw(batches(inputs, least=2 * plan.micro_batches)))
    eager = copy.deepcopy(model)
    try:
        oracle(eager, args, sizes(len(args[0]), plan.micro_batches), of_all)
    except RuntimeError:  # in-place writes may destroy what backward needs
        assume(False)
    assume(any(p.grad is not None for p in eager.parameters()))
    pipe = compiled_with_fewer(model, plan, args, check=False)
    pipe.step(*args, loss_fn=of_all, reduction="mean")
    for (name, a), b in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad), name
    for (name, a), b in zip(model.named_buffers(), eager.buffers(), strict=True):
        assert torch.equal(a, b), name


# -- schedules of the user's own -------------------------------------------------------------------------------------


def test_a_schedule_of_the_users_own_from_csv(tmp_path):
    text = "0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"
    own = fxsplit.Schedule.from_csv(text, name="mine")
    plan = fxsplit.Plan(stages=2, micro_batches=2, schedule=own)
    plan.save(tmp_path / "plan.json")
    assert fxsplit.Plan.load(tmp_path / "plan.json") == plan
    model, x, target = Net(), torch.randn(6, 4), torch.randint(0, 3, (6,))
    twin = copy.deepcopy(model)
    for m, p in ((model, plan), (twin, plan.replace(schedule="1f1b"))):
        torch.manual_seed(2)
        pipe = fxsplit.compile(m.eval(), p, example_args=(x,))
        pipe.step(x, target=target, **LOSS)
    assert "mine with 2 micro-batches" in fxsplit.compile(model, plan, example_args=(x,)).report()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    pipe.step(x[:1], target=target[:1], **LOSS)  # fewer micro-batches: the others are left out


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


def test_a_schedule_that_deadlocks_is_refused_before_anything_runs():
    own = fxsplit.Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    plan = fxsplit.Plan(stages=2, micro_batches=2, schedule=own)
    with pytest.raises(fxsplit.errors.ScheduleError, match="can never finish"):
        fxsplit.compile(Net(), plan, example_args=(torch.randn(4, 4),))


def test_devices_of_workers_are_those_of_their_stages():
    plan = fxsplit.Plan(stages=4, devices=["cuda:0", "cuda:1"], schedule="interleaved_1f1b")
    assert plan.workers == 2 and plan.devices == ("cuda:0", "cuda:1", "cuda:0", "cuda:1")
    assert fxsplit.Plan.from_dict(plan.to_dict()) == plan


# -- deferred batch normalisation ------------------------------------------------------------------------------------


def norms(momentum=0.1):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm1d(4, momentum=momentum), nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 3)
    ).double()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4])
def test_running_statistics_are_those_of_the_whole_batch(schedule, checkpoint, micro_batches):
    model, eager = norms(), norms()
    x, target = 1e4 + torch.randn(11, 4).double(), torch.randint(0, 3, (11,))
    plan = plan_for(schedule, 2, micro_batches=micro_batches, checkpoint=checkpoint, deferred_batch_norm=True)
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    for _ in range(3):
        pipe.step(x, target=target, **LOSS)
        F.cross_entropy(eager(x), target).backward()
    torch.testing.assert_close(model[0].running_mean, eager[0].running_mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(model[0].running_var, eager[0].running_var, rtol=1e-9, atol=0)
    assert model[0].num_batches_tracked == model[3].num_batches_tracked == 3
    pipe.eval()
    before = copy.deepcopy(model.state_dict())
    pipe(x)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_cumulative_average_and_calls_outside_of_a_step():
    model, eager = norms(momentum=None), norms(momentum=None)
    x = torch.randn(9, 4).double()
    plan = fxsplit.Plan(stages=2, micro_batches=3, deferred_batch_norm=True)
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    for i in range(3):
        with torch.no_grad():
            pipe(x + i), eager(x + i)
    torch.testing.assert_close(model[0].running_mean, eager[0].running_mean)
    torch.testing.assert_close(model[0].running_var, eager[0].running_var)


def test_a_failed_step_commits_nothing():
    model = norms()
    x = torch.randn(9, 4).double()
    for schedule in ("gpipe", "1f1b"):
        plan = fxsplit.Plan(stages=2, micro_batches=3, schedule=schedule, deferred_batch_norm=True)
        pipe = fxsplit.compile(model, plan, example_args=(x,))
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ZeroDivisionError):
            pipe.step(x, loss_fn=lambda y: y.sum() * (1 // 0), reduction="sum")
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def _low(function):
    return lambda x, mean, var, training: function(x, None, None, mean, var, training, 0.2, 1e-5, False)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, mean, var, training: F.batch_norm(x, mean, var, None, None, training, 0.2),
        _low(torch.batch_norm),
        _low(torch.ops.aten.batch_norm.default),
    ],
    ids=["functional", "torch", "aten"],
)
def test_functions_of_batch_norm_are_put_off_too(function):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("var", torch.ones(4))
            self.l = nn.Linear(4, 3)

        def forward(self, x):
            return self.l(function(x, self.mean, self.var, self.training))

    model = Own()
    eager, x = copy.deepcopy(model), torch.randn(10, 4) + 3
    pipe = fxsplit.compile(model, fxsplit.Plan(micro_batches=4, deferred_batch_norm=True), example_args=(x,))
    pipe(x), eager(x)
    torch.testing.assert_close(model.mean, eager.mean)
    torch.testing.assert_close(model.var, eager.var)


# -- anomalies -------------------------------------------------------------------------------------------------------


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        z = torch.sqrt(y[:, :1] * 0 + x[:, :1])  # the line that is named
        return self.b(y + z)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_the_first_nan_is_named(schedule, checkpoint):
    model, x = Root(), torch.rand(8, 4) + 1
    plan = fxsplit.Plan(
        cut=["b"], micro_batches=4, schedule=schedule, checkpoint=checkpoint, detect_anomaly="nan"
    )
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    good = pipe.step(x, loss_fn=lambda y: y.square().mean(), reduction="mean")
    assert good.isfinite()
    x[5, 0] = -1.0
    with pytest.raises(fxsplit.errors.AnomalyError, match="a NaN first appears in z") as caught:
        pipe.step(x, loss_fn=lambda y: y.square().mean(), reduction="mean")
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    line = next(
        i
        for i, row in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "the line that is named" in row
    )
    assert f"test_engine.py:{line}" in text
    assert "stage 0" in text and "micro-batch 2 of 4" in text


def test_infinities_are_looked_for_where_that_is_asked():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.full((4, 4), 3e38)
    for kind, raises in (("nan", False), ("inf", True)):
        plan = fxsplit.Plan(stages=2, micro_batches=2, detect_anomaly=kind)
        pipe = fxsplit.compile(nn.Sequential(nn.ReLU(), _Large()), plan, example_args=(torch.ones(4, 4),))
        if raises:
            with pytest.raises(fxsplit.errors.AnomalyError, match="infinity"):
                pipe(x)
        else:
            assert pipe(x).isinf().all()
    del model


class _Large(nn.Module):
    def forward(self, x):
        return x * 10


def test_a_gradient_that_is_none_is_named():
    class Corner(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(4, 4)

        def forward(self, x):
            return (self.l(x) * 0).sum(1).sqrt()  # of zero: its gradient is infinite, times zero

    x = torch.zeros(4, 4)
    model = Corner()
    with torch.no_grad():
        model.l.bias.fill_(-1.0)
    plan = fxsplit.Plan(micro_batches=2, detect_anomaly="nan")
    pipe = fxsplit.compile(model, plan, example_args=(torch.ones(4, 4),), check=False)
    with pytest.raises(fxsplit.errors.AnomalyError, match=r"gradient of l\.weight"):
        pipe.step(x, loss_fn=lambda y: y.sum())


# -- events ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_event_for_every_action(schedule):
    x, target = torch.randn(8, 4), torch.randint(0, 3, (8,))
    pipe = fxsplit.compile(Net(), plan_for(schedule, micro_batches=4), example_args=(x,))
    events, lock = [], threading.Lock()

    def log(event):
        with lock:
            events.append(event)

    handle = pipe.register_action_hook(log)
    pipe.step(x, target=target, **LOSS)
    assert sorted(e.action for e in events) == sorted(a for row in pipe.schedule.workers for a in row)
    for actions in pipe.schedule.workers:
        mine = [e for e in sorted(events, key=lambda e: e.begin) if e.action in actions]
        assert [e.action for e in mine] == list(actions)
        assert all(a.end <= b.begin for a, b in itertools.pairwise(mine))
    handle.remove()
    events.clear()
    pipe.step(x, target=target, **LOSS)
    assert not events


def test_an_error_of_a_hook_is_that_of_its_action():
    x = torch.randn(8, 4)
    pipe = fxsplit.compile(Net(), plan_for("1f1b", micro_batches=4), example_args=(x,))

    def fail(event):
        raise LookupError(str(event.action))

    with pipe.register_action_hook(fail), pytest.raises(LookupError):
        pipe(x)
    pipe(x)


# -- training loops --------------------------------------------------------------------------------------------------


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


# -- memory ----------------------------------------------------------------------------------------------------------


class _Packed:
    """A tensor that autograd has saved, for as long as it is."""

    def __init__(self, alive, stage, tensor):
        self.alive, self.tensor = alive, tensor.detach()  # with its graph it would hold itself
        self.alive[id(self)] = stage, self.tensor

    def __del__(self):
        del self.alive[id(self)]


def _kept_by_workers(pipe, step, monkeypatch):
    """The most bytes that each worker keeps for backward at once: what autograd has saved, and what stages hold."""
    monkeypatch.setattr(pipe._begun.common, "serial", True)
    worker_of = {a.stage: w for w, actions in enumerate(pipe.schedule.workers) for a in actions}
    most, alive, now = [0] * len(pipe.schedule.workers), {}, []
    known = [*pipe.parameters(), *pipe.example]
    known = {t.untyped_storage().data_ptr() for t in known}
    act = play.act

    def watched(call, instruction):
        now[:] = [instruction.stage]
        act(call, instruction)
        held = list(alive.values())
        for (stage, _), record in call.records.items():
            for row in (*record.inputs.values(), *record.outputs.values()):
                held += [(stage, leaf) for leaf in row]
        owners = {}
        for stage, tensor in held:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                owners.setdefault(storage.data_ptr(), (storage.nbytes(), set()))[1].add(stage)
        kept = [0] * len(most)
        for nbytes, stages in owners.values():
            kept[worker_of[min(stages)]] += nbytes
        most[:] = map(max, most, kept)

    monkeypatch.setattr(play, "act", watched)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: _Packed(alive, now[0], t) if now else t, lambda p: p.tensor if isinstance(p, _Packed) else p
    ):
        step()
    assert not alive
    return most


@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_kept_is_what_was_simulated(schedule, checkpoint, monkeypatch):
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=bool(i % 2))
        for i in range(8)
    ]
    model, x = nn.Sequential(*layers), torch.randn(32, 64, 16)
    plan = plan_for(schedule, micro_batches=8, checkpoint=checkpoint)
    pipe = fxsplit.compile(model, plan, example_args=(x,))

    def step():
        pipe.step(pipe.example[0], loss_fn=lambda y: y.square().mean(), reduction="mean")

    (live,) = pipe.memory().values()
    measured = sum(_kept_by_workers(pipe, step, monkeypatch))
    assert abs(measured - live.kept) <= 0.05 * live.kept, (measured, live)


# -- found by review -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_checkpoint_around_the_pipeline(micro_batches):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    eager, x = copy.deepcopy(model), torch.randn(8, 6, requires_grad=True)
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=2, micro_batches=micro_batches), example_args=(x,))
    torch.utils.checkpoint.checkpoint(lambda v: pipe(v).relu(), x, use_reentrant=False).sum().backward()
    got, x.grad = x.grad, None
    eager(x).relu().sum().backward()
    torch.testing.assert_close(got, x.grad)
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_hook_that_calls_the_pipeline_does_not_wait_for_itself():
    x = torch.randn(8, 4)
    pipe = fxsplit.compile(Net(), plan_for("1f1b", micro_batches=4), example_args=(x,))
    with (
        pipe.register_action_hook(lambda event: pipe(x)),
        pytest.raises(fxsplit.errors.ArgumentError, match="from inside of its own call"),
    ):
        pipe(x)
    pipe(x)


def test_after_an_anomaly_the_callers_autocast_is_as_before():
    class Low(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                h = torch.log(self.a(x).abs() * 0 + x)
            return h.float()

    pipe = fxsplit.compile(Low(), fxsplit.Plan(detect_anomaly="nan"), example_args=(torch.rand(4, 4),))
    with pytest.raises(fxsplit.errors.AnomalyError):
        pipe(-torch.ones(4, 4))
    assert nn.Linear(2, 2)(torch.rand(1, 2)).dtype == torch.float32


def test_a_mask_is_no_infinity_and_an_ordinary_error_names_the_line():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(5, 4)

        def forward(self, i):
            x = self.e(i)  # the line of the index
            scores = x @ x.transpose(1, 2)
            mask = torch.full((3, 3), float("-inf")).triu(1)
            return (scores + mask).softmax(-1) @ x

    ids = torch.randint(0, 5, (4, 3))
    pipe = fxsplit.compile(Masked(), fxsplit.Plan(micro_batches=2, detect_anomaly="inf"), example_args=(ids,))
    assert pipe(ids).isfinite().all()
    with pytest.raises(IndexError) as caught:
        pipe(ids + 5)
    line = next(
        i
        for i, row in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "the line of the index" in row
    )
    assert f"test_engine.py:{line}" in "\n".join(caught.value.__notes__)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_norm_that_is_called_twice(momentum):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.n = nn.BatchNorm1d(4, momentum=momentum)

        def forward(self, x):
            return self.n(x) + self.n(3 * x)

    model, x = Twice().double(), torch.randn(9, 4).double() + 5
    eager = copy.deepcopy(model)
    pipe = fxsplit.compile(model, fxsplit.Plan(micro_batches=3, deferred_batch_norm=True), example_args=(x,))
    for _ in range(2):
        pipe(x), eager(x)
    for a, b in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_schedule_of_forwards_only_is_refused():
    own = fxsplit.Schedule.from_csv("0F0,0F1\n1F0,1F1\n")
    with pytest.raises(fxsplit.errors.PlanError, match="never goes backward"):
        fxsplit.Plan(stages=2, micro_batches=2, schedule=own)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_backward_in_another_order_than_forward(checkpoint):
    """A buffer orders the forwards; backward is free, unless it goes forward again."""
    own = fxsplit.Schedule.from_csv("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n", name="lifo")
    model, x = norms(), torch.randn(6, 4).double()
    plan = fxsplit.Plan(stages=2, micro_batches=2, schedule=own, checkpoint=checkpoint)
    if checkpoint == "always":
        with pytest.raises(fxsplit.errors.ScheduleError, match="can never finish"):
            fxsplit.compile(model, plan, example_args=(x,))
        return
    eager = copy.deepcopy(model)
    fxsplit.compile(model, plan, example_args=(x,)).step(x, loss_fn=of_all)
    fxsplit.compile(eager, plan.replace(schedule="gpipe"), example_args=(x,)).step(x, loss_fn=of_all)
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_outputs_that_are_constants_and_losses_without_a_gradient(schedule):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return {"o": self.b(self.a(x)), "n": None, "k": 3, "s": "name"}

    x = torch.randn(8, 4)
    pipe = fxsplit.compile(Pair(), plan_for(schedule, 2, micro_batches=4), example_args=(x,))
    _, output = pipe.step_with_output(x, loss_fn=lambda y: y["o"].square().mean(), reduction="mean")
    assert output["n"] is None and output["k"] == 3 and output["s"] == "name" and output["o"].shape == (8, 3)
    with pytest.raises(fxsplit.errors.GradientError, match="nothing that requires"):
        pipe.step(x, loss_fn=lambda y: y["o"].detach().mean(), reduction="mean")


def test_one_device_for_each_worker_even_if_they_are_the_same():
    plan = fxsplit.Plan(stages=4, schedule="breadth_first", devices=["cpu", "cpu"])
    assert plan.workers == 2 and plan.devices == ("cpu",) * 4


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_step_of_a_model_that_lost_a_module_says_so(schedule):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), torch.randn(8, 4)
    pipe = fxsplit.compile(model, plan_for(schedule, 2, micro_batches=2), example_args=(x,))
    model[1] = nn.Identity()
    with pytest.raises(fxsplit.errors.ArgumentError, match="compile again"):
        pipe.step(x, loss_fn=lambda y: y.sum(), reduction="sum")
