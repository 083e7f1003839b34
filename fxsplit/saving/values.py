"""Values of a graph ↔ JSON. Functions and classes are written as the name that they are imported by."""

from __future__ import annotations

import base64
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from ..errors import SerializeError
from ..graph.ir import TensorSpec
from ..modules.callables import name_of
from ..trace.operations import FunctionCall
from .trust import Names


class CannotEncodeError(SerializeError):
    """A value that no file can hold; `what` says which."""


def encode(value: Any) -> Any:
    """`value` as JSON; what JSON has no word for is an object with one key.

    Raises:
        CannotEncodeError: it is neither a plain value nor something that can be imported.
    """
    if value is None or (isinstance(value, bool | int | str) and type(value) in (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, TensorSpec):
        return {"spec": [list(value.shape), str(value.dtype), str(value.device)]}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"named": [name_of(type(value)), [encode(v) for v in value]]}
    if isinstance(value, tuple):
        return {"tuple": [encode(v) for v in value]}
    if isinstance(value, list):
        return [encode(v) for v in value]
    if isinstance(value, dict):
        return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, slice):
        return {"slice": [encode(value.start), encode(value.stop), encode(value.step)]}
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.Tensor):
        return {"tensor": _encode_tensor(value)}
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, FunctionCall):
        return {"apply": encode(value.function)["function"]}
    if callable(value):
        name = name_of(value)
        if name is not None:
            return {"function": name}
    raise CannotEncodeError(f"a {type(value).__name__} has no name that it could be imported by")


class Decoder:
    """The inverse of `encode`. A hostile value is an error of Python's here; `load` says what it means.

    Args:
        names: looks up functions and classes.
        nodes: those of the graph that is being built.
    """

    def __init__(self, names: Names, nodes: Mapping[str, fx.Node] | None = None) -> None:
        self._names, self._nodes = names, {} if nodes is None else nodes

    def __call__(self, value: Any) -> Any:
        """The value that `encode` wrote."""
        if isinstance(value, list):
            return [self(v) for v in value]
        if not isinstance(value, dict):
            return value
        ((kind, inner),) = value.items()
        match kind:
            case "node":
                return self._nodes[inner]
            case "named":
                return self._names.find_class(inner[0], tuple)(*(self(v) for v in inner[1]))
            case "tuple":
                return tuple(self(v) for v in inner)
            case "dict":
                return {self(k): self(v) for k, v in inner}
            case "slice":
                return slice(*(self(v) for v in inner))
            case "tensor":
                return _decode_tensor(inner)
            case "apply":
                return FunctionCall(self._names.find_class(inner, torch.autograd.Function))
            case "function":
                return self._names.find(inner)
        return _PLAIN[kind](inner)

    def function(self, value: Any) -> Any:
        """The target of a node that calls a function."""
        if not isinstance(value, dict) or set(value) & {"function", "apply"} != set(value):
            raise ValueError(f"{value!r} is not the name of a function")
        return self(value)

    def facts(self, value: Any) -> Any:
        """As a call; a `TensorSpec` may be in it."""
        if isinstance(value, dict) and set(value) == {"spec"}:
            shape, dtype, device = value["spec"]
            if not all(type(n) is int and 0 <= n < 2**63 for n in shape):
                raise ValueError(f"{shape} is no shape")
            return TensorSpec(
                tuple(shape), _of_torch(dtype.removeprefix("torch."), torch.dtype), torch.device(device)
            )
        if isinstance(value, list):
            return [self.facts(v) for v in value]
        if isinstance(value, dict) and set(value) == {"tuple"}:
            return tuple(self.facts(v) for v in value["tuple"])
        if isinstance(value, dict) and set(value) == {"named"}:
            kind, items = value["named"]
            return self._names.find_class(kind, tuple)(*(self.facts(v) for v in items))
        if isinstance(value, dict) and set(value) == {"dict"}:
            return {self(k): self.facts(v) for k, v in value["dict"]}
        return self(value)

    def dtype(self, value: Any) -> torch.dtype:
        """As a call, of a dtype."""
        found: torch.dtype = _of_type(self(value), torch.dtype)
        return found

    def device(self, value: Any) -> torch.device:
        """As a call, of a device."""
        found: torch.device = _of_type(self(value), torch.device)
        return found

    def signature(self, rows: list[Any]) -> inspect.Signature:
        """The inverse of `encode_signature`."""
        parameters = []
        for name, kind, *default in rows:
            value = self(default[0]) if default else inspect.Parameter.empty
            if kind not in _KINDS:
                raise ValueError(f"{kind!r} is no kind of parameter")
            parameters.append(inspect.Parameter(name, getattr(inspect.Parameter, kind), default=value))
        return inspect.Signature(parameters)


_KINDS = ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD", "VAR_POSITIONAL", "KEYWORD_ONLY", "VAR_KEYWORD")
_TORCH = torch.dtype | torch.layout | torch.memory_format


def _of_type(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{value!r} is no {kind.__name__}")
    return value


def _of_torch(name: str, kind: Any = _TORCH) -> Any:
    value = vars(torch).get(name)
    if not isinstance(value, kind):
        raise ValueError(f"torch.{name} is no dtype, layout or memory format")
    return value


_PLAIN: dict[str, Callable[[Any], Any]] = {
    "float": lambda text: float(_of_type(text, str)),
    "torch": _of_torch,
    "device": lambda text: torch.device(_of_type(text, str)),
    "ellipsis": lambda _: ...,
    "complex": lambda parts: complex(*parts),
    "bytes": lambda text: base64.b64decode(text),
    "range": lambda parts: range(*parts),
}


def names_in(data: Any) -> Iterator[Any]:
    """All names of functions and classes in what was encoded."""
    todo = [data]
    while todo:
        value = todo.pop()
        if isinstance(value, list):
            todo += value
        elif isinstance(value, dict):
            if len(value) == 1:
                ((kind, inner),) = value.items()
                if kind in ("function", "apply"):
                    yield inner
                elif kind == "named" and isinstance(inner, list):
                    yield from inner[:1]
            todo += value.values()


_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("indices", "values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Indices and values of a sparse tensor.

    Raises:
        CannotEncodeError: it is of no layout that is known, or quantized.
    """
    if tensor.layout not in _PARTS:
        raise CannotEncodeError(f"a tensor of layout {tensor.layout} is not written")
    return [
        getattr(tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor, p)()
        for p in _PARTS[tensor.layout]
    ]


def _encode_tensor(tensor: torch.Tensor) -> list[Any]:
    """Shape, strides, dtype and the memory from the first to the last element; of a sparse tensor its parts."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    kind = str(plain.dtype).removeprefix("torch.")
    if plain.is_quantized or (type(plain) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter)):
        raise CannotEncodeError(f"a {type(tensor).__name__} of {kind} is not written")
    if plain.layout is not torch.strided:
        parts = [_encode_tensor(part) for part in sparse_parts(plain)]
        return [list(plain.shape), kind, str(plain.layout).removeprefix("torch."), parts]
    length = memory_of(plain) if plain.numel() else 0
    flat = plain.as_strided((length,), (1,)).contiguous()
    data = bytes(flat.view(torch.uint8).tolist()) if length else b""
    return [list(plain.shape), kind, list(plain.stride()), base64.b64encode(data).decode()]


def memory_of(tensor: torch.Tensor) -> int:
    """From the first to the last element of a strided tensor, in elements."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _decode_tensor(stored: list[Any]) -> torch.Tensor:
    shape, dtype, layout, data = stored
    kind = _of_torch(dtype, torch.dtype)
    if isinstance(layout, str):
        parts = [_decode_tensor(part) for part in data]
        form = _of_torch(layout, torch.layout)
        if form not in _PARTS:
            raise ValueError(f"{form} is no layout of a sparse tensor")
        make: Any = functools.partial(torch.sparse_compressed_tensor, layout=form)
        make = torch.sparse_coo_tensor if form is torch.sparse_coo else make
        found: torch.Tensor = make(*parts, shape, check_invariants=True)
        return found.coalesce() if form is torch.sparse_coo else found
    if not all(type(n) is int and n >= 0 for n in (*shape, *layout)):
        raise ValueError("shape and strides of a tensor are no sizes")
    raw = bytearray(base64.b64decode(data, validate=True))
    flat = torch.frombuffer(raw, dtype=kind).clone() if raw else torch.empty(0, dtype=kind)
    return flat.as_strided(shape, layout)  # torch looks whether that is inside


def encode_signature(signature: inspect.Signature) -> list[Any]:
    """Names, kinds and defaults of the parameters; a default that no file can hold is left out."""
    rows = []
    for parameter in signature.parameters.values():
        row: list[Any] = [parameter.name, parameter.kind.name]
        if parameter.default is not inspect.Parameter.empty:
            try:
                row.append(encode(parameter.default))
            except CannotEncodeError:
                row.append(None)
        rows.append(row)
    return rows
