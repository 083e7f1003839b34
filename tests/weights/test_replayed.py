"""What making a model on meta would have done is done later: bit for bit what the constructor makes."""

import pytest
import torch
from torch import nn

from fxsplit import errors
from fxsplit.weights.replayed import recorded
from tests.models import MODELS


class Odd(nn.Module):
    """Weights in odd ways: cut out, drawn twice, made of others, of numbers, tied, by functions that do nothing on meta."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.scale = nn.Parameter(torch.randn(8).abs() + 0.5)
        self.table = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.register_buffer("steps", 1.0 / 10 ** (torch.arange(0, 8) / 8), persistent=False)
        self.register_buffer("mask", torch.ones(4, 4).tril().bool())
        nn.init.trunc_normal_(self.layers[0].weight, std=0.02)
        nn.init.orthogonal_(self.layers[1].weight)
        with torch.no_grad():
            self.layers[2].bias[2:4] = 7.0
            self.layers[2].weight.copy_(self.layers[0].weight.flip(0) * self.scale)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.layers[0].weight
        self.lstm = nn.LSTM(4, 4)


def tensors(model):
    named = (model.named_parameters, model.named_buffers)
    return {name: t for one in named for name, t in one(remove_duplicate=False)}


@pytest.mark.parametrize("make", [Odd, *(make for make, _ in MODELS.values())])
def test_weights_are_those_of_the_constructor(make):
    model, recording = recorded(make)
    assert all(t.is_meta for t in model.parameters())
    torch.manual_seed(3)
    found = recording.replayed(model, {*tensors(model)})
    after = torch.rand(2)
    torch.manual_seed(3)
    expected = tensors(make())
    assert torch.equal(torch.rand(2), after)
    assert {n for n, t in tensors(model).items() if t.is_meta} == found.keys()
    assert all(torch.equal(t, expected[name]) for name, t in found.items())
    some = {name for k, name in enumerate(expected) if k % 3 == 0} & found.keys()
    torch.manual_seed(3)
    alone = recording.replayed(model, some)
    assert alone.keys() == some and all(torch.equal(t, expected[name]) for name, t in alone.items())


def test_functions_of_torch_are_what_they_were():
    before = nn.init.normal_
    with pytest.raises(ZeroDivisionError):
        recorded(lambda: 1 / 0)
    assert nn.init.normal_ is before


class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.own = nn.Linear(2, 2), nn.Parameter(torch.empty(3))


def test_what_nobody_initializes_is_named():
    model, recording = recorded(Empty)
    with pytest.raises(errors.WeightsError, match=r"no values to own\n.*normal_") as caught:
        recording.replayed(model, {"own", "lin.weight"})
    assert "weights=" in str(caught.value)


OUTSIDE = torch.ones(3)


class Outside(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(OUTSIDE * 2)


def test_values_from_outside_are_read():
    model, recording = recorded(Outside)
    values = model.own if not model.own.is_meta else recording.replayed(model, {"own"})["own"]
    assert torch.equal(values, OUTSIDE * 2)
