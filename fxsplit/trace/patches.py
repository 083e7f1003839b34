"""What is replaced in torch while a model is traced, and put back afterwards."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from ..compat import function_apply, functorch_levels, sdpa_switches, tree_leaves
from ..graph.assumptions import CALLER
from .reads import Reads
from .refusal import CannotInlineError
from .source import is_ours


class Tracer(Protocol):
    """What the replacements tell the tracer."""

    says_compiling: bool
    reads: Reads

    def is_tracing(self) -> bool:
        """Whether this thread is in a forward that is being inlined."""

    def call_module(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A module is called."""

    def call_function(
        self, call: Callable[..., Any], cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A custom autograd.Function is applied."""

    def enter_context(self, context: Any) -> None:
        """A context such as no_grad is entered."""

    def leave_context(self, context: Any) -> None:
        """A context is left."""

    def read_mode(self, module: nn.Module) -> None:
        """Somebody asks for ``module.training``."""

    def ask_caller(self, what: str, value: Any, *, by_torch: bool) -> None:
        """Somebody asks for the caller's state."""


Patch = tuple[Any, str, Any]


@contextlib.contextmanager
def patched(tracer: Tracer) -> Iterator[None]:
    """Torch tells `tracer` of the calls that a function mode does not see."""
    missing = object()
    patches = [
        *_calls(tracer),
        *_conversions(tracer),
        *_contexts(tracer),
        *_refusals(tracer),
        *_questions(tracer),
        *tracer.reads.patches(),
    ]
    originals = [(owner, name, owner.__dict__.get(name, missing)) for owner, name, _ in patches]
    try:
        for owner, name, value in patches:
            setattr(owner, name, value)
        yield
    finally:
        tracer.reads.close()
        for owner, name, value in originals:
            if value is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _calls(tracer: Tracer) -> Iterator[Patch]:
    call, eager = nn.Module.__call__, nn.Module._call_impl  # past what `module.compile()` has put before it

    def module_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not tracer.is_tracing():
            return call(module, *args, **kwargs)
        return tracer.call_module(eager, module, args, kwargs)

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        original = function_apply(cls)

        def call(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        if tracer.is_tracing() and any(isinstance(a, torch.Tensor) for a in tree_leaves((args, kwargs))):
            return tracer.call_function(call, cls, args, kwargs)
        return call(*args, **kwargs)

    def read_mode(module: nn.Module) -> bool:
        if tracer.is_tracing():
            tracer.read_mode(module)
        try:
            return bool(module.__dict__["training"])
        except KeyError:
            raise AttributeError("training") from None

    def write_mode(module: nn.Module, mode: bool) -> None:
        module.__dict__["training"] = mode

    yield nn.Module, "__call__", module_call
    yield nn.Module, "training", property(read_mode, write_mode)
    yield torch.autograd.Function, "apply", classmethod(apply)
    if tracer.says_compiling:
        is_compiling = torch.compiler.is_compiling

        def says_compiling() -> bool:
            # What torch's own modules leave out when they are compiled, they do otherwise by the values of tensors.
            by_torch = sys._getframe(1).f_code.co_filename.startswith(_MODULES)
            return is_compiling() or (tracer.is_tracing() and not by_torch)

        yield torch.compiler, "is_compiling", says_compiling


def _conversions(tracer: Tracer) -> Iterator[Patch]:
    convert = torch.Tensor.type

    def as_type(tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False) -> Any:
        """`Tensor.type`, which no function mode sees, as `Tensor.to`."""
        if not tracer.is_tracing():
            return convert(tensor, dtype, non_blocking)
        if dtype is None:
            asked = tensor.dtype, tensor.device  # a name for both: who reads it asks for them
            with torch._C.DisableTorchFunction():
                return convert(torch.empty(0, dtype=asked[0], device=asked[1]))
        if isinstance(dtype, torch.dtype):
            return tensor.to(dtype, non_blocking=non_blocking)
        with torch._C.DisableTorchFunction():
            named = convert(torch.empty(0, device="cpu"), dtype)  # "torch.DoubleTensor"
        if tensor.device.type in (named.device.type, "meta"):
            return tensor.to(named.dtype, non_blocking=non_blocking)
        return tensor.to(named.device, named.dtype, non_blocking=non_blocking)

    yield torch.Tensor, "type", as_type


def _contexts(tracer: Tracer) -> Iterator[Patch]:
    for kind in (torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.autocast):
        yield from _context(tracer, kind)


def _context(tracer: Tracer, kind: Any) -> Iterator[Patch]:
    original_enter, original_exit = kind.__enter__, kind.__exit__

    def enter(context: Any) -> Any:
        if tracer.is_tracing():
            tracer.enter_context(context)
        return original_enter(context)

    def leave(context: Any, *exc: Any) -> Any:
        tracer.leave_context(context)
        return original_exit(context, *exc)

    yield kind, "__enter__", enter
    yield kind, "__exit__", leave


def _questions(tracer: Tracer) -> Iterator[Patch]:
    for name, (owner, attribute) in CALLER.items():
        yield owner, attribute, _question(tracer, name, getattr(owner, attribute))


def _question(tracer: Tracer, name: str, original: Any) -> Any:
    def asked(*args: Any) -> Any:
        value = original(*args)
        path = sys._getframe(1).f_code.co_filename
        by_torch = path.startswith(_TORCH)
        counts = (
            path.startswith(_MODULES) and ("is_" in name or "fastpath" in name)
            if by_torch
            else not is_ours(path)
        )
        if counts and tracer.is_tracing():
            tracer.ask_caller(f"{name}({', '.join(map(repr, args))})", value, by_torch=by_torch)
        return value

    return asked


_TORCH = os.path.dirname(torch.__file__) + os.sep
_MODULES = os.path.join(_TORCH, "nn", "modules", "")  # the rest of torch asks for its own use


def _refusals(tracer: Tracer) -> Iterator[Patch]:
    for name in sdpa_switches():
        yield _refusal(tracer, torch._C, name, "it chooses the kernels of scaled_dot_product_attention")
    for owner, name in functorch_levels():
        yield _refusal(tracer, owner, name, "it calls torch.vmap or another transform of torch.func")
    for name in ("grad", "backward"):
        yield _refusal(tracer, torch.autograd, name, f"it calls torch.autograd.{name}")
    yield _refusal(tracer, torch.inference_mode, "__enter__", "it enters inference_mode")


def _refusal(tracer: Tracer, owner: Any, name: str, why: str) -> Patch:
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if tracer.is_tracing():
            raise CannotInlineError(why)
        return original(*args, **kwargs)

    return owner, name, call
