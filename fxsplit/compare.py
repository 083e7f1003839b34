"""Compare two values: the one place that knows about sparse, meta, NaN and integer tensors."""

from __future__ import annotations

from typing import Any

import torch


def equal(a: Any, b: Any) -> bool:
    """Bit for bit; NaN equals NaN. Tensors on meta are equal when their shapes and dtypes are."""
    return agree(a, b)


def agree(a: Any, b: Any, *, rtol: float = 0.0, atol: float = 0.0, of_largest: float = 0.0) -> bool:
    """Equal up to ``atol + rtol · |b|``, or up to `of_largest` times the largest element of `b`.

    Anything but floating point and complex tensors has to be equal.
    """
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        if isinstance(a, float) and isinstance(b, float):
            return a == b or (a != a and b != b) or abs(a - b) <= atol + (rtol + of_largest) * abs(b)
        return type(a) is type(b) and bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_meta or b.is_meta:
        return True
    a, b = _dense(a), _dense(b)
    if torch.equal(a, b):
        return True
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return False
    if of_largest and b.numel():
        atol += of_largest * float(b.nan_to_num().abs().max())
    return bool(torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True))


def difference(found: Any, expected: Any) -> str:
    """In words, how two values that do not agree differ."""
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return f"{_name(found)} instead of {_name(expected)}"
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{found.dtype}{tuple(found.shape)} instead of {expected.dtype}{tuple(expected.shape)}"
    a, b = _dense(found).double(), _dense(expected).double()
    return f"off by {(a - b).abs().max().item():.3g}, of {b.abs().max().item():.3g} at most"


def gradient_for(output: torch.Tensor) -> torch.Tensor:
    """A gradient that differs from element to element, so that rows in a wrong order show."""
    ramp = torch.linspace(0.5, 1.5, max(1, output.numel()), device=output.device)[: output.numel()]
    return ramp.reshape(output.shape).to(output.dtype)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _name(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
