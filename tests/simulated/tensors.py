"""Whole pipelines with torch: what a call gives and leaves behind is, bit for bit, that of one without a simulation.

Blocks of a linear layer, batch normalisation, dropout and a skip, two numbers wide, with a weight that two stages share.
After a failure, buffers and gradients are as before, and the next call is right.
"""

import contextlib
import functools
import random
from unittest import mock

import torch
from torch import nn

import fxsplit
from fxsplit.inserted import recompute
from fxsplit.replicas.meeting import StoppedError
from fxsplit.runtime import play
from fxsplit.schedules.catalog import NAMES, SHARED, usual_workers

from .cases import FAULTS, Faults, OnPurpose, comes_first, own_schedule
from .installed import LINES, plain
from .scheduler import Simulation, SimulationError, Thread, pass_time, point, simulation

WIDTH, ROWS, MICRO_BATCHES = 2, 7, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)

    def forward(self, x):
        return torch.tanh(self.drop(self.norm(self.fc(x))))


class Model(nn.Module):
    """`count` blocks in a row; the last one reads what the first one gave, and its weight."""

    def __init__(self, count):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x):
        first = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return nn.functional.linear(x + first, self.blocks[0].fc.weight)


def _plans():
    """Each schedule by itself, recomputed, and where it can be, with replicas, and with micro-batches that meet."""
    for name in NAMES:
        shared = {"workers": usual_workers(name, 4)} if name in SHARED else {}
        base = fxsplit.Plan(
            cut=[f"blocks.{s}" for s in range(1, 4)], schedule=name, micro_batches=MICRO_BATCHES, **shared
        )
        yield base
        yield base.replace(checkpoint="always")
        if name not in SHARED:
            yield base.replace(replicas=[2, 1, 2, 1], checkpoint="except_last")
        if name == "gpipe":
            yield base.replace(sync_batch_norm=True)
        if name in ("gpipe", "1f1b"):
            yield base.replace(deferred_batch_norm=True, replicas=[1, 3, 1, 2])
    for seed in range(4):  # of somebody's own, with micro-batches of a stage on several workers
        own = own_schedule(random.Random(seed), 4, MICRO_BATCHES)
        yield base.replace(schedule=own, workers=None, checkpoint="always" if seed % 2 else "never")


PLANS = tuple(_plans())


def _batch():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def _loss(y):
    return y.square().sum()


LOSS = {"loss_fn": _loss, "reduction": "sum"}
KINDS = (*FAULTS, "twice")


class Made:
    """A pipeline, what it was before any call, and what one call makes of that."""

    def __init__(self, plan):
        torch.manual_seed(0)
        self.pipe = fxsplit.compile(Model(4), plan, example_args=(_batch(),))
        for p in self.pipe.parameters():
            p.grad = torch.ones_like(p)
        self.first = self.state()
        self.tape = self.pipe.tape
        self.inside = self.pipe.plan.loss_inside
        with plain():
            self.step()  # compares what is compared once
            self.after = {}
            for by_hand in (False, True):
                self.reset()
                self.after[by_hand] = [self.step(by_hand)], self.state()
            self.reset()
            self.after["twice"] = [self.step(), self.pipe.step(_batch(), **LOSS)], self.state()
            self.reset()
            with torch.no_grad():
                torch.manual_seed(2)
                self.pipe(_batch())
            self.forward_only = self.state()
        recompute._CALLED.clear()  # locks that are not simulated

    def state(self):
        grads = {f"{name}.grad": p.grad for name, p in self.pipe.named_parameters()}
        found = {k: v.detach().clone() for k, v in {**self.pipe.state_dict(), **grads}.items()}
        return {**found, "random": torch.get_rng_state()}

    def reset(self):
        with torch.no_grad():
            now = {**dict(self.pipe.named_parameters()), **dict(self.pipe.named_buffers())}
            for name, value in now.items():
                value.data.copy_(self.first[name])
            for name, p in self.pipe.named_parameters():
                p.grad = self.first[f"{name}.grad"].clone()

    def step(self, by_hand=False):
        torch.manual_seed(2)
        if by_hand:
            loss = _loss(self.pipe(_batch()))
            loss.backward()
            return loss.detach()
        return self.pipe.step(_batch(), **LOSS)

    def twice(self):
        """Two threads call it; who comes first makes no difference."""
        torch.manual_seed(2)
        losses = []
        other = Thread(target=lambda: losses.append(self.pipe.step(_batch(), **LOSS)), name="other caller")
        other.start()
        losses.append(self.pipe.step(_batch(), **LOSS))
        other.join()
        return losses


@functools.cache
def made(number):
    return Made(PLANS[number])


class Run:
    """One interleaving of one step, by its seed."""

    def __init__(self, seed):
        rng = random.Random(f"tensors {seed}")
        self.seed, self.plan = seed, rng.randrange(len(PLANS))
        self.made = made(self.plan)
        self.faults = Faults.drawn(rng, self.made.tape)
        self.by_hand = not self.made.inside and rng.random() < 0.5
        if rng.random() < 0.1:
            self.faults, self.by_hand = Faults("twice", {}, [], {}), False
        lines = LINES if rng.random() < 0.5 else ()
        self.simulation = Simulation(rng.random(), lines)
        self.again = Simulation(rng.random(), lines)
        self.faults.aim(self.simulation)
        self.begun, self.done, self.raised, self.wrong = [], set(), [], []

    def __str__(self):
        plan = PLANS[self.plan]
        return (
            f"tensors, seed {self.seed}: {plan.schedule_name}, checkpoint {plan.checkpoint}, replicas {plan.replicas}, "
            f"sync {plan.sync_batch_norm}, deferred {plan.deferred_batch_norm}; by hand {self.by_hand}, faults: {self.faults.kind}, {self.faults}"
        )

    @contextlib.contextmanager
    def watched(self):
        """Every instruction is noted, and fails where it is to."""
        act = play.act

        def acts(call, x):
            if simulation() is not self.simulation:
                act(call, x)
                return
            try:
                point()
                if x.number in self.begun and self.faults.kind != "twice":
                    self.wrong.append(f"{x} is played twice")
                self.begun.append(x.number)
                self._fail(x, "before")
                if x.number in self.faults.delays:
                    pass_time(self.faults.delays[x.number])
                act(call, x)
                point()
                self._fail(x, "after", "within")
                self.done.add(x.number)
            except Exception as error:
                if not isinstance(error, (OnPurpose, StoppedError)):
                    self.wrong.append(f"{x}: {error!r}")
                raise

        with mock.patch.object(play, "act", acts):
            yield

    def _fail(self, x, *places):
        when, error = self.faults.errors.get(x.number, ("", None))
        if when in places:
            self.raised.append((x, error))
            raise error

    def run(self):
        """Raises: AssertionError: it is not as it has to be."""
        one = self.made
        one.reset()
        error = losses = None
        with self.watched():
            try:
                losses = self.simulation.run(self._steps)
            except SimulationError:
                raise
            except BaseException as raised:
                error = raised
        assert not self.wrong, self.wrong
        struck = self.simulation.struck
        if not struck and not self.raised:
            assert error is None, repr(error)
            times = 2 if self.faults.kind == "twice" else 1
            assert sorted(self.begun) == sorted([x.number for x in one.tape.order] * times)
        else:
            self._check_error(error, struck)
            one.reset()
            losses = self.again.run(self._steps)
        wanted, after = one.after["twice" if self.faults.kind == "twice" else self.by_hand]
        assert {*map(float, losses)} == {*map(float, wanted)} and len(losses) == len(wanted)
        now = one.state()
        if (
            self.faults.kind == "twice" and not one.inside
        ):  # whose backward comes first is the callers' own affair
            grads = [name for name in now if name.endswith(".grad")]
            assert all(torch.allclose(now[name], after[name]) for name in grads)
            now.update((name, after[name]) for name in grads)
        _check_equal(now, after)

    def _steps(self):
        return self.made.twice() if self.faults.kind == "twice" else [self.made.step(self.by_hand)]

    def _check_error(self, error, struck):
        assert error is not None
        if struck:
            assert any(error is one for one in struck), f"{error!r} instead of one of {struck}"
        else:
            x, first = min(self.raised, key=comes_first)
            assert error is first, f"{error!r} instead of {first!r}, of {x}"
        for x, one in self.raised:
            (note,) = one.__notes__
            assert f" of stage {x.stage} (" in note, note
            assert f"micro-batch {x.micro_batches[0]} of {MICRO_BATCHES}" in note, note
            assert f", action {x}" in note, note
        now, one = self.made.state(), self.made
        done = any(not x.is_forward for x, _ in self.raised) or any(
            not x.is_forward for x in one.tape.order if x.number in self.done
        )
        for name in now:
            if name.endswith(".grad"):
                assert torch.equal(now[name], one.first[name]), f"{name} has changed"
        buffers = {name: now[name] for name, _ in one.pipe.named_buffers()}
        if self.by_hand and done:  # the forward was a call by itself
            _check_equal(buffers, {name: one.forward_only[name] for name in buffers})
        elif not (self.by_hand and struck and _same(buffers, one.forward_only)):
            _check_equal(buffers, {name: one.first[name] for name in buffers})


def _same(some, all_of_them):
    return all(torch.equal(value, all_of_them[name]) for name, value in some.items())


def _check_equal(now, wanted):
    wrong = [name for name, value in wanted.items() if not torch.equal(now[name], value)]
    assert not wrong, f"other bits in {wrong}"


@contextlib.contextmanager
def tensors():
    """Nothing more than `installed`."""
    torch.set_num_threads(1)
    yield
