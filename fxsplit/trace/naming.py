"""Values are named as the user named them: ``scores = q @ k.transpose(-2, -1)`` gives a node `scores`."""

from __future__ import annotations

import ast
import functools
import linecache
import operator
from collections.abc import Container

from torch import fx

from ..graph.ir import Source


def with_the_users_names(graph: fx.Graph) -> fx.Graph:
    """The same graph, with the names of the variables that the user's statements assign.

    The value of ``name = expression`` has that name; a second one gets a number. Modules' values keep the path of the
    module.
    """
    result = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    numbers: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_number(node, numbers):
            numbers.add(node)
        # A number is written when it is first needed, which is in another statement.
        name = _users_name(node) if node not in numbers else None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        if node.op == "output":
            copy = result.output(args[0])
        else:
            copy = result.create_node(node.op, node.target, args, kwargs, name=name or node.name)
        copy.meta = {**node.meta, "named": name} if name else dict(node.meta)
        variable = _variable(node) if node.op == "call_module" else name
        if variable is not None:
            copy.meta["variable"] = variable
        if (count := _unpacked(node)) is not None:
            copy.meta["unpacks"] = count
        values[node] = copy
    return result


def _users_name(node: fx.Node) -> str | None:
    return _variable(node) if node.op in ("call_function", "call_method") else None


def _unpacked(node: fx.Node) -> int | None:
    """Into how many variables the user's statement takes a value apart: ``q, k, v = x.chunk(3)``."""
    source: Source | None = node.meta.get("source")
    if source is None or source.span is None or node.op not in ("call_function", "call_method"):
        return None
    target = _assignments(source.path).get(source.span)
    if node.target is operator.getitem or not isinstance(target, ast.Tuple | ast.List):
        return None
    return None if any(isinstance(e, ast.Starred) for e in target.elts) else len(target.elts)


def _variable(node: fx.Node) -> str | None:
    """What the user's statement assigns the value to."""
    source: Source | None = node.meta.get("source")
    if source is None or source.span is None:
        return None
    if any(user.target is operator.getitem and user.meta.get("source") == source for user in node.users):
        return None  # its parts have the names
    target = _assignments(source.path).get(source.span)
    place: list[int] = []  # l[1][0] for h in: out, (h, c) = l
    inner = node
    while (
        inner.target is operator.getitem
        and isinstance(inner.args[1], int)
        and isinstance(inner.args[0], fx.Node)
    ):
        if inner.args[0].meta.get("source") != source:
            break
        place.insert(0, inner.args[1])
        inner = inner.args[0]
    for index in place:
        if not isinstance(target, ast.Tuple) or not 0 <= index < len(target.elts):
            return None
        target = target.elts[index]
    name = target.id if isinstance(target, ast.Name) else None
    return name if name and name.strip("_") and name != "self" else None


def _is_number(node: fx.Node, numbers: Container[fx.Node]) -> bool:
    """A size, or arithmetic of sizes; `numbers` are those before it."""
    if node.op == "call_method":
        return node.target in ("size", "numel", "stride", "dim")
    if node.target is len:
        return True
    operands = node.all_input_nodes
    return (
        getattr(node.target, "__module__", "") == "_operator"
        and bool(operands)
        and all(operand in numbers for operand in operands)
    )


@functools.lru_cache(maxsize=256)
def _assignments(path: str) -> dict[tuple[int | None, ...], ast.expr]:
    """Span of an expression whose value is assigned → what it is assigned to."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[tuple[int | None, ...], ast.expr] = {}
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            found[_span(statement.value)] = statement.targets[0]
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            found[_span(statement.value)] = statement.target
        elif isinstance(statement, ast.AugAssign):
            found[_span(statement)] = statement.target
    return found


def _span(node: ast.expr | ast.stmt) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
