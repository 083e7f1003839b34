"""One graph that is right in train and in eval mode; or one for each, where the model takes different paths."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from ..compat import tree_leaves
from ..errors import ArgumentError, TraceError
from ..graph.code import write
from ..graph.nodes import ModuleMode, is_within, resolve, structure
from ..modules.state import preserved
from ..passes import named
from .capture import Capture, FrontEnd, Request

Modes = tuple[bool, ...]


class OthersFlagError(TraceError):
    """Two graphs would be needed, and which one is right is not said by the model's own flag."""


@named("capture", lambda found: "\n".join(write(capture.graph).code for capture, _ in found))
def in_both_modes(
    front_end: FrontEnd, request: Request, give_up: Callable[[Request], bool] = lambda request: False
) -> list[tuple[Capture, Modes]]:
    """Capture the model in train and in eval mode.

    Arguments that differ are read from the modules' flags at run time. A module that takes another path is kept
    whole; if that is the model itself, there is one capture for each mode. `request.kept` gains what was found.

    Args:
        give_up: asked whenever `request.kept` has grown.

    Returns:
        Captures, with the modes that each is right for; that of the model's own mode first. A mode in which the
        example cannot be run (batch normalisation of a single row) is missing. Nothing, if it gave up.

    Raises:
        TraceError: the model's own mode cannot be captured.
    """
    model = request.model
    own = [module.training for module in model.modules()]
    settings: list[Sequence[bool]] = [own, [not own[0]] * len(own)]
    if len(set(own)) > 1:
        settings.append([own[0]] * len(own))
    while True:
        found = _each(front_end, request, settings)
        if found is None:
            if give_up(request):
                return []
            continue  # again from the start, so that names do not depend on what was tried
        if len(found) < len(settings):
            return [(found[0], (own[0],))]
        first, other, same = found[0], found[1], found[-1] if len(found) == 3 else found[0]
        both = replace(first, taken=first.taken | other.taken | same.taken)
        if structure(first.graph) == structure(other.graph) == structure(same.graph):
            _ask_alike(*(list(graph.nodes) for graph in (first.graph, other.graph, same.graph)))
            return [(both, (True, False))]
        if not _is_repeatable(front_end, request, first):
            continue
        train, evaluated = (same, other) if own[0] else (other, same)
        try:
            asking = [list(graph.nodes) for graph in (first.graph, other.graph, same.graph)]
            readers = read_mode_where_it_matters(model, first, train.graph, evaluated.graph)
        except DifferentPathsError:
            parted = [p for p in _parted(train, evaluated) if p not in request.kept]
            if not parted:
                _refuse_others_flags(model, first, other)
                return [(first, (own[0],)), (other, (not own[0],))]
            request.kept.update((path, "it reads self.training") for path in parted)
            continue
        _ask_alike(*asking)
        return [(replace(both, constants={**first.constants, **readers}), (True, False))]


def _each(front_end: FrontEnd, request: Request, settings: Sequence[Sequence[bool]]) -> list[Capture] | None:
    """A capture for each setting of the flags in which the example can be run; None once more is kept whole."""
    known, found, model = len(request.kept), list[Capture](), request.model
    for setting in settings:
        with preserved(model):
            for module, mode in zip(model.modules(), setting, strict=True):
                module.training = mode
            try:
                found.append(front_end(request))
            except (TraceError, ArgumentError):
                if setting[0] == settings[0][0]:
                    raise
        if len(request.kept) > known:
            return None
    return found


def _is_repeatable(front_end: FrontEnd, request: Request, first: Capture) -> bool:
    """Whether the same mode gives the same path again; otherwise `request.kept` gains the modules that part.

    Raises:
        TraceError: it is the model itself.
    """
    with preserved(request.model):
        again = front_end(request)
    if structure(again.graph) == structure(first.graph):
        return True
    parted = [p for p in _parted(first, again) if p not in request.kept]
    if not parted:
        raise TraceError(
            f"{type(request.model).__name__}.forward takes another path from one call to the next",
            where=_first_line(first.graph),
            remedy="move what keeps state in Python into a submodule (it is then kept whole)",
        )
    request.kept.update((path, "it takes another path from one call to the next") for path in parted)
    return False


def _ask_alike(*graphs: Sequence[fx.Node]) -> None:
    """What forward asks of a value in one of the modes, it may ask in all of them."""
    for nodes in zip(*graphs, strict=True):
        asked = {
            what: answer for node in reversed(nodes) for what, answer in node.meta.get("asked", {}).items()
        }
        if asked:
            nodes[0].meta["asked"] = asked


def _refuse_others_flags(model: nn.Module, *captures: Capture) -> None:
    """A graph for each mode is chosen by the model's own flag."""
    for capture in captures:
        read = capture.flags.get("", frozenset()) - {""}
        if read:
            raise OthersFlagError(
                f"{type(model).__name__}.forward takes another path by the mode of {sorted(read)[0]!r}, not by its own",
                where=_first_line(capture.graph),
                remedy="read self.training, or move what reads the other module's mode into a submodule",
            )


def _parted(a: Capture, b: Capture) -> list[str]:
    """The innermost modules whose own part of the two captures differs; empty where it is the model itself."""
    differing: list[str] = []
    for detail in ("operations", "literals", "operands"):  # what else differs follows from the first
        parts = [_parts(capture, detail) for capture in (a, b)]
        both = {"", *(p for p in parts[0] if p in parts[1])}
        odd = [p for p in {**parts[0], **parts[1]} if parts[0].get(p) != parts[1].get(p)]
        # a module that one of them does not call at all is its caller's doing
        differing = [next(q for q in _ancestry(p) if q in both) for p in odd]
        if differing:
            break
    return [
        p for p in dict.fromkeys(differing) if p and not any(o != p and is_within(o, p) for o in differing)
    ]


def _ancestry(path: str) -> Iterator[str]:
    """`path`, the modules around it, and the model, from the inside out."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _first_line(graph: fx.Graph) -> str | None:
    return next((str(n.meta["source"]) for n in graph.nodes if n.meta["source"]), None)


def _parts(capture: Capture, detail: str) -> dict[str, list[tuple[Any, ...]]]:
    """Per module path what its own forward does: its operations; also literal arguments; also what made the operands."""

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return (value.op, value.target) if detail == "operands" else "node"
        if detail == "operations":
            return None
        return value if isinstance(value, int | float | bool | str | slice) else type(value)

    parts: dict[str, list[tuple[Any, ...]]] = {path: [] for path in capture.called}
    for node in capture.graph.nodes:
        path = node.meta["module_path"]
        if node.op == "call_module":
            path = node.meta["caller"]
        row = (node.op, node.target, [plain(v) for v in tree_leaves((node.args, node.kwargs))])
        parts.setdefault(path, []).append(row)
    return parts


class DifferentPathsError(Exception):
    """The two graphs differ in more than literal arguments."""


@dataclass(frozen=True)
class _Choice:
    train: Any
    eval: Any


def read_mode_where_it_matters(
    model: nn.Module, capture: Capture, train: fx.Graph, other: fx.Graph
) -> dict[str, ModuleMode]:
    """Replace the literals of `graph` that differ between the two modes by what ``self.training`` selects.

    ``F.dropout(x, 0.1, self.training)`` is traced with True or with False, an attention's
    ``dropout_p=self.p if self.training else 0.0`` with one of two numbers. The module whose forward made the
    call is the one whose flag is read, when the program runs.

    Args:
        capture: in any mode; its graph is changed in place.
        train, other: traces in train and in eval mode.

    Returns:
        What the new ``get_attr`` nodes read, by name.

    Raises:
        DifferentPathsError: the graphs have other operations, or a forward has read the flags of several modules;
            the graph is as it was.
    """
    graph = capture.graph
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
    paths: dict[int, str] = {}
    for i in merged:
        node = rows[0][i]
        path = node.meta["module_path"] if node.op != "call_module" else node.meta["caller"]
        asked = capture.flags.get(path, frozenset()) or {path}
        if len(asked) > 1:
            raise DifferentPathsError
        paths[i] = next(iter(asked))
    for i, (args, kwargs) in merged.items():
        node, path = rows[0][i], paths[i]
        name = f"{path.replace('.', '_') or 'model'}_mode"
        if name[0].isdigit():
            name = f"layer_{name}"
        readers[name] = ModuleMode(path, resolve(model, path))

        def select(choice: _Choice, node: fx.Node = node, name: str = name) -> fx.Node:
            holder = graph.create_node("get_attr", name)
            made = [holder, graph.call_function(getattr, (holder, "training"))]
            if (choice.train, choice.eval) != (True, False):
                made.append(graph.call_function(operator.getitem, ((choice.eval, choice.train), made[-1])))
            for new in made:
                new.meta.update(node.meta)
            return made[-1]

        with graph.inserting_before(node):
            node.args = _chosen(args, select, rows[0])
            node.kwargs = _chosen(kwargs, select, rows[0])
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


def _chosen(value: Any, select: Callable[[_Choice], fx.Node], nodes: list[fx.Node]) -> Any:
    """The inverse of `_merge`, with a node that selects for each choice."""
    if isinstance(value, tuple) and value and value[0] is fx.Node:
        return nodes[value[1]]
    if isinstance(value, list):
        kind, *items = value
        made = [_chosen(item, select, nodes) for item in items]
        if kind is slice:
            return slice(*made)
        return kind(*made) if hasattr(kind, "_fields") else kind(made)
    if isinstance(value, dict):
        return {key: _chosen(item, select, nodes) for key, item in value.items()}
    return select(value) if isinstance(value, _Choice) else value
