"""Compare two values: the one place that knows about sparse, meta, NaN and integer tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterable
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


def agree_each(a: Any, b: Any, *, largest: float = 0.0) -> bool:
    """Equal element by element, up to what other kernels for the same numbers make of it.

    An element may differ by 1e-4 of the largest one in its row, in its column, and so on along every dimension, whichever
    is the smallest; so a column of small numbers is not compared with the scale of a large one. What is nothing but
    rounding of terms that cancel out may differ by some last digits of `largest`, or of the largest in `b`.
    """
    if agree(a, b):
        return True
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return agree(a, b, rtol=1e-4)
    if a.shape != b.shape or a.dtype != b.dtype or not (a.dtype.is_floating_point or a.dtype.is_complex):
        return False
    x, y = _dense(a), _dense(b)
    eps = torch.finfo(x.dtype).eps
    near, digits = max(1e-4, 16 * eps), 64 * eps if eps < 1e-5 else 4 * eps
    same = (x == y) | ((x != x) & (y != y))
    x, y = x.nan_to_num(), y.nan_to_num()
    size = y.abs().float() if eps > 1e-6 else y.abs()
    scale = size
    if y.dim() > 1:
        others = [tuple(e for e in range(y.dim()) if e != d) for d in range(y.dim())]
        scale = functools.reduce(torch.minimum, (size.amax(dims, keepdim=True) for dims in others))
    floor = digits * max(largest, float(size.max()))
    return bool((same | ((x - y).abs() <= near * scale + floor)).all()) and bool(
        (_dense(a).isfinite() == _dense(b).isfinite()).all()
    )


def largest_of(values: Iterable[Any]) -> float:
    """The largest element, by its size, in any floating point tensor among the values."""
    floats = [
        v for v in values if isinstance(v, torch.Tensor) and v.dtype.is_floating_point and not v.is_meta
    ]
    return max((float(_dense(v).nan_to_num().abs().max()) for v in floats if v.numel()), default=0.0)


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
