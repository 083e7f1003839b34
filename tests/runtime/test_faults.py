"""Every action of a call may fail: who hears of it, what is left, and that the next step is as if nothing had been."""

import contextlib
import copy
import ctypes
import functools
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.batch.merge import sizes
from fxsplit.errors import WorkerError
from fxsplit.runtime import worker
from fxsplit.schedules.catalog import NAMES as SCHEDULES
from fxsplit.schedules.catalog import SHARED as SHARED_WORKERS
from fxsplit.schedules.schedule import Action

STAGES, MICRO_BATCHES, ROWS, WIDTH = 3, 4, 9, 6
PLAN = fxsplit.Plan(cut=["blocks.1", "blocks.2"], micro_batches=MICRO_BATCHES)
# name → plan, the kinds of action in which the model fails, whether the loss is inside of the schedule, and whether the
# model draws random numbers
PLANS = {
    "gpipe": (PLAN, "FB", False, False),
    "1f1b": (PLAN.replace(schedule="1f1b"), "FB", True, False),
    "1f1b, recomputed, replicas, random": (
        PLAN.replace(schedule="1f1b", checkpoint="always", replicas=[2, 1, 2]),
        "FB",
        True,
        True,
    ),
    "zb_h1": (PLAN.replace(schedule="zb_h1"), "FI", True, True),
    "breadth_first": (PLAN.replace(schedule="breadth_first", workers=2), "FB", False, False),
    "interleaved_1f1b": (PLAN.replace(schedule="interleaved_1f1b", workers=2), "FB", True, True),
    "interleaved_zero_bubble": (
        PLAN.replace(schedule="interleaved_zero_bubble", workers=2),
        "FI",
        True,
        False,
    ),
}


class Trip(torch.autograd.Function):
    """The identity; calls back where it goes forward and backward."""

    @staticmethod
    def forward(ctx, x, tag, wire, what):
        ctx.wire, ctx.what, ctx.micro_batch = wire, what, int(tag[0])
        if what == "input":
            wire.passed("F", ctx.micro_batch)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.wire.passed({"input": "I", "weight": "W"}[ctx.what], ctx.micro_batch)
        return gradient, None, None, None


class Wire(nn.Module):
    """Does what it is armed with when a micro-batch passes in a direction. Rows say their micro-batch: `tag`."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))
        self.armed, self.count = {}, 0

    def forward(self, x, tag):
        self.count += 1  # keeps the tracer out
        return Trip.apply(x, tag, self, "input") * Trip.apply(self.weight, tag, self, "weight")

    def passed(self, kind, micro_batch):
        self.armed.get((kind, micro_batch), lambda: None)()

    def __deepcopy__(self, memo):
        twin = Wire()
        twin.weight = copy.deepcopy(self.weight, memo)
        return twin


class Block(nn.Module):
    def __init__(self, draws):
        super().__init__()
        self.fc, self.norm, self.wire = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Wire()
        self.drop = nn.Dropout(0.1) if draws else nn.Identity()

    def forward(self, x, tag):
        x = self.drop(self.norm(self.fc(x)))
        return torch.tanh(self.wire(x, tag))  # the line that fails


class Model(nn.Module):
    def __init__(self, draws=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(draws) for _ in range(STAGES))

    def forward(self, x, tag):
        for block in self.blocks:
            x = block(x, tag)
        return x

    def arm(self, action, do):
        """Let `do` be called in an action. A backward in one fails where it computes the gradients of inputs."""
        kind = "I" if action.kind == "B" else action.kind
        self.blocks[action.stage].wire.armed[kind, action.micro_batch] = do

    def disarm(self):
        for block in self.blocks:
            block.wire.armed.clear()


def fail_with(error):
    def fail():
        raise error

    return fail


def batch():
    rows = sizes(ROWS, MICRO_BATCHES)
    tag = [float(i) for i, n in enumerate(rows) for _ in range(n)]
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)), torch.tensor(tag)


@functools.cache
def compiled(name):
    """A pipeline, and one that never fails."""
    torch.manual_seed(0)
    plan, _, _, draws = PLANS[name]
    pipe = fxsplit.compile(Model(draws), plan, example_args=batch())
    return pipe, copy.deepcopy(pipe)


@pytest.fixture
def pair(request):
    pipe, twin = compiled(getattr(request, "param", "gpipe"))
    twin.load_state_dict(pipe.state_dict())
    for p in (*pipe.parameters(), *twin.parameters()):
        p.grad = torch.ones_like(p)
    yield pipe, twin
    pipe.model.disarm()


def state(pipe):
    """Weights, buffers and gradients, copied."""
    grads = {f"{name}.grad": p.grad for name, p in pipe.named_parameters()}
    return {k: v.clone() for k, v in {**pipe.state_dict(), **grads}.items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def step(pipe, inside, before=lambda: None):
    """One training step; `before` is called before each call of the pipeline."""
    torch.manual_seed(2)
    before()
    if inside:
        return pipe.step(*batch(), loss_fn=lambda y: y.square().sum(), reduction="sum")
    loss = pipe(*batch()).square().sum()
    before()
    loss.backward()
    return loss.detach()


def check_fails(pipe, inside, error):
    """A step raises just this error, and leaves no thread, no half-written buffer and no gradient."""
    states, threads = [], threading.enumerate()
    with pytest.raises(type(error)) as caught:
        step(pipe, inside, lambda: states.append(state(pipe)))
    assert caught.value is error
    assert threading.enumerate() == threads
    assert equal(state(pipe), states[-1])
    return len(states)


def check_recovers(pipe, twin, inside):
    """The next step is bit-equal to that of a pipeline that has never failed."""
    pipe.model.disarm()
    twin.load_state_dict(pipe.state_dict())  # a forward that was done has counted its batch
    loss = step(pipe, inside)
    assert torch.equal(loss, step(twin, inside))
    assert equal(state(pipe), state(twin))


def cases():
    return [
        pytest.param(name, Action(kind, s, i), inside, id=f"{name}-{s}{kind}{i}")
        for name, (_, kinds, inside, _) in PLANS.items()
        for kind, s, i in itertools.product(kinds, range(STAGES), range(MICRO_BATCHES))
    ]


LINE = next(
    f", at test_faults.py:{i} (blocks."
    for i, line in enumerate(Path(__file__).read_text().splitlines(), start=1)
    if line.endswith("# the line that fails")
)


@pytest.mark.slow
@pytest.mark.parametrize(("pair", "action", "inside"), cases(), indirect=["pair"])
def test_any_action_may_fail(pair, action, inside):
    pipe, twin = pair
    error = ValueError("on purpose")
    pipe.model.arm(action, fail_with(error))
    calls = check_fails(pipe, inside, error)
    assert calls == (1 if inside or action.kind == "F" else 2)
    (note,) = error.__notes__
    direction = "forward" if action.kind == "F" else "backward"
    for part in (
        f"in the {direction} of stage {action.stage} ",
        f"(blocks.{action.stage}.fc … blocks.{action.stage}, on cpu)",
        f"micro-batch {action.micro_batch} of {MICRO_BATCHES}",
        f"action {action}",
    ):
        assert part in note
    assert action.kind != "F" or LINE in note
    check_recovers(pipe, twin, inside)


@functools.cache
def compiled_plainly(schedule, checkpoint):
    """The same of a model of torch's own modules, whose backward is halved."""
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)) for _ in range(4)
    )
    workers = 2 if schedule in SHARED_WORKERS else None
    plan = fxsplit.Plan(stages=4, micro_batches=3, schedule=schedule, workers=workers, checkpoint=checkpoint)
    pipe = fxsplit.compile(nn.Sequential(*blocks), plan, example_args=(batch()[0][:8],))
    return pipe, copy.deepcopy(pipe)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_failure_after_any_action_of_any_schedule(schedule, checkpoint):
    pipe, twin = compiled_plainly(schedule, checkpoint)
    x = batch()[0][:8]

    def run(pipe):
        torch.manual_seed(2)
        return pipe.step(x, loss_fn=lambda y: y.square().sum(), reduction="sum")

    for p in (*pipe.parameters(), *twin.parameters()):
        p.grad = torch.ones_like(p)
    for action in [a for row in pipe.schedule.workers for a in row]:
        error = ValueError("on purpose")

        def fail(event, action=action, error=error):
            if event.action == action:
                raise error

        before, threads = state(pipe), threading.enumerate()
        with pipe.register_action_hook(fail), pytest.raises(ValueError) as caught:
            run(pipe)
        assert caught.value is error and threading.enumerate() == threads
        assert equal(state(pipe), before)
        (note,) = error.__notes__
        assert f"stage {action.stage} " in note and f"action {action}" in note
        assert torch.equal(run(pipe), run(twin))
        assert equal(state(pipe), state(twin))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "action", "inside"),
    [c for c in cases() if (c.values[1].stage, c.values[1].micro_batch) in {(0, 0), (1, 2), (2, 3)}],
    indirect=["pair"],
)
def test_interrupts_inside_of_workers_propagate(pair, action, inside):
    pipe, twin = pair
    error = SystemExit("stop") if action.stage == 2 else KeyboardInterrupt()
    pipe.model.arm(action, fail_with(error))
    check_fails(pipe, inside, error)
    check_recovers(pipe, twin, inside)


@pytest.mark.parametrize(
    ("first", "second", "errors"),
    [
        (Action("F", 2, 0), Action("F", 0, 2), (ValueError, KeyError)),
        (Action("F", 1, 1), Action("F", 0, 2), (ValueError, ValueError)),
        (Action("B", 2, 0), Action("F", 0, 2), (KeyError, ValueError)),
        (Action("F", 0, 2), Action("F", 2, 0), (KeyboardInterrupt, ValueError)),  # an interrupt goes before
    ],
    ids=str,
)
@pytest.mark.parametrize("pair", ["1f1b"], indirect=True)
def test_of_two_failures_the_caller_gets_the_earlier_one(pair, first, second, errors):
    """Both actions have begun before either fails, and the one whose error is wanted fails last."""
    pipe, _ = pair
    wanted, other = (kind(str(a)) for kind, a in zip(errors, (first, second), strict=True))
    both, failed = threading.Barrier(2), threading.Event()

    def early():
        both.wait(30)
        failed.set()
        raise other

    def late():
        both.wait(30)
        assert failed.wait(30)
        raise wanted

    pipe.model.arm(first, late)
    pipe.model.arm(second, early)
    check_fails(pipe, True, wanted)


def test_an_error_that_is_dropped_keeps_nothing(pair):
    """Without the garbage collector: who catches an out-of-memory error wants the memory now."""
    pipe, _ = pair

    def tensors():
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    def fail():
        raise ValueError("on purpose")

    step(pipe, inside=False)
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        for action in (Action("F", 2, 1), Action("B", 0, 1)):
            pipe.model.arm(action, fail)
            with contextlib.suppress(ValueError):
                step(pipe, inside=False)
            pipe.model.disarm()
            assert tensors() <= before
    finally:
        gc.enable()


# -- the caller is interrupted ----------------------------------------------------------------------------------------


@pytest.fixture
def stopped(monkeypatch):
    """An event: the workers have been told to stop."""
    event, stop = threading.Event(), worker._Players._stop

    def telling(self):
        stop(self)
        event.set()

    monkeypatch.setattr(worker._Players, "_stop", telling)
    return event


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("pair", ["gpipe", "1f1b"], indirect=True)
@pytest.mark.parametrize("times", [1, 3])
def test_the_caller_is_interrupted(pair, stopped, times):
    """What is being computed is waited for, also after more interrupts; nothing else starts."""
    pipe, twin = pair
    inside, done, begun = pipe.plan.schedule == "1f1b", [], []

    def compute():
        interrupt()
        assert stopped.wait(30)
        for _ in range(times - 1):
            interrupt()
            threading.Event().wait(0.1)  # the caller gets each by itself
        done.append(True)

    pipe.model.arm(Action("F", 0, 0), compute)
    for s, i in itertools.product(range(STAGES), range(MICRO_BATCHES)):
        if (s, i) != (0, 0):
            pipe.model.arm(Action("F", s, i), lambda: begun.append(True))
    threads, before = threading.enumerate(), state(pipe)
    with pytest.raises(KeyboardInterrupt):
        step(pipe, inside)
    assert done and not begun
    assert threading.enumerate() == threads
    assert equal(state(pipe), before)
    check_recovers(pipe, twin, inside)


@pytest.mark.parametrize("early", [True, False])
def test_the_caller_is_interrupted_while_workers_start(pair, monkeypatch, early):
    """Before the second thread is there, and just after."""
    pipe, twin = pair
    start, count = threading.Thread.start, itertools.count()

    def interrupted(thread):
        second = next(count) == 1
        if not (second and early):
            start(thread)
        if second:
            raise KeyboardInterrupt

    monkeypatch.setattr(worker, "LOOK", 0.05)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupted)
        step(pipe, inside=False)
    assert not [t for t in threading.enumerate() if t.name.startswith("fxsplit")]
    check_recovers(pipe, twin, inside=False)


# -- a worker ends, and says nothing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("says_so", [True, False])
def test_a_worker_that_is_gone_is_noticed(pair, monkeypatch, says_so):
    pipe, twin = pair
    work = worker._Players._work

    def gone(self, w):
        if w != 1:
            work(self, w)
        elif says_so:
            self.outbox.put(w)

    monkeypatch.setattr(worker, "LOOK", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(worker._Players, "_work", gone)
        with pytest.raises(WorkerError, match=r"(?s)ended before.*where: stage 1\.0, at action 1F0"):
            step(pipe, inside=False)
    check_recovers(pipe, twin, inside=False)


def test_an_exception_from_another_thread_ends_a_worker(pair):
    """`PyThreadState_SetAsyncExc` is how some tools interrupt threads."""
    pipe, twin = pair

    class ElsewhereError(Exception):
        pass

    def strike():
        ident = ctypes.c_ulong(threading.get_ident())
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(ElsewhereError)) == 1

    pipe.model.arm(Action("F", 1, 1), strike)
    with pytest.raises(ElsewhereError):
        step(pipe, inside=False)
    check_recovers(pipe, twin, inside=False)


# -- processes --------------------------------------------------------------------------------------------------------

SETUP = """
import ctypes, os, sys, threading, torch, fxsplit
from torch import nn

def made():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    plan = fxsplit.Plan(stages=2, micro_batches=2)
    return fxsplit.compile(model, plan, example_args=(torch.ones(4, 4),))

def loss_of(pipe):
    return float(pipe.step(torch.ones(4, 4), loss_fn=lambda y: y.sum()))
"""


def run(tmp_path, script):
    """What a process prints that runs `script`; it has to end by itself, without an error."""
    file = tmp_path / "script.py"
    file.write_text(SETUP + script)
    done = subprocess.run(
        [sys.executable, file], capture_output=True, text=True, timeout=120, check=False, cwd=Path.cwd()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only there a thread's end can be seen from outside")
def test_a_thread_that_the_system_ended(tmp_path):
    """Python itself takes such a thread for alive."""
    script = """
from fxsplit.runtime import worker
worker.LOOK = 0.1

class Fatal(nn.Module):
    armed, calls = False, 0
    def forward(self, x):
        self.calls += 1
        if self.armed:
            ctypes.CDLL(None).pthread_exit(None)
        return x * 1

model = nn.Sequential(nn.Linear(4, 4), Fatal(), nn.Linear(4, 4))
pipe = fxsplit.compile(model, fxsplit.Plan(cut=["1"], micro_batches=2), example_args=(torch.ones(4, 4),))
before = pipe(torch.ones(4, 4))
model[1].armed = True
try:
    pipe(torch.ones(4, 4))
except fxsplit.errors.WorkerError as error:
    print(error.where.replace(" ", "_"))
model[1].armed = False
print(torch.equal(pipe(torch.ones(4, 4)), before))
"""
    assert run(tmp_path, script) == ["stage_1.0,_at_action_1F0", "True"]


@pytest.mark.slow
def test_fork_spawn_and_exit(tmp_path):
    """After a fork; in a spawned process; at the end, with an unfinished graph and a thread in the middle of a call."""
    script = """
def spawned(rank, parents):
    os._exit(0 if loss_of(made()) == parents else 1)

if __name__ == "__main__":
    pipe = made()
    loss = loss_of(pipe)
    child = os.fork()
    if not child:
        os._exit(0 if loss_of(pipe) == loss else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    torch.multiprocessing.spawn(spawned, (loss,))
    print("spawned")

    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0
        def forward(self, x):
            self.calls += 1
            if threading.current_thread() is not threading.main_thread() and inside is not None:
                inside.set()
                threading.Event().wait()
            return x * 1

    inside = None
    model = nn.Sequential(nn.Linear(4, 4), Slow())
    slow = fxsplit.compile(model, fxsplit.Plan(cut=["1"], micro_batches=2), example_args=(torch.ones(4, 4),))
    inside = threading.Event()
    threading.Thread(target=slow, args=(torch.ones(4, 4),), daemon=True).start()
    print(inside.wait(60))
    output = pipe(torch.ones(4, 4))
"""
    assert run(tmp_path, script) == ["0", "spawned", "True"]


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pipeline_that_nobody_holds_is_freed(schedule, fails):
    model = Model()
    pipe = fxsplit.compile(model, PLAN.replace(schedule=schedule), example_args=batch())
    if fails:
        model.arm(Action("B", 0, 1), fail_with(ValueError("on purpose")))
    with contextlib.suppress(ValueError):
        step(pipe, schedule == "1f1b")
    model.disarm()  # drops the error
    output = pipe(*batch())
    refs = [weakref.ref(pipe), weakref.ref(model), weakref.ref(model.blocks[0].fc.weight)]
    del pipe, model
    gc.collect()
    assert refs[2]() is not None, "the unfinished graph needs the weights"
    del output
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3
