"""Which front end captures the model, and under which conditions its graph is accepted."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from ..compat import tree_flatten, tree_leaves
from ..errors import ArgumentError, ModelError, TraceError, did_you_mean
from ..graph import is_within, resolve, run_under, structure
from ..ir import NodeFacts, Traced
from ..names import local_names
from ..signature import Signature
from ..state import preserved
from .facts import find_facts
from .modes import DifferentPathsError, read_mode_where_it_matters
from .source import error_line
from .tracer import BY_VALUE, CannotInlineError, ValueTracer

# Tracing patches classes of torch for the whole process (four threads at once poison it for good), and compiling
# runs the user's model: one compilation at a time.
TRACING = threading.RLock()


def trace(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    leaf_modules: Sequence[str | type[nn.Module]] = (),
) -> Traced:
    """Capture `model` as a graph over its own modules.

    *Requires* an example call ``model(*args, **kwargs)``. *Ensures* that the model is as it was, that the graph
    is the same in train and eval mode (modules that read ``self.training`` stay whole), and that every node
    has its facts.

    Raises:
        ModelError: `model` is not an `nn.Module`, or computes nothing.
        ArgumentError: the example does not fit `forward`.
        TraceError: the model itself cannot be inlined; names the user's line.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"the model is {type(model).__name__}, not an nn.Module",
            remedy="pass the module instance: fxsplit.compile(model, plan, example_args=(x,))",
        )
    _refuse_root(model)
    signature = Signature.of_example(model.forward, args, kwargs)
    inputs = signature.flatten(args, kwargs)
    asked = _asked_whole(model, leaf_modules)
    with TRACING, preserved(model, parameters=True):
        tracer, graph, out_spec, modes, kept = _best_trace(model, signature, inputs, asked)
    _read_attributes_where_used(graph)
    targets = dict.fromkeys(str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr"))
    constants = {name: tracer.constants[name] for name in targets if name in tracer.constants}
    if not any(node.op in ("call_module", "call_function", "call_method") for node in graph.nodes):
        raise ModelError(
            f"{type(model).__name__} computes nothing: its outputs are its inputs or parameters",
            remedy="compile a model with at least one operation",
        )
    names = local_names(dict.fromkeys([*constants, *targets]))
    objects = {name: constants[name] if name in constants else resolve(model, name) for name in targets}
    facts = find_facts(model, run_under(graph, names, objects), inputs)
    _read_latest_names(graph, facts)
    module = run_under(graph, names, objects)
    used = {path: why for path, why in kept.items() if path in objects}
    return Traced(
        graph, names, module, signature, out_spec, facts, constants, "the value-carrying tracer", used, modes
    )


def _asked_whole(model: nn.Module, leaf_modules: Sequence[str | type[nn.Module]]) -> dict[str, str]:
    """Paths of the modules that the user wants whole."""
    modules = dict(model.named_modules(remove_duplicate=False))
    first_name = {id(module): name for name, module in model.named_modules()}
    paths: dict[str, str] = {}
    for leaf in leaf_modules:
        if isinstance(leaf, str) and leaf not in modules:
            raise TraceError(
                f"leaf_modules names {leaf!r}, which {type(model).__name__} does not have",
                remedy=did_you_mean(leaf, modules),
            )
        found = [leaf] if isinstance(leaf, str) else [p for p, m in modules.items() if isinstance(m, leaf)]
        paths.update((first_name[id(modules[path])], "leaf_modules asks for it") for path in found)
    if "" in paths:
        raise TraceError(
            "leaf_modules asks to keep the whole model in one node", remedy="name modules inside of it"
        )
    return paths


def _refuse_root(model: nn.Module) -> None:
    kind = type(model).__name__
    what, instead = None, None
    if hasattr(model, "unsplit"):
        what, instead = "is a pipeline already", "compile pipe.unsplit()"
    elif hasattr(model, "_orig_mod"):
        what, instead = "was made by torch.compile", "compile the module that was given to torch.compile"
    elif isinstance(model, torch.jit.ScriptModule):
        what, instead = (
            "is a ScriptModule, which cannot be looked into",
            "compile the Python module that it was made from",
        )
    elif "forward" not in vars(model) and type(model).forward is nn.Module.forward:
        what, instead = "has no forward", "compile a module that can be called"
    elif any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        what, instead = "has lazy parameters that are not initialised yet", "run it once, then compile"
    elif (
        model._forward_hooks or model._forward_pre_hooks or model._backward_hooks or model._backward_pre_hooks
    ):
        what, instead = (
            "has hooks, which a split would not call",
            "put it into another module: nn.Sequential(model)",
        )
    if what is not None:
        raise ModelError(f"the model ({kind}) {what}", remedy=instead)


def _best_trace(
    model: nn.Module, signature: Signature, inputs: Sequence[torch.Tensor], asked: Mapping[str, str]
) -> tuple[ValueTracer, fx.Graph, Any, tuple[bool, ...], dict[str, str]]:
    """The trace that keeps the fewest parameters in modules kept whole.

    The first one runs the model as eager does. If something has to stay whole then, the second one says to
    libraries that the model is being compiled, so that they leave out shortcuts that depend on values.
    """
    found: list[tuple[int, tuple[ValueTracer, fx.Graph, Any, tuple[bool, ...], dict[str, str]]]] = []
    failed: TraceError | None = None
    for says_compiling in (False, True):
        kept = dict(asked)
        try:
            traced = _trace_in_both_modes(model, signature, inputs, kept, says_compiling)
        except TraceError as error:
            failed = failed or error
            continue
        sizes = [sum(p.numel() for p in model.get_submodule(path).parameters()) for path in kept]
        found.append((sum(sizes), (*traced, kept)))
        if not any(BY_VALUE in why for why in kept.values()):
            break
    if not found:
        assert failed is not None
        raise failed
    return min(found, key=lambda pair: pair[0])[1]


def _trace_in_both_modes(
    model: nn.Module,
    signature: Signature,
    inputs: Sequence[torch.Tensor],
    kept: dict[str, str],
    says_compiling: bool,
) -> tuple[ValueTracer, fx.Graph, Any, tuple[bool, ...]]:
    own = [module.training for module in model.modules()]
    modes: list[bool | None]
    while True:
        before = len(kept)
        graphs = []
        modes = [None, True, False] if len(set(own)) > 1 else [None, not own[0]]
        for training in modes:
            with preserved(model):
                for module, mode in zip(model.modules(), own, strict=True):
                    module.training = mode if training is None else training
                try:
                    graphs.append(_trace_once(model, signature, inputs, kept, says_compiling))
                except (TraceError, ArgumentError):
                    if training in (None, own[0]):
                        raise
        if len(kept) > before:
            continue  # trace again from the start, so that names do not depend on what was tried
        if len(graphs) < len(modes):
            return (*graphs[0], (own[0],))
        train, other = (
            g for _, g, _ in (graphs[1:] if len(graphs) == 3 else graphs if own[0] else graphs[::-1])
        )
        if structure(graphs[0][1]) == structure(train) == structure(other):
            return (*graphs[0], (True, False))
        with preserved(model):  # the same mode again: what differs now is not the mode's doing
            _, again, _ = _trace_once(model, signature, inputs, kept, says_compiling)
        if structure(again) != structure(graphs[0][1]):
            _keep_mode_readers(model, graphs[0][1], again, kept)
            continue
        try:
            readers = read_mode_where_it_matters(model, graphs[0][1], train, other)
        except DifferentPathsError:
            _keep_mode_readers(model, train, other, kept)
            continue
        graphs[0][0].constants.update(readers)
        return (*graphs[0], (True, False))


def _keep_mode_readers(model: nn.Module, a: fx.Graph, b: fx.Graph, kept: dict[str, str]) -> None:
    """Keep whole every module whose own part of the two graphs differs."""
    for operands in (False, True):  # what else differs follows from the first
        parts = [_parts(graph, operands) for graph in (a, b)]
        differing = {
            p: parts[i].get(p) for i in (0, 1) for p in parts[i] if parts[0].get(p) != parts[1].get(p)
        }
        if differing:
            break
    inner = [
        path for path in differing if path and not any(o != path and is_within(o, path) for o in differing)
    ]
    if not inner:
        found = next((nodes for nodes in differing.values() if nodes), None)
        nodes = [n for graph in (a, b) for n in graph.nodes if found and n.meta["module_path"] == ""]
        line = next((n.meta["source"] for n in nodes if n.meta["source"]), None)
        raise TraceError(
            f"{type(model).__name__}.forward takes another path in train() than in eval(), or from one call to the next",
            where=str(line) if line else None,
            remedy="move what reads self.training or keeps state in Python into a submodule "
            "(nn.Dropout instead of F.dropout)",
        )
    kept.update((path, "it reads self.training") for path in inner)


def _parts(graph: fx.Graph, operands: bool) -> dict[str, list[tuple[Any, ...]]]:
    """Per module path what its own forward does: operations and literal arguments, and what made the operands."""

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return (value.op, value.target) if operands else "node"
        return value if isinstance(value, int | float | bool | str | slice) else type(value)

    parts: dict[str, list[tuple[Any, ...]]] = {}
    for node in graph.nodes:
        path = node.meta["module_path"]
        if node.op == "call_module":
            path = node.meta["caller"]
        row = (node.op, node.target, [plain(v) for v in tree_leaves((node.args, node.kwargs))])
        parts.setdefault(path, []).append(row)
    return parts


def _trace_once(
    model: nn.Module,
    signature: Signature,
    inputs: Sequence[torch.Tensor],
    kept: dict[str, str],
    says_compiling: bool,
) -> tuple[ValueTracer, fx.Graph, Any]:
    tracer = ValueTracer(model, kept, says_compiling=says_compiling)
    specs = []

    def call(root: nn.Module, *values: Any) -> Sequence[Any]:
        args, kwargs = signature.unflatten(values)
        leaves, spec = tree_flatten(root.forward(*args, **kwargs))
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor | int | float | bool | str | type(None)):
                raise CannotInlineError(
                    f"it returns {type(leaf).__name__}, which is not a registered pytree "
                    f"(torch.utils._pytree.register_pytree_node or register_dataclass)"
                )
        specs.append(spec)
        return leaves

    try:
        leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        graph = tracer.trace(call, leaves, [a.placeholder for a in signature.arguments])
    except Exception as error:
        line = error_line(error)
        text = str(error).splitlines()[0] if str(error) else ""
        _refuse_bad_example(model, signature, inputs)
        raise TraceError(
            f"{type(model).__name__}.forward cannot be captured: {text or type(error).__name__}",
            where=str(line) if line else None,
            remedy="move what depends on the values of tensors into a submodule (it is then kept whole), "
            "or replace it by tensor operations such as torch.where",
        ) from error
    return tracer, graph, specs[0]


def _refuse_bad_example(model: nn.Module, signature: Signature, inputs: Sequence[torch.Tensor]) -> None:
    """Where the model itself fails on the example, that is what is wrong."""
    args, kwargs = signature.unflatten([x.detach().clone().requires_grad_(x.requires_grad) for x in inputs])
    with preserved(model):
        try:
            model(*args, **kwargs)
        except Exception as error:
            line = error_line(error)
            raise ArgumentError(
                f"{type(model).__name__} itself fails on the example: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
                where=str(line) if line else None,
                remedy="give example_args that the model can be called with",
            ) from error


def _read_latest_names(graph: fx.Graph, facts: Mapping[str, NodeFacts]) -> None:
    """After ``b = a.add_(1)`` whoever read `a` reads `b`: the same object, and the order shows in the data flow."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    same: dict[str, str] = {}  # name → the first name of the same object
    for node in graph.nodes:
        fact = facts[node.name]
        if fact.returns is None:
            continue
        same[node.name] = first = same.get(fact.returns, fact.returns)
        operand = next((o for o in node.all_input_nodes if same.get(o.name, o.name) == first), None)
        if operand is not None and fact.writes & facts[operand.name].storages:
            operand.replace_all_uses_with(node, delete_user_cb=lambda user, n=node: order[user] > order[n])


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
