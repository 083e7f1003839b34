"""Streams and events: on a stand-in that writes down what is queued, and on a GPU where there is one."""

import copy
import itertools

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.runtime.device import CudaLanes, Lanes, lanes_of
from fxsplit.schedules.catalog import gpipe, one_f_one_b
from fxsplit.schedules.lower import Flow, lower
from fxsplit.schedules.schedule import Action


class Cuda:
    """What `CudaLanes` asks of `torch.cuda`: every queue is a list, in the order of the host's calls."""

    def __init__(self):
        self.numbers = itertools.count()
        self.current = {torch.device("cuda", i): self.Stream(torch.device("cuda", i)) for i in range(3)}

    class Stream:
        def __init__(self, device):
            self.device, self.queue = device, []

        def wait_event(self, event):
            self.queue.append(("wait", event))

        def wait_stream(self, other):
            self.queue.append(("wait", other.record_event()))

        def record_event(self):
            event = object()
            self.queue.append(("record", event))
            return event

    class _Entered:
        def __init__(self, cuda, stream):
            self.cuda, self.now = cuda, stream

        def __enter__(self):
            self.before = self.cuda.current[self.now.device]
            self.cuda.current[self.now.device] = self.now

        def __exit__(self, *exc):
            self.cuda.current[self.now.device] = self.before

    def stream(self, stream):
        return self._Entered(self, stream)

    def device(self, device):
        return torch.device("cpu")

    def current_stream(self, device):
        return self.current[device]


class OnCuda:
    """Stands for a tensor of a device that is not there."""

    def __init__(self, cuda, device):
        self.cuda, self.device, self.read_on = cuda, device, []

    def to(self, device, non_blocking=False):
        for d in {self.device, device}:
            if d.type == "cuda":
                self.cuda.current[d].queue.append(("copy", non_blocking))
        return OnCuda(self.cuda, device)

    def record_stream(self, stream):
        self.read_on.append(stream)


def instruction_of(tape, *action):
    return next(x for x in tape.order if Action(*action) in x.actions)


DEVICES = [torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cuda", 0)]


def finished_before(streams, event):
    """What a device has done for certain when the event is reached: everything queued before it, and so on."""
    done, waiting = set(), [event]
    while waiting:
        sought = waiting.pop()
        if sought in done:
            continue
        done.add(sought)
        for stream in streams:
            position = next((i for i, row in enumerate(stream.queue) if row == ("record", sought)), None)
            if position is not None:
                waiting += [what for kind, what in stream.queue[:position] if kind in ("wait", "record")]
                done |= {what for kind, what in stream.queue[:position] if kind == "act"}
    return done


def computing(lanes):
    return [stream for row in lanes._compute for stream in row if stream is not None]


def test_an_action_is_behind_what_it_needs_and_no_host_waits():
    cuda = Cuda()
    lanes = CudaLanes([[d] for d in DEVICES], cuda)
    tape = lower(one_f_one_b(3, 4), Flow(3, [[0, 1], [1, 2]]))

    def act(x):
        d = DEVICES[x.stage]
        cuda.current_stream(d).queue.append(("act", x.number))

    queued = lanes.queued(act)
    with lanes.fenced():
        for x in tape.order:
            queued(x)
    for x in tape.order:
        done = finished_before(computing(lanes), lanes._events[x.number][0])
        assert x.after or (x.stage == 0 and x.kind == "forward")
        assert {x.number, *x.after} <= done
    for i in (0, 1):  # the caller goes on after everything
        d = torch.device("cuda", i)
        end = cuda.current[d].record_event()
        mine = {x.number for x in tape.order if DEVICES[x.stage] == d}
        assert mine <= finished_before([*computing(lanes), *lanes._copy.values(), cuda.current[d]], end)


def test_a_copy_waits_for_its_source_and_not_for_what_its_reader_computes():
    cuda = Cuda()
    lanes = CudaLanes([[d] for d in DEVICES], cuda)
    tape, copies = lower(one_f_one_b(3, 2), Flow(3, [[0, 1], [1, 2]])), {}

    def act(x):
        d = DEVICES[x.stage]
        cuda.current_stream(d).queue.append(("act", *x.actions))
        if x.stage == 1:
            source = OnCuda(cuda, DEVICES[0])
            copies[x.number] = source, lanes.move(source, DEVICES[1])

    queued = lanes.queued(act)
    for i in range(2):
        for s in (0, 1):
            queued(instruction_of(tape, "F", s, i))
    number = instruction_of(tape, "F", 1, 1).number
    source, moved = copies[number]
    on_copy = [row for row in lanes._copy[DEVICES[1]].queue if row[0] == "copy"]
    assert on_copy == [("copy", True)] * 2
    last = [what for kind, what in lanes._copy[DEVICES[1]].queue if kind == "record"][-1]
    done = finished_before([*computing(lanes), *lanes._copy.values()], last)
    assert Action("F", 0, 1) in done and Action("F", 1, 0) not in done
    assert source.read_on == [lanes._copy[DEVICES[0]]] and moved.read_on == lanes._compute[1]
    assert Action("F", 1, 1) in finished_before(
        [*computing(lanes), *lanes._copy.values()], lanes._events[number][0]
    )


def test_a_copy_to_the_host_is_waited_for_and_one_from_a_cpu_stage_is_seen_by_its_reader():
    cuda = Cuda()
    lanes = CudaLanes([[torch.device("cuda", 0)], [torch.device("cpu")]], cuda)

    def act(x):
        if x.stage == 1 and x.kind == "forward":
            lanes.move(OnCuda(cuda, DEVICES[0]), torch.device("cpu"))
        elif x.stage == 1:
            lanes.move(OnCuda(cuda, torch.device("cpu")), DEVICES[0])

    queued = lanes.queued(act)
    for x in lower(one_f_one_b(2, 1), Flow(2, [[0, 1]])).order:
        queued(x)
    copy_stream = lanes._copy[DEVICES[0]]
    assert [row for row in copy_stream.queue if row[0] == "copy"] == [("copy", False), ("copy", True)]
    arrived = [what for kind, what in copy_stream.queue if kind == "record"][-1]
    assert ("wait", arrived) in lanes._compute[0][0].queue


class Held(torch.Tensor):
    """A tensor that says it is on a device that is not there, and by whom it is read."""

    device = DEVICES[0]

    def record_stream(self, stream):
        self.__dict__.setdefault("read_on", []).append(stream)


def test_memory_that_another_stream_reads_is_kept_from_the_allocator():
    cuda = Cuda()
    lanes = CudaLanes([[d] for d in DEVICES], cuda)
    here = torch.ones(1).as_subclass(Held)
    lanes.uses(2, 0, [None, 3, here])
    lanes.uses(1, 0, [here])  # of another device: a copy of it is read there
    assert here.read_on == lanes._compute[2]
    lanes.leaves([None, here])
    assert here.read_on == [*lanes._compute[2], cuda.current[DEVICES[0]]]


def test_replicas_have_streams_of_their_own_and_gradients_are_added_on_one():
    cuda = Cuda()
    lanes = CudaLanes([[DEVICES[0], DEVICES[1]]], cuda)
    home = DEVICES[0]

    def act(x):
        (i,), (action,) = x.micro_batches, x.actions
        device, stream = lanes._at(0, i)
        assert cuda.current_stream(device) is stream and device == DEVICES[i % 2]
        stream.queue.append(("act", action))
        if x.kind == "backward":
            term = lanes.move(OnCuda(cuda, device), home)
            with lanes.adding(term):
                assert cuda.current_stream(home) is lanes._sum[home]
                cuda.current_stream(home).queue.append(("act", ("sum", i)))
            assert term.read_on[-1] is lanes._sum[home]

    queued = lanes.queued(act)
    with lanes.fenced():
        for x in lower(gpipe(1, 4), Flow(1, [])).order:
            queued(x)
    every = [*computing(lanes), *lanes._copy.values(), *lanes._sum.values()]
    for i in range(4):  # a sum is behind the backward that made its term, and behind those before it
        position = lanes._sum[home].queue.index(("act", ("sum", i)))
        before = [what for kind, what in lanes._sum[home].queue[:position] if kind == "wait"]
        done = set().union(*(finished_before(every, event) for event in before))
        assert {Action("B", 0, j) for j in range(i + 1)} <= done
    end = cuda.current[home].record_event()  # and the caller goes on after all of them
    assert {("sum", i) for i in range(4)} <= finished_before([*every, cuda.current[home]], end)
    with lanes.adding(None):
        pass


def test_a_cpu_has_no_queues():
    lanes = lanes_of([[torch.device("cpu")]])
    act = object()
    assert type(lanes) is Lanes and lanes.queued(act) is act
    x = torch.ones(2)
    assert lanes.move(x, torch.device("cpu")) is x


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
SCHEDULES = ["gpipe", "1f1b", "zb_h1"]


@GPU
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "devices",
    [
        ["cuda:0"] * 4,
        ["cpu", "cuda:0", "cpu", "cuda:0"],
        [["cuda:0", "cuda:0"], ["cpu", "cuda:0"], ["cuda:0", "cpu"], ["cuda:0"]],
    ],
)
def test_on_a_gpu(schedule, devices):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
    eager, x = copy.deepcopy(model).cuda(), torch.randn(64, 256)
    plan = fxsplit.Plan(stages=4, devices=devices, micro_batches=8, schedule=schedule)
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    for _ in range(20):
        model.zero_grad()
        eager.zero_grad()
        loss = pipe.step(x, loss_fn=lambda y: y.square().mean(), reduction="mean")
        expected = eager(x.cuda()).square().mean()
        expected.backward()
        torch.testing.assert_close(loss.cpu(), expected.detach().cpu())
        for a, b in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(a.grad.cpu(), b.grad.cpu(), rtol=1e-4, atol=1e-6)


@GPU
def test_streams_are_in_force():
    assert isinstance(lanes_of([[torch.device("cuda")]]), CudaLanes)


@GPU
@pytest.mark.parametrize("row", [["cuda:0", "cuda:0"], ["cuda:0", "cpu"], ["cpu", "cuda:0"]])
def test_batches_are_normalised_together_on_a_gpu(row):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).double()
    eager, x = copy.deepcopy(model), torch.randn(24, 16).double()
    plan = fxsplit.Plan(devices=[row], micro_batches=4, sync_batch_norm=True)
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    for _ in range(10):
        model.zero_grad(), eager.zero_grad()
        pipe(x).square().mean().backward()
        eager(x).square().mean().backward()
        for a, b in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-9, atol=1e-12)
    for a, b in zip(model.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-9, atol=1e-12)
