"""Values of a graph ↔ JSON. Functions and classes are written as the name that they are imported by."""

from __future__ import annotations

import base64
import importlib
import inspect
import math
from typing import Any

import torch
from torch import fx

from ..callables import name_of, resolve_name
from ..errors import SerializeError
from ..ir import TensorSpec
from ..trace.operations import FunctionCall


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


def decode(value: Any, nodes: dict[str, fx.Node] | None = None) -> Any:
    """The inverse of `encode`; `nodes` are those of the graph that is being built."""
    if isinstance(value, list):
        return [decode(v, nodes) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    match kind:
        case "float":
            return float(inner)
        case "node":
            assert nodes is not None
            return nodes[inner]
        case "spec":
            return TensorSpec(
                tuple(inner[0]), getattr(torch, inner[1].removeprefix("torch.")), torch.device(inner[2])
            )
        case "named":
            return resolve_name(inner[0])(*(decode(v, nodes) for v in inner[1]))
        case "tuple":
            return tuple(decode(v, nodes) for v in inner)
        case "dict":
            return {decode(k, nodes): decode(v, nodes) for k, v in inner}
        case "slice":
            return slice(*(decode(v, nodes) for v in inner))
        case "torch":
            return getattr(torch, inner)
        case "device":
            return torch.device(inner)
        case "tensor":
            return _decode_tensor(inner)
        case "ellipsis":
            return ...
        case "complex":
            return complex(*inner)
        case "bytes":
            return base64.b64decode(inner)
        case "range":
            return range(*inner)
        case "apply":
            return FunctionCall(resolve_name(inner))
        case "function":
            return resolve_name(inner)
    raise SerializeError(
        f"the file has a value of an unknown kind, {kind!r}", remedy="save the pipeline again"
    )


def _encode_tensor(tensor: torch.Tensor) -> list[Any]:
    plain = tensor.detach().cpu().contiguous()
    data = bytes(plain.view(torch.uint8).flatten().tolist()) if plain.numel() else b""
    return [list(plain.shape), str(plain.dtype).removeprefix("torch."), base64.b64encode(data).decode()]


def _decode_tensor(stored: list[Any]) -> torch.Tensor:
    shape, dtype, data = stored
    kind = getattr(torch, dtype)
    raw = bytearray(base64.b64decode(data))
    flat = torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)
    return flat.reshape(shape).clone()


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


def decode_signature(rows: list[Any]) -> inspect.Signature:
    """The inverse of `encode_signature`."""
    parameters = []
    for name, kind, *default in rows:
        value = decode(default[0]) if default else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name, getattr(inspect.Parameter, kind), default=value))
    return inspect.Signature(parameters)


def import_all(modules: list[str]) -> None:
    """Import what registers the classes that arguments and outputs are made of."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise SerializeError(
                f"the pipeline needs {name!r}, which cannot be imported: {error}",
                remedy="install it, or make it importable",
            ) from None
