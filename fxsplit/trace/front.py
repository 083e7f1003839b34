"""Which front end captures the model, and under which conditions its graph is accepted."""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from ..compat import TreeSpec, tree_flatten, tree_unflatten
from ..errors import ModelError, TraceError
from ..graph import bind, first_difference, output_values, resolve, structure
from ..ir import NodeFacts, Traced
from ..signature import Signature
from ..state import preserved
from .facts import find_facts
from .tracer import CannotInlineError, LeafFallbackTracer, error_line

# Tracing patches classes of torch for the whole process (four threads at once poison it for good), and compiling
# runs the user's model: one compilation at a time.
TRACING = threading.RLock()


def trace(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Traced:
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
    signature = Signature.of_example(model.forward, args, kwargs)
    with TRACING, preserved(model):
        kept: dict[str, str] = {}
        tracer, graph, out_spec = _trace_in_both_modes(model, signature, kept)
    _read_attributes_where_used(graph)
    targets = dict.fromkeys(str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr"))
    constants = {name: tracer.constants[name] for name in targets if name in tracer.constants}
    attributes = {name: constants[name] if name in constants else resolve(model, name) for name in targets}
    if not any(node.op in ("call_module", "call_function", "call_method") for node in graph.nodes):
        raise ModelError(
            f"{type(model).__name__} computes nothing: its outputs are its inputs or parameters",
            remedy="compile a model with at least one operation",
        )
    module = bind(graph, attributes, type(model).__name__)
    facts = dict(find_facts(model, module, signature.flatten(args, kwargs)))
    _read_latest_names(module.graph, facts)
    out_spec = _open_outputs(module.graph, facts, out_spec)
    # `y += c` on a number is an ordinary addition: fx prints the in-place form, which would rebind the name
    for node in module.graph.nodes:
        _number_is_not_mutated(
            node, facts[node.args[0].name].value if node.args and isinstance(node.args[0], fx.Node) else None
        )
    module.recompile()
    used = {path: why for path, why in kept.items() if path in attributes}
    return Traced(
        module, signature, out_spec, facts, constants, "fxsplit tracer (proxies, leaf fallback)", used
    )


def _trace_in_both_modes(
    model: nn.Module, signature: Signature, kept: dict[str, str]
) -> tuple[LeafFallbackTracer, fx.Graph, Any]:
    while True:
        before = len(kept)
        graphs = []
        for training in (None, True, False):
            with preserved(model):
                for module in model.modules():
                    module.training = module.training if training is None else training
                graphs.append(_trace_once(model, signature, kept))
        if len(kept) > before:
            continue  # trace again from the start, so that names do not depend on what was tried
        rows = [structure(graph) for _, graph, _ in graphs]
        for other in (1, 2):
            where = first_difference(rows[0], rows[other])
            if where is not None:
                _keep_mode_reader(model, [graphs[0][1], graphs[other][1]], where, kept)
        if len(kept) == before:
            return graphs[0]


def _keep_mode_reader(model: nn.Module, graphs: Sequence[fx.Graph], where: int, kept: dict[str, str]) -> None:
    nodes = [list(graph.nodes)[where : where + 1] for graph in graphs]
    found = [node for row in nodes for node in row if node.op != "output"]
    paths = [node.meta["module_path"] for node in found]
    path = max(paths, key=len, default="")
    owner = next((n for n in found if n.meta["module_path"] == path), None)
    if path in kept and owner is not None and owner.op == "call_module":
        path = path.rpartition(".")[0]
    if not path:
        raise TraceError(
            f"{type(model).__name__}.forward takes another path in train() than in eval(), or from one call to the next",
            where=str(owner.meta["source"]) if owner is not None else None,
            remedy="move what reads self.training or keeps state in Python into a submodule "
            "(nn.Dropout instead of F.dropout)",
        )
    kept[path] = "it reads self.training"


def _trace_once(
    model: nn.Module, signature: Signature, kept: dict[str, str]
) -> tuple[LeafFallbackTracer, fx.Graph, Any]:
    tracer = LeafFallbackTracer(kept)
    specs = []

    def call(root: nn.Module, *proxies: Any) -> Sequence[Any]:
        args, kwargs = signature.unflatten(proxies)
        leaves, spec = tree_flatten(root.forward(*args, **kwargs))
        for leaf in leaves:
            if not isinstance(leaf, fx.Proxy | torch.Tensor | int | float | bool | str | type(None)):
                raise CannotInlineError(
                    f"it returns {type(leaf).__name__}, which is not a registered pytree "
                    f"(torch.utils._pytree.register_pytree_node or register_dataclass)"
                )
        specs.append(spec)
        return leaves

    try:
        graph = tracer.flat_trace(model, call, [a.placeholder for a in signature.arguments])
    except Exception as error:
        line = error_line(error)
        text = str(error).splitlines()[0] if str(error) else ""
        raise TraceError(
            f"{type(model).__name__}.forward cannot be captured: {text or type(error).__name__}",
            where=str(line) if line else None,
            remedy="move what depends on the values of tensors into a submodule (it is then kept whole), "
            "or replace it by tensor operations such as torch.where",
        ) from error
    return tracer, graph, specs[0]


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


def _open_outputs(graph: fx.Graph, facts: dict[str, NodeFacts], spec: TreeSpec) -> TreeSpec:
    """Outputs that are tuples, lists or dicts (of a module kept whole) become their leaves."""

    def opened(value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        fact = facts[value.name]
        if isinstance(fact.value, tuple | list):
            items = [item(value, key, fact.value[key]) for key in range(len(fact.value))]
            plain = type(fact.value) in (tuple, list)
            return type(fact.value)(items) if plain else type(fact.value)(*items)
        if type(fact.value) is dict:
            return {key: item(value, key, inner) for key, inner in fact.value.items()}
        return value

    def item(value: fx.Node, key: Any, inner: Any) -> Any:
        with graph.inserting_before(graph.output_node()):
            node = graph.call_function(operator.getitem, (value, key))
        fact = facts[value.name]
        node.meta.update(value.meta)
        facts[node.name] = replace(
            fact, value=inner, writes=frozenset(), parameters=(), buffers=(), random=False
        )
        return opened(node)

    tree = tree_unflatten([opened(value) for value in output_values(graph)], spec)
    leaves, spec = tree_flatten(tree)
    graph.output_node().args = (tuple(leaves),)
    return spec


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


def _number_is_not_mutated(node: fx.Node, value: Any) -> None:
    name = getattr(node.target, "__name__", "")
    if (
        node.op == "call_function"
        and getattr(node.target, "__module__", "") == "_operator"
        and name.startswith("i")
    ):
        plain = getattr(operator, name[1:], None)
        if plain is not None and isinstance(value, int | float | bool | complex):
            node.target = plain
