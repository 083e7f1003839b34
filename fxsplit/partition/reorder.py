"""The same program in another order of execution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from ..errors import VerifyError
from ..graph.ir import Traced
from ..graph.nodes import run_under


def reordered(traced: Traced, order: Sequence[str]) -> Traced:
    """The program with its nodes in this order; every node keeps its name, its operands and its facts.

    Args:
        order: names of all nodes that belong to a stage.

    Raises:
        VerifyError: a node would run before one of its operands, or is missing.
    """
    nodes = {node.name: node for node in traced.graph.nodes}
    inputs = [node.name for node in traced.graph.nodes if node.op == "placeholder"]
    whole = [*inputs, *order, traced.graph.output_node().name]
    if sorted(whole) != sorted(nodes):
        odd = sorted(set(whole) ^ set(nodes))
        raise VerifyError(f"the new order has other nodes than the program, first {odd[:1]}")
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for name in whole:
        node = nodes[name]
        early = [operand.name for operand in node.all_input_nodes if operand not in values]
        if early:
            raise VerifyError(f"{name!r} would run before its operand {early[0]!r}", where=name)
        values[node] = graph.node_copy(node, values.__getitem__)
    used = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
    objects = {fqn: getattr(traced.module, traced.names[fqn]) for fqn in used}
    return replace(traced, graph=graph, module=run_under(graph, traced.names, objects))
