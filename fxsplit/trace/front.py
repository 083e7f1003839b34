"""Which front end captures the model, and under which conditions its graph is accepted."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from ..batch.dims import BatchDims
from ..compat import SYMBOLIC_SHAPES, load_quietly, transforms_left
from ..errors import (
    ArgumentError,
    FxsplitError,
    ModelError,
    TraceError,
    VerifyError,
    did_you_mean,
    pass_on_if_full,
)
from ..graph.assumptions import ASKS_FOR_GRAD
from ..graph.code import write
from ..graph.ir import NodeFacts, Traced
from ..graph.nodes import resolve, run_under, structure
from ..graph.signature import Signature
from ..modules.names import local_names
from ..modules.state import preserved
from ..passes import named
from .accept import BakedInError, accept, holds_for_other_rows
from .assume import assumed
from .by_value import GivenTracer, as_compiled, as_eager
from .capture import Capture, FrontEnd, Request
from .exported import exported, exported_strictly
from .facts import find_facts
from .modes import Modes, OthersFlagError, in_both_modes
from .naming import with_the_users_names
from .one_row import but_for_one_row, one_row, refused_for_one_row
from .refusal import BY_VALUE
from .simplify import simplify

# Tracing patches classes of torch for the whole process (four threads at once poison it for good), and compiling
# runs the user's model: one compilation at a time.
TRACING = threading.RLock()

ASKED_WHOLE = "leaf_modules asks for it"  # why a module is kept whole


@named("trace")
def trace(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    leaf_modules: Sequence[str | type[nn.Module]] = (),
    tracer: Any = None,
    batch_dims: Mapping[str, int | None] | None = None,
    check: bool = True,
    grad: bool = True,
) -> Traced:
    """Capture `model` as a graph over its own modules, by the first front end whose graph computes the same.

    *Requires* an example call ``model(*args, **kwargs)``. *Ensures* that the model is as it was, that the graph
    holds in train and in eval mode (or has another one beside it for the other mode), and that every node has its
    facts.

    Args:
        leaf_modules: paths and classes of modules that stay one node.
        tracer: the only front end to use: an `fx.Tracer`, or a function from the model to a `fx.GraphModule`.
        batch_dims: as in the plan.
        check: compare outputs, gradients, buffers and random state with the model's before a graph is accepted, on
            the example and on another batch size.
        grad: whether the caller wants gradients; where forward asks for it.

    Raises:
        ModelError: `model` is not an `nn.Module`, or computes nothing.
        ArgumentError: the example does not fit `forward`.
        TraceError: no front end captures it; names the user's line.
        VerifyError: every graph computes something else; names the first difference.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"the model is {type(model).__name__}, not an nn.Module",
            remedy="pass the module instance: fxsplit.compile(model, plan, example_args=(x,))",
        )
    _refuse_root(model)
    load_quietly(SYMBOLIC_SHAPES)
    signature = Signature.of_example(model.forward, args, kwargs)
    inputs = signature.flatten(args, kwargs)
    dims = BatchDims.of_example(signature, inputs, batch_dims)
    asked = _asked_whole(model, leaf_modules)
    refused: dict[str, FxsplitError] = {}
    narrow: Traced | None = None
    with TRACING, preserved(model, parameters=True), torch.enable_grad(), transforms_left():
        first = Request(model, signature, inputs, asked)
        if not grad and _asks_for_grad(first):
            first = replace(first, grad=False)
        for name, front_end, request, captures in _attempts(first, tracer, refused):
            while captures:
                try:
                    traced = _traced(request, name, captures)
                    if check:
                        with torch.set_grad_enabled(request.grad):
                            accept(model, traced, inputs, dims)
                            traced = _for_one_row_too(request, name, captures, traced, dims)
                    traced = replace(traced, refused={n: e.what for n, e in refused.items()})
                    return _for_any_grad_mode(traced, request)
                except BakedInError as error:
                    refused[name] = error
                    if narrow is None and holds_for_other_rows(model, traced, inputs, dims):
                        narrow = traced
                    captures = _kept_whole(front_end, request, error)
                except (VerifyError, TraceError) as error:
                    refused[name], captures = error, []
    reason = next(iter(refused.values()))
    if narrow is None:
        others = {f"{name}: {error.what}" for name, error in refused.items() if error is not reason}
        for text in sorted(others):
            reason.add_note(f"not captured by another front end either: {text}")
        raise reason
    warnings.warn(
        f"{type(model).__name__} was captured for batches of {dims.batch_size(inputs)} rows only: {reason.what}. To run "
        "other batch sizes, move what reads the batch size as a plain number into a submodule (it is then kept whole)",
        stacklevel=3,
    )
    return replace(narrow, refused={n: e.what for n, e in refused.items()})


Attempt = tuple[str, FrontEnd, Request, list[tuple[Capture, Modes]]]


def _attempts(request: Request, tracer: Any, refused: dict[str, FxsplitError]) -> Iterator[Attempt]:
    """What each front end captures, in the order in which it is to be tried; what fails is written into `refused`."""

    def attempt(name: str, front_end: FrontEnd, give_up: Callable[[Request], bool] = _never) -> list[Attempt]:
        own = replace(request, kept=dict(request.kept))
        try:
            captures = in_both_modes(front_end, own, give_up)
        except OthersFlagError:  # other front ends do not notice
            raise
        except TraceError as error:
            refused[name] = error
            return []
        return [(name, front_end, own, captures)] if captures else []

    if tracer is not None:
        given = GivenTracer(tracer)
        yield from attempt(given.name, given)
        return
    # As eager, if that keeps nothing whole because of the values of tensors. Else as if compiled: libraries then
    # leave out shortcuts. If that does not help either, what keeps fewer parameters whole comes first.
    eager = attempt("the value-carrying tracer", as_eager, _reads_values)
    yield from eager
    if not eager:
        compiled = attempt("the value-carrying tracer, as if compiled", as_compiled)
        clean = [a for a in compiled if not _reads_values(a[2])]
        yield from clean
        if "the value-carrying tracer" not in refused:
            eager = attempt("the value-carrying tracer", as_eager)
        yield from sorted([*eager, *(() if clean else compiled)], key=lambda a: _parameters_kept(a[2]))
    yield from attempt("torch.export", exported)
    yield from attempt("torch.export (strict)", exported_strictly)


def _asks_for_grad(request: Request) -> bool:
    """Whether forward decides by the gradient mode of its caller. Otherwise it is captured as in training."""
    try:
        capture = as_eager(replace(request, kept=dict(request.kept), grad=False))
    except (TraceError, ArgumentError):
        return False
    asked = [what for _, what, _ in capture.taken.asked]
    asked += [what for node in capture.graph.nodes for what in node.meta.get("asked", ())]
    return ASKS_FOR_GRAD in asked or "requires_grad" in asked


def _for_any_grad_mode(traced: Traced, request: Request) -> Traced:
    """Without the assumption about the gradient mode, where forward asks for it only to enter it again."""
    if not any(row.what == ASKS_FOR_GRAD for row in traced.assumptions.of_kind("caller")):
        return traced
    try:
        rows = [
            structure(as_eager(replace(request, kept=dict(request.kept), grad=grad)).graph)
            for grad in (True, False)
        ]
    except (TraceError, ArgumentError):
        return traced
    alike = [[row[:2] if row[1] is torch.set_grad_enabled else row for row in found] for found in rows]
    if alike[0] != alike[1]:
        return traced
    other = traced.other_mode
    if other is not None:
        other = replace(other, assumptions=other.assumptions.without(ASKS_FOR_GRAD))
    return replace(traced, assumptions=traced.assumptions.without(ASKS_FOR_GRAD), other_mode=other)


def _never(request: Request) -> bool:
    return False


def _reads_values(request: Request) -> bool:
    return any(BY_VALUE in why for why in request.kept.values())


def _parameters_kept(request: Request) -> int:
    whole = [request.model.get_submodule(path) for path in request.kept]
    return sum(p.numel() for module in whole for p in module.parameters())


def _kept_whole(front_end: FrontEnd, request: Request, error: BakedInError) -> list[tuple[Capture, Modes]]:
    """Another capture in which the module that bakes in the batch size stays whole; empty if that does not help."""
    if not error.path or error.path in request.kept:
        return []
    request.kept[error.path] = f"it is written for one batch size: {error.what}"
    try:
        return in_both_modes(front_end, request)
    except TraceError:
        return []


@named("simplify", lambda traced: write(traced.graph).code)
def _traced(request: Request, name: str, captures: Sequence[tuple[Capture, Modes]]) -> Traced:
    """The captures with the facts of their nodes; the second one is for the other mode."""
    model, found = request.model, []
    for capture, modes in captures:
        graph = with_the_users_names(capture.graph)
        _read_attributes_where_used(graph)
        if not any(node.op in ("call_module", "call_function", "call_method") for node in graph.nodes):
            raise ModelError(
                f"{type(model).__name__} computes nothing: its outputs are its inputs or parameters",
                remedy="compile a model with at least one operation",
            )
        targets = dict.fromkeys(str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr"))
        constants = {target: capture.constants[target] for target in targets if target in capture.constants}
        names = local_names(dict.fromkeys([*constants, *targets]))
        objects = {t: constants[t] if t in constants else resolve(model, t) for t in targets}
        try:
            module = run_under(graph, names, objects)
            facts = find_facts(model, module, request.inputs)
        except Exception as error:
            pass_on_if_full(error)
            text = (str(error).splitlines() or [type(error).__name__])[0]
            raise TraceError(
                f"the graph that {name} made of {type(model).__name__} does not run: {text}"
            ) from error
        renamed = _read_latest_names(graph, facts)
        simpler = simplify(graph, facts, objects)
        renamed |= len(simpler) < len(facts)
        facts = simpler
        found.append(
            Traced(
                graph=graph,
                names=names,
                module=run_under(graph, names, objects) if renamed else module,
                signature=request.signature,
                out_spec=capture.out_spec,
                facts=facts,
                constants=constants,
                front_end=name,
                kept_whole={path: why for path, why in request.kept.items() if path in objects},
                modes=modes,
                assumptions=assumed(request, capture, graph),
            )
        )
    return replace(found[0], other_mode=found[1] if len(found) == 2 else None)


def _for_one_row_too(
    request: Request,
    name: str,
    captures: Sequence[tuple[Capture, Modes]],
    traced: Traced,
    dims: BatchDims,
) -> Traced:
    """Micro-batches may be of one row: a guard against that goes where the graph computes what the model does."""
    if dims.batch_size(request.inputs) in (None, 0, 1):
        return traced
    row = one_row(request.inputs, dims)
    wider = [
        (but_for_one_row(capture, refused_for_one_row(traced.for_mode(modes[0]), row), dims), modes)
        for capture, modes in captures
    ]
    if all(a.graph is b.graph for (a, _), (b, _) in zip(wider, captures, strict=True)):
        return traced
    try:
        found = _traced(request, name, wider)
        accept(request.model, found, row, dims)
    except FxsplitError:
        return traced
    return found


def _asked_whole(model: nn.Module, leaf_modules: Sequence[str | type[nn.Module]]) -> dict[str, str]:
    """Paths of the modules that the user wants whole."""
    modules = dict(model.named_modules(remove_duplicate=False))
    first_name = {id(module): name for name, module in model.named_modules()}
    paths: dict[str, str] = {}
    if isinstance(leaf_modules, str) or not isinstance(leaf_modules, Iterable):
        raise ArgumentError(
            f"leaf_modules={leaf_modules!r} is no list", remedy=f"leaf_modules=[{leaf_modules!r}]"
        )
    for leaf in leaf_modules:
        if not isinstance(leaf, str | type):
            raise ArgumentError(
                f"leaf_modules has {leaf!r}, neither a module's path nor a class",
                remedy='leaf_modules=["h.4", Block]',
            )
    for leaf in leaf_modules:
        if isinstance(leaf, str) and leaf not in modules:
            raise TraceError(
                f"leaf_modules names {leaf!r}, which {type(model).__name__} does not have",
                remedy=did_you_mean(leaf, modules),
            )
        found = [leaf] if isinstance(leaf, str) else [p for p, m in modules.items() if isinstance(m, leaf)]
        paths.update((first_name[id(modules[path])], ASKED_WHOLE) for path in found)
    if "" in paths:
        raise TraceError(
            "leaf_modules asks to keep the whole model in one node", remedy="name modules inside of it"
        )
    return paths


def _refuse_root(model: nn.Module) -> None:
    kind = type(model).__name__
    what, instead = None, None
    if hasattr(type(model), "unsplit"):
        what, instead = "is a pipeline already", "compile pipe.unsplit()"
    elif hasattr(model, "_orig_mod"):
        what, instead = "was made by torch.compile", "compile the module that was given to torch.compile"
    elif (wrapped := _wrapped_by_ddp(model)) is not None:
        what, instead = (
            ("is" if not wrapped else f"has {wrapped!r}, which is")
            + " a DistributedDataParallel: its forward talks to other processes, which stages in threads would do in any order",
            "compile without it, and wrap the pipeline: DistributedDataParallel(fxsplit.compile(...))",
        )
    elif isinstance(model, torch.jit.ScriptModule):
        what, instead = (
            "is a ScriptModule, which cannot be looked into",
            "compile the Python module that it was made from",
        )
    elif "forward" not in vars(model) and type(model).forward is nn.Module.forward:
        what, instead = "has no forward", "compile a module that can be called"
    elif type(model).__call__ is not nn.Module.__call__ and not isinstance(model, fx.GraphModule):
        what, instead = (
            "has a __call__ of its own, which a pipeline does not run: it has the model's forward",
            "move what __call__ does into forward, or into a module around it",
        )
    elif any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        what, instead = "has lazy parameters that are not initialised yet", "run it once, then compile"
    if what is not None:
        raise ModelError(f"the model ({kind}) {what}", remedy=instead)


def _wrapped_by_ddp(model: nn.Module) -> str | None:
    """The path of a module that reduces its gradients over processes; empty for the model itself."""
    if not torch.distributed.is_available():
        return None
    wrapper = nn.parallel.DistributedDataParallel
    return next((path for path, module in model.named_modules() if isinstance(module, wrapper)), None)


def _read_latest_names(graph: fx.Graph, facts: Mapping[str, NodeFacts]) -> bool:
    """After ``b = a.add_(1)`` whoever read `a` reads `b`: the same object, and the order shows in the data flow.

    Returns:
        Whether anything was changed.
    """
    renamed = False
    order = {node: i for i, node in enumerate(graph.nodes)}
    same: dict[str, str] = {}  # name → the first name of the same object
    for node in graph.nodes:
        fact = facts[node.name]
        if fact.returns is None:
            continue
        same[node.name] = first = same.get(fact.returns, fact.returns)
        operand = next((o for o in node.all_input_nodes if same.get(o.name, o.name) == first), None)
        if operand is not None and fact.writes & facts[operand.name].storages:
            users = operand.replace_all_uses_with(
                node, delete_user_cb=lambda user, n=node: order[user] > order[n]
            )
            renamed = renamed or bool(users)
    return renamed


def _read_attributes_where_used(graph: fx.Graph) -> None:
    """One ``get_attr`` before each reader: every stage then reads its own parameters."""
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        for user in list(node.users):
            with graph.inserting_before(user):
                copy = graph.node_copy(node)
            user.replace_input_with(node, copy)
        graph.erase_node(node)
