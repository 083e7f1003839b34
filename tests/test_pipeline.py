"""Where a pipeline is: devices that are not there, and the meta device."""

import pytest
import torch

from fxsplit import errors
from tests.helpers import TwoLayers, compiled_on_rows


def test_a_device_that_is_not_there_and_a_placement_that_fails_change_nothing():
    model = TwoLayers()
    for fields in ({"devices": "cuda:7"}, {"device_map": {"a": "meta", "b": "cuda:7"}}):
        with pytest.raises(errors.PlanError, match="not there"):
            compiled_on_rows(model, **fields)
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_a_model_on_the_meta_device_can_be_planned():
    with torch.device("meta"):
        model, x = TwoLayers(), torch.randn(6, 4)
    pipe = compiled_on_rows(model, x, stages=2)
    assert pipe.devices == (torch.device("cpu"),) * 2 and all(p.is_meta for p in model.parameters())
    with pytest.raises(errors.ArgumentError, match="no weights yet"):
        pipe(torch.randn(6, 4))
