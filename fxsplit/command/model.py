"""MODEL and --input: what is to be split, and one call of it."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ArgumentError

_INPUT = re.compile(r"(?:(\w+)=)?(\w+)\[([\d,\s]*)\](?:<(\d+))?$")
_SPELLED = "x=float32[8,3,224,224], or ids=int64[8,128]<50000 for numbers below 50000"
Call = tuple[nn.Module, Sequence[Any], dict[str, Any]]


def add_to(parser: argparse.ArgumentParser) -> None:
    """MODEL, ``--input``, ``--meta``, ``--seed``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="package.module:factory or file.py:factory; it returns a model, or (model, args), or (model, args, kwargs)",
    )
    parser.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="x=TYPE[SIZES]",
        help=f"an argument of the model, of random numbers: {_SPELLED}",
    )
    parser.add_argument("--meta", action="store_true", help="make the model on the meta device")
    parser.add_argument("--seed", type=int, default=0, help="of what is random (default: 0)")


def call_of(given: argparse.Namespace) -> Call:
    """The model, and the arguments of one call.

    Raises:
        ArgumentError: there is no such factory, it does not return this, or an input is spelled wrong.
    """
    factory = named(given.model)
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ArgumentError(f"{given.model}: {error}", remedy="a function without arguments") from None
    torch.manual_seed(given.seed)
    with torch.device("meta") if given.meta else contextlib.nullcontext():
        made = _made(given.model, factory)
    model, *rest = made if isinstance(made, tuple) else (made,)
    if not isinstance(model, nn.Module) or len(rest) > 2 or (rest and not isinstance(rest[0], tuple | list)):
        raise ArgumentError(
            f"{given.model} did not return a model and its example arguments",
            remedy="return model, (x,), or model, (), {'x': x}; or the model, with --input",
        )
    args = tuple(rest[0]) if rest else ()
    kwargs = dict(rest[1]) if len(rest) == 2 else {}
    for text in given.input:
        name, value = _input("--input", text)
        if name is None:
            args = (*args, value)
        else:
            kwargs[name] = value
    if not args and not kwargs:
        raise ArgumentError(
            f"{given.model} gives no example arguments", remedy=f"--input {_SPELLED}; or return model, (x,)"
        )
    return model, args, kwargs


def _made(name: str, factory: Callable[[], Any]) -> Any:
    try:
        return factory()
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ArgumentError(
            f"{name} raised {type(error).__name__}: {error}",
            where=f"{frame.filename}:{frame.lineno}: {frame.line}",
            remedy="fxsplit --debug COMMAND ... shows the traceback",
        ) from error


def value_of(flag: str, text: str) -> torch.Tensor:
    """Random numbers of the type and sizes that `text` says.

    Raises:
        ArgumentError: it says none.
    """
    return _input(flag, text)[1]


def _input(flag: str, text: str) -> tuple[str | None, torch.Tensor]:
    found = _INPUT.match(text.replace(" ", ""))
    kind = getattr(torch, found[2], None) if found else None
    if found is None or not isinstance(kind, torch.dtype):
        raise ArgumentError(f"{flag} {text!r} is no type and sizes", remedy=f"{flag} {_SPELLED}")
    sizes = [int(size) for size in found[3].split(",") if size]
    if kind.is_floating_point or kind.is_complex:
        return found[1], torch.randn(sizes, dtype=kind)
    most = 2 if kind == torch.bool else int(found[4] or 2)
    return found[1], torch.randint(most, sizes).to(kind)


def named(name: str) -> Callable[[], Any]:
    """The function that ``package.module:factory`` or ``file.py:factory`` names.

    Raises:
        ArgumentError: there is none.
    """
    module, _, attribute = name.rpartition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(
            _from_file(module) if module.endswith(".py") else importlib.import_module(module), attribute
        )
    except (ImportError, AttributeError, ValueError, OSError, SyntaxError) as error:
        raise ArgumentError(
            f"{name!r} names no function: {error}", remedy="package.module:factory, or file.py:factory"
        ) from None
    if not callable(found):
        raise ArgumentError(f"{name!r} is no function", remedy="package.module:factory")
    return found  # type: ignore[no-any-return]


def _from_file(path: str) -> Any:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no file {path}")
    name = os.path.splitext(os.path.basename(path))[0]
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == os.path.abspath(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, os.path.abspath(path))
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    sys.modules[name] = module  # as import does: classes and dataclasses in it look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
