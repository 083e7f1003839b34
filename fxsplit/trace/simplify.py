"""What computes nothing is gone: a graph with the same values, in which a person would miss nothing.

Sizes that are the same for every call are written as numbers, and others are asked for once, where a value is made; what
was asked of them, and always holds, is asked no more; nor does anything stay that nobody reads.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..graph.code import RESIZES, block_of
from ..graph.ir import NodeFacts, TensorSpec
from ..inserted.ops import guard
from .sizes import Number, Size, known_operation, sizes_of

_NUMBERS = ("size", "numel", "nelement", "dim")


def simplify(
    graph: fx.Graph, facts: Mapping[str, NodeFacts], objects: Mapping[str, Any]
) -> Mapping[str, NodeFacts]:
    """Simplify a graph in place.

    Args:
        objects: target of a ``call_module`` or ``get_attr`` → what it is.

    Returns:
        The facts of the nodes that are left; fewer than before, if anything has changed.
    """
    if any(n.op == "call_method" and n.target in RESIZES for n in graph.nodes):
        return facts
    found = sizes_of(graph, facts, objects)
    same_as: dict[str, str] = {}  # what is gone → what it gave back as it was
    first = _First(graph, found)
    asked: set[Any] = set()  # conditions on sizes that were looked at before
    for node in list(graph.nodes):
        number = found.get(node)
        if node.target is guard:
            condition = _condition(node.args[0], found)
            if condition is True or condition in asked:
                graph.erase_node(node)
            elif condition is not None:
                asked.add(condition)
        elif _is_number(node, facts) and isinstance(number, int | Size) and not isinstance(number, bool):
            instead: Any = number if isinstance(number, int) else first.of(node, number)
            if instead is not node and node.users:
                _replaced(node, instead)
        elif (same := _does_nothing(node, facts)) is not None:
            _replaced(node, same)
            same_as[node.name] = same_as.get(same.name, same.name)
    for node in reversed(list(graph.nodes)):
        idle = node.op == "get_attr" or (known_operation(node) and not _does_something(facts[node.name]))
        if idle and not node.users:
            graph.erase_node(node)
    left = {node.name for node in graph.nodes}

    def of(name: str | None) -> str | None:
        return name if name is None or name in left else same_as.get(name, name)

    return {
        name: replace(fact, returns=of(fact.returns), alias=of(fact.alias))
        for name, fact in facts.items()
        if name in left
    }


class _First:
    """Who asks for a size first: in each block anew, of a value that is there anyway; a value does not travel for its size.

    Whatever the cut is, a block then reads its sizes from what it computes with, as a person would write it.
    """

    def __init__(self, graph: fx.Graph, found: Mapping[fx.Node, Any]) -> None:
        self._place = {node: k for k, node in enumerate(graph.nodes)}
        self._found = found
        self._anywhere: dict[Number, fx.Node] = {}
        self._in_block: dict[tuple[str, Number], fx.Node] = {}

    def of(self, node: fx.Node, number: Size) -> fx.Node:
        """The node that has this number where `node` asks for it: itself, or one before it."""
        anywhere = self._anywhere.setdefault(number, node)
        return self._in_block.setdefault((block_of(node), number), node if self._is_there(node) else anywhere)

    def _is_there(self, node: fx.Node) -> bool:
        """Whether what is asked for its size is computed with here, or later."""
        here = self._place[node]
        return all(
            isinstance(self._found.get(o), int | Size)
            or any(self._place[u] > here and not self._is_size(u) for u in o.users)
            for o in node.all_input_nodes
        )

    def _is_size(self, node: fx.Node) -> bool:
        return node.op != "output" and isinstance(self._found.get(node), int | Size | tuple)


def _condition(argument: Any, found: Mapping[fx.Node, Any]) -> Any:
    """What a guard looks at, by sizes; None where that is not known."""
    if not isinstance(argument, fx.Node):
        return argument
    if found.get(argument) is not None:
        return found[argument]
    sides = [found.get(a) if isinstance(a, fx.Node) else a for a in argument.args]
    sized = argument.op == "call_function" and all(isinstance(side, int | Size) for side in sides)
    return (argument.target, *sides) if sized and sides else None


def _replaced(node: fx.Node, instead: Any) -> None:
    """Whoever reads a node reads something else."""

    def other(argument: fx.Node) -> Any:
        return instead if argument is node else argument

    for user in list(node.users):
        user.args = fx.node.map_arg(user.args, other)
        user.kwargs = fx.node.map_arg(user.kwargs, other)


def _is_number(node: fx.Node, facts: Mapping[str, NodeFacts]) -> bool:
    value = facts[node.name].value if node.op != "output" else None
    asks = node.op == "call_method" and node.target in _NUMBERS
    counts = node.op == "call_function" and known_operation(node)
    return isinstance(value, int) and not isinstance(value, bool) and (asks or counts)


def _does_something(fact: NodeFacts) -> bool:
    return bool(fact.writes) or fact.random or fact.stateful or fact.rng_state


def _does_nothing(node: fx.Node, facts: Mapping[str, NodeFacts]) -> Any:
    """What a node gives back as it is; None where that is not so, or somebody might notice that it is not a copy."""
    if node.op not in ("call_function", "call_method") or not node.args or not known_operation(node):
        return None
    x, *rest = node.args
    if not isinstance(x, fx.Node) or x.op not in ("call_function", "call_method", "call_module"):
        return None
    was, now = facts[x.name].value, facts[node.name].value
    if not isinstance(was, TensorSpec) or was != now:
        return None
    if node.op == "call_method" and node.target == "to":
        return x if _asks_for_what_is(rest, node.kwargs, was) else None
    integer = not was.dtype.is_floating_point and not was.dtype.is_complex and was.dtype != torch.bool
    nothing = node.target is operator.add and integer and rest == [0] and not node.kwargs
    fresh = list(x.users) == [node] and not facts[x.name].storages & facts[x.name].lasting
    return x if nothing and fresh else None


def _asks_for_what_is(args: Sequence[Any], kwargs: Mapping[str, Any], spec: TensorSpec) -> bool:
    """Whether ``x.to(...)`` names the type and the device that it has anyway, which is then x."""
    if set(kwargs) - {"device", "dtype"}:
        return False
    asked = [*args, *kwargs.values()]
    return all(
        (isinstance(a, torch.device) and a == spec.device) or (isinstance(a, torch.dtype) and a == spec.dtype)
        for a in asked
    )
