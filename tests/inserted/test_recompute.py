"""Recomputation refuses what is no longer as it was."""

import pytest
import torch

from fxsplit import errors
from tests.helpers import SIX_ROWS, TwoLayers, compiled_on_rows


def test_checkpoints_refuse_what_changed_before_backward():
    pipe = compiled_on_rows(TwoLayers(), stages=2, checkpoint="always")
    output = pipe(SIX_ROWS)
    with torch.no_grad():
        pipe.model.a.weight.mul_(2)
    with pytest.raises(errors.GradientError, match=r"optimizer\.step"):
        output.sum().backward()
    output = pipe(SIX_ROWS)
    pipe.eval()
    with pytest.raises(errors.GradientError, match="mode"):
        output.sum().backward()
