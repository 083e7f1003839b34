"""Every module of torch.nn, on the inputs that torch tests it with: captured, and computing what it computes.

The database of torch's own tests is private, and asks for ``expecttest``; without it there is nothing to run.
"""

import copy
import warnings

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import Plan
from fxsplit.testing import assert_equivalent

pytest.importorskip("expecttest")
pytestmark = pytest.mark.slow
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_modules import module_db  # 2.13.0

OWN_SAMPLES = {
    "nn.FractionalMaxPool2d",
    "nn.FractionalMaxPool3d",
}  # which fail in eager, too, with those of the database
TRIED = 2  # of the samples of each


class Holds(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held = held

    def forward(self, *args, **kwargs):
        return self.held(*args, **kwargs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("info", [m for m in module_db if m.name not in OWN_SAMPLES], ids=lambda m: m.name)
def test_every_module_of_torch(info):
    samples = info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=False, training=True
    )
    for sample in samples[:TRIED]:
        torch.manual_seed(0)
        made = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
        args, kwargs = tuple(sample.forward_input.args), sample.forward_input.kwargs
        model = Holds(made)
        model(*copy.deepcopy(args), **copy.deepcopy(kwargs))  # those that are lazy get their parameters
        pipe = fxsplit.compile(copy.deepcopy(model), Plan(), example_args=args, example_kwargs=kwargs)
        assert_equivalent(model, pipe, *args, **kwargs)
