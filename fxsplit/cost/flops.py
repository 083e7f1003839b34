"""Floating point operations: torch's own registry, and the fused operations of the CPU that are not in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from ..compat import CPU_ATTENTION, CPU_RECURRENT_LAYER, DYNAMO, TRILINEAR, load_quietly

Shape = Sequence[int]


def flop_counter() -> FlopCounterMode:
    """A mode that counts what runs under it; the same figure on the CPU as on the ``meta`` device."""
    load_quietly(DYNAMO)
    return FlopCounterMode(display=False, custom_mapping=dict(_FUSED))


def _attention(query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    """Two products: query by key, and their softmax by value. Shapes: batch, heads, length, width."""
    rows = math.prod(query[:-1])
    return 2 * rows * key[-2] * query[-1] + 2 * rows * key[-2] * value[-1]


def _recurrent_layer(inputs: Shape, from_input: Shape, from_hidden: Shape, *args: Any, **kwargs: Any) -> int:
    """Each step multiplies the input and the hidden state by their weights."""
    return 2 * math.prod(inputs[:-1]) * (math.prod(from_input) + math.prod(from_hidden))


def _bilinear(left: Shape, weight: Shape, right: Shape, *args: Any, **kwargs: Any) -> int:
    """Left row by matrix by right row, for each output feature."""
    return 2 * math.prod(left[:-1]) * math.prod(weight)


_FUSED: dict[Any, Callable[..., int]] = {
    CPU_ATTENTION: _attention,
    CPU_RECURRENT_LAYER: _recurrent_layer,
    TRILINEAR: _bilinear,
}
