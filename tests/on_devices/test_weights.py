"""Weights that come to several devices: each tensor goes to its stage's, and nowhere else."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxsplit
from fxsplit import Plan, errors
from tests.weights.test_weights import Looks, Rotary, Tied, X, on_meta, written


def devices_of(model):
    return {name: str(p.device) for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["state_dict", "folder"])
def test_weights_go_where_their_stages_are(kind, tmp_path):
    model = Tied()
    plan = Plan(stages=2, devices=["sim:0", "sim:1"], micro_batches=2)
    source = written(model.state_dict(), tmp_path)[kind]
    empty = on_meta(Tied)
    pipe = fxsplit.compile(empty, plan, example_args=(X,), weights=source)
    assert {p.device.type for p in empty.parameters()} == {"sim"}
    same = fxsplit.compile(model, plan, example_args=(X,))
    assert devices_of(empty) == devices_of(model)
    assert all(a.device == b.device for a, b in zip(empty.buffers(), model.buffers(), strict=True))
    target = torch.randint(0, 11, (6, 11, 5)).float()
    for one in (pipe, same):
        one.step(
            X,
            target=target.to("sim:1"),
            loss_fn=lambda y, t: F.mse_loss(y.transpose(1, 2), t),
            reduction="mean",
        )
    for a, b in zip(empty.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad.cpu(), b.grad.cpu())
    assert "numbers:" in pipe.verify()


def test_a_map_and_a_buffer_that_is_computed():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Rotary(), Rotary()

        def forward(self, x):
            return self.b(self.a(x))

    model, x = Net(), torch.randn(3, 4)
    empty = on_meta(Net)
    plan = Plan(device_map={"a": "sim:0", "b": "cpu"})
    pipe = fxsplit.compile(empty, plan, example_args=(x,), weights=model.state_dict())
    assert str(empty.a.frequencies.device) == "sim:0" and str(empty.b.frequencies.device) == "cpu"
    assert torch.equal(pipe(x).cpu(), model(x))


def test_no_room_on_a_device():
    state = Tied().state_dict()

    class Full(dict):
        def __getitem__(self, name):
            return super().__getitem__(name)

        def get(self, name, default=None):
            found = super().get(name, default)
            if name == "blocks.2.up.weight":
                raise torch.OutOfMemoryError("sim:1 is full")
            return found

    model = on_meta(Tied)
    pipe = fxsplit.compile(model, Plan(stages=2, devices=["sim:0", "sim:1"]), example_args=(X,))
    with pytest.raises(
        errors.WeightsError, match=r"no room for blocks.2.up.weight .*on sim:1, where stage 1 is"
    ):
        pipe.load_weights(Full(state))
    assert all(p.is_meta for p in model.parameters())


def test_replicas_on_several_devices():
    model, x = Tied(), X
    plan = Plan(
        stages=2,
        replicas=2,
        micro_batches=2,
        devices=[("sim:0", "sim:1"), ("sim:2", "sim:3")],
        deferred_batch_norm=True,
    )
    pipe = fxsplit.compile(on_meta(Tied), plan, example_args=(x,), weights=model.state_dict()).eval()
    assert torch.equal(pipe(x).cpu(), model.eval()(x))


def test_a_saved_plan_with_replicas_takes_weights_later(tmp_path):
    model = Tied().eval()
    plan = Plan(stages=2, devices=[["sim:0", "sim:1"], ["sim:2", "sim:3"]], micro_batches=2)
    pipe = fxsplit.compile(on_meta(Tied).eval(), plan, example_args=(X,))
    pipe.save_code(tmp_path / "code")
    for other in (copy.deepcopy(pipe), fxsplit.load(tmp_path / "code", on_meta(Tied).eval())):
        other.load_weights(model.state_dict())
        torch.testing.assert_close(other(X).cpu(), model(X))


def test_outputs_are_compared_on_several_devices():
    x = torch.randn(4, 4)
    plan = Plan(device_map={"a": "sim:0", "b": "sim:1", "": "sim:0"})
    with pytest.raises(errors.VerifyError, match="another output 0 than the model: off by 1"):
        fxsplit.compile(on_meta(Looks), plan, example_args=(x,), weights=Looks().state_dict())
