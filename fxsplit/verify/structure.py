"""One table of named rules that every `Program` obeys; it needs no data and costs milliseconds."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import networkx as nx
import torch
from torch import fx, nn

from ..compat import tree_leaves
from ..errors import VerifyError
from ..graph import device_constants, first_difference, region_modules, stage_graph, structure
from ..ir import Program, Stage, TensorSpec, Traced
from ..ops import checkpoint, transfer


def inline(program: Program) -> fx.Graph:
    """Put the stages back into one graph, without transfer and checkpoint nodes, under the model's FQNs."""
    graph = fx.Graph()
    stages = {f"stage_{s.index}": s for s in program.stages}

    def splice(module: fx.GraphModule, values: list[Any], stage: Stage | None) -> Any:
        env: dict[fx.Node, Any] = {}
        operands = iter(values)
        for node in module.graph.nodes:
            arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
            args = arguments[0]
            if node.op == "placeholder":
                env[node] = next(operands)
            elif node.op == "output":
                return args[0]
            elif node.op == "call_module" and stage is None:
                called = stages[str(node.target)]
                env[node] = splice(called.module, list(args), called)
            elif node.target is transfer:
                env[node] = args[0]
            elif node.op == "get_attr" and isinstance(
                getattr(module, str(node.target), None), fx.GraphModule
            ):
                env[node] = getattr(module, str(node.target))
            elif node.target is checkpoint:
                env[node] = splice(args[0], list(args[1:]), stage)
            elif node.target is operator.getitem and isinstance(args[0], tuple) and isinstance(args[1], int):
                env[node] = args[0][args[1]]
            else:
                copy = graph.node_copy(node, lambda n: env[n])
                if stage is not None and node.op in ("call_module", "get_attr"):
                    copy.target = stage.paths.get(str(node.target), str(node.target))
                env[node] = copy
        raise AssertionError("a graph without output")

    inputs = [graph.placeholder(name) for name in program.inputs]
    graph.output(splice(program.root, inputs, None))
    return graph


@dataclass(frozen=True)
class Rule:
    """A named property of programs. `check` yields what is wrong, as (message, place)."""

    name: str
    why: str
    check: Callable[[nn.Module, Traced, Program], Iterator[tuple[str, str | None]]]


def verify_structure(model: nn.Module, traced: Traced, program: Program) -> None:
    """Check every rule.

    Raises:
        VerifyError: names the rule, the node and the user's line.
    """
    for rule in RULES:
        for what, where in rule.check(model, traced, program):
            raise VerifyError(
                f"rule {rule.name!r}: {what}", where=where, remedy=f"this is a bug in fxsplit: {rule.why}"
            )


def _defined(model: nn.Module, traced: Traced, program: Program) -> Iterator[tuple[str, str | None]]:
    graphs = [("the root", program.root.graph)]
    for stage in program.stages:
        for module in (stage.module, *region_modules(stage.module)):
            graphs.append((f"stage {stage.index}", module.graph))
    for where, graph in graphs:
        seen: set[fx.Node] = set()
        for node in graph.nodes:
            for operand in node.all_input_nodes:
                if operand not in seen:
                    yield f"{where} reads {operand.name!r} in {node.name!r} before it is computed", None
            seen.add(node)


def _same_graph(model: nn.Module, traced: Traced, program: Program) -> Iterator[tuple[str, str | None]]:
    split = inline(program)
    ours, theirs = structure(split), structure(traced.graph)
    index = first_difference(ours, theirs)
    if index is not None:
        rows = [list(g.nodes)[index : index + 1] for g in (split, traced.graph)]
        shown = [row[0].format_node() if row else "nothing" for row in rows]
        node = rows[1][0] if rows[1] else None
        source = traced.facts[node.name].source if node is not None and node.name in traced.facts else None
        yield (
            f"node {index} of the split is {shown[0]}, of the model {shown[1]}",
            str(source) if source else None,
        )


def _acyclic(model: nn.Module, traced: Traced, program: Program) -> Iterator[tuple[str, str | None]]:
    stage_of = {name: stage.index for stage in program.stages for name in stage.nodes}
    quotient = stage_graph(stage_of, traced.graph)
    if not nx.is_directed_acyclic_graph(quotient):
        yield f"stages {sorted(next(nx.simple_cycles(quotient)))} wait for each other", None
    for a, b in quotient.edges:
        if a > b:
            yield f"stage {b} reads from stage {a}, which runs after it", None


def _transfers(model: nn.Module, traced: Traced, program: Program) -> Iterator[tuple[str, str | None]]:
    made_by = program.producers()
    for stage in program.stages:
        for node in stage.module.graph.nodes:
            if node.op != "placeholder":
                continue
            users = list(node.users)
            moved = [user for user in users if user.target is transfer]
            specs = [s for s in tree_leaves(traced.facts[node.name].value) if isinstance(s, TensorSpec)]
            home = made_by[node.name]
            origins = (
                {s.device for s in specs} if home < 0 else {program.stages[home].device} if specs else set()
            )
            crosses = bool(origins - {stage.device})
            if crosses and (len(moved) != 1 or len(users) != 1):
                yield (
                    f"stage {stage.index} on {stage.device} reads {node.name!r} from {_names(origins)} without one transfer",
                    None,
                )
            if not crosses and moved:
                yield f"stage {stage.index} transfers {node.name!r}, which is on {stage.device} already", None
            for user in moved:
                if user.args[1] != stage.device:
                    yield f"stage {stage.index} on {stage.device} moves {node.name!r} to {user.args[1]}", None


def _devices_follow(model: nn.Module, traced: Traced, program: Program) -> Iterator[tuple[str, str | None]]:
    for stage in program.stages:
        for module in (stage.module, *region_modules(stage.module)):
            for node in module.graph.nodes:
                stale = device_constants(node) & traced.devices - {stage.device}
                if stale and node.target is not transfer:
                    yield f"stage {stage.index} on {stage.device} has {_names(stale)} in {node.name!r}", None


def _names(devices: set[torch.device]) -> str:
    return ", ".join(sorted(map(str, devices)))


def _own_objects(model: nn.Module, traced: Traced, program: Program) -> Iterator[tuple[str, str | None]]:
    for stage in program.stages:
        for name, fqn in stage.paths.items():
            holders = [
                stage.module,
                *(m for _, m in stage.module.named_children() if isinstance(m, fx.GraphModule)),
            ]
            found = [getattr(h, name) for h in holders if hasattr(h, name)]
            expected = getattr(traced.module, traced.names[fqn])
            if not found or any(value is not expected for value in found):
                yield f"stage {stage.index}: self.{name} is not the model's {fqn}", None


def _one_device(model: nn.Module, traced: Traced, program: Program) -> Iterator[tuple[str, str | None]]:
    home: dict[str, Stage] = {}
    for stage in program.stages:
        for fqn in stage.parameters:
            first = home.setdefault(fqn, stage)
            if first.device != stage.device:
                yield (
                    f"parameter {fqn!r} is read on {first.device} (stage {first.index}) and {stage.device} (stage {stage.index})",
                    None,
                )


RULES = (
    Rule("defined-before-use", "a value is computed before it is read", _defined),
    Rule(
        "same-graph",
        "the stages put together must be the traced graph: operations, arguments and order",
        _same_graph,
    ),
    Rule("acyclic", "a stage may only read from stages before it", _acyclic),
    Rule(
        "minimal-transfers",
        "one transfer for each value that changes device, none where nothing crosses",
        _transfers,
    ),
    Rule("devices-follow", "what was on the example's device is on the stage's", _devices_follow),
    Rule("own-objects", "a stage computes with the model's own modules and parameters", _own_objects),
    Rule("one-device", "a parameter has one home", _one_device),
)
