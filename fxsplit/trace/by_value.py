"""The first front end: the value-carrying tracer, on the model or on the graph of the user's own tracer."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from ..compat import TreeSpec, transforms_left, tree_flatten
from ..errors import TraceError, pass_on_if_full
from ..graph.ir import Source
from ..modules.attributes import attributes_of, changed_attributes, restore_attributes
from ..modules.state import preserved
from .capture import Capture, Request, refuse_bad_example
from .reads import reads_of_a_run
from .refusal import CannotInlineError, WritesAttributeError
from .source import error_line
from .tracer import ValueTracer


def as_eager(request: Request) -> Capture:
    """The model as it runs without a compiler."""
    return _settled(request, says_compiling=False)


def as_compiled(request: Request) -> Capture:
    """The same while ``torch.compiler.is_compiling()`` is true: libraries leave out shortcuts that depend on values."""
    return _settled(request, says_compiling=True)


def _settled(request: Request, *, says_compiling: bool) -> Capture:
    """The capture; of the second call, where the first one writes attributes that later calls leave alone.

    Models of transformers find out in the first call which problem they are for, and write it into ``self.config``.
    That later calls compute the same is compared before a graph is accepted.
    """

    def once() -> Capture:
        tracer = ValueTracer(request.model, request.kept, says_compiling=says_compiling)
        return _run(request, request.model.forward, tracer)

    try:
        return once()
    except TraceError as error:
        if not isinstance(error.__cause__, WritesAttributeError) or not _settles(request):
            raise
        return once()


def _settles(request: Request) -> bool:
    """Call the model: whether a further call writes no attribute any more. If not, they are as before."""
    model = request.model
    before = attributes_of(model)
    with torch.no_grad():
        for _ in range(2):
            written = attributes_of(model)
            args, kwargs = request.arguments()
            model.forward(*args, **kwargs)
    if not changed_attributes(model, written):
        return True
    restore_attributes(model, before)
    return False


class GivenTracer:
    """The user's own: an `fx.Tracer`, or a function from the model to a graph of it.

    The graph is run through the value-carrying tracer, every module that it calls stays one node.
    """

    def __init__(self, tracer: Any) -> None:
        self.tracer = tracer

    @property
    def name(self) -> str:
        """``tracer=`` and what the user calls it."""
        own = (
            self.tracer
            if isinstance(self.tracer, type) or hasattr(self.tracer, "__name__")
            else type(self.tracer)
        )
        return f"tracer={own.__name__}"

    def __call__(self, request: Request) -> Capture:
        """Capture `request`.

        Raises:
            TraceError: the tracer fails, or returns something else than a graph.
        """
        model, tracer = request.model, self.tracer
        if isinstance(tracer, type) and issubclass(tracer, fx.Tracer):
            tracer = tracer()
        try:
            found = tracer.trace(model) if isinstance(tracer, fx.Tracer) else tracer(model)
        except Exception as error:
            raise TraceError(
                f"{self.name} cannot capture {type(model).__name__}: {type(error).__name__}: "
                f"{(str(error).splitlines() or [''])[0]}",
                where=_line(error, model),
                remedy="leave tracer= out, or repair it",
            ) from error
        graph = found.graph if isinstance(found, fx.GraphModule) else found
        if not isinstance(graph, fx.Graph):
            raise TraceError(
                f"{self.name} returned {type(found).__name__}, not a torch.fx graph",
                remedy="pass an fx.Tracer, or a function from the model to a torch.fx.GraphModule",
            )
        own = fx.GraphModule(found if isinstance(found, fx.GraphModule) else model, graph)
        first_name = {id(module): name for name, module in model.named_modules()}
        for node in graph.nodes:
            if node.op == "call_module":
                path = first_name.get(id(own.get_submodule(str(node.target))))
                if path is not None and next(model.get_submodule(path).children(), None) is not None:
                    request.kept.setdefault(path, f"{self.name} keeps it whole")
        capture = _run(request, own.forward, ValueTracer(model, request.kept))
        with preserved(model, parameters=True):
            taken = reads_of_a_run(request)
        whole = [str(n.target) for n in capture.graph.nodes if n.op == "call_module"]
        return replace(capture, taken=capture.taken | taken.outside(whole))


def _run(request: Request, forward: Any, tracer: ValueTracer) -> Capture:
    specs: list[TreeSpec] = []

    def call(root: nn.Module, *values: Any) -> Sequence[Any]:
        args, kwargs = request.signature.unflatten(values)
        leaves, spec = tree_flatten(forward(*args, **kwargs))
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor | int | float | bool | str | type(None)):
                raise CannotInlineError(
                    f"it returns {type(leaf).__name__}, which is not a registered pytree "
                    f"(torch.utils._pytree.register_pytree_node or register_dataclass)"
                )
        specs.append(spec)
        return leaves

    try:
        with transforms_left(), torch.set_grad_enabled(request.grad):
            graph = tracer.trace(call, request.leaves(), [a.placeholder for a in request.signature.arguments])
    except Exception as error:
        pass_on_if_full(error)
        refuse_bad_example(request)
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if any(p.is_meta for p in request.model.parameters()):
            raise TraceError(
                f"{type(request.model).__name__}.forward cannot be captured on the meta device, where nothing has a value: "
                f"{text}",
                where=_line(error, request.model),
                remedy="compile the model with its weights; or let it not ask for values (in transformers for example "
                'attn_implementation="sdpa", experts_implementation="batched_mm")',
            ) from error
        raise TraceError(
            f"{type(request.model).__name__}.forward cannot be captured: {text}",
            where=_line(error, request.model),
            remedy="move what depends on the values of tensors or keeps state in Python into a submodule (it is then "
            "kept whole), or replace it by tensor operations such as torch.where",
        ) from error
    return Capture(graph, specs[0], tracer.constants, tuple(tracer.called), tracer.flags, tracer.taken())


def _line(error: BaseException, model: nn.Module) -> str | None:
    """The user's line in the traceback with its text; else where the model's forward begins."""
    line = error_line(error)
    code = getattr(inspect.unwrap(model.forward), "__code__", None)
    if line is None and code is not None:
        line = Source(code.co_filename, code.co_firstlineno)
    return None if line is None else line.with_text()
