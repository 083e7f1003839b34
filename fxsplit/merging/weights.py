"""The weight of a mean as a value of the program: nodes beside the mean, and a flat output that nobody sees."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from ..graph.ir import Traced
from ..graph.nodes import resolve, run_under
from ..modules.names import local_names
from ..trace.facts import find_facts
from .dependence import Denominator, Elements, Targets, Weight


def describe(weight: Weight) -> str:
    """For reports."""
    if isinstance(weight, Targets):
        return f"the targets {weight.node} != {weight.ignore_index}" + ", each by its class" * (
            weight.weight is not None
        )
    return f"the elements of {weight.node}" if isinstance(weight, Elements) else weight.node


def with_hidden_outputs(
    model: nn.Module,
    traced: Traced,
    weights: Sequence[Weight],
    terms: Sequence[str],
    inputs: Sequence[torch.Tensor],
) -> Traced:
    """The program with weights, and the values of these nodes, as further flat outputs after those of the model."""
    if not weights and not terms:
        return traced
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    values = graph.graph_copy(traced.graph, copies)
    nodes = {node.name: node for node in graph.nodes}
    made = [_node_of(graph, nodes, traced, weight) for weight in weights]
    assert isinstance(values, tuple | list)
    made += [nodes[name] for name in terms]
    graph.output((*values, *made)).meta.update(module_path="", source=None)
    targets = dict.fromkeys(str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr"))
    names = local_names(dict.fromkeys([*traced.constants, *targets]))
    objects = {t: traced.constants[t] if t in traced.constants else resolve(model, t) for t in targets}
    module = run_under(graph, names, objects)
    return replace(traced, graph=graph, names=names, module=module, facts=find_facts(model, module, inputs))


def _node_of(graph: fx.Graph, nodes: dict[str, fx.Node], traced: Traced, weight: Weight) -> fx.Node:
    """The node whose value is this weight, written as soon as there is what it is made of."""
    beside = nodes[weight.node]
    if isinstance(weight, Denominator):
        return beside
    table = nodes.get(weight.weight or "") if isinstance(weight, Targets) else None
    last = max((n for n in (beside, table) if n is not None), key=list(graph.nodes).index)

    def add(op: str, target: Any, *args: Any) -> fx.Node:
        nonlocal last
        with graph.inserting_after(last):
            last = graph.create_node(op, target, args)
        last.meta.update({key: value for key, value in beside.meta.items() if key != "named"})
        return last

    if isinstance(weight, Elements):
        return add("call_method", "numel", beside)
    counted = add("call_function", operator.ne, beside, weight.ignore_index)
    if weight.weight is not None:
        if table is None:
            table = add("get_attr", _path(traced, weight.weight))
        known = add("call_method", "clamp", beside, 0)  # what is ignored may be no class at all
        each = add("call_function", operator.getitem, table, known)
        counted = add("call_function", operator.mul, each, counted)
    return add("call_method", "sum", counted)


def _path(traced: Traced, name: str) -> str:
    """The FQN of a tensor of the traced module, ``self.name``."""
    holder, _, rest = name.removeprefix("self.").partition(".")
    fqn = next(path for path, local in traced.names.items() if local == holder)
    return f"{fqn}.{rest}" if rest else fqn
