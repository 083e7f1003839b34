"""What computes nothing is gone: a graph with the same values, in which a person would miss nothing.

Sizes that are the same for every call are written as numbers, and others are asked for once, where a value is made; what
was asked of them, and always holds, is asked no more; nor does anything stay that nobody reads.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..graph.code import RESIZES
from ..graph.ir import NodeFacts, TensorSpec
from ..inserted.ops import guard
from .sizes import Number, Size, known_operation, sizes_of

_NUMBERS = ("size", "numel", "nelement", "dim")


def simplify(graph: fx.Graph, facts: Mapping[str, NodeFacts], objects: Mapping[str, Any]) -> bool:
    """Simplify a graph in place.

    Args:
        objects: target of a ``call_module`` or ``get_attr`` → what it is.

    Returns:
        Whether anything has changed.
    """
    before = len(graph.nodes)
    if any(n.op == "call_method" and n.target in RESIZES for n in graph.nodes):
        return False
    found = sizes_of(graph, facts, objects)
    changed = False
    first: dict[Number, fx.Node] = {}
    for node in list(graph.nodes):
        number = found.get(node)
        if node.target is guard and _value(node.args[0], found) is True:
            graph.erase_node(node)
        elif _is_number(node, facts) and isinstance(number, int | Size) and not isinstance(number, bool):
            instead: Any = number if isinstance(number, int) else first.setdefault(number, node)
            if instead is not node and node.users:
                _replaced(node, instead)
                changed = True
        elif (same := _does_nothing(node, facts)) is not None:
            _replaced(node, same)
            changed = True
    for node in reversed(list(graph.nodes)):
        idle = node.op == "get_attr" or (known_operation(node) and not _does_something(facts[node.name]))
        if idle and not node.users:
            graph.erase_node(node)
    return changed or len(graph.nodes) != before


def _value(argument: Any, found: Mapping[fx.Node, Any]) -> Any:
    return found.get(argument) if isinstance(argument, fx.Node) else argument


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
