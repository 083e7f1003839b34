"""Pipelines over several devices, against the same plan on a CPU: the same numbers, bit for bit."""

import copy
import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxsplit
from fxsplit.schedules.catalog import IN_V, NAMES, SHARED
from tests.models import MODELS, build

DEVICES = ["sim:0", "sim:1", "sim:2"]
MIXED = ["cpu", "sim:1", "cpu"]
SCHEDULES = {
    s: {"stages": 4, "devices": DEVICES[:2], "workers": 2}
    if s in IN_V
    else {"stages": 3, "devices": DEVICES, **({"workers": 3} if s in SHARED else {})}
    for s in NAMES
}


def leaves(tree):
    return torch.utils._pytree.tree_leaves(tree)


def loss_of(output):
    """On the CPU: the outputs may be on several devices."""
    return sum(t.square().mean().cpu() for t in leaves(output))


def trained(model, plan, batch, *, step=False, train=True):
    """What comes of two steps of training by AdamW, and where the parameters are."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    parameters = list(model.parameters())
    pipe = fxsplit.compile(model.train(train), plan, example_args=batch)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    torch.manual_seed(3)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        if step:
            loss, output = pipe.step_with_output(*batch, loss_fn=loss_of, reduction="mean")
        else:
            output = pipe(*batch)
            loss = loss_of(output)
            loss.backward()
        found += [loss, *leaves(output)]
        found += [torch.zeros(()) if p.grad is None else p.grad.clone() for p in parameters]
        optimizer.step()
    found += model.state_dict().values()
    return pipe, [t.detach().cpu() for t in found], torch.get_rng_state()


def assert_as_on_a_cpu(model, batch, plan, **how):
    """Train on the plan's devices, and with the same cuts on a CPU."""
    twin = copy.deepcopy(model)
    pipe, found, state = trained(model, plan, batch, **how)
    cuts = {"device_map": dict.fromkeys(plan.device_map, "cpu")} if plan.device_map else {"devices": "cpu"}
    _, expected, expected_state = trained(twin, plan.replace(**cuts), batch, **how)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), (i, (a - b).abs().max())
    assert torch.equal(state, expected_state)
    for stage in pipe:
        assert {model.get_parameter(name).device for name in stage.parameters} <= {stage.device}
    return pipe


@pytest.mark.parametrize("step", [False, True], ids=["call", "step"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_schedules(name, schedule, step):
    model, batch = build(name)
    plan = fxsplit.Plan(micro_batches=4, schedule=schedule, **SCHEDULES[schedule])
    assert_as_on_a_cpu(model, batch(8), plan, step=step)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("devices", [DEVICES, MIXED], ids=["devices", "with a cpu"])
def test_models(name, devices):
    """Long skips, two branches, tied weights, modules that stay whole."""
    model, batch = build(name)
    plan = fxsplit.Plan(stages=3, devices=devices, micro_batches=4, schedule="1f1b")
    pipe = assert_as_on_a_cpu(model, batch(7), plan, step=True)
    assert [str(d) for d in pipe.devices] == devices


@pytest.mark.parametrize("step", [False, True], ids=["call", "step"])
@pytest.mark.parametrize("mode", ["always", "except_last", ["h.1", "layer1"]], ids=str)
@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_checkpoints(name, mode, step):
    model, batch = build(name)
    if isinstance(mode, list):
        mode = mode[:1] if name == "gpt" else mode[1:]
    plan = fxsplit.Plan(stages=3, devices=DEVICES, micro_batches=4, schedule="1f1b", checkpoint=mode)
    assert_as_on_a_cpu(model, batch(8), plan, step=step)


@pytest.mark.parametrize("fields", [{}, {"micro_batches": 3}, {"micro_batches": 4, "replicas": 2}], ids=str)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_tied_weight_on_two_devices(fields, checkpoint):
    model, batch = build("gpt")
    weight = model.wte.weight
    device_map = {"": "sim:0", "h.1": "sim:1", "h.2": "sim:2", "ln_f": "sim:1", "head": "sim:1"}
    plan = fxsplit.Plan(device_map=device_map, checkpoint=checkpoint, **fields)
    on_cpus = plan.replace(device_map={k: v.replace("sim", "cpu") for k, v in device_map.items()})
    twin, x = copy.deepcopy(model), batch(8)
    pipe, found, _ = trained(model, plan, x)
    _, expected, _ = trained(twin, on_cpus, x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert model.head.weight is model.wte.weight is weight and str(weight.device) == "sim:0"
    assert pipe.hf_device_map == device_map


def test_replicas_that_lend_a_weight_do_not_take_it_for_a_change():
    """While one replica's call has the travelled weight in the module, the other one looks at the module's versions."""
    model, batch = build("gpt")
    device_map = {"": "sim:0", "h.1": "sim:1", "head": "sim:1"}
    plan = fxsplit.Plan(device_map=device_map, micro_batches=6, replicas=2, checkpoint="always")
    pipe, x = fxsplit.compile(model, plan, example_args=batch(12)), batch(12)
    for _ in range(12):
        loss_of(pipe(*x)).backward()


def test_a_word_for_a_device_map():
    model, batch = build("resnet")
    plan = fxsplit.Plan(device_map="sequential", max_memory={0: "20KiB", 1: "20KiB", 2: "1GiB"})
    pipe = fxsplit.compile(model, plan, example_args=batch(4))
    assert {str(d) for d in pipe.devices} == set(DEVICES) == set(pipe.hf_device_map.values())
    fxsplit.verify(pipe)


class Dropping(nn.Module):
    """Random numbers in every stage, once in a checkpoint of the model's own."""

    def __init__(self, own_checkpoint):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.own_checkpoint = own_checkpoint

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if i == 3 and self.own_checkpoint:
                x = checkpoint(self.noisy, layer, x, use_reentrant=False)
            else:
                x = self.noisy(layer, x)
        return x

    def noisy(self, layer, x):
        return F.dropout(layer(x), 0.4, self.training) + torch.rand_like(x)


@pytest.mark.parametrize("own_checkpoint", [False, True])
@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_random_numbers(own_checkpoint, mode, micro_batches):
    plan = fxsplit.Plan(stages=3, devices=DEVICES, micro_batches=micro_batches, checkpoint=mode)
    assert_as_on_a_cpu(Dropping(own_checkpoint), (torch.randn(8, 8),), plan)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers(kind):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = kind(4, 6, batch_first=True), kind(6, 6, batch_first=True)
            self.head = nn.Linear(6, 2)

        def forward(self, x):
            return self.head(self.b(self.a(x)[0])[0][:, -1])

    plan = fxsplit.Plan(stages=3, devices=DEVICES, micro_batches=3, schedule="zb_h1")
    assert_as_on_a_cpu(Net(), (torch.randn(6, 5, 4),), plan, step=True)


@pytest.mark.parametrize("where", ["cpu", "sim:1", "sim:3"])
def test_inputs_and_targets_may_be_anywhere(where):
    model, batch = build("resnet")
    (x,), target, twin = batch(8), torch.arange(8) % 5, copy.deepcopy(model)
    plan = fxsplit.Plan(stages=3, devices=DEVICES, micro_batches=4, schedule="1f1b")
    pipe = fxsplit.compile(model.to(where), plan, example_args=(x.to(where),))
    leaf = x.to(where).requires_grad_()
    assert str(pipe(leaf).device) == "sim:2"
    loss = pipe.step(leaf, target=target.to("sim:2"), loss_fn=F.cross_entropy)
    assert leaf.grad.device == leaf.device and leaf.grad.any() and str(loss.device) == "sim:2"
    expected = pipe(leaf).detach().cpu()
    for elsewhere in ("cpu", "sim:0", "sim:3"):
        moved = x.detach().to(elsewhere, copy=True).requires_grad_()
        assert torch.equal(pipe(moved).detach().cpu(), expected)
        again = pipe.step(moved, target=target.to(elsewhere), loss_fn=F.cross_entropy)
        assert moved.grad.device == moved.device and torch.equal(again.cpu(), loss.cpu())
        assert torch.equal(moved.grad.cpu(), leaf.grad.cpu())
        criterion = pipe.criterion(F.cross_entropy)
        assert str(criterion(pipe(moved), target.to(elsewhere)).device) == "sim:2"
    gpipe = fxsplit.compile(
        twin.to(where), plan.replace(schedule="gpipe"), example_args=(x.detach().to(where),)
    )
    outside = gpipe.step(x.detach(), target=target, loss_fn=F.cross_entropy)
    torch.testing.assert_close(outside.cpu(), loss.cpu())
    with pytest.raises(fxsplit.errors.ArgumentError, match="'image' is on the meta device"):
        pipe(x.to("meta"))


@pytest.mark.parametrize("name", MODELS)
def test_the_proof_holds(name):
    model, batch = build(name)
    pipe = fxsplit.compile(
        model, fxsplit.Plan(stages=3, devices=DEVICES, micro_batches=2), example_args=batch(6)
    )
    assert "same-graph: holds" in fxsplit.verify(pipe)


def test_memory_is_that_of_a_cpu_by_device():
    model, batch = build("gpt")
    plan = fxsplit.Plan(stages=3, devices=DEVICES, micro_batches=4, schedule="1f1b")
    pipe = fxsplit.compile(copy.deepcopy(model), plan, example_args=batch(8))
    found = pipe.memory()
    assert [str(d) for d in found] == DEVICES
    assert {str(p.device) for p in pipe.parameters()} == set(DEVICES)
    on_cpus = fxsplit.compile(model, plan.replace(devices=["cpu:0", "cpu:1", "cpu:2"]), example_args=batch(8))
    assert list(found.values()) == list(on_cpus.memory().values())


def test_state_dict_and_copies():
    model, batch = build("resnet")
    reference, x = copy.deepcopy(model).eval(), batch(4)
    plan = fxsplit.Plan(stages=3, devices=DEVICES, micro_batches=2)
    pipe = fxsplit.compile(model, plan, example_args=x).eval()
    state = {k: v.cpu() for k, v in pipe.state_dict().items()}
    assert all(torch.equal(v, state[k]) for k, v in reference.state_dict().items())
    before = pipe(*x)
    twin = copy.deepcopy(pipe)
    for p in pipe.parameters():
        p.data.zero_()
    assert not pipe(*x).any() and torch.equal(twin(*x), before)
    pipe.load_state_dict(state)
    assert torch.equal(pipe(*x), before)
    with pytest.raises(fxsplit.errors.MoveError):
        pipe.to("sim:1")
    half = pipe.to(torch.float64)
    assert {p.dtype for p in half.parameters()} == {torch.float64}
    assert {str(p.device) for p in half.parameters()} == set(DEVICES)


def test_saved_code_runs_on_its_devices(tmp_path):
    model, batch = build("gpt")
    plan = fxsplit.Plan(stages=3, devices=DEVICES, micro_batches=2)
    pipe = fxsplit.compile(copy.deepcopy(model), plan, example_args=batch(4))
    pipe.save_code(tmp_path / "split")
    loaded = fxsplit.load(tmp_path / "split", model)
    x = batch(4)
    assert list(loaded.devices) == list(pipe.devices) and torch.equal(loaded(*x), pipe(*x))


def test_a_model_that_is_on_a_device_already():
    model, batch = build("gpt")
    plan = fxsplit.Plan(stages=3, devices=DEVICES, micro_batches=2)
    x = batch(4)
    expected = trained(copy.deepcopy(model), plan, x)[1]
    found = trained(model.to("sim:3"), plan, tuple(t.to("sim:3") for t in x))[1]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_model_is_compiled_again_for_other_devices():
    model, batch = build("gpt")
    x = batch(4)
    plan = fxsplit.Plan(stages=3, devices=DEVICES, micro_batches=2)
    pipe = fxsplit.compile(model, plan, example_args=x)
    expected = pipe(*x)
    model = pipe.unsplit().to("cpu")
    again = fxsplit.compile(model, plan.replace(devices=["sim:3", "sim:2", "sim:1"]), example_args=x)
    assert torch.equal(again(*x).cpu(), expected.cpu())


def test_a_backward_in_the_thread_of_its_own_device():
    """Autograd plays the pipeline's node in its thread for the last stage's device; that stage does not wait for it."""
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))).to("sim:0")
    x = torch.randn(8, 4, device="sim:0", requires_grad=True)
    plan = fxsplit.Plan(stages=3, devices=["sim:0", "sim:1", "sim:0"], micro_batches=4)
    pipe = fxsplit.compile(layers, plan, example_args=(x.detach(),))
    y = pipe(x * 1)
    (y * pipe(y.sin())).sum().backward()
    assert x.grad.any()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_two_threads_may_train_with_one_pipeline(schedule):
    """The end of a step needs no thread of autograd's, which may be waiting for that step."""
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    plan = fxsplit.Plan(stages=2, devices=DEVICES[:2], micro_batches=4, schedule=schedule)
    pipe = fxsplit.compile(layers, plan, example_args=(torch.randn(8, 4),))
    errors = []

    def train(step):
        try:
            for _ in range(10):
                x = torch.randn(8, 4)
                pipe.step(x, loss_fn=loss_of, reduction="mean") if step else loss_of(pipe(x)).backward()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(step,)) for step in (True, False, True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.parametrize("what", ["step", "recompile"])
def test_a_backward_that_waits_holds_up_nobody(what):
    """It waits for the pipeline in autograd's thread for a device; who has the pipeline goes backward without that."""
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    x = torch.randn(8, 4)
    plan = fxsplit.Plan(stages=2, devices="sim:0", micro_batches=2, schedule="1f1b")
    pipe = fxsplit.compile(layers, plan, example_args=(x,))
    waiting = threading.Thread(target=loss_of(pipe(x)).backward, daemon=True)
    compiler = pipe._compiler

    def begin():
        if waiting.ident is None:
            waiting.start()
            waiting.join(0.5)

    def loss(output):
        begin()
        return loss_of(output)

    def made(*args, **kwargs):
        begin()
        return compiler(*args, **kwargs)

    pipe.compiled_by(made)
    run = (
        functools.partial(pipe.step, x, loss_fn=loss, reduction="mean") if what == "step" else pipe.recompile
    )
    having = threading.Thread(target=run, daemon=True)
    having.start()
    having.join(60)
    waiting.join(60)
    assert not having.is_alive() and not waiting.is_alive()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.tau = nn.Linear(4, 4), 1.0
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        return self.lin(x) * self.tau + self.shift


def test_a_model_that_is_spread_is_compiled_again():
    model, x = nn.Sequential(*(Scaled() for _ in range(4))), torch.randn(4, 4)
    twin, parameters = copy.deepcopy(model), list(model.parameters())
    plan = fxsplit.Plan(stages=2, micro_batches=2, devices=["sim:0", "sim:1"])
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    before = [t.device for t in (*model.parameters(), *model.buffers())]
    model[1].tau = twin[1].tau = 2.0
    with pytest.raises(fxsplit.errors.AssumptionError, match=r"1.tau was 1.0, is 2.0"):
        pipe(x)
    pipe.recompile()
    assert [t.device for t in (*model.parameters(), *model.buffers())] == before
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    expected = torch.cat([twin(x[:2]), twin(x[2:])])
    assert torch.equal(pipe(x).cpu(), expected)
    other = fxsplit.compile(pipe.unsplit(), plan.replace(devices=["sim:2", "cpu"]), example_args=(x,))
    assert torch.equal(other(x).cpu(), expected)
    assert {t.device for t in model.parameters()} == {torch.device("sim:2"), torch.device("cpu")}
    alone = fxsplit.compile(pipe.unsplit(), fxsplit.Plan(stages=2, micro_batches=2), example_args=(x,))
    assert torch.equal(alone(x), expected) and {t.device.type for t in model.parameters()} == {"cpu"}
    twin = copy.deepcopy(other.recompile())
    twin.unsplit()[0].tau = 4.0
    assert torch.equal(twin.recompile()(x).cpu(), twin.unsplit().cpu()(x).cpu())


class Wide(nn.Module):
    """A tie, a residual, a recurrent layer, statistics, an attribute, sizes and devices that forward asks for."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.rnn = (
            nn.Embedding(9, 4),
            nn.BatchNorm1d(4, affine=False),
            nn.GRU(4, 4, batch_first=True),
        )
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def forward(self, ids, keep=None):
        x = self.embed(ids)
        x = x + torch.arange(x.shape[1], device=x.device)[None, :, None] * self.scale
        y, _ = self.rnn(self.norm(x.transpose(1, 2)).transpose(1, 2))
        y = y + self.attend(y, x, x, need_weights=False)[0]
        y[:, 0] = x[:, 0]
        return torch.nn.functional.linear(y if keep is None else y * keep, self.embed.weight)


@pytest.mark.parametrize("mode", [True, False])
def test_a_spread_model_is_compiled_where_it_is(monkeypatch, mode):
    """No device holds all of it in between; the numbers are compared all the same."""
    torch.manual_seed(0)
    model, ids = Wide().train(mode), torch.randint(0, 9, (6, 3))
    eager = copy.deepcopy(model)
    cuts = {"embed": "sim:0", "norm": "sim:1", "rnn": "sim:1", "attend": "sim:2", "": "sim:0"}
    fxsplit.compile(model, fxsplit.Plan(device_map=cuts), example_args=(ids,))
    homes = {t.device for t in model.parameters()}
    monkeypatch.setattr(fxsplit.compiler, "gathered", None)
    for plan, kwargs in (
        (fxsplit.Plan(device_map={**cuts, "rnn": "sim:3"}), {}),
        (fxsplit.Plan(stages=3, devices=["sim:3", "cpu", "sim:0"]), {"keep": torch.rand(6, 3, 4)}),
        (fxsplit.Plan(stages=2, devices="sim:2"), {}),
    ):
        pipe = fxsplit.compile(model, plan, example_args=(ids,), example_kwargs=kwargs)
        found, wanted = pipe(ids, **kwargs), eager(ids, **kwargs)
        torch.testing.assert_close(found.cpu(), wanted)
        for m, y in ((model, found), (eager, wanted)):
            m.zero_grad()
            y.square().sum().backward()
        for a, b in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-4, atol=1e-5)
        for a, b in zip(model.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(a.cpu(), b)
        with monkeypatch.context() as patch:
            if len({t.device for t in model.parameters()}) > 1:
                patch.setattr(fxsplit.questions, "_beside", None)  # nor a copy
            assert "numbers:" in pipe.verify()
    assert len(homes) == 3 and {t.device for t in model.parameters()} == {torch.device("sim:2")}


def test_a_recompile_that_fails_leaves_everything_where_it_is():
    model, x = nn.Sequential(Scaled(), Scaled()), torch.randn(4, 4)
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=2, devices=["sim:0", "sim:1"]), example_args=(x,))
    tensors, expected = [*model.parameters(), *model.buffers()], pipe(x).cpu()
    before = [t.device for t in tensors]
    model[0].forward = lambda x: x.nothing
    with pytest.raises(fxsplit.errors.ArgumentError, match="itself fails on the example"):
        pipe.recompile()
    del model[0].forward
    assert all(a is b for a, b in zip(tensors, (*model.parameters(), *model.buffers()), strict=True))
    assert [t.device for t in tensors] == before and torch.equal(pipe(x).cpu(), expected)


def test_a_model_that_was_moved_is_compiled_again_where_it_is():
    model, x = nn.Sequential(Scaled(), Scaled()), torch.randn(4, 4)
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=2), example_args=(x,))
    expected = model(x)
    model.to("sim:1")
    with pytest.raises(fxsplit.errors.ArgumentError, match=r"(?s)device sim:1.*pipe.recompile"):
        pipe(x.to("sim:1"))
    pipe.recompile()
    assert set(map(str, pipe.devices)) == {"sim:1"} and torch.equal(pipe(x.to("sim:1")).cpu(), expected)
