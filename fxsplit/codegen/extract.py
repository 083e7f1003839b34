"""What each stage reads and gives: the values that cross, in program order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from ..graph.ir import Assignment, Traced
from ..graph.nodes import compute_nodes, is_context, output_values


@dataclass(frozen=True)
class Part:
    """A stage before code is generated: its nodes, and the values that cross its border."""

    index: int
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def extract(traced: Traced, assignment: Assignment) -> tuple[Part, ...]:
    """Requires an assignment of every node. Ensures that each value crosses to each reader directly."""
    stage_of: Mapping[str, int] = assignment.stage_of()
    results = {value for value in output_values(traced.graph) if isinstance(value, fx.Node)}
    order = {node: i for i, node in enumerate(traced.graph.nodes)}
    by_stage: list[list[fx.Node]] = [[] for _ in assignment.stages]
    for node in compute_nodes(traced.graph):
        by_stage[stage_of[node.name]].append(node)
    parts = []
    for index, nodes in enumerate(by_stage):
        inside = set(nodes)
        read = {
            operand
            for node in nodes
            for operand in node.all_input_nodes
            if operand not in inside and not is_context(operand)
        }
        given = [
            n
            for n in nodes
            if not is_context(n)
            and (n in results or any(user not in inside and user.op != "output" for user in n.users))
        ]
        parts.append(Part(index, tuple(nodes), tuple(sorted(read, key=order.__getitem__)), tuple(given)))
    return tuple(parts)
