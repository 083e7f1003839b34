"""Replicas on several devices, against the same replicas on a CPU: the same numbers, bit for bit."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxsplit
from fxsplit import Plan, errors
from fxsplit.schedules.catalog import IN_V
from tests.models import build
from tests.on_devices.test_pipeline import SCHEDULES, assert_as_on_a_cpu, leaves

ROWS = [["sim:0", "sim:1"], ["sim:2", "sim:3", "sim:0"], ["sim:1"]]
MIXED = [["cpu", "sim:1"], ["sim:2"], ["sim:1", "cpu"]]
SHARED = [["sim:0", "sim:1"], ["sim:1", "sim:0"], ["sim:0", "sim:1"]]  # for workers that have several stages


def on_cpu(plan):
    return plan.replace(devices=[["cpu"] * len(row) for row in plan.devices])


@pytest.mark.parametrize("step", [False, True], ids=["call", "step"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_schedules(name, schedule, step):
    model, batch = build(name)
    fields = {"workers": 1} if "workers" in SCHEDULES[schedule] else {}
    rows = (SHARED if fields else ROWS)[: 2 if schedule in IN_V else 3]
    plan = Plan(stages=len(rows), devices=rows, micro_batches=7, schedule=schedule, **fields)
    assert_as_on_a_cpu(model, batch(8), plan, step=step)


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
@pytest.mark.parametrize("rows", [ROWS, MIXED], ids=["devices", "with a cpu"])
@pytest.mark.parametrize("name", ["gpt", "resnet", "unet"])
def test_checkpoints(name, rows, checkpoint):
    model, batch = build(name)
    plan = Plan(stages=3, devices=rows, micro_batches=5, schedule="1f1b", checkpoint=checkpoint)
    assert_as_on_a_cpu(model, batch(9), plan, step=True)


class Net(nn.Module):
    """Layers with state, a constant on the device of the input, and a weight that two stages read."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.lstm, self.drop = nn.LSTM(8, 8, batch_first=True), nn.Dropout(0.3)
        self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8)
        self.c.weight = self.b.weight
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        h = self.norm(self.a(x)) * self.scale + torch.arange(8, device=x.device) * 0.01
        self.steps.add_(h.detach().abs().mean())
        h = self.drop(self.lstm(h.view(-1, 1, 8))[0].reshape(-1, 8))
        return self.c(torch.relu(self.b(h)))


def net():
    torch.manual_seed(0)
    return Net()


X = torch.randn(9, 8)  # rows of 32 bytes: matrix products round by the alignment of their memory


@pytest.mark.parametrize("fields", [{}, {"deferred_batch_norm": True}, {"checkpoint": "always"}], ids=str)
def test_layers_with_state(fields):
    plan = Plan(cut=["b", "c"], devices=ROWS, micro_batches=4, **fields)
    pipe = assert_as_on_a_cpu(net(), (X,), plan)
    assert "torch.device('sim:0')" in pipe[0].code.replace('"', "'")
    assert pipe.model.norm.num_batches_tracked == (2 if fields.get("deferred_batch_norm") else 8)


def outputs(model, plan, change):
    pipe = fxsplit.compile(model, plan, example_args=(X,))
    found = [pipe(X)]
    for do in (change, lambda model: None):
        do(model)
        y = pipe(X.to(next(model.parameters()).dtype))
        model.zero_grad()
        if y.requires_grad:
            y.square().mean().backward()
        found += [y, *(p.grad for p in model.parameters() if p.grad is not None)]
    return [t.detach().cpu() for t in found]


def halve(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)


def set_data(model):
    for p in model.parameters():
        p.data = p.data * 0.5


def assign(model):
    model.load_state_dict(
        {k: v * 2 if v.is_floating_point() else v for k, v in model.state_dict().items()}, assign=True
    )
    model.c.weight = model.b.weight


def fused(optimizer, **options):
    def step(model):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer(model.parameters(), lr=0.1, **options).step()

    return step


CHANGES = {
    "in place": halve,
    "p.data =": set_data,
    "load_state_dict": lambda model: model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}),
    "load_state_dict(assign)": assign,
    "to(dtype)": lambda model: model.double(),
    "SGD": fused(torch.optim.SGD, momentum=0.9),
    "SGD(foreach)": fused(torch.optim.SGD, foreach=True),
    "AdamW(foreach)": fused(torch.optim.AdamW, foreach=True),
    "frozen": lambda model: model.a.requires_grad_(False),
    "all frozen": lambda model: model.requires_grad_(False),
    "buffer": lambda model: model.scale.mul_(3),
    "buffer set": lambda model: model.register_buffer("scale", torch.full_like(model.scale, 2)),
    "eval": lambda model: model.eval(),
    "attribute": lambda model: setattr(model.norm, "momentum", 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_copies_follow_what_changes(change):
    model = net()
    model.drop.p = 0.0
    twin = copy.deepcopy(model)
    plan = Plan(cut=["b"], devices=[["cpu", "sim:1"], ["cpu", "sim:2", "sim:1"]], micro_batches=4)
    found, expected = (outputs(m, p, CHANGES[change]) for m, p in ((model, plan), (twin, on_cpu(plan))))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.equal(found[0].double(), found[1].double()) or change in (
        "frozen",
        "all frozen",
        "attribute",
    )


def test_a_copy_is_made_only_when_something_has_changed(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = fxsplit.compile(model, Plan(devices=[["cpu", "sim:1"]]), example_args=(torch.randn(4, 4),))
    pipe(torch.randn(4, 4))
    made = []
    copy_ = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda a, b, *args: (made.append(b), copy_(a, b, *args))[1])
    pipe(torch.randn(4, 4))
    assert not made
    with torch.no_grad():
        model[1].weight.add_(1)
    pipe(torch.randn(4, 4))
    assert [id(t) for t in made] == [id(model[1].weight)]


def test_a_backward_whose_copies_have_changed_since_says_so():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    pipe = fxsplit.compile(model, Plan(devices=[["cpu", "sim:1"]]), example_args=(torch.randn(4, 4),))
    first = pipe(torch.randn(4, 4))
    halve(model)
    pipe(torch.randn(4, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_whole_batch(schedule):
    """Batch 5 on 2 devices, 9 on 4, 1 on 4: the loss and the gradients of the whole batch."""
    for rows, row in (
        (5, ["sim:0", "sim:1"]),
        (9, ["sim:0", "sim:1", "sim:2", "sim:3"]),
        (1, ["cpu", "sim:1", "sim:2", "sim:3"]),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        x, t = torch.randn(rows, 8).double(), torch.randint(0, 4, (rows,))
        twin = copy.deepcopy(model)
        expected = F.cross_entropy(twin(x), t)
        expected.backward()
        example = (torch.randn(8, 8).double(),)
        pipe = fxsplit.compile(model, Plan(devices=[row], schedule=schedule), example_args=example)
        loss = pipe.step(x, target=t.to(row[0]), loss_fn=F.cross_entropy)
        torch.testing.assert_close(loss.cpu(), expected.detach(), rtol=1e-12, atol=1e-12)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-12, atol=1e-12)


def test_scattered_outputs_and_criterion():
    model, (x,) = net(), (X,)
    model.drop.p = 0.0
    twin = copy.deepcopy(model)
    plan = Plan(devices=[["sim:0", "sim:1", "cpu"]], micro_batches=4, gather=False)
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    t = torch.randint(0, 8, (9,))
    out = pipe(x)
    assert [str(d) for d in out.devices] == ["sim:0", "sim:1", "cpu", "sim:0"]
    assert [p.device for p in out.parts] == list(out.devices) and out.sizes == (3, 2, 2, 2)
    loss = pipe.criterion(nn.CrossEntropyLoss(ignore_index=3, weight=torch.arange(1.0, 9.0)).to("sim:0"))(
        out, t
    )
    loss.backward()
    whole = fxsplit.compile(twin, plan.replace(devices="cpu", replicas=1, gather=True), example_args=(x,))
    expected = F.cross_entropy(whole(x), t, ignore_index=3, weight=torch.arange(1.0, 9.0))
    expected.backward()
    torch.testing.assert_close(loss.detach().cpu(), expected.detach())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad)
    assert str(out.gather().device) == "sim:0"


def test_synchronised_batch_normalisation():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4), nn.BatchNorm1d(4)
    ).double()
    twin, x = copy.deepcopy(model), X.double()
    plan = Plan(
        cut=["3"], devices=[["sim:0", "cpu"], ["sim:1", "sim:2"]], micro_batches=4, sync_batch_norm=True
    )
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    for _ in range(2):
        y, expected = pipe(x), twin(x)
        y.square().mean().backward(), expected.square().mean().backward()
    torch.testing.assert_close(y.cpu(), expected, rtol=1e-12, atol=1e-12)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-12, atol=1e-12)
    for b, c in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(b.cpu(), c, rtol=1e-12, atol=1e-12)


def test_replication_callbacks():
    log = []
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4))
    fxsplit.on_replicate(model[1], lambda module, ctx, copy_id: log.append((copy_id, module, ctx)))
    pipe = fxsplit.compile(model, Plan(devices=[["cpu", "sim:1", "sim:2"]]), example_args=(X,))
    assert [i for i, _, _ in log] == [0, 1, 2] and len({id(c) for _, _, c in log}) == 1
    assert [str(m.weight.device) for _, m, _ in log] == ["cpu", "sim:1", "sim:2"]
    assert log[0][1].weight is model[1].weight
    pipe(X).sum().backward()
    assert model[1].weight.grad is not None and all(m.weight.grad is None for _, m, _ in log[1:])


def test_what_is_shown():
    pipe = fxsplit.compile(net(), Plan(cut=["b"], devices=[["cpu", "sim:1"], "sim:2"]), example_args=(X,))
    assert "cpu, sim:1" in pipe.report()
    assert pipe[0].code.startswith("# stage 0 of 2 · cpu (replicas on sim:1) · ")
    assert {str(d) for d in pipe.memory()} == {"cpu", "sim:1", "sim:2"}
    assert "same-graph: holds" in pipe.verify()
    assert isinstance(pipe(X), torch.Tensor)
    assert leaves(pipe(X))[0].device.type == "sim"


def test_replicas_that_would_each_change_their_own():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(8, 4), 0

        def forward(self, x):
            self.calls += 1
            return self.linear(x) * (1.0 if self.calls else 2.0)

    model = nn.Sequential(Counts(), nn.Linear(4, 4))
    with pytest.raises(errors.PlanError, match="changes attributes that are no tensors"):
        fxsplit.compile(model, Plan(devices=[["cpu", "sim:1"]]), example_args=(X,))
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_replicas_auto_on_devices():
    model, batch = build("gpt")
    twin, x = copy.deepcopy(model), batch(8)
    plan = Plan(replicas="auto", stages=2, devices=[f"sim:{i}" for i in range(4)], cost="flops")
    pipe = fxsplit.compile(model, plan, example_args=x)
    assert sum(len(row) for row in pipe.assignment.rows) == 4 and plan.micro_batches == 4
    other = fxsplit.compile(twin, plan.replace(devices=["cpu"] * 4), example_args=x)
    assert torch.equal(pipe(*x).cpu(), other(*x))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_fused_optimizers_leave_no_trace_in_version_counters(optimizer):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    twin = copy.deepcopy(model)
    pipe = fxsplit.compile(model, Plan(devices=[["cpu", "sim:1"]]), example_args=(X,))
    for _ in range(3):
        for m, run in ((model, pipe), (twin, twin)):
            run(X).square().mean().backward()
            optimizer(m.parameters(), lr=0.1, fused=True).step()
            m.zero_grad()
    torch.testing.assert_close(pipe(X), twin(X))


def test_what_is_written_through_data_is_copied_when_asked():
    model = nn.Sequential(nn.Linear(8, 4))
    pipe = fxsplit.compile(model, Plan(devices=[["cpu", "sim:1"]]), example_args=(X,))
    pipe(X)
    model[0].weight.data.mul_(2)
    pipe.refresh_replicas()
    torch.testing.assert_close(pipe(X), model(X))


def test_memory_that_is_used_again_is_not_taken_for_the_same():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    pipe = fxsplit.compile(model, Plan(devices=[["cpu", "sim:1"]]), example_args=(X,))
    for _ in range(5):
        pipe(X)
        for factor in (0.5, 1.5):
            for p in model.parameters():
                p.data = p.data * factor
        torch.testing.assert_close(pipe(X), model(X))


def test_copies_that_are_made_in_inference_mode_can_be_trained():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    pipe = fxsplit.compile(model, Plan(devices=[["cpu", "sim:1"]]), example_args=(X,))
    model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}, assign=True)
    with torch.inference_mode():
        pipe(X)
    pipe(X).sum().backward()
    halve(model)
    pipe(X).sum().backward()
    assert model[0].weight.grad is not None


class Odd(nn.Linear):
    """What a copy of a module might lose."""

    __slots__ = ("factor",)

    def __new__(cls, features):
        return super().__new__(cls)

    def __init__(self, features):
        super().__init__(features, features)
        self.factor = 3.0
        self.own = [self.weight]
        self.register_forward_hook(self.shifted)
        self.calls = {"times": self.times}

    def shifted(self, module, args, output):
        return output + self.bias

    def times(self, x):
        return x * self.own[0].sum() * self.factor

    def forward(self, x):
        if bool(x.sum() > 1e9):
            return x
        return self.calls["times"](super().forward(x))


def test_what_modules_hold_beside_their_parameters():
    model, twin = nn.Sequential(Odd(8)), nn.Sequential(Odd(8))
    twin.load_state_dict(model.state_dict())
    pipe = fxsplit.compile(model, Plan(devices=[["cpu", "sim:1"]]), example_args=(X,))
    for _ in range(2):
        found, expected = pipe(X), twin(X)
        found.sum().backward(), expected.sum().backward()
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(model[0].weight.grad, twin[0].weight.grad)
        halve(model), halve(twin)


def test_callbacks_are_called_when_parameters_are_where_they_belong():
    seen = []
    model = nn.Sequential(nn.Linear(8, 4))
    fxsplit.on_replicate(model[0], lambda module, ctx, copy_id: seen.append(str(module.weight.device)))
    fxsplit.compile(model, Plan(devices=[["sim:2", "sim:1", "cpu"]]), example_args=(X,))
    assert seen == ["sim:2", "sim:1", "cpu"]


class TwoPaths(nn.Module):
    """Another graph in each mode; the one of train() writes statistics that the one of eval() only reads."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        h = self.norm(self.a(x))
        return h if self.training else h.relu() * 2


@pytest.mark.parametrize("trained_first", [True, False])
def test_statistics_that_only_the_other_mode_writes(trained_first):
    model = TwoPaths().train(trained_first)
    pipe = fxsplit.compile(model, Plan(devices=[["cpu", "sim:1"]], micro_batches=4), example_args=(X,))
    assert pipe.compiled[True] is not pipe.compiled[False]
    pipe.eval()
    pipe(X)  # there are copies now
    pipe.train()
    for _ in range(3):
        pipe(X * 3 + 1)
    pipe.eval()
    torch.testing.assert_close(pipe(X), model(X))
