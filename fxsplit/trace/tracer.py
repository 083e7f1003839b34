"""An fx tracer that keeps a submodule whole where its `forward` cannot be inlined, and says why."""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from ..compat import tree_leaves
from ..ir import Source
from ..state import attributes_of, changed_attributes, restore_attributes

# fx records these only when a Proxy is in a tensor position; a size or a seedable constant must be a node too.
_FACTORIES = (
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "zeros",
)
_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_DEMO = os.path.join(_HERE, "demo") + os.sep  # a model like any user's


class CannotInlineError(Exception):
    """Raised while a module's `forward` runs on proxies: the module has to stay whole."""


class InPlaceProxy(fx.Proxy):
    """A Proxy on which ``y += c`` is recorded as the in-place operation that it is.

    fx's own Proxy lets Python fall back to ``y = y + c``, which another name for the same tensor does not see.
    """


def _record_in_place(name: str) -> None:
    target = getattr(operator, name)

    def method(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    setattr(InPlaceProxy, f"__{name}__", method)


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "ipow", "iand", "ior", "ixor"):
    _record_in_place(_name)


class LeafFallbackTracer(fx.Tracer):
    """Inlines the `forward` of every module that can be inlined.

    Args:
        kept: module path → reason, of modules that must stay whole; modules found while tracing are added.
    """

    proxy_buffer_attributes = True

    def __init__(self, kept: dict[str, str]) -> None:
        super().__init__()
        self.kept = kept
        self.constants: dict[str, torch.Tensor] = {}
        self._thread = threading.get_ident()
        self._modes = _thread_modes()
        self._proxy_cache: dict[str, Any] = {}

    def flat_trace(
        self, model: nn.Module, call: Callable[..., Sequence[Any]], placeholders: Sequence[str]
    ) -> fx.Graph:
        """The graph of ``call(model, *proxies)``, which returns the flat outputs."""
        self._call, self._placeholders = call, placeholders
        with _patched(self._traced_factories()):
            return self.trace(model)

    # -- what fx calls ---------------------------------------------------------------------------------------

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in self._placeholders]
        before = attributes_of(self.root)

        def forward(root: nn.Module, *values: Any) -> tuple[Any, ...]:
            outputs = tuple(self._call(root, *values))
            self._refuse_written_attributes(root, before)
            return outputs

        return forward, [self.root, *proxies]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self.kept:
            return True
        if isinstance(m, fx.GraphModule | nn.Sequential | nn.ModuleList | nn.ModuleDict):
            builtin = False
        else:
            builtin = super().is_leaf_module(m, module_qualified_name)
        if builtin:
            return True
        reason = _why_opaque(m)
        if reason:
            self.kept[module_qualified_name] = reason
        return reason is not None

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)  # fx patches nn.Module for the whole process
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            return super().call_module(m, forward, args, kwargs)
        last = next(reversed(self.graph.nodes), None)
        stack, calls, before = dict(self.module_stack), dict(self.num_calls), attributes_of(m)
        try:
            result = super().call_module(m, forward, args, kwargs)
            self._refuse_written_attributes(m, before)
            return result
        except Exception as error:  # whatever the user's forward raises on a proxy
            self.kept[path] = _reason(error)
            restore_attributes(m, before)
            self._erase_after(last)
            self.module_stack.clear()
            self.module_stack.update(stack)
            self.num_calls = calls
            return super().call_module(m, forward, args, kwargs)

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: Any = None, type_expr: Any = None
    ) -> fx.Node:
        if _thread_modes() != self._modes:
            raise CannotInlineError("it changes grad mode or autocast")
        if kind == "call_module" and name is None and target[0].isdigit():
            name = f"layer_{target.replace('.', '_')}"  # fx would call the value of "0" `_0`
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        frames = self.module_stack
        node.meta["module_path"] = next(reversed(frames.values()))[0] if frames else ""
        node.meta["source"] = user_line()
        return node

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor) and a not in self.tensor_attrs:
            # fx would put the constant on the user's root module
            name = (
                next((n for n, t in self.constants.items() if t is a), None)
                or f"constant_{len(self.constants)}"
            )
            self.constants[name] = a
            return self.create_node("get_attr", name, (), {})
        return super().create_arg(a)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return InPlaceProxy(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        self._proxy_cache = parameter_proxy_cache
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    # -- helpers ---------------------------------------------------------------------------------------------

    def _refuse_written_attributes(self, module: nn.Module, before: dict[str, Any]) -> None:
        written = changed_attributes(module, before)
        if written:
            restore_attributes(module, before)
            raise CannotInlineError(f"its forward writes self.{written[0]}")

    def _erase_after(self, last: fx.Node | None) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node is last:
                break
            self.graph.erase_node(node)
            for name, proxy in list(self._proxy_cache.items()):
                if proxy.node is node:
                    del self._proxy_cache[name]

    def _traced_factories(self) -> list[tuple[Any, str, Any]]:
        patches: list[tuple[Any, str, Any]] = []
        for name in _FACTORIES:
            original = getattr(torch, name)

            def record(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
                if threading.get_ident() != self._thread:
                    return _original(*args, **kwargs)
                return self.create_proxy("call_function", _original, args, kwargs)

            patches.append((torch, name, record))
        apply: Any = torch.autograd.Function.__dict__["apply"]

        def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
            # inlining would keep the forward and drop the user's backward
            if threading.get_ident() == self._thread and any(
                isinstance(a, fx.Proxy) for a in tree_leaves((args, kwargs))
            ):
                raise CannotInlineError(f"it calls the autograd.Function {cls.__name__}")
            return apply.__func__(cls, *args, **kwargs)

        return [*patches, (torch.autograd.Function, "apply", classmethod(refuse))]


def user_line() -> Source | None:
    """The innermost line on the stack that is neither torch's nor fxsplit's."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if _is_the_users(path):
            return Source(path, frame.f_lineno)
        frame = frame.f_back
    return None


def error_line(error: BaseException) -> Source | None:
    """The innermost line of the traceback that is neither torch's nor fxsplit's."""
    found, step = None, error.__traceback__
    while step is not None:
        path = step.tb_frame.f_code.co_filename
        if _is_the_users(path):
            found = Source(path, step.tb_lineno)
        step = step.tb_next
    return found


def _is_the_users(path: str) -> bool:
    return not path.startswith((_TORCH, "<")) and (not path.startswith(_HERE) or path.startswith(_DEMO))


def _thread_modes() -> tuple[bool, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


def _why_opaque(m: nn.Module) -> str | None:
    """Why `m` must not be inlined although its forward may trace."""
    if isinstance(m, torch.jit.ScriptModule):
        return "it is a ScriptModule"
    if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
        return "it has hooks"
    if hasattr(m, "__data_parallel_replicate__"):
        return "it has a replication callback"
    return None


def _reason(error: Exception) -> str:
    line = error_line(error)
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if not isinstance(error, CannotInlineError):
        text = f"{type(error).__name__}: {text}"
    return f"{text}, {line.short}" if line else text


@contextlib.contextmanager
def _patched(patches: list[tuple[Any, str, Any]]) -> Iterator[None]:
    originals = [(owner, name, owner.__dict__[name]) for owner, name, _ in patches]
    try:
        for owner, name, value in patches:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)
