"""What is on which device: outputs that a pair sends on, parameters that a map names, tensors that nobody moves."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxsplit
from fxsplit import Plan
from fxsplit.errors import PlanError

X = torch.randn(6, 4)


def loss_of(out, target):
    return F.mse_loss(out["y"], target.to(out["y"].device))


def on_host(tree):
    return torch.utils._pytree.tree_map(lambda t: t.detach().cpu(), tree)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 3)

    def forward(self, x):
        h = self.body(x)
        return {"h": h, "y": self.head(h)}


PAIRS = {
    "the whole model": ({"": ("sim:0", "sim:1")}, "sim:1", "sim:1"),
    "one module": ({"": "sim:0", "head": ["sim:1", "cpu"]}, "sim:0", "cpu"),
    "the outermost": ({"": ("sim:0", "sim:2"), "head": ("sim:1", "sim:3")}, "sim:2", "sim:2"),
    "a module around": ({"body": ("sim:0", "sim:3"), "body.2": "sim:1", "head": "sim:2"}, "sim:3", "sim:2"),
    "the host": ({"": ("sim:0", "cpu")}, "cpu", "cpu"),
}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("device_map", "h", "y"), PAIRS.values(), ids=PAIRS)
def test_an_output_is_where_the_outermost_pair_sends_it(device_map, h, y, schedule, tmp_path):
    model = Two()
    twin, saved = copy.deepcopy(model), copy.deepcopy(model)
    plan = Plan(device_map=device_map, micro_batches=3, schedule=schedule)
    pipe = fxsplit.compile(model, plan, example_args=(X,))
    x = X.clone().requires_grad_()
    found, expected = pipe(x), twin(X)
    assert (str(found["h"].device), str(found["y"].device)) == (h, y)
    torch.testing.assert_close(on_host(found), on_host(expected))
    (found["h"].sum().cpu() + found["y"].sum().cpu()).backward()
    (expected["h"].sum() + expected["y"].sum()).backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad)
    assert x.grad is not None
    pipe.zero_grad()
    target = torch.randn(6, 3)
    loss, output = pipe.step_with_output(X, target=target, loss_fn=loss_of, reduction="mean")
    assert (str(loss.device), str(output["y"].device)) == (y, y)
    torch.testing.assert_close(loss.cpu(), F.mse_loss(twin(X)["y"], target))
    fxsplit.verify(pipe)
    assert str(pipe.recompile()(X)["y"].device) == y
    pipe.save_code(tmp_path / "split")
    assert str(fxsplit.load(tmp_path / "split", saved)(X)["y"].device) == y
    assert str(fxsplit.load(tmp_path / "split", saved.state_dict())(X)["y"].device) == y
    assert str(copy.deepcopy(pipe)(X)["y"].device) == y


class Otherwise(nn.Module):
    """Another graph in eval mode."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(torch.relu(self.a(x))) if self.training else self.b(self.a(x)).softmax(1)


@pytest.mark.parametrize(
    "device_map", [{"": ("sim:0", "cpu")}, {"": ("sim:0", "cpu"), "b": "sim:1"}], ids=["one device", "two"]
)
def test_an_output_goes_there_in_both_modes(device_map):
    model = Otherwise()
    twin = copy.deepcopy(model)
    pipe = fxsplit.compile(model, Plan(device_map=device_map, micro_batches=2), example_args=(X,))
    assert pipe.compiled[True] is not pipe.compiled[False]
    for mode in (True, False):
        assert pipe.train(mode)(X).device.type == "cpu"
        torch.testing.assert_close(pipe(X), twin.train(mode)(X))


def test_an_output_device_that_is_not_there():
    model = Two()
    with pytest.raises(PlanError, match=r"output .* is placed on cuda:0, which is not there"):
        fxsplit.compile(model, Plan(device_map={"": ("sim:0", "cuda:0")}), example_args=(X,))
    with pytest.raises(PlanError, match=r"output .* is placed on meta"):
        fxsplit.compile(model, Plan(device_map={"": ("sim:0", "meta")}), example_args=(X,))
    assert {p.device.type for p in model.parameters()} == {"cpu"}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.mid, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x):
        return self.head(self.mid(self.emb(x)))


HOMES = {
    "the first reader, where no key names it": ({"": "sim:0", "head": "sim:1"}, "sim:0"),
    "the key that names it": ({"": "sim:0", "head.weight": "sim:1"}, "sim:1"),
    "the key by its other name": ({"": "sim:1", "head": "sim:0", "emb.weight": "sim:2"}, "sim:2"),
    "the first reader, where keys disagree": (
        {"": "sim:0", "head.weight": "sim:1", "emb.weight": "sim:2"},
        "sim:2",
    ),
    "a pair": ({"": "sim:0", "mid": "sim:1", "head.weight": ("sim:1", "cpu")}, "sim:1"),
}


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize(("device_map", "home"), HOMES.values(), ids=HOMES)
def test_a_parameter_that_is_read_on_two_devices_has_one_home(device_map, home, schedule, checkpoint):
    model, x = Tied(), torch.arange(12).view(4, 3) % 9
    twin, weight = copy.deepcopy(model), model.head.weight
    plan = Plan(device_map=device_map, micro_batches=2, schedule=schedule, checkpoint=checkpoint)
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    assert model.emb.weight is model.head.weight is weight and str(weight.device) == home
    loss = pipe.step(
        x, target=x, loss_fn=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()), reduction="mean"
    )
    expected = F.cross_entropy(twin(x).flatten(0, 1), x.flatten())
    expected.backward()
    torch.testing.assert_close(loss.cpu(), expected.detach())
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad)
    assert pipe.hf_device_map == device_map
    fxsplit.verify(pipe)


class Tables(nn.Module):
    """Tensors that are neither parameters nor buffers, read at several places."""

    def __init__(self, whole=False):
        super().__init__()
        self.a, self.b, self.whole = nn.Linear(4, 4), nn.Linear(4, 4), Whole() if whole else nn.Identity()
        self.table, self.scale = torch.arange(4.0), torch.tensor(3.0)

    def forward(self, x):
        h = torch.tanh(self.a(x) + self.table)
        return self.whole(self.b(h * self.scale)) + self.table


class Whole(nn.Module):
    """Stays whole, because of what it does with values."""

    def __init__(self):
        super().__init__()
        self.lin, self.offset = nn.Linear(4, 4), torch.arange(4.0)

    def forward(self, x):
        return self.lin(x) + self.offset if float(x.detach().sum()) < 1e9 else x


DEVICES = [["sim:0", "sim:1"], ["cpu", "sim:1"], ["sim:1", "sim:1"], [["sim:0", "sim:1"], ["sim:2", "sim:3"]]]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("whole", [False, True], ids=["inlined", "whole"])
@pytest.mark.parametrize("devices", DEVICES, ids=str)
def test_tensors_that_are_attributes_are_where_they_are_read(devices, whole, checkpoint, tmp_path):
    model = Tables(whole)
    twin, saved = copy.deepcopy(model), copy.deepcopy(model)
    replicas = 2 if isinstance(devices[0], list) else 1
    plan = Plan(cut=["b"], devices=devices, micro_batches=2, checkpoint=checkpoint, replicas=replicas)
    pipe = fxsplit.compile(model, plan, example_args=(X,))

    def same():
        pipe.zero_grad()
        twin.zero_grad()
        found, expected = pipe(X), twin(X)
        found.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(on_host(found), on_host(expected))
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a.grad.cpu(), b.grad)

    same()
    assert model.table.device.type == "cpu"  # the user's own, which nobody else moves
    model.table.add_(1)
    twin.table.add_(1)
    same()
    model.table, twin.table = torch.ones(4), torch.ones(4)
    same()
    model.table = torch.ones(4, device="sim:3")
    same()
    if whole:
        model.whole.offset.mul_(2)
        twin.whole.offset.mul_(2)
        same()
    model.table = torch.ones(4)
    fxsplit.verify(pipe)
    saved.table.fill_(1)
    pipe.save_code(tmp_path / "split")
    torch.testing.assert_close(
        fxsplit.load(tmp_path / "split", saved)(X).cpu(), fxsplit.load(tmp_path / "split", saved)(X).cpu()
    )
    pipe.recompile()
    same()


def test_a_tensor_that_forward_writes_and_nobody_moves_is_refused():
    class Counting(Tables):
        def forward(self, x):
            h = self.b(self.a(x))
            self.table.add_(1)
            return h + self.table

    class Registered(Counting):
        def __init__(self):
            super().__init__()
            del self.table
            self.register_buffer("table", torch.arange(4.0), persistent=False)

    plan = Plan(stages=2, devices=["sim:0", "sim:1"], micro_batches=2)
    model = Counting()
    with pytest.raises(PlanError, match=r"writes to table(?s:.*)self.register_buffer\('table'"):
        fxsplit.compile(model, plan, example_args=(X,))
    assert model.a.weight.device.type == "cpu" and torch.equal(model.table, torch.arange(4.0))
    pipe = fxsplit.compile(Registered(), plan, example_args=(X,))
    pipe(X)
    assert torch.equal(pipe.table.cpu(), torch.arange(4.0) + 2)
