"""MODEL and --input, and the picture of the stages."""

import argparse

import torch
from torch import nn

import fxsplit
from fxsplit.command.draw import dot
from fxsplit.command.model import call_of, value_of


def test_numbers_are_random_and_below_what_is_said():
    found = value_of("--target", "int64[400]<9")
    assert found.dtype == torch.int64 and set(found.tolist()) == set(range(9))
    assert set(value_of("--target", "int32[100]").tolist()) == {0, 1}
    assert value_of("--target", "bool[100]").dtype == torch.bool


def linear():
    return nn.Linear(3, 3)


def test_the_same_seed_gives_the_same_model_and_numbers():
    def made(seed):
        given = argparse.Namespace(
            model="tests.command.test_model:linear", meta=False, seed=seed, input=["float32[2,3]"]
        )
        model, (x,), _ = call_of(given)
        return torch.cat([model.weight.detach().flatten(), x.flatten()])

    assert torch.equal(made(1), made(1)) and not torch.equal(made(1), made(2))


def test_what_crosses_a_cut_has_its_bytes():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = fxsplit.compile(model, fxsplit.Plan(cut=["2"]), example_args=(torch.randn(2, 4),))
    (crossing,) = [line for line in dot(pipe).splitlines() if "penwidth" in line]
    assert "32 B" in crossing
