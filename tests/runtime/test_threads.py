"""Workers see what PyTorch and Python keep for each thread as the caller has it; calls from many threads; long runs."""

import contextlib
import contextvars
import copy
import gc
import os
import threading
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    disable_saved_tensors_hooks,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fxsplit
from fxsplit.compat import default_device
from fxsplit.runtime import worker
from fxsplit.schedules.catalog import forward_only
from fxsplit.schedules.lower import Flow, lower
from fxsplit.schedules.schedule import Action, Schedule

NAME = contextvars.ContextVar("NAME", default="nobody")
STEPS = int(os.environ.get("FXSPLIT_STEPS", "300"))


# -- the caller's thread state ----------------------------------------------------------------------------------------


class Look(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, probe):
        ctx.probe = probe
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.probe.note("backward")
        return gradient, None


class Probe(nn.Module):
    """Notes what `look` gives in forward and backward, and in which thread."""

    def __init__(self):
        super().__init__()
        self.look, self.seen, self.threads, self.calls = (lambda: None), [], set(), 0

    def forward(self, x):
        self.note("forward")
        self.calls += 1  # keeps the tracer out
        return Look.apply(x, self)

    def note(self, where):
        self.seen.append((where, self.look()))
        self.threads.add(threading.current_thread().name)

    def __deepcopy__(self, memo):
        return Probe()


class Probed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.probe, self.b = nn.Linear(6, 6), Probe(), nn.Linear(6, 6)

    def forward(self, x):
        return self.b(torch.tanh(self.probe(torch.tanh(self.a(x)))))


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def probed():
    """A pipeline whose second worker has the probe, and the model by itself."""
    torch.manual_seed(0)
    model = Probed()
    eager = copy.deepcopy(model)
    plan = fxsplit.Plan(cut=["probe", "b"], micro_batches=2)
    return fxsplit.compile(model, plan, example_args=(X,)), eager


@contextlib.contextmanager
def setting(switch, before, now):
    """For settings without a context of their own."""
    switch(now)
    try:
        yield
    finally:
        switch(before)


@contextlib.contextmanager
def named(name):
    token = NAME.set(name)
    try:
        yield
    finally:
        NAME.reset(token)


# what is set, as a context → what is read
STATES = {
    "autocast": (
        lambda: torch.autocast("cpu", torch.float16),
        lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    ),
    "autocast of another kind of device": (
        lambda: torch.autocast("xpu", torch.bfloat16),
        lambda: (torch.is_autocast_enabled("xpu"), torch.get_autocast_dtype("xpu")),
    ),
    "autocast that is off has a dtype": (
        lambda: torch.autocast("cpu", torch.float16, enabled=False),
        lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    ),
    "autocast without cache": (
        lambda: torch.autocast("cpu", cache_enabled=False),
        torch.is_autocast_cache_enabled,
    ),
    "no_grad": (torch.no_grad, torch.is_grad_enabled),
    "inference mode": (torch.inference_mode, torch.is_inference_mode_enabled),
    "default device": (lambda: torch.device("meta"), default_device),
    "default device of the process": (
        lambda: setting(torch.set_default_device, None, "meta"),
        default_device,
    ),
    "default dtype": (
        lambda: setting(torch.set_default_dtype, torch.float32, torch.float64),
        torch.get_default_dtype,
    ),
    "deterministic algorithms": (
        lambda: setting(torch.use_deterministic_algorithms, False, True),
        torch.are_deterministic_algorithms_enabled,
    ),
    "matmul precision": (
        lambda: setting(torch.set_float32_matmul_precision, "highest", "high"),
        torch.get_float32_matmul_precision,
    ),
    "kernels of attention": (
        lambda: sdpa_kernel(SDPBackend.MATH),
        torch.backends.cuda.flash_sdp_enabled,
    ),
    "anomaly mode": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
    "denormal numbers": (
        lambda: setting(torch.set_flush_denormal, False, True),
        lambda: bool((torch.full((1,), 1e-40, dtype=torch.float32, device="cpu") * 1).item()),
    ),
    "saved tensors": (
        lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
        lambda: torch._C._autograd._top_saved_tensors_default_hooks(False) is not None,
    ),
    "no hooks of saved tensors": (
        lambda: disable_saved_tensors_hooks("not now"),
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message,
    ),
    "context variables": (lambda: named("caller"), NAME.get),
}


def seen_by(model, probe, inside, around, parts):
    """What the probe notes, with the contexts `inside` around forward and `around` backward."""
    probe.seen.clear(), probe.threads.clear()
    for part in X.chunk(parts):
        with inside():
            y = model(part)
        if y.requires_grad:
            loss = y.float().sum()
            with around():
                loss.backward()
    return Counter(probe.seen)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype")
@pytest.mark.parametrize("where", ["forward", "backward", "both"])
@pytest.mark.parametrize("name", STATES)
def test_workers_see_the_callers_state(probed, name, where):
    """As eager: in forward that of the call, in backward that of whoever calls backward."""
    pipe, eager = probed
    context, look = STATES[name]
    nothing = contextlib.nullcontext
    pipe.model.probe.look = eager.probe.look = look
    inside, around = (context if where in (w, "both") else nothing for w in ("forward", "backward"))
    found = seen_by(pipe, pipe.model.probe, inside, around, 1)
    assert pipe.model.probe.threads == {"fxsplit stage 1.0"}
    assert found == seen_by(eager, eager.probe, inside, around, 2)
    if where == "both":
        assert found != seen_by(eager, eager.probe, nothing, nothing, 2)  # there was something to see


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_autocast_keeps_no_weight_of_an_earlier_step(checkpoint):
    """Its cache of cast weights is one for all threads, and is emptied by whoever leaves the outermost context."""
    pipe, eager = both(checkpoint)
    for model, parts in ((pipe, 1), (eager, 2)):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(3):
            optimizer.zero_grad()
            for part in X.chunk(parts):
                with torch.autocast("cpu"):
                    output = model(part)
                output.sum().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(pipe.parameters(), eager.parameters(), strict=True))


# -- hooks of saved tensors -------------------------------------------------------------------------------------------


class Saves(nn.Module):
    """Saves tensors of different sizes."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 7), nn.Linear(7, 8), nn.Linear(8, 9)

    def forward(self, x):
        return torch.sigmoid(self.c(torch.tanh(self.b(torch.exp(self.a(x))))))


def both(checkpoint="never", schedule="gpipe"):
    torch.manual_seed(0)
    model = Saves()
    plan = fxsplit.Plan(cut=["b", "c"], micro_batches=2, checkpoint=checkpoint, schedule=schedule)
    return fxsplit.compile(model, plan, example_args=(X,)), copy.deepcopy(model)


def gradients(model):
    return [p.grad for p in model.parameters()]


class Packing:
    """Hooks that write down what they get, and keep it in another form."""

    def __init__(self):
        self.packed, self.unpacked = [], []

    def pack(self, tensor):
        self.packed.append(tuple(tensor.shape))
        return "packed", tensor.detach().clone()

    def unpack(self, packed):
        self.unpacked.append(tuple(packed[1].shape))
        return packed[1]

    def hooks(self):
        return saved_tensors_hooks(self.pack, self.unpack)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("nested", [False, True])
def test_hooks_of_saved_tensors_see_what_eagers_do(schedule, nested):
    """Of several, autograd calls the innermost."""
    pipe, eager = both(schedule=schedule)
    mine, eagers, outer = Packing(), Packing(), Packing()
    with outer.hooks() if nested else contextlib.nullcontext():
        for part in X.chunk(2):
            with eagers.hooks():
                loss = eager(part).sum()
            loss.backward()
        assert not outer.packed
        if schedule == "gpipe":
            with mine.hooks():
                output = pipe(X)
            assert mine.packed and not mine.unpacked
            output.sum().backward()
        else:
            with mine.hooks():
                pipe.step(X, loss_fn=lambda y: y.sum(), reduction="sum")
    assert Counter(mine.packed) == Counter(eagers.packed)
    assert Counter(mine.unpacked) == Counter(eagers.unpacked)
    assert all(torch.equal(a, b) for a, b in zip(gradients(pipe), gradients(eager), strict=True))


@pytest.mark.parametrize("hooks", [save_on_cpu, lambda: Packing().hooks()])
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_hooks_of_saved_tensors_and_recomputation(checkpoint, hooks):
    pipe, eager = both(checkpoint)
    for part in X.chunk(2):
        eager(part).sum().backward()
    with hooks():
        output = pipe(X)
    output.sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(pipe), gradients(eager), strict=True))


def test_refused_hooks_are_refused_in_workers():
    """Recomputation is made of them."""
    pipe, _ = both("always")
    with disable_saved_tensors_hooks("not now"), pytest.raises(RuntimeError, match="not now") as caught:
        pipe(X)
    assert any("in the forward of stage" in note for note in caught.value.__notes__)
    output = pipe(X)
    with disable_saved_tensors_hooks("not now"), pytest.raises(RuntimeError, match="not now"):
        output.sum().backward()


# -- modes ------------------------------------------------------------------------------------------------------------


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.threads, self.called = set(), Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.threads.add(threading.current_thread())
        self.called[getattr(func, "__name__", "")] += 1
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.threads, self.called = set(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.threads.add(threading.current_thread())
        self.called[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_modes_see_the_whole_call_from_one_thread():
    pipe, eager = both()
    for mode in (Functions(), Operations()):
        with mode:
            output = pipe(X)
            assert [mode.called[f] for f in ("exp", "tanh", "sigmoid")] == [2, 2, 2]
            output.sum().backward()
        assert mode.threads == {threading.current_thread()}
    assert [mode.called[f] for f in ("tanh_backward", "sigmoid_backward")] == [2, 2]
    mine, eagers = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with torch.no_grad(), mine:
        pipe(X)
    with torch.no_grad(), eagers:
        eager(X)
    assert mine.get_total_flops() == eagers.get_total_flops() > 0


class Overwrites(nn.Module):
    def forward(self, x):
        y = x.exp()
        z = y.sin()  # keeps y
        y.mul_(2)
        return y + z


def test_saved_tensors_may_be_written_to_where_autograd_allows_it():
    model = nn.Sequential(nn.Linear(6, 6), Overwrites(), nn.Linear(6, 6))
    eager = copy.deepcopy(model)
    pipe = fxsplit.compile(
        model, fxsplit.Plan(cut=["1", "2"], micro_batches=2), example_args=(X,), check=False
    )
    for m, parts in ((pipe, 1), (eager, 2)):
        for part in X.chunk(parts):
            with allow_mutation_on_saved_tensors():
                m(part).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(pipe), gradients(eager), strict=True))


def test_the_profiler_sees_workers_where_it_is_told_to_look_at_all_threads():
    pipe, _ = both()
    config = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(experimental_config=config) as found:
        pipe(X)
    counts = {event.key: event.count for event in found.key_averages()}
    assert counts["aten::tanh"] == counts["aten::exp"] == 2


# -- intra-op threads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("callers", "workers", "asked", "expected"),
    [(4, 2, None, 2), (5, 2, None, 2), (1, 3, None, 1), (2, 3, None, 1), (1, 2, 3, 3), (4, 2, 1, 1)],
)
def test_workers_share_the_callers_intra_op_threads(callers, workers, asked, expected):
    torch.set_num_threads(callers)
    tape, seen = lower(forward_only(workers, 2), Flow(workers, [(s, s + 1) for s in range(workers - 1)])), []
    for fails in (False, True):

        def act(instruction, fails=fails):
            seen.append(torch.get_num_threads())
            if fails and instruction.actions == (Action("F", 0, 1),):
                raise ValueError("on purpose")

        with pytest.raises(ValueError) if fails else contextlib.nullcontext():
            worker.play(tape, act, intra_op=asked)
        assert torch.get_num_threads() == callers
    assert set(seen) == {expected}
    later = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start(), thread.join()
    assert later == [callers]


def test_a_list_without_actions_has_a_name_all_the_same():
    names = []
    lists = ((), (Action("F", 0, 0),), (Action("F", 1, 0),))
    tape = lower(Schedule("mine", lists, ((7, 0), (0, 0), (1, 2))), Flow(2, [(0, 1)]))
    worker.play(tape, lambda _: names.append(threading.current_thread().name))
    assert names == ["fxsplit stage 0.0", "fxsplit stage 1.2"]


# -- many calls -------------------------------------------------------------------------------------------------------


class Whole(nn.Module):
    """Of whole numbers: their sums are exact, in whatever order they are added."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        for p in self.parameters():
            nn.init.constant_(p.data, 0).add_(torch.randint(-3, 4, p.shape))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_eight_threads_call_one_pipeline_a_hundred_times(schedule):
    """Every tenth call of each is a step."""
    callers, calls = 8, 100
    model = Whole().double()
    eager = copy.deepcopy(model)
    inputs = [torch.randint(-3, 4, (2 + i % 3, 4)).double() for i in range(callers)]
    plan = fxsplit.Plan(stages=2, micro_batches=2, schedule=schedule)
    pipe = fxsplit.compile(model, plan, example_args=(inputs[1],))
    expected = [eager(x).detach() for x in inputs]
    right = Counter()

    def call(i):
        for k in range(calls):
            if k % 10 == 0:
                loss = pipe.step(inputs[i], loss_fn=lambda y: y.square().sum(), reduction="sum")
                right[i] += bool(loss == expected[i].square().sum())
            else:
                with contextlib.nullcontext() if k % 2 else torch.no_grad():
                    right[i] += torch.equal(pipe(inputs[i]), expected[i])

    threads = [threading.Thread(target=call, args=(i,)) for i in range(callers)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert right == Counter(dict.fromkeys(range(callers), calls))
    sum(eager(x).square().sum() * (calls // 10) for x in inputs).backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(pipe), gradients(eager), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_steps_leave_nothing_behind(schedule):
    """No tensor, no object, no thread, no memory. ``FXSPLIT_STEPS=10000`` for a long run."""
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    plan = fxsplit.Plan(stages=2, micro_batches=2, schedule=schedule)
    x = torch.randn(128, 64)
    pipe = fxsplit.compile(model, plan, example_args=(x,))

    def steps(count):
        for _ in range(count):
            pipe.step(x, loss_fn=lambda y: y.sum(), reduction="sum")

    def measured():
        gc.collect()
        statm, tasks = Path("/proc/self/statm"), Path("/proc/self/task")
        resident = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
        threads = len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()
        objects = gc.get_objects()
        tensors = sum(issubclass(type(o), torch.Tensor) for o in objects)
        return tensors, len(objects), threads, tracemalloc.get_traced_memory()[0], resident

    steps(30)
    tracemalloc.start()
    steps(10)
    try:
        before = measured()
        steps(STEPS)
        after = measured()
    finally:
        tracemalloc.stop()
    tensors, objects, threads, traced, resident = (b - a for a, b in zip(before, after, strict=True))
    assert tensors <= 0 and objects < STEPS / 2 and threads <= 0
    assert (
        traced < 16 * STEPS + 2**16
    )  # bytes: less than the smallest object in each step, and Python's free lists
    assert resident < 16 * 2**20  # bytes; each step makes 0.4 MB of activations


@pytest.mark.parametrize("count", [1, 2])
def test_one_micro_batch_is_computed_by_the_thread_that_calls(count):
    pipe = fxsplit.compile(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        fxsplit.Plan(stages=2, micro_batches=count),
        example_args=(torch.randn(4, 4),),
    )
    workers = set()
    pipe.register_action_hook(lambda event: workers.add(event.worker))
    pipe(torch.randn(4, 4)).sum().backward()
    mine = threading.current_thread().name
    assert workers == ({mine} if count == 1 else {"fxsplit stage 0.0", "fxsplit stage 1.0"})
