"""Generating with a cache that is where its layers are."""

import torch

import fxsplit
from fxsplit import Plan
from tests.test_in_place import IDS, Decoder


def test_generate_over_devices():
    torch.manual_seed(0)
    model = Decoder().eval()
    wanted = model.generate(IDS)
    pipe = fxsplit.compile(model, Plan(stages=2, devices=["sim:0", "sim:1"]), example_args=(IDS,))
    homes = {name: p.device for name, p in model.named_parameters()}
    assert len(set(homes.values())) == 2
    for _ in range(2):
        assert torch.equal(pipe.generate(IDS).cpu(), wanted)
        assert {name: p.device for name, p in model.named_parameters()} == homes
