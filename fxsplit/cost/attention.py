"""Attention on the ``meta`` device as the fused kernels of real devices do it: without the square matrix of weights.

PyTorch takes attention apart there, and what autograd keeps of it then grows with the square of the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class FusedAttention(TorchFunctionMode):
    """Stands in for `scaled_dot_product_attention` of meta tensors, also inside of modules.

    Attributes:
        flops: what the calls under this mode would have computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention:
            return func(*args, **given)
        query, key, value = [*args, *(given[n] for n in ("query", "key", "value") if n in given)][:3]
        alike = query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
        if not (alike and query.is_meta and key.is_meta and value.is_meta):
            return func(*args, **given)
        products = math.prod(query.shape[:-1]) * key.shape[-2]
        self.flops += 2 * products * (query.shape[-1] + value.shape[-1])
        return _Fused.apply(query, key, value)  # type: ignore[no-untyped-call]


class _Fused(torch.autograd.Function):
    """Keeps the operands, the result and a number for each row, as the flash kernels do (Dao et al., 2022)."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        *batch, heads, length, _ = (1, *query.shape) if query.dim() < 4 else query.shape
        result = query.new_empty((*batch, length, heads, value.shape[-1])).transpose(-3, -2)  # their layout
        result = result.view(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(
            query, key, value, result, query.new_empty(query.shape[:-1], dtype=torch.float32)
        )
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
