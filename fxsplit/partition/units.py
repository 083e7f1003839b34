"""Units: the smallest groups of nodes that may be cut apart, in program order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx, nn

from ..graph.ir import Traced
from ..graph.nodes import compute_nodes, enters


@dataclass(frozen=True)
class Unit:
    """Nodes ``[start, end)`` of the program order."""

    start: int
    end: int


@dataclass(frozen=True)
class Bond:
    """Why the program may not be cut between positions `first` and `last`.

    `writer` is the node that writes in place to a value that both ends can see; None for a parameter and
    its reader, and for a context and its entry.
    """

    first: int
    last: int
    writer: fx.Node | None


def bonds(traced: Traced) -> list[Bond]:
    """What may not be separated.

    * A parameter or buffer and the node that reads it.
    * A context (no_grad, autocast) and the node that enters it. It may be cut later: the next stage enters it again.
    * A value and everything that touches its storage until the last in-place write to it. After that write
      its contents are final, and another stage may read it. Storage that outlives the call (the model's
      buffers, the caller's inputs) has no final write: all that touch it stay together.
    """
    nodes = compute_nodes(traced.graph)
    position = {node: i for i, node in enumerate(nodes)}
    found = [
        Bond(position[node], _reader(node, position), None)
        for node in nodes
        if node.op == "get_attr" and node.users
    ]
    for i, node in enumerate(nodes):
        context = enters(node)
        if context is not None and context is not node:
            found.append(Bond(position[context], i, None))
    touching: dict[int, list[int]] = {}
    writers: dict[int, list[int]] = {}
    lasting: set[int] = set()
    for node in traced.graph.nodes:
        fact = traced.facts[node.name]
        lasting |= fact.lasting
        if node in position:
            for storage in fact.storages:
                touching.setdefault(storage, []).append(position[node])
            for storage in fact.writes:
                writers.setdefault(storage, []).append(position[node])
    for storage, writing in writers.items():
        touched = touching[storage]
        last = touched[-1] if storage in lasting else writing[-1]
        if last > touched[0]:
            found.append(Bond(touched[0], last, nodes[writing[0]]))
    return found


def _reader(node: fx.Node, position: dict[fx.Node, int]) -> int:
    """Where a ``get_attr`` has to be: with its readers, or with the first one if its value travels to the others."""
    if "home" in node.meta:  # on a device of its own
        return position[node]
    readers = [position.get(user, position[node]) for user in node.users]
    return min(readers) if node.meta.get("shared") else max(readers)


def find_units(traced: Traced) -> list[Unit]:
    """The units of the graph, in program order; together they hold every node once."""
    count = len(compute_nodes(traced.graph))
    open_at = [0] * (count + 1)
    for bond in bonds(traced):
        open_at[bond.first + 1] += 1
        open_at[bond.last + 1] -= 1
    starts, depth = [], 0
    for i in range(count):
        depth += open_at[i]
        if depth == 0:
            starts.append(i)
    return [Unit(a, b) for a, b in zip(starts, [*starts[1:], count], strict=True)]


def balance_starts(model: nn.Module, traced: Traced, units: Sequence[Unit]) -> list[int]:
    """Where the things that `balance` counts begin: the children of an `nn.Sequential`, the graph's units otherwise.

    A child that computes nothing begins where the next one does.
    """
    if type(model).forward is not nn.Sequential.forward:
        return [unit.start for unit in units]
    nodes = compute_nodes(traced.graph)
    starts = [0]
    for child in range(1, len(model)):  # type: ignore[arg-type]
        calls = (i for i, node in enumerate(nodes) if traced.facts[node.name].child_call > child)
        start = next(calls, len(nodes))
        while start and nodes[start - 1].op == "get_attr":  # what it reads stands before it
            start -= 1
        starts.append(start)
    return starts
