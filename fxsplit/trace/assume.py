"""The table of what a capture has taken for granted."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from ..graph.assumptions import (
    LOOKUPS,
    MODEL_WIDE,
    TABLES,
    Assumption,
    Assumptions,
    Lookup,
    attribute_tensors,
    is_there,
)
from ..graph.nodes import is_within
from ..modules.seen import MISSING
from .capture import Capture, Request


def assumed(request: Request, capture: Capture, graph: fx.Graph) -> Assumptions:
    """What `graph` of `capture` is right for, looked up in the model as it is now."""
    model = request.model
    modules = [path for path, _ in model.named_modules()]
    tensors = [
        name
        for named in (model.named_parameters, model.named_buffers)
        for name, _ in named(remove_duplicate=False)
    ]
    aliases = [path for path, _ in model.named_modules(remove_duplicate=False)]
    reads = {f"{path}.{name}" if path else name for path, row in capture.taken.reads.items() for name in row}
    tensors += [name for name, _ in attribute_tensors(model) if name in reads]
    names = frozenset((*aliases, *tensors))
    lookup = Lookup(model, Assumptions(names=names))
    for path in capture.taken.objects:
        where, _, what = path.rpartition(".")
        lookup.follow(where, what)
    rows = []
    for kind, where, what in _keys(modules, capture, graph):
        empty = Assumption(kind, where, what, MISSING)
        if kind != "attribute" or is_there(lookup.at(where)):
            rows.append(Assumption(kind, where, what, LOOKUPS[kind](lookup, empty)))
    rows += [
        Assumption("asked" if where else "caller", where, what, was)
        for where, what, was in capture.taken.asked
    ]
    inputs = dict(
        zip((n for n in graph.nodes if n.op == "placeholder"), request.signature.arguments, strict=True)
    )
    for node in graph.nodes:
        kind, name = ("argument", inputs[node].name) if node in inputs else ("value", node.name)
        rows += [Assumption(kind, name, what, was) for what, was in node.meta.get("asked", {}).items()]
    return Assumptions(tuple(rows), names, request.grad)


def _keys(modules: list[str], capture: Capture, graph: fx.Graph) -> Iterator[tuple[str, str, str]]:
    """What to look up: kind, path and name."""
    whole = {str(n.target) for n in graph.nodes if n.op == "call_module"}
    for path in modules:
        inside = any(is_within(path, w) for w in whole)
        reads = capture.taken.reads.get(path, {})
        if inside or reads or path in capture.called or not path:
            yield "class", path, ""
        if inside:  # its own forward is called: what it reads it reads anew, but nobody would give a new parameter a gradient
            yield from (("table", path, table) for table in TABLES[:2])
        if not path:
            yield "attribute", path, "forward"
        for name in reads:
            if name in TABLES or name == "__dict__":
                yield "table", path, name
            elif not inside or name not in ("forward",):
                yield "attribute", path, name
    for path in capture.taken.objects:
        yield from (("attribute", path, name) for name in capture.taken.reads.get(path, {}))
    yield from (("model", "", what) for what in MODEL_WIDE)
