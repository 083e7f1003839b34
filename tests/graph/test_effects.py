"""What may happen counts: state that is written, random numbers, and what is computed a second time."""

import copy
import itertools
import random
import sys
import threading
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxsplit
from fxsplit import Plan
from fxsplit.errors import BatchError, EffectError, FxsplitError, GradientError, PlanError
from fxsplit.graph.effects import DRAWING, draws_now, may_draw, of_module
from tests.strategies import EXAMPLES, compiled_with_fewer

pytestmark = pytest.mark.filterwarnings("ignore:.*than for the whole batch")
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
SCHEDULES = [{}, {"schedule": "1f1b"}, {"schedule": "zb_h1"}, {"replicas": 2}]


def trained(step, model, x, parts):
    """Losses, gradients and buffers of `parts` micro-batches, one after the other, by `step(model, x)`."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    for piece in x.tensor_split(parts):
        step(model, piece)
    found = {n: p.grad for n, p in model.named_parameters()}
    found.update(model.named_buffers())
    return {**found, "input": x.grad}


def eager_in_order(model, x, parts=4):
    """Forward and backward of each micro-batch, one after the other: what recomputation has to give."""
    return trained(lambda m, piece: m(piece).sum().backward(), copy.deepcopy(model), x, parts)


def split(model, x, plan, example=None, change=None):
    model = copy.deepcopy(model)
    pipe = fxsplit.compile(model, plan, example_args=(x if example is None else example,))
    if change is not None:
        change(model)
    return trained(lambda m, piece: pipe(piece).sum().backward(), model, x, 1)


def assert_same(found, expected):
    for name, value in expected.items():
        assert (value is None and found[name] is None) or torch.equal(found[name], value), name


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        self.n += 1
        return self.a(x) * self.n


class Adds(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        self.n += 1
        return x + self.n


class Scales(nn.Module):
    """An average of the largest values, by which it divides: as in quantizers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        h = self.a(x)
        self.scale.mul_(0.9).add_(h.detach().abs().amax(0), alpha=0.1)
        return self.b(h / self.scale)


class PlainAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n = nn.Linear(4, 4), torch.zeros(())

    def forward(self, x):
        self.n.add_(1)
        return self.a(x) * self.n


class Views(nn.Module):
    """Two buffers that are views of one memory: written by one name, read by the other."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("whole", torch.ones(8))
        self.register_buffer("part", self.whole[4:])

    def forward(self, x):
        self.whole += 1
        return self.a(x) * self.part


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        return self.a(x) * self.n


class TwoNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = Counts(), Reads()
        self.other.n = self.one.n

    def forward(self, x):
        return self.other(self.one(x))


class Whole(nn.Module):
    """Stays whole, because it asks for the values of a tensor."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) if x.sum() < 1e9 else x


MODELS = {
    "counter": Counts,
    "scale": Scales,
    "plain attribute": PlainAttribute,
    "views": Views,
    "two names": TwoNames,
    "whole": lambda: nn.Sequential(nn.Linear(4, 4), Whole(Counts()), nn.Linear(4, 4)),
    "whole views": lambda: nn.Sequential(nn.Linear(4, 4), Whole(Views()), nn.Linear(4, 4)),
    "whole scale": lambda: nn.Sequential(Whole(Scales()), nn.Linear(4, 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("more", SCHEDULES, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_a_region_is_recomputed_on_copies_of_what_it_writes(kind, more):
    torch.manual_seed(0)
    model = MODELS[kind]()
    found = split(model, X, Plan(micro_batches=4, checkpoint="always", **more))
    assert_same(found, eager_in_order(model, X))


def test_a_step_recomputes_on_copies_too():
    model = Counts()
    for schedule in ("gpipe", "1f1b", "zb_h1"):
        mine = copy.deepcopy(model)
        pipe = fxsplit.compile(
            mine, Plan(micro_batches=4, checkpoint="always", schedule=schedule), example_args=(X,)
        )
        pipe.step(X, loss_fn=lambda y, t: y.sum(), target=torch.zeros(8), reduction="sum")
        expected = eager_in_order(model, X)
        assert torch.equal(mine.a.weight.grad, expected["a.weight"]), schedule
        assert mine.n == 4


def test_a_loaded_pipeline_recomputes_on_copies_too(tmp_path):
    model = Counts()
    pipe = fxsplit.compile(model, Plan(micro_batches=4, checkpoint="always"), example_args=(X,))
    pipe.save_code(tmp_path / "p")
    mine = copy.deepcopy(model)
    loaded = fxsplit.load(tmp_path / "p", mine)
    expected = eager_in_order(model, X)
    assert_same(trained(lambda m, piece: loaded(piece).sum().backward(), mine, X, 1), expected)


def test_recomputation_leaves_the_buffer_objects_in_place():
    model = Counts()
    buffer = model.n
    pipe = fxsplit.compile(model, Plan(micro_batches=2, checkpoint="always"), example_args=(X,))
    loss = pipe(X).sum()
    version = buffer._version
    loss.backward(retain_graph=True)
    loss.backward()
    assert model.n is buffer and buffer == 2 and buffer._version == version


# -- what the example did not do --------------------------------------------------------------------------------


class ConvNet(nn.Module):
    def __init__(self, momentum=0.1):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 4, 1, bias=False), nn.BatchNorm1d(4, momentum=momentum)
        self.register_buffer("zero", torch.zeros(()))

    def forward(self, x):
        return self.norm(self.conv(x[..., None]))[..., 0]


@pytest.mark.parametrize("momentum", [0.1, 0.0, None])
@pytest.mark.parametrize("functional", [False, True])
def test_running_statistics_may_be_written_whatever_the_example_was(momentum, functional):
    torch.manual_seed(0)
    model = ConvNet(momentum)
    if functional:
        model = FunctionalNorm(momentum or 0.0)
    with torch.no_grad():
        for p in model.norm.parameters() if not functional else ():
            p.copy_(torch.randn(4))
    found = split(model, X, Plan(micro_batches=4, checkpoint="always"), example=torch.zeros(8, 4))
    assert_same(found, eager_in_order(model, X))


class FunctionalNorm(nn.Module):
    def __init__(self, momentum):
        super().__init__()
        self.a, self.momentum = nn.Linear(4, 4, bias=False), momentum
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x):
        return F.batch_norm(self.a(x), self.mean, self.var, training=self.training, momentum=self.momentum)


def test_a_failed_call_restores_statistics_that_the_example_did_not_move():
    class Fails(nn.Module):
        def forward(self, x):
            if x.isnan().any():
                raise ValueError("nan")
            return x

    model = nn.Sequential(nn.BatchNorm1d(4, momentum=0.0), Fails())
    pipe = fxsplit.compile(model, Plan(micro_batches=2), example_args=(torch.zeros(8, 4),))
    model[0].momentum = 0.1
    bad = X.clone()
    bad[-1] = float("nan")
    with pytest.raises(ValueError, match="nan"):
        pipe(bad)
    assert model[0].num_batches_tracked == 0 and (model[0].running_mean == 0).all()


def test_a_dropout_whose_rate_is_raised_later_is_recomputed_with_its_mask():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4), nn.Tanh())
    for parts in (1, 4):
        results = []
        for policy in ("never", "always"):
            mine = copy.deepcopy(model)
            pipe = fxsplit.compile(
                mine, Plan(stages=2, micro_batches=parts, checkpoint=policy), example_args=(X,)
            )
            mine[1].p = 0.5
            torch.manual_seed(1)
            results.append(trained(lambda m, piece, pipe=pipe: pipe(piece).sum().backward(), mine, X, 1))
        assert_same(*results)


class Sometimes(nn.Module):
    """Draws and writes only for some data."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        x = self.a(x)
        if x.sum() > 0:
            self.seen.add_(1)
            x = x * torch.rand(()) * self.seen
        return x


def test_what_a_whole_module_does_for_some_data_is_recomputed_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Sometimes(), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].a.bias.fill_(100.0)
    quiet = -1e4 * torch.ones(8, 4)
    with torch.no_grad():
        assert model[1].a(model[0](quiet)).sum() <= 0 or model[1].a(model[0](-quiet)).sum() <= 0
        if model[1].a(model[0](quiet)).sum() > 0:
            quiet = -quiet
    results = []
    for policy in ("never", "always"):
        for stages in (1, 2):
            if (policy, stages) == ("never", 2):
                continue
            torch.manual_seed(7)
            plan = Plan(stages=stages, micro_batches=4, checkpoint=policy, schedule="1f1b")
            mine = copy.deepcopy(model)
            pipe = fxsplit.compile(mine, plan, example_args=(quiet,))
            torch.manual_seed(7)
            pipe.step(X, loss_fn=lambda y, t: y.sum(), target=torch.zeros(8), reduction="sum")
            assert mine[1].seen == 4
            results.append({n: p.grad for n, p in mine.named_parameters()})
    assert_same(results[1], results[0])


def test_a_generator_that_nobody_drew_from_is_left_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=4), example_args=(X,))
    pipe.eval()
    before = torch.get_rng_state()
    pipe(X)
    assert torch.equal(before, torch.get_rng_state())
    pipe.train()
    pipe(X)
    assert not torch.equal(before, torch.get_rng_state())


class AttributeForSome(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        if x.sum() > 0:
            self.calls += 1
        return self.a(x) * (1 + self.calls)


@pytest.mark.parametrize("more", [{"checkpoint": "always"}, {"replicas": 2}], ids=str)
def test_an_attribute_that_is_set_though_it_was_not_on_the_example_is_an_error(more):
    model = nn.Sequential(nn.Linear(4, 4), AttributeForSome())
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    plan = Plan(micro_batches=4, **more)
    pipe = fxsplit.compile(model, plan, example_args=(X,))
    with torch.no_grad():
        model[0].bias.fill_(100.0)
    with pytest.raises(EffectError, match=r"1\.calls"):
        pipe(X).sum().backward()
    # The remedy: an example on which it does.
    fresh = copy.deepcopy(model)
    fresh[1].calls = 0
    pipe = fxsplit.compile(fresh, plan, example_args=(X,))
    pipe(X).sum().backward()
    assert fresh[1].calls == 4


# -- what changes between forward and a recomputing backward ------------------------------------------------------


class Rated(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.1)
        self.register_buffer("shift", torch.ones(4))
        self.plain = torch.ones(4)
        self.tail = Tail()

    def forward(self, x):
        return self.tail(self.drop(self.norm(self.a(x) * self.shift * self.plain)))


class Tail(nn.Module):
    def __init__(self):
        super().__init__()
        self.tau, self.options = 2.0, {"power": 2}

    def forward(self, x):
        return x / self.tau if x.isnan().any() else x * self.options["power"] * self.tau


def _set(path, value):
    def change(model):
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, value)

    return change


CHANGES = {
    "shift": lambda m: m.shift.mul_(2),
    "plain": lambda m: m.plain.mul_(2),
    "drop.p": _set("drop.p", 0.9),
    "norm.eps": _set("norm.eps", 1.0),
    "tail.tau": _set("tail.tau", 7.0),
    "tail.options": lambda m: m.tail.options.update(power=9),
    "a.weight": lambda m: m.a.weight.data.mul_(2) if False else m.a.weight.detach().mul_(2),
    "norm.weight": lambda m: m.norm.register_parameter("weight", nn.Parameter(torch.zeros(4))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_between_forward_and_a_recomputing_backward_is_an_error(name):
    model = Rated()
    pipe = fxsplit.compile(model, Plan(micro_batches=2, checkpoint="always"), example_args=(X,))
    loss = pipe(X).sum()
    CHANGES[name](model)
    with pytest.raises(
        GradientError, match=f"{name.rpartition('.')[2]}|{name.partition('.')[0]}.*between forward"
    ):
        loss.backward()
    pipe(X).sum().backward()  # the next call is right


# -- state past the modules ---------------------------------------------------------------------------------------


class Draws(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.a, self.draw = nn.Linear(4, 4), draw

    def forward(self, x):
        return self.a(x) * self.draw()


class Imports(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        if x.sum() > 0:
            x = x + random.random() + np.random.rand()
        return self.a(x)


class Bumps(nn.Module):
    """Counts in what it is given, which another may have too."""

    def __init__(self, shared):
        super().__init__()
        self.a, self.shared = nn.Linear(4, 4), shared

    def forward(self, x):
        shared = self.shared
        if isinstance(shared, dict):
            shared["n"] = n = shared["n"] + 1
        elif isinstance(shared, list):
            shared.append(0)
            n = len(shared)
        elif isinstance(shared, torch.Generator):
            n = float(torch.rand((), generator=shared))
        elif isinstance(shared, nn.Module):
            shared.n.add_(1)
            n = float(shared.n)
        else:
            shared.n += 1
            n = shared.n
        return self.a(x) * n


class Plain:
    def __init__(self):
        self.n = 0


SHARED = {
    "dict": lambda: {"n": 0},
    "list": list,
    "object": Plain,
    "generator": lambda: torch.Generator().manual_seed(5),
}


def both_in_order(make, seed, parts=4):
    """Numbers of eager, micro-batch after micro-batch, and of the pipeline; from equal models."""
    model, other = make(), make()
    other.load_state_dict(model.state_dict())
    seed()
    expected = torch.cat([model(piece) for piece in X.tensor_split(parts)])
    return model, other, expected


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("more", [{}, {"checkpoint": "always", "schedule": "1f1b"}, {"replicas": 2}], ids=str)
def test_modules_that_share_what_changes_are_in_one_stage_and_take_turns(kind, more):
    torch.manual_seed(0)

    def make():
        shared = SHARED[kind]()
        return nn.Sequential(Bumps(shared), nn.Linear(4, 4), Bumps(shared), nn.Linear(4, 4))

    _, other, expected = both_in_order(make, lambda: None)
    pipe = fxsplit.compile(other, Plan(stages=2, micro_batches=4, **more), example_args=(X,))
    assert torch.equal(pipe(X), expected)
    at = [
        next(s.index for s in pipe if any(n.startswith(f"{k}.") for n, _ in s.named_parameters()))
        for k in (0, 2)
    ]
    assert at[0] == at[1]


def test_a_module_that_writes_to_one_in_a_list_of_its_own_stays_with_it():
    torch.manual_seed(0)

    class Watches(nn.Module):
        def __init__(self, other):
            super().__init__()
            self.a, self.others = nn.Linear(4, 4), [other]

        def forward(self, x):
            self.others[0].n.add_(1)
            return self.a(x) + self.others[0].n if x.sum() < 1e9 else x

    def make():
        counts = Adds()
        return nn.Sequential(counts, nn.Linear(4, 4), Watches(counts), nn.Linear(4, 4))

    _, other, expected = both_in_order(make, lambda: None)
    pipe = fxsplit.compile(other, Plan(stages=2, micro_batches=4), example_args=(X,))
    assert torch.equal(pipe(X), expected) and other[0].n == 8


@pytest.mark.parametrize("kind", ["random", "numpy", "both, for some data"])
def test_modules_that_draw_from_pythons_random_numbers_draw_in_order(kind):
    torch.manual_seed(0)
    makers = {
        "random": lambda: Draws(random.random),
        "numpy": lambda: Draws(np.random.rand),
        "both, for some data": Imports,
    }

    def make():
        return nn.Sequential(makers[kind](), nn.Linear(4, 4), makers[kind](), nn.Linear(4, 4))

    def seed():
        random.seed(1)
        np.random.seed(1)

    _, other, expected = both_in_order(make, seed)
    example = X if kind != "both, for some data" else -abs(X) * 0 - 1
    pipe = fxsplit.compile(
        other, Plan(stages=2, micro_batches=4, checkpoint="always"), example_args=(example,)
    )
    for _ in range(3):
        seed()
        found = pipe(X)
        assert torch.equal(found, expected)
        found.sum().backward()


class FromDefault(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x) * torch.rand((), generator=torch.default_generator)


class Reseeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        torch.default_generator.manual_seed(0)
        if x.sum() > 1e9:
            return x
        return self.a(x) * torch.rand(())


@pytest.mark.parametrize("kind", [FromDefault, Reseeds])
def test_the_default_generator_by_its_name_gives_the_same_numbers_in_every_run(kind):
    torch.manual_seed(0)
    model = nn.Sequential(kind(), nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), kind(), nn.Linear(4, 4))
    found = set()
    for policy in ("never", "always"):
        for schedule in ("gpipe", "1f1b"):
            mine = copy.deepcopy(model)
            plan = Plan(stages=2, micro_batches=4, checkpoint=policy, schedule=schedule)
            pipe = fxsplit.compile(mine, plan, example_args=(X,))
            for _ in range(4):
                mine.zero_grad()
                torch.manual_seed(3)
                pipe.step(X, loss_fn=lambda y, t: y.sum(), target=torch.zeros(8), reduction="sum")
                cut = tuple(len(s.nodes) for s in pipe)
                found.add((cut, mine[0].a.weight.grad.sum().item()))
    assert len(found) == len({cut for cut, _ in found})


def test_a_module_that_seeds_is_with_all_that_draw():
    model = nn.Sequential(Reseeds(), nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=4), example_args=(X,))
    assert [s.index for s in pipe if s.random] == [0]
    assert "layer_0" in pipe[0].nodes and "layer_2" in pipe[0].nodes


def test_values_in_a_threading_local_are_refused_where_stages_have_threads():
    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.store = nn.Linear(4, 4), threading.local()

        def forward(self, x):
            self.store.n = getattr(self.store, "n", 0) + 1
            return self.a(x) * self.store.n

    model = nn.Sequential(nn.Linear(4, 4), Local())
    with pytest.raises(PlanError, match=r"^1 has a threading\.local[\s\S]*micro_batches=1"):
        fxsplit.compile(model, Plan(stages=2, micro_batches=4), example_args=(X,))
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=1), example_args=(X,))
    y, z = pipe(X), pipe(X)
    assert torch.equal(z, model[1].a(model[0](X)) * 2) and torch.equal(y * 2, z)


@pytest.mark.parametrize("hooked", ["forward", "pre"])
def test_hooks_hear_of_a_forward_once_whatever_is_recomputed(hooked):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    heard = []
    register = model[2].register_forward_hook if hooked == "forward" else model[2].register_forward_pre_hook
    register(lambda *_: heard.append(1))
    pipe = fxsplit.compile(model, Plan(micro_batches=4, checkpoint="always"), example_args=(X,))
    heard.clear()
    pipe(X).sum().backward()
    assert len(heard) == 4
    assert any("checkpoint(" in stage.code for stage in pipe)  # what has no hooks is


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")  # torch's own, at its first use
def test_forward_mode_differentiation_is_refused_and_not_lost():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    pipe = fxsplit.compile(model, Plan(micro_batches=2), example_args=(X,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, torch.ones_like(X))
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(GradientError, match="forward-mode"):
                pipe(dual)
        pipe(X)  # without a tangent, it runs
    with torch.no_grad(), pytest.raises(GradientError, match=r"pipe\.unsplit\(\)"):
        torch.func.jvp(pipe, (X,), (torch.ones_like(X),))


class CheckpointsAndPipes(nn.Module):
    def __init__(self, pipe):
        super().__init__()
        self.pipe, self.a = pipe, nn.Linear(4, 4)

    def forward(self, x):
        def drop(v):
            return F.dropout(self.a(v), 0.5)

        return self.pipe(torch.utils.checkpoint.checkpoint(drop, x, use_reentrant=False))


def test_a_pipeline_inside_of_a_module_that_has_the_generator_to_itself():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5))
    inner = fxsplit.compile(inner, Plan(stages=2, micro_batches=2), example_args=(X[:4],))
    model = nn.Sequential(nn.Linear(4, 4), CheckpointsAndPipes(inner), nn.Dropout(0.3), nn.Linear(4, 4))
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=2), example_args=(X,), leaf_modules=["1"])
    found, failed = set(), []

    def run():
        try:
            for _ in range(3):
                torch.manual_seed(0)
                y = pipe(X)
                y.sum().backward()
                found.add(y.sum().item())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and not failed and len(found) == 1


class Waits(nn.Module):
    """Lets other threads do something."""

    def forward(self, x):
        time.sleep(0.03)
        return x * 1


@pytest.mark.parametrize("draws", [False, True])
def test_a_thread_that_draws_meanwhile_is_named_where_it_matters(draws):
    stop = threading.Event()

    def draw():
        for size in itertools.cycle(range(1, 98)):  # so that two runs hardly ever find the same
            if stop.wait(0.0005):
                break
            torch.rand(size)

    thread = threading.Thread(target=draw)
    thread.start()
    model = nn.Sequential(Waits(), nn.Linear(4, 4), nn.Dropout(0.5 if draws else 0.0), nn.Linear(4, 4))
    try:
        if draws:
            with pytest.raises(fxsplit.errors.VerifyError, match="another thread draws"):
                fxsplit.compile(model, Plan(stages=2), example_args=(X,), leaf_modules=["0"])
        else:
            fxsplit.compile(model, Plan(stages=2), example_args=(X,), leaf_modules=["0"])
    finally:
        stop.set()
        thread.join()


def test_every_operation_that_torch_says_is_seeded_may_draw():
    seeded = set()
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        if space == "aten" and not name.startswith("_"):
            overload = getattr(getattr(torch.ops.aten, name), schema.overload_name or "default")
            if torch.Tag.nondeterministic_seeded in overload.tags:
                seeded.add(name.removesuffix("_"))
    unknown = {n for n in seeded if n not in DRAWING and not n.startswith(("miopen", "cudnn"))}
    assert unknown <= {"normal_functional", "rrelu_with_noise_functional"}


class Gate(nn.Module):
    """Stays whole; writes a buffer and, if it is to, draws, for some data."""

    def __init__(self, draws):
        super().__init__()
        self.a, self.draws = nn.Linear(4, 4), draws
        self.register_buffer("seen", torch.ones(4))

    def forward(self, x):
        x = self.a(x)
        if x.sum() > 0:
            self.seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            x = x + torch.rand(4) if self.draws else x * 2
        return x * self.seen


class Told(nn.Module):
    """Stays whole; sets an attribute for some data."""

    def __init__(self):
        super().__init__()
        self.a, self.last = nn.Linear(4, 4), 1.0

    def forward(self, x):
        if x.sum() > 0:
            self.last += 1.0
        return self.a(x) * self.last


LAYERS = {
    "linear": lambda: nn.Linear(4, 4),
    "tanh": nn.Tanh,
    "counts": Counts,
    "scales": Scales,
    "plain": PlainAttribute,
    "norm": lambda: nn.BatchNorm1d(4),
    "still norm": lambda: nn.BatchNorm1d(4, momentum=0.0),
    "mean norm": lambda: nn.BatchNorm1d(4, momentum=None),
    "gate": lambda: Gate(False),
    "drawing gate": lambda: Gate(True),
    "told": Told,
    "dropout": lambda: nn.Dropout(0.0),
    "whole counts": lambda: Whole(Counts()),
}


@st.composite
def effectful(draw):
    names = draw(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=5))
    torch.manual_seed(draw(st.integers(0, 50)))
    return names, nn.Sequential(nn.Linear(4, 4), *(LAYERS[n]() for n in names))


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(
    made=effectful(),
    policy=st.sampled_from(["never", "always", "except_last"]),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb_h1"]),
    stages=st.integers(1, 3),
    parts=st.integers(1, 4),
    replicas=st.integers(1, 2),
    example=st.sampled_from(["like it", "zeros", "negative"]),
    raised=st.booleans(),
)
def test_effects_are_eagers_or_an_error(made, policy, schedule, stages, parts, replicas, example, raised):
    """What a model may do beside computing is done as a loop over the micro-batches does it, whatever the plan is."""
    names, model = made
    plan = Plan(stages=stages, micro_batches=parts, checkpoint=policy, schedule=schedule, replicas=replicas)
    x = {"like it": X, "zeros": torch.zeros_like(X), "negative": -X}[example]
    mine, reference = copy.deepcopy(model), copy.deepcopy(model)
    try:
        pipe = compiled_with_fewer(mine, plan, (x,))
    except BatchError:
        assert parts > 1 and {"told", "gate", "drawing gate"} & {
            *names
        }  # which look at the whole batch to decide
        return
    raised = raised and "dropout" in names
    for layer in (*mine, *reference) if raised else ():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.5
    draws = raised or "drawing gate" in names

    def step(run, x):
        return run.step(x, loss_fn=lambda y, t: y.sum(), target=torch.zeros(len(x)), reduction="sum")

    if (
        draws and parts > 1
    ):  # eager has no such numbers: those of the same cut, without recomputation, by one worker
        cut = [len(stage.nodes) for stage in pipe]
        plain = Plan(stages=len(cut), micro_batches=parts)
        other = fxsplit.compile(reference, plain, example_args=(x,))
        if [len(stage.nodes) for stage in other] != cut:
            return

        def oracle(m, piece):
            step(other, piece)

        splits = 1
    else:

        def oracle(m, piece):
            m(piece).sum().backward()

        splits = parts
    torch.manual_seed(5)
    try:
        expected = trained(oracle, reference, X, splits)
    except RuntimeError:
        return  # eager refuses as well
    torch.manual_seed(5)
    try:
        found = trained(lambda m, piece: step(pipe, piece), mine, X, 1)
    except (RuntimeError, FxsplitError):
        return
    assert_same(found, expected)
    if parts > 1 and draws:
        assert torch.equal(mine[0].weight.grad, reference[0].weight.grad)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_replicas_do_not_write_what_the_backward_of_others_reads(schedule):
    """Either always eager's numbers or always an error: what order it is in is not left to chance."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), PlainAttribute())
    reference, found = copy.deepcopy(model), set()
    expected = trained(lambda m, piece: m(piece).sum().backward(), reference, X, 3)
    pipe = fxsplit.compile(
        model, Plan(cut=["2"], micro_batches=3, schedule=schedule, replicas=2), example_args=(X,)
    )
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(30):
            model[2].n.zero_()
            try:
                now = trained(
                    lambda m, piece: pipe.step(
                        piece, loss_fn=lambda y, t: y.sum(), target=torch.zeros(len(piece)), reduction="sum"
                    ),
                    model,
                    X,
                    1,
                )
            except RuntimeError as error:
                found.add(type(error))
            else:
                assert_same(now, expected)
                found.add(None)
    finally:
        sys.setswitchinterval(interval)
    assert found == ({None} if schedule == "1f1b" else {RuntimeError})


class InList(nn.Module):
    """Adds to a tensor in a list, for some data."""

    def __init__(self):
        super().__init__()
        self.a, self.sums = nn.Linear(4, 4), [torch.zeros(4)]

    def forward(self, x):
        if x.sum() > 0:
            self.sums[0].add_(x.detach().sum(0))
        return self.a(x) + self.sums[0]


def test_a_tensor_in_a_list_is_state_too():
    torch.manual_seed(0)
    model = nn.Sequential(InList(), nn.Linear(4, 4))
    plan = Plan(stages=2, micro_batches=4, checkpoint="always")
    pipe = fxsplit.compile(model, plan, example_args=(X.abs(),))
    assert (model[0].sums[0] == 0).all()
    expected = copy.deepcopy(model)
    pipe(X.abs()).sum().backward()
    found = eager_in_order(expected, X.abs())
    assert_same(
        {n: p.grad for n, p in model.named_parameters()}, {n: found[n] for n, _ in model.named_parameters()}
    )
    pipe = fxsplit.compile(model, plan.replace(micro_batches=1), example_args=(-X.abs(),))
    with pytest.raises(EffectError, match="that 0 can get hold of"):
        pipe(X.abs())


COUNTED = {"n": 0}


class CountsInGlobal(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        COUNTED["n"] += 1
        return self.a(x) * COUNTED["n"] if x.sum() < 1e9 else x


def test_a_global_that_modules_change_binds_them_and_is_as_before_after_compile():
    torch.manual_seed(0)
    COUNTED["n"] = 0
    model = nn.Sequential(CountsInGlobal(), nn.Linear(4, 4), CountsInGlobal(), nn.Linear(4, 4))
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=4), example_args=(X,))
    assert COUNTED["n"] == 0
    found = pipe(X)
    COUNTED["n"] = 0
    assert torch.equal(found, torch.cat([model(piece) for piece in X.tensor_split(4)]))


def test_an_embedding_that_shortens_its_rows_may_write_to_them():
    for functional in (False, True):
        torch.manual_seed(0)
        model = Embeds(functional)
        pipe = fxsplit.compile(
            model, Plan(micro_batches=2, checkpoint="always"), example_args=(torch.zeros(4).long(),)
        )
        assert all(stage.stateful for stage in pipe)
        with torch.no_grad():
            model.e.weight[1:] = 9.0
        pipe(torch.tensor([0, 1, 2, 3])).sum().backward()
        assert model.e.weight[1].norm() <= 1.001


class Embeds(nn.Module):
    def __init__(self, functional):
        super().__init__()
        self.e, self.functional = nn.Embedding(4, 4, max_norm=1.0), functional
        with torch.no_grad():
            self.e.weight.mul_(0.01)

    def forward(self, x):
        return F.embedding(x, self.e.weight, max_norm=1.0) if self.functional else self.e(x)


class CountsSome(nn.Module):
    """Counts batches that the example is not like: nobody knows of it before."""

    def __init__(self):
        super().__init__()
        self.fc, self.seen = nn.Linear(4, 4), 0

    def forward(self, x):
        if bool(x.sum() > 100):
            self.seen = self.seen + 1
        return self.fc(x)


OWN = fxsplit.Schedule.from_csv("0F0,0B0,0F2,0B2\n0F1,0B1\n1F0,1B0,1F1,1B1,1F2,1B2\n", name="own")


@pytest.mark.parametrize("fields", [{"replicas": [2, 1]}, {"schedule": OWN}], ids=["replicas", "own"])
def test_what_micro_batches_of_a_stage_change_at_the_same_time_is_noticed(fields):
    """Replicas of the plan, or several workers for a stage in a schedule of the user's own."""
    model = nn.Sequential(CountsSome(), nn.Linear(4, 4))
    pipe = fxsplit.compile(
        model, Plan(cut=["1"], micro_batches=3, **fields), example_args=(torch.zeros(6, 4),)
    )
    loss = {"loss_fn": lambda y: y.sum(), "reduction": "sum"}
    pipe.step(torch.zeros(6, 4), **loss)
    with pytest.raises(EffectError, match=r"0\.seen was 0, and is \d in forward, by micro-batches"):
        pipe.step(torch.full((6, 4), 100.0), **loss)


def test_what_layers_may_do_whatever_they_did_on_the_example():
    for kind in (nn.Embedding, nn.EmbeddingBag):
        layer = kind(3, 2, max_norm=1.0)
        assert of_module(layer).writes[0] is layer.weight and not of_module(kind(3, 2)).writes
    norm = nn.BatchNorm1d(2)
    assert {id(t) for t in of_module(norm).writes} == set(map(id, norm.buffers()))
    assert of_module(nn.Dropout(0.0)).draws and not of_module(norm).draws
    assert not draws_now(nn.Dropout(0.0), "p") and not draws_now(nn.Dropout(0.5).eval(), "p")
    assert draws_now(nn.Dropout(0.5), "p")


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "draws"),
    [
        (torch.rand, (2,), {}, True),
        (torch.rand, (2,), {"generator": torch.Generator()}, False),
        (F.dropout, (None, 0.5, True), {}, True),
        (F.dropout, (None, 0.0, True), {}, False),
        (F.dropout, (None, 0.5, False), {}, False),
        (F.dropout, (None,), {"p": 0.5, "training": False}, False),
        (F.scaled_dot_product_attention, (None, None, None), {}, False),
        (F.scaled_dot_product_attention, (None, None, None), {"dropout_p": 0.1}, True),
        (torch.add, (1, 2), {}, False),
    ],
)
def test_what_operations_may_draw(target, args, kwargs, draws):
    graph = torch.fx.Graph()
    node = graph.call_function(target, args, {k: v for k, v in kwargs.items() if k != "generator"})
    node._kwargs = {**node.kwargs, **kwargs}  # a generator is no argument that fx would write
    assert may_draw(node) is draws
