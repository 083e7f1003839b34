"""Values are named as the user named them: ``scores = q @ k.transpose(-2, -1)`` gives a node `scores`."""

from __future__ import annotations

import ast
import functools
import linecache
import operator

from torch import fx

from ..ir import Source

Assigned = ast.expr | None


def with_the_users_names(graph: fx.Graph) -> fx.Graph:
    """The same graph, with the names of the variables that the user's statements assign.

    The value that leaves a statement has its name; a second one of that name gets a number. Modules' values keep the
    path of the module.
    """
    result = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        name = _users_name(node)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        if node.op == "output":
            copy = result.output(args[0])
        else:
            copy = result.create_node(node.op, node.target, args, kwargs, name=name or node.name)
        copy.meta = {**node.meta, "named": name} if name else dict(node.meta)
        values[node] = copy
    return result


def _users_name(node: fx.Node) -> str | None:
    source: Source | None = node.meta.get("source")
    if source is None or node.op not in ("call_function", "call_method"):
        return None
    place = (source, node.meta["module_path"])
    inside = [
        (u.meta.get("source"), u.meta.get("caller", u.meta["module_path"])) == place for u in node.users
    ]
    parts = [u.target is operator.getitem for u in node.users]
    if all(inside) or any(i and p for i, p in zip(inside, parts, strict=True)):
        return None  # it does not leave the statement, or its parts do
    target, value = _assignments(source.path).get(source.line, (None, None))
    if node.op == "call_method" and node.target == "size":
        target = _size(node, target, value)
    if isinstance(target, ast.Tuple) and node.target is operator.getitem and isinstance(node.args[1], int):
        index = node.args[1]
        target = target.elts[index] if index < len(target.elts) else None
    name = target.id if isinstance(target, ast.Name) else None
    return name if name and name.strip("_") else None


def _size(node: fx.Node, target: Assigned, value: Assigned) -> Assigned:
    """``rows, width = x.shape`` and ``n = x.size(0)`` name a size; in a longer expression it has no name."""
    if isinstance(value, ast.Subscript):
        value = value.value
    function = value.func if isinstance(value, ast.Call) else value
    if not isinstance(function, ast.Attribute) or function.attr not in ("shape", "size"):
        return None
    if isinstance(target, ast.Tuple):
        dim = node.args[1] if len(node.args) > 1 else None
        return target.elts[dim] if isinstance(dim, int) and dim < len(target.elts) else None
    return target


@functools.lru_cache(maxsize=256)
def _assignments(path: str) -> dict[int, tuple[Assigned, Assigned]]:
    """Line → target and value of the assignment that it is a part of."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[int, tuple[Assigned, Assigned]] = {}
    for statement in ast.walk(tree):
        target: Assigned = None
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
        elif isinstance(statement, ast.AugAssign | ast.AnnAssign):
            target = statement.target
        if target is not None:
            lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)  # type: ignore[attr-defined]
            value = getattr(statement, "value", None)
            found.update({n: (None, None) if n in found else (target, value) for n in lines})
    return found
