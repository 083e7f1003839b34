"""Two traces of a model, in train and in eval mode → one graph that reads the mode where they differ."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from ..graph import ModuleMode, resolve


class DifferentPathsError(Exception):
    """The two graphs differ in more than literal arguments."""


@dataclass(frozen=True)
class _Choice:
    train: Any
    eval: Any


def read_mode_where_it_matters(
    model: nn.Module, graph: fx.Graph, train: fx.Graph, other: fx.Graph
) -> dict[str, ModuleMode]:
    """Replace the literals of `graph` that differ between the two modes by what ``self.training`` selects.

    ``F.dropout(x, 0.1, self.training)`` is traced with True or with False, an attention's
    ``dropout_p=self.p if self.training else 0.0`` with one of two numbers. The module whose forward made the
    call is the one whose flag is read, when the program runs.

    Args:
        graph: a trace in any mode; changed in place.
        train, other: traces in train and in eval mode.

    Returns:
        What the new ``get_attr`` nodes read, by name.

    Raises:
        DifferentPathsError: the graphs have other operations; `graph` is as it was.
    """
    rows = [list(g.nodes) for g in (graph, train, other)]
    if len({len(row) for row in rows}) != 1:
        raise DifferentPathsError
    places = [{node: i for i, node in enumerate(row)} for row in rows]
    merged: dict[int, tuple[Any, ...]] = {}
    for i, (node, a, b) in enumerate(zip(*rows, strict=True)):
        if not (node.op == a.op == b.op and node.target == a.target == b.target):
            raise DifferentPathsError
        found: list[_Choice] = []
        arguments = tuple(
            _merge(x, y, places[1], places[2], found) for x, y in ((a.args, b.args), (a.kwargs, b.kwargs))
        )
        if found:
            merged[i] = arguments
    readers: dict[str, ModuleMode] = {}
    for i, (args, kwargs) in merged.items():
        node = rows[0][i]
        path = node.meta["module_path"] if node.op != "call_module" else node.meta["caller"]
        name = f"{path.replace('.', '_') or 'model'}_mode"
        if name[0].isdigit():
            name = f"layer_{name}"
        readers[name] = ModuleMode(path, resolve(model, path))
        with graph.inserting_before(node):
            holder = graph.create_node("get_attr", name)
            training = graph.call_function(getattr, (holder, "training"))
            for new in (holder, training):
                new.meta.update(node.meta)
            node.args = _chosen(args, graph, training, rows[0])
            node.kwargs = _chosen(kwargs, graph, training, rows[0])
    return readers


def _merge(
    a: Any, b: Any, in_a: Mapping[fx.Node, int], in_b: Mapping[fx.Node, int], found: list[_Choice]
) -> Any:
    """One structure for both: nodes as their positions, literals that differ as choices."""
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        if in_a[a] != in_b[b]:
            raise DifferentPathsError
        return fx.Node, in_a[a]
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        raise DifferentPathsError
    if isinstance(a, tuple | list) and type(a) is type(b):
        if len(a) != len(b):
            raise DifferentPathsError
        return [type(a), *(_merge(x, y, in_a, in_b, found) for x, y in zip(a, b, strict=True))]
    if isinstance(a, dict) and isinstance(b, dict):
        if list(a) != list(b):
            raise DifferentPathsError
        return {key: _merge(a[key], b[key], in_a, in_b, found) for key in a}
    if isinstance(a, slice) and isinstance(b, slice):
        return [
            slice,
            *(_merge(getattr(a, k), getattr(b, k), in_a, in_b, found) for k in ("start", "stop", "step")),
        ]
    if type(a) is type(b) and a == b:
        return a
    found.append(_Choice(a, b))
    return found[-1]


def _chosen(value: Any, graph: fx.Graph, training: fx.Node, nodes: list[fx.Node]) -> Any:
    """The inverse of `_merge`, with a node that selects for each choice."""
    if isinstance(value, tuple) and value and value[0] is fx.Node:
        return nodes[value[1]]
    if isinstance(value, list):
        kind, *items = value
        made = [_chosen(item, graph, training, nodes) for item in items]
        if kind is slice:
            return slice(*made)
        return kind(*made) if hasattr(kind, "_fields") else kind(made)
    if isinstance(value, dict):
        return {key: _chosen(item, graph, training, nodes) for key, item in value.items()}
    if isinstance(value, _Choice):
        if (value.train, value.eval) == (True, False):
            return training
        selected = graph.call_function(operator.getitem, ((value.eval, value.train), training))
        selected.meta.update(training.meta)
        return selected
    return value
