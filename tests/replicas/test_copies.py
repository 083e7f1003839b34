"""Modules that are told of their copies, and copies that talk to each other."""

import copy
import os
import queue
import signal
import sys
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxsplit
from fxsplit import Plan, errors
from fxsplit.modules.callbacks import callbacks_of
from fxsplit.runtime import worker


class SyncMaster:
    """What such clients have: the copies send to the master, which answers each. (As jactorch's users write it.)"""

    def __init__(self, reduce):
        self.reduce, self.inbox, self.outboxes = reduce, queue.Queue(), {}

    def register(self, copy_id):
        self.outboxes[copy_id] = queue.Queue()

    def run_slave(self, copy_id, message):
        self.inbox.put((copy_id, message))
        return self.outboxes[copy_id].get()

    def run_master(self, message):
        messages = {0: message}
        for _ in self.outboxes:
            copy_id, other = self.inbox.get()
            messages[copy_id] = other
        answers = self.reduce([messages[i] for i in sorted(messages)])
        for copy_id, outbox in self.outboxes.items():
            outbox.put(answers[copy_id])
        return answers[0]


class SyncBatchNorm(nn.BatchNorm1d):
    """Batch normalisation over all copies: sums go to the master, which sends back mean and inverse deviation."""

    def __init__(self, features):
        super().__init__(features)
        self.master = SyncMaster(self.reduce)
        self.is_parallel, self.copy_id = False, None

    def __data_parallel_replicate__(self, ctx, copy_id):
        self.is_parallel, self.copy_id = True, copy_id
        if copy_id == 0:
            ctx.master = self.master
        else:
            ctx.master.register(copy_id)
            self.master = ctx.master

    def reduce(self, messages):
        count = sum(n for n, _, _ in messages)
        mean = sum(s for _, s, _ in messages) / count
        variance = sum(q for _, _, q in messages) / count - mean * mean
        with torch.no_grad():
            m = self.momentum
            self.running_mean.mul_(1 - m).add_(mean.detach() * m)
            self.running_var.mul_(1 - m).add_(variance.detach() * m * count / (count - 1))
            self.num_batches_tracked += 1
        return [(mean, (variance + self.eps).rsqrt())] * len(messages)

    def forward(self, x):
        if not (self.is_parallel and self.training):
            return super().forward(x)
        message = len(x), x.sum(0), (x * x).sum(0)
        if self.copy_id == 0:
            mean, inverse = self.master.run_master(message)
        else:
            mean, inverse = self.master.run_slave(self.copy_id, message)
        return (x - mean) * (inverse * self.weight) + self.bias


class Net(nn.Module):
    def __init__(self, norm=SyncBatchNorm):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 6), norm(6), nn.Linear(6, 6)
        self.norm2, self.c = norm(6), nn.Linear(6, 3)

    def forward(self, x):
        h = torch.relu(self.norm(self.a(x)))
        return self.c(h + torch.tanh(self.norm2(self.b(h))))


def net(norm=SyncBatchNorm):
    torch.manual_seed(0)
    return Net(norm).double()


X, T = torch.randn(12, 4).double(), torch.randn(12, 3).double()


def assert_as_whole(model, pipe, x=X, t=T, step=False):
    """Loss, output, gradients and buffers of one training step are those of the whole batch in one piece."""
    twin = net(nn.BatchNorm1d)
    twin.load_state_dict(model.state_dict())
    loss = F.mse_loss(twin(x), t)
    loss.backward()
    if step:
        found = pipe.step(x, target=t, loss_fn=F.mse_loss)
    else:
        found = F.mse_loss(pipe(x), t)
        found.backward()
    torch.testing.assert_close(found.detach(), loss.detach(), rtol=1e-12, atol=1e-12)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12, msg=name)
    for (name, b), c in zip(model.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(b, c, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("step", [False, True])
def test_a_client_that_talks_to_its_copies(replicas, step):
    model = net()
    pipe = fxsplit.compile(model, Plan(cut=["b"], replicas=replicas), example_args=(X,))
    for _ in range(3):
        model.zero_grad()
        assert_as_whole(model, pipe, step=step)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "breadth_first", "interleaved_1f1b"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_rounds_of_copies_in_every_schedule(schedule, checkpoint):
    """Four micro-batches on two copies are two rounds: each is normalised by its own statistics."""
    workers = 1 if schedule in ("breadth_first", "interleaved_1f1b") else None
    plan = Plan(
        cut=["b"], replicas=2, micro_batches=4, schedule=schedule, checkpoint=checkpoint, workers=workers
    )
    model = net()
    pipe = fxsplit.compile(model, plan, example_args=(X,))
    twin = net(nn.BatchNorm1d)
    loss = pipe.step(X, target=T, loss_fn=F.mse_loss)
    expected = sum(F.mse_loss(twin(x), t) / 2 for x, t in zip(X.split(6), T.split(6), strict=True))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12)
    for b, c in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(b, c, rtol=1e-12, atol=1e-12)


class Told(nn.Module):
    """Writes down what it is told."""

    def __init__(self, log):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.log = log

    def forward(self, x):
        return self.linear(x)

    def __data_parallel_replicate__(self, ctx, copy_id):
        self.log.append((self, ctx, copy_id))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_every_copy_is_told_the_master_first_with_one_context_for_each_module(replicas):
    log, more = [], []
    model = nn.Sequential(Told(log), nn.Sequential(nn.ReLU(), Told(log)), nn.Linear(4, 2))
    fxsplit.on_replicate(model[2], lambda module, ctx, copy_id: more.append((module, ctx, copy_id)))
    pipe = fxsplit.compile(model, Plan(stages=2, replicas=replicas), example_args=(X.float(),))
    assert [i for _, _, i in log] == [i for i in range(replicas) for _ in range(2)]
    assert [i for _, _, i in more] == list(range(replicas))
    for first, told in ((0, log), (1, log)):
        rows = told[first::2]
        assert len({id(ctx) for _, ctx, _ in rows}) == 1 and len({id(m) for m, _, _ in rows}) == replicas
        assert all(isinstance(ctx, fxsplit.ReplicationContext) for _, ctx, _ in rows)
        # copies on one device share the parameters, and are no module of the model's
        assert all(m.linear.weight is rows[0][0].linear.weight for m, _, _ in rows)
        assert not {id(m) for m, _, _ in rows} & {id(m) for m in model.modules()}
    assert log[0][1] is not log[1][1]
    for _ in range(2):  # once: they live as long as the pipeline
        pipe(X.float())
    assert len(log) == 2 * replicas


def test_the_model_is_left_as_it_is():
    model = net()
    pipe = fxsplit.compile(model, Plan(stages=2, replicas=2), example_args=(X,))
    pipe(X)
    assert not model.norm.is_parallel and model.norm.copy_id is None
    assert model.training and model(X).shape == (12, 3)  # nobody to wait for
    pipe.verify()
    assert pipe.memory()
    pipe.eval()
    torch.testing.assert_close(pipe(X), model(X), rtol=1e-12, atol=1e-12)  # copies follow the mode


def test_copies_follow_attributes_that_are_set_later():
    log = []
    model = nn.Sequential(Told(log), nn.Dropout(0.5))
    fxsplit.on_replicate(model[1], lambda module, ctx, copy_id: None)
    pipe = fxsplit.compile(model, Plan(replicas=2), example_args=(X.float(),))
    model[1].p = 0.0
    assert torch.equal(pipe(X.float()), torch.cat([model(x) for x in X.float().split(6)]))


def test_a_callback_that_is_taken_away_is_not_called():
    more = []
    model = nn.Sequential(nn.Linear(4, 2))
    handle = fxsplit.on_replicate(model[0], lambda *told: more.append(told))
    handle.remove()
    fxsplit.compile(model, Plan(replicas=2), example_args=(X.float(),))
    assert not more
    with pytest.raises(errors.ArgumentError, match="on_replicate"):
        fxsplit.on_replicate(model, None)


def test_an_error_of_a_callback_names_module_and_copy():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2)))
    error = KeyError("mine")

    def callback(module, ctx, copy_id):
        if copy_id == 1:
            raise error

    fxsplit.on_replicate(model[1][0], callback)
    with pytest.raises(KeyError) as caught:
        fxsplit.compile(model, Plan(replicas=2), example_args=(X.float(),))
    assert caught.value is error
    assert error.__notes__ == ["fxsplit: in the replication callback of 1.0, copy 1"]


def test_copies_are_told_anew_after_one_could_not_be():
    told, wrong = [], []
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2)))

    def callback(module, ctx, copy_id):
        if wrong and copy_id == 1:
            raise KeyError("mine")
        told.append(copy_id)

    fxsplit.on_replicate(model[0], callback)
    pipe = fxsplit.compile(model, Plan(replicas=2), example_args=(X.float(),))
    model[0] = copy.deepcopy(model[0])  # copies are made anew in the next call
    wrong.append(True)
    with pytest.raises(KeyError, match="mine"):
        pipe(X.float())
    wrong.clear()
    torch.testing.assert_close(pipe(X.float()), model(X.float()))
    assert told == [0, 1, 0, 0, 1]


def test_copies_that_would_be_called_an_unequal_number_of_times():
    with pytest.raises(errors.PlanError, match="micro_batches=3, but 'norm' has a replication callback"):
        fxsplit.compile(net(), Plan(replicas=2, micro_batches=3), example_args=(X,))
    model = net()
    pipe = fxsplit.compile(model, Plan(replicas=2, micro_batches=4), example_args=(X,))
    with pytest.raises(errors.BatchError, match="a batch of 1 cannot be shared out evenly to 2 replicas"):
        pipe(X[:1])
    threads = threading.active_count()
    for rows in (2, 3, 5):  # fewer micro-batches, but each copy as often as the other
        assert pipe(X[:rows]).shape == (rows, 3)
    assert threading.active_count() == threads


class Fails(SyncBatchNorm):
    """Raises in one copy before it has said anything to the others."""

    which = None

    def forward(self, x):
        if self.copy_id is not None and self.copy_id == Fails.which:
            raise ValueError("mine")
        return super().forward(x)


@pytest.mark.parametrize("which", [0, 1])
def test_a_copy_that_fails_does_not_leave_the_caller_waiting_for_the_others(which):
    model = net(Fails)
    pipe = fxsplit.compile(model, Plan(stages=2, replicas=3, schedule="1f1b"), example_args=(X,))
    before = {name: b.clone() for name, b in model.named_buffers()}
    queues = [q for m in (model.norm, model.norm2) for q in (m.master.inbox, *m.master.outboxes.values())]
    try:
        Fails.which = which
        with pytest.raises(ValueError, match="mine") as caught:
            pipe.step(X, target=T, loss_fn=F.mse_loss)
    finally:
        Fails.which = None
    notes = caught.value.__notes__
    assert any(f"replica {which} of 3" in note for note in notes)
    assert any("waits for a copy that has failed" in note and "test_copies.py:" in note for note in notes)
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    with pytest.raises(errors.ArgumentError, match="copies of a module still wait"):
        pipe(X)
    left = [t for t in threading.enumerate() if t.name.startswith("fxsplit")]
    for q in queues * 2:
        q.put((0, (torch.zeros(6), torch.zeros(6))))
    for thread in left:  # their wait has ended
        thread.join(10)
    for q in queues:
        while not q.empty():
            q.get()
    model.zero_grad()
    assert_as_whole(model, pipe)  # with copies anew


def test_what_cannot_meet_is_refused():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.plain = nn.Linear(4, 6), SyncBatchNorm(6), nn.BatchNorm1d(6)

        def forward(self, x):
            return self.plain(self.norm(self.a(x)))

    with pytest.raises(
        errors.PlanError, match=r"writes to 'plain.running_mean', but its micro-batches meet in 'norm'"
    ):
        fxsplit.compile(Mixed(), Plan(replicas=2), example_args=(X.float(),))
    fxsplit.compile(Mixed(), Plan(replicas=2, deferred_batch_norm=True), example_args=(X.float(),))(X.float())
    pipe = fxsplit.compile(Mixed(), Plan(cut=["plain"], replicas=2), example_args=(X.float(),))
    pipe(X.float())
    with torch.overrides.BaseTorchFunctionMode(), pytest.raises(errors.ArgumentError, match="leave the mode"):
        pipe(X.float())


def test_a_callback_that_comes_after_the_compile_is_noticed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2)))
    pipe = fxsplit.compile(model, Plan(replicas=2), example_args=(X.float(),))
    pipe(X.float())
    handle = fxsplit.on_replicate(model[1], print)
    with pytest.raises(errors.ArgumentError, match="1 got a replication callback after compile"):
        pipe(X.float())
    handle.remove()
    pipe(X.float())


def test_a_model_that_wants_to_be_told_itself_has_to_be_a_child():
    model = Told([])
    with pytest.raises(errors.ModelError, match=r"Told itself has a replication callback"):
        fxsplit.compile(model, Plan(replicas=2), example_args=(X.float(),))
    pipe = fxsplit.compile(nn.Sequential(model), Plan(replicas=2), example_args=(X.float(),))
    assert [copy_id for _, _, copy_id in model.log] == [0, 1]
    torch.testing.assert_close(pipe(X.float()), model(X.float()))


def test_state_beside_a_module_that_is_told():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.n = 0

        def forward(self, x):
            self.n += 1
            return x * self.n

    model = nn.Sequential(nn.Linear(4, 4), Counter(), Told([]))
    with pytest.raises(errors.PlanError, match="changes attributes that are no tensors, in '1'"):
        fxsplit.compile(model, Plan(replicas=2), example_args=(X.float(),))
    pipe = fxsplit.compile(model, Plan(), example_args=(X.float(),))
    expected = [copy.deepcopy(model[0])(X.float()) for _ in range(2)]
    for k in (1, 2):  # one replica: the counter is the model's
        torch.testing.assert_close(pipe(X.float()), model[2](expected[0] * k))
    assert model[1].n == 2


def test_a_module_that_two_stages_call():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.told, self.a, self.b = Told([]), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.told(self.b(self.told(self.a(x))))

    with pytest.raises(
        errors.PlanError, match=r"'told' has a replication callback, and is called in stages 0, 1"
    ):
        fxsplit.compile(Twice(), Plan(cut=["b"], replicas=2), example_args=(X.float(),))
    fxsplit.compile(Twice(), Plan(cut=["b"]), example_args=(X.float(),))


def test_a_module_of_which_only_parts_are_used():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.told, self.unused = Told([]), Told([])

        def forward(self, x):
            return F.linear(x, self.told.linear.weight)

    with pytest.raises(
        errors.ModelError, match="'told' has a replication callback, but only its parts are used"
    ):
        fxsplit.compile(Parts(), Plan(replicas=2), example_args=(X.float(),))


def test_a_wrapper_is_not_told_what_the_module_inside_is():
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self._modules["inner"], name)

        def forward(self, x):
            return self.inner(x)

    log = []
    fxsplit.compile(nn.Sequential(Wrapper(Told(log))), Plan(replicas=2), example_args=(X.float(),))
    assert [copy_id for _, _, copy_id in log] == [0, 1]


class TwoPaths(nn.Module):
    """Another graph in each mode."""

    def __init__(self, told):
        super().__init__()
        self.a, self.told = nn.Linear(4, 4), told

    def forward(self, x):
        h = self.told(self.a(x))
        return h if self.training else h.relu() * 2


def test_both_modes_have_the_same_copies():
    log = []
    model = TwoPaths(Told(log))
    pipe = fxsplit.compile(model, Plan(replicas=2), example_args=(X.float(),))
    pipe(X.float())
    pipe.eval()
    torch.testing.assert_close(pipe(X.float()), model(X.float()))
    pipe.train()
    torch.testing.assert_close(pipe(X.float()), model(X.float()))
    assert [copy_id for _, _, copy_id in log] == [0, 1]
    twin = copy.deepcopy(pipe)
    assert len(twin.model.told.log) == 4  # copies of a copy are told too


def test_one_pipeline_at_a_time_talks():
    model = net()
    first = fxsplit.compile(model, Plan(replicas=2), example_args=(X,))
    first(X)
    second = fxsplit.compile(model, Plan(replicas=3), example_args=(X,))
    second(X)
    with pytest.raises(errors.ArgumentError, match="another pipeline was compiled from this model since"):
        first(X)
    second(X)


def test_a_module_that_is_replaced_has_copies_anew():
    model = nn.Sequential(Told([]), nn.Linear(4, 4))
    pipe = fxsplit.compile(model, Plan(replicas=2), example_args=(X.float(),))
    model[0].linear = nn.Linear(4, 4)
    pipe(X.float()).sum().backward()
    torch.testing.assert_close(pipe(X.float()), model(X.float()))
    assert model[0].linear.weight.grad is not None
    assert [copy_id for _, _, copy_id in model[0].log] == [0, 1, 0, 1]


class Assigns(SyncBatchNorm):
    """Puts new tensors in the place of its buffers, as the first such clients did."""

    wrong = False

    def reduce(self, messages):
        found = super().reduce(messages)
        self.running_mean = self.running_mean * 1.0
        if Assigns.wrong:
            raise ValueError("mine")
        return found


def test_buffers_that_were_assigned_are_put_back_after_an_error():
    model = net(Assigns)
    pipe = fxsplit.compile(model, Plan(stages=2), example_args=(X,))
    before = [(b, b.clone()) for b in model.buffers()]
    Assigns.wrong = True
    try:
        with pytest.raises(ValueError, match="mine"):
            pipe(X)
    finally:
        Assigns.wrong = False
    for (b, value), now in zip(before, model.buffers(), strict=True):
        assert now is b and torch.equal(b, value)
    assert_as_whole(model, pipe)


# -- copies that wait for ever ----------------------------------------------------------------------------------------


class Bell:
    """What a copy waits for, in each of the ways that there are."""

    def __init__(self, way):
        self.way, self.lock, self.queue = way, threading.Lock(), queue.SimpleQueue()
        self.event = threading.Event()
        self.lock.acquire()

    def wait(self):
        if self.way == "lock":
            self.lock.acquire()
            self.lock.release()
        elif self.way == "queue":
            self.queue.get()
        elif self.way == "event":
            self.event.wait()
        while self.way == "sleep" and not self.event.is_set():
            time.sleep(0.01)

    def ring(self):
        self.lock.release()
        self.event.set()
        for _ in range(3):
            self.queue.put(None)


class Waits(nn.Module):
    """Copies wait for the bell, but those that fail, pass, or compute."""

    def __init__(self, way, does):
        super().__init__()
        self.bell, self.does, self.copy_id = Bell(way), does, None

    def __data_parallel_replicate__(self, ctx, copy_id):
        self.copy_id = copy_id

    def forward(self, x):
        what = self.does.get(self.copy_id, "passes")
        if what == "fails":
            raise ValueError("mine")
        if what == "waits":
            self.bell.wait()
        if what == "computes":
            ends, big = time.monotonic() + 1.5, torch.randn(300, 300)
            while time.monotonic() < ends:
                big @ big
        return x


def waiting(monkeypatch, way, does):
    monkeypatch.setattr(worker, "LOOK", 0.05)
    model = nn.Sequential(nn.Linear(4, 4), Waits(way, {}), nn.Linear(4, 2)).double()
    pipe = fxsplit.compile(model, Plan(stages=2, replicas=3), example_args=(X,), check=False)
    assert pipe(X).shape == (12, 2)
    model[1].does.update(does)
    return pipe, model[1].bell


def ended(bell, count):
    """The workers that were left go when what they wait for comes."""
    left = [t for t in threading.enumerate() if t.name.startswith("fxsplit")]
    assert len(left) == count
    bell.ring()
    for thread in left:
        thread.join(10)
    assert not any(thread.is_alive() for thread in left)


@pytest.mark.parametrize("way", ["event", "queue", "lock", "sleep"])
@pytest.mark.parametrize("passes", [0, 2])
def test_a_copy_that_waits_for_those_that_have_finished(monkeypatch, way, passes):
    does = {i: "waits" for i in range(3) if i != passes}
    pipe, bell = waiting(monkeypatch, way, does)
    with pytest.raises(errors.WorkerError, match="not called equally often") as caught:
        pipe(X)
    assert f"stage 1.{min(does)}, at action 1F{min(does)}: " in str(caught.value)
    assert "test_copies.py:" in str(caught.value)
    with pytest.raises(errors.ArgumentError, match="copies of a module still wait"):
        pipe(X)
    ended(bell, 2)
    pipe.model[1].does.clear()
    assert pipe(X).shape == (12, 2)


@pytest.mark.parametrize("way", ["event", "queue", "lock", "sleep"])
def test_whatever_the_way_to_wait_for_a_copy_that_has_failed(monkeypatch, way):
    pipe, bell = waiting(monkeypatch, way, {0: "waits", 1: "fails"})
    with pytest.raises(ValueError, match="mine") as caught:
        pipe(X)
    assert any("stage 1.0 waits for a copy that has failed" in note for note in caught.value.__notes__)
    ended(bell, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell how long a thread has computed")
@pytest.mark.parametrize("other", ["fails", "passes"])
def test_a_copy_that_computes_for_long_is_waited_for(monkeypatch, other):
    pipe, _ = waiting(monkeypatch, "event", {0: "computes", 1: other})
    if other == "passes":
        assert pipe(X).shape == (12, 2)
    else:
        with pytest.raises(ValueError, match="mine") as caught:
            pipe(X)
        assert not any("left there" in note for note in caught.value.__notes__)
    assert not [t for t in threading.enumerate() if t.name.startswith("fxsplit")]


def test_an_exchange_that_takes_its_time_is_waited_for(monkeypatch):
    """The others wait for longer than it takes to be left, but one still computes."""
    pipe, bell = waiting(monkeypatch, "event", {0: "waits", 1: "passes", 2: "computes"})
    threading.Timer(1.0, bell.ring).start()
    assert pipe(X).shape == (12, 2)


@pytest.mark.parametrize("way", ["event", "queue"])
def test_an_interrupt_while_all_copies_wait_for_each_other(monkeypatch, way):
    pipe, bell = waiting(monkeypatch, way, dict.fromkeys(range(3), "waits"))
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        pipe(X)
    ended(bell, 3)


def test_a_module_may_want_to_be_told_in_two_ways():
    told = []

    class Both(nn.Module):
        def __data_parallel_replicate__(self, context, copy_id):
            told.append(("method", copy_id))

    module = Both()
    handle = fxsplit.on_replicate(module, lambda copy, context, copy_id: told.append(("function", copy_id)))
    for callback in callbacks_of(module):
        callback(module, None, 0)
    assert told == [("method", 0), ("function", 0)]
    handle.remove()
    assert len(callbacks_of(module)) == 1 and not callbacks_of(nn.Linear(2, 2))


def test_buffers_of_the_master_are_the_models():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(()))

        def forward(self, x):
            self.n.add_(1)
            return x * self.n

    model, told = nn.Sequential(nn.Linear(X.shape[1], 3), Counts()).to(X.dtype), []
    fxsplit.on_replicate(model[1], lambda copy, context, copy_id: told.append(copy))
    pipe = fxsplit.compile(model, Plan(replicas=2, micro_batches=4), example_args=(X,))
    buffer = model[1].n
    pipe(X)
    assert model[1].n is buffer and told[0].n is buffer and buffer == 2
    assert told[1].n is not buffer and told[1].n == 2
