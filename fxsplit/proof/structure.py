"""One table of named rules that every `Program` obeys; it needs no data and costs milliseconds."""

from __future__ import annotations

import graphlib
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ..compat import tree_leaves
from ..errors import VerifyError
from ..graph.code import StageModule, is_current
from ..graph.ir import Program, Source, Stage, TensorSpec, Traced
from ..graph.nodes import (
    compute_nodes,
    device_constants,
    enters,
    first_difference,
    leaves,
    open_contexts,
    plain_tensors,
    region_modules,
    stage_graph,
    structure,
)
from ..inserted.ops import transfer
from ..passes import named
from .inline import inline


@dataclass(frozen=True)
class Violation:
    """What is wrong, at which node of the program, and the user's line that it came from."""

    what: str
    node: fx.Node | None = None
    source: Source | None = None


Found = Iterator[Violation]


@dataclass(frozen=True)
class Rule:
    """A named property of programs, and the reason it is one."""

    name: str
    why: str
    check: Callable[[nn.Module, Traced, Program], Found]


@named("prove")
def verify_structure(model: nn.Module, traced: Traced, program: Program) -> list[str]:
    """Check every rule.

    Returns:
        What was shown, a line for each rule.

    Raises:
        VerifyError: names the rule, the node and the user's line, and shows the program around it.
    """
    for rule in RULES:
        for violation in rule.check(model, traced, program):
            raise VerifyError(
                f"rule {rule.name!r}: {violation.what}{_around(violation.node)}",
                where=str(violation.source) if violation.source else None,
                remedy=f"compile again, if a stage was changed since; otherwise this is a bug in fxsplit: {rule.why}",
            )
    return [f"{rule.name}: holds ({rule.why})" for rule in RULES]


def _around(node: fx.Node | None) -> str:
    """The program around a node."""
    if node is None:
        return ""
    nodes = list(node.graph.nodes)
    if node not in nodes:
        return ""
    place = nodes.index(node)
    rows = [(i == place, n.format_node() or "output") for i, n in enumerate(nodes)][
        max(place - 2, 0) : place + 3
    ]
    return "".join(f"\n  {'>' if here else ' '} {row}" for here, row in rows)


def _graphs(program: Program) -> Iterator[tuple[str, Stage | None, fx.GraphModule]]:
    yield "the root", None, program.root
    for stage in program.stages:
        for module in (stage.module, *region_modules(stage.module)):
            yield f"stage {stage.index}", stage, module


def _defined(model: nn.Module, traced: Traced, program: Program) -> Found:
    for where, _, module in _graphs(program):
        seen: set[fx.Node] = set()
        for node in module.graph.nodes:
            for operand in node.all_input_nodes:
                if operand not in seen:
                    yield Violation(
                        f"{where} reads {operand.name!r} in {node.name!r} before it is computed", node
                    )
            seen.add(node)


def _interface(model: nn.Module, traced: Traced, program: Program) -> Found:
    """What the runtime is told of a stage is what its code takes and gives."""
    values: dict[Any, str] = {}
    stages = {f"stage_{s.index}": s for s in program.stages}
    called = []
    for node in program.root.graph.nodes:
        if node.op == "placeholder":
            values[node] = node.name
        elif node.op == "call_module":
            stage = stages[str(node.target)]
            called.append(stage.index)
            given = tuple(values.get(a, "?") for a in node.args)
            if given != stage.inputs:
                yield Violation(f"stage {stage.index} is called with {given}, and takes {stage.inputs}", node)
            if len(stage.outputs) == 1:
                values[node] = stage.outputs[0]
        elif node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            outputs = dict(enumerate(stages[str(node.args[0].target)].outputs))
            values[node] = outputs.get(node.args[1], "?")
    if called != [s.index for s in program.stages]:
        yield Violation(f"stages are called in the order {called}")
    results = program.root.graph.output_node().args[0]
    shown = tuple(values.get(v, "?") if isinstance(v, fx.Node) else (v,) for v in results)  # type: ignore[union-attr]
    if shown != program.outputs:
        yield Violation(f"the program returns {shown}, and is said to return {program.outputs}")
    if tuple(n.name for n in program.root.graph.nodes if n.op == "placeholder") != program.inputs:
        yield Violation(f"the program does not take {program.inputs}")
    for stage in program.stages:
        graph = stage.module.graph
        takes = tuple(n.name for n in graph.nodes if n.op == "placeholder")
        returned = graph.output_node().args[0]
        gives = tuple(v.name for v in (returned if isinstance(returned, tuple | list) else (returned,)))  # type: ignore[union-attr]
        if takes != stage.inputs:
            yield Violation(f"the code of stage {stage.index} takes {takes}, and is given {stage.inputs}")
        moved = {n.name: n.args[0].name for n in graph.nodes if n.target is transfer}
        if tuple(moved.get(name, name) for name in gives) != stage.outputs:
            yield Violation(
                f"the code of stage {stage.index} gives {gives}, and is said to give {stage.outputs}"
            )


def _complete(model: nn.Module, traced: Traced, program: Program) -> Found:
    nodes = {n.name: n for n in compute_nodes(traced.graph)}
    owner: dict[str, int] = {}
    for stage in program.stages:
        for name in stage.nodes:
            if name in owner or name not in nodes:
                yield Violation(
                    f"{name!r} is said to be in stage {stage.index}, and in {owner.get(name, 'none')}"
                )
            owner[name] = stage.index
    for name, node in nodes.items():
        if name not in owner:
            yield Violation(f"no stage is said to compute {name!r}", node, traced.facts[name].source)


def _same_graph(model: nn.Module, traced: Traced, program: Program) -> Found:
    split = inline(program)
    ours, theirs = structure(split), structure(traced.graph)
    index = first_difference(ours, theirs)
    if index is not None:
        rows = [list(g.nodes)[index : index + 1] for g in (split, traced.graph)]
        shown = [row[0].format_node() if row else "nothing" for row in rows]
        node = rows[1][0] if rows[1] else None
        source = traced.facts[node.name].source if node is not None and node.name in traced.facts else None
        yield Violation(f"node {index} of the split is {shown[0]}, of the model {shown[1]}", node, source)


def _contexts(model: nn.Module, traced: Traced, program: Program) -> Found:
    nodes = compute_nodes(traced.graph)
    opened = open_contexts(nodes)
    position = 0
    for stage in program.stages:
        before = opened[position]
        position += len(stage.nodes)
        after = opened[min(position, len(nodes))]
        graph = list(stage.module.graph.nodes)
        own = [
            i
            for i, n in enumerate(graph)
            if not (n.meta.get("again") or n.op in ("placeholder", "output") or n.target is transfer)
        ]
        first, last = (own[0], own[-1]) if own else (len(graph), -1)
        again = [(i, n) for i, n in enumerate(graph) if n.meta.get("again")]
        entered = [(i, made) for i, n in again if (made := enters(n)) is not None]
        left = [(i, made) for i, n in again if (made := leaves(n)) is not None]
        if [_call(made) for _, made in entered] != [_call(c) for c in before] or any(
            i > first for i, _ in entered
        ):
            yield Violation(
                f"stage {stage.index} begins inside of {[c.name for c in before]}, and does not enter them"
            )
        if [_call(made) for _, made in left] != [_call(c) for c in reversed(after)] or any(
            i < last for i, _ in left
        ):
            yield Violation(
                f"stage {stage.index} ends inside of {[c.name for c in after]}, and does not leave them"
            )


def _call(node: fx.Node) -> tuple[Any, ...]:
    return node.target, node.args, node.kwargs


def _acyclic(model: nn.Module, traced: Traced, program: Program) -> Found:
    stage_of = {name: stage.index for stage in program.stages for name in stage.nodes}
    quotient = stage_graph(stage_of, traced.graph)
    try:
        graphlib.TopologicalSorter(quotient).prepare()
    except graphlib.CycleError as error:
        yield Violation(f"stages {sorted(set(error.args[1]))} wait for each other")
    for b, sources in quotient.items():
        for a in sorted(sources):
            if a > b:
                yield Violation(f"stage {b} reads from stage {a}, which runs after it")


def _effects_together(model: nn.Module, traced: Traced, program: Program) -> Found:
    """An in-place write is seen by all that hold the value; a stage hands on detached copies of the tensor object."""
    stage_of = {name: stage.index for stage in program.stages for name in stage.nodes}
    touching: dict[int, list[fx.Node]] = {}
    for node in compute_nodes(traced.graph):
        for storage in sorted(traced.facts[node.name].storages):
            touching.setdefault(storage, []).append(node)
    lasting = {s for n in traced.graph.nodes for s in traced.facts[n.name].lasting}
    for storage, touched in touching.items():
        writing = [i for i, n in enumerate(touched) if storage in traced.facts[n.name].writes]
        if not writing:
            continue
        bound = touched if storage in lasting else touched[: writing[-1] + 1]
        writer = touched[writing[0]]
        for node in bound:
            if stage_of.get(node.name) != stage_of.get(writer.name):
                yield Violation(
                    f"{writer.name!r} writes to what {node.name!r} sees, in another stage",
                    writer,
                    traced.facts[writer.name].source,
                )


def _effects_known(model: nn.Module, traced: Traced, program: Program) -> Found:
    """Order, random numbers and rollback in the runtime go by these words."""
    for stage in program.stages:
        facts = [traced.facts[name] for name in stage.nodes if name in traced.facts]
        known = (set(stage.writes), stage.stateful, stage.random, stage.rng_state, set(stage.parameters))
        real = (
            {b for f in facts for b in f.buffers},
            any(f.stateful for f in facts),
            any(f.random for f in facts),
            any(f.rng_state for f in facts),
            {p for f in facts for p in f.parameters},
        )
        words = ("writes", "stateful", "random", "rng_state", "parameters")
        for word, said, is_so in zip(words, known, real, strict=True):
            if said != is_so:
                yield Violation(f"stage {stage.index} is said to have {word} {said}, and has {is_so}")
        targets = {n.name: str(n.target) for n in traced.graph.nodes if n.op == "call_module"}
        drawing = {
            targets.get(name, name)
            for name in stage.nodes
            if name in traced.facts and traced.facts[name].random
        }
        if stage.rates and drawing != set(stage.rates):
            yield Violation(
                f"stage {stage.index} is said to draw by {set(stage.rates)} alone, and {drawing} draw"
            )


def _repeatable(model: nn.Module, traced: Traced, program: Program) -> Found:
    for stage in program.stages:
        by_name = {name: traced.facts[name] for name in stage.nodes if name in traced.facts}
        for region in region_modules(stage.module):
            inner = [n for n in region.graph.nodes if n.op not in ("placeholder", "output")]
            facts = [by_name[n.name] for n in inner if n.name in by_name]
            for node in inner:
                fact = by_name.get(node.name)
                if fact is not None and fact.stateful:
                    yield Violation(f"{node.name!r} changes state, and would do so twice", node, fact.source)
            if any(f.random for f in facts) and not region.meta.get("random"):
                yield Violation(
                    f"a region of stage {stage.index} draws random numbers, which would not be repeated"
                )
            written = {b for f in facts for b in f.buffers}
            if {_fqn(stage, name) for name in region.meta.get("writes", ())} != written:
                yield Violation(
                    f"a region of stage {stage.index} writes {sorted(written)}, and would do so twice"
                )


def _fqn(stage: Stage, name: str) -> str:
    """The model's name of a buffer in a region's code."""
    first, _, rest = name.partition(".")
    return f"{stage.paths.get(first, first)}.{rest}" if rest else stage.paths.get(first, first)


def _transfers(model: nn.Module, traced: Traced, program: Program) -> Found:
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
                {s.device for s in specs} if home < 0 else set(program.stages[home].row) if specs else set()
            )
            where = f"stage {stage.index} on {_names(set(stage.row))}"
            crosses = bool(origins) and len(origins.union(stage.row)) > 1
            if crosses and (len(moved) != 1 or len(users) != 1):
                yield Violation(
                    f"{where} reads {node.name!r} from {_names(origins)} without one transfer", node
                )
            if not crosses and moved:
                yield Violation(f"{where} transfers {node.name!r}, which is on {stage.device} already", node)
            for user in moved:
                if user.args[1] != stage.device:
                    yield Violation(f"{where} moves {node.name!r} to {user.args[1]}", user)
    plain = plain_tensors(model, traced)
    for where, owner, module in _graphs(program):
        for node in module.graph.nodes if owner is not None else ():
            assert owner is not None
            if node.op == "get_attr" and owner.paths.get(str(node.target)) in plain:
                apart = {traced.facts[node.name].value.device, *owner.row} != {owner.device}
                if apart and any(user.target is not transfer for user in node.users):
                    yield Violation(f"{where} reads {node.name!r}, a tensor that nobody moves", node)


def _devices_follow(model: nn.Module, traced: Traced, program: Program) -> Found:
    for where, stage, module in _graphs(program):
        for node in module.graph.nodes if stage is not None else ():
            assert stage is not None
            stale = device_constants(node) & traced.devices - {stage.device}
            if stale and node.target is not transfer:
                yield Violation(f"{where} on {stage.device} has {_names(stale)} in {node.name!r}", node)


def _names(devices: set[torch.device]) -> str:
    return ", ".join(sorted(map(str, devices)))


def _own_objects(model: nn.Module, traced: Traced, program: Program) -> Found:
    for stage in program.stages:
        for module in (stage.module, *region_modules(stage.module)):
            for node in module.graph.nodes:
                reads = node.op in ("call_module", "get_attr") and str(node.target) not in stage.paths
                value = getattr(module, str(node.target), None) if reads else None
                if isinstance(value, nn.Module | nn.Parameter) and not isinstance(value, fx.GraphModule):
                    yield Violation(
                        f"stage {stage.index}: self.{node.target} is not said to be the model's", node
                    )
        for name, fqn in stage.paths.items():
            holders = [stage.module, *region_modules(stage.module)]
            found = [getattr(h, name) for h in holders if hasattr(h, name)]
            expected = getattr(traced.module, traced.names[fqn])
            if not found or any(value is not expected for value in found):
                yield Violation(f"stage {stage.index}: self.{name} is not the model's {fqn}")


def _one_home(model: nn.Module, traced: Traced, program: Program) -> Found:
    home: dict[str, Stage] = {}
    for stage in program.stages:
        for fqn in (*stage.parameters, *stage.writes):
            first = home.setdefault(fqn, stage)
            if first.device != stage.device:
                yield Violation(
                    f"{fqn!r} is used on {first.device} (stage {first.index}) and {stage.device} (stage {stage.index})"
                )


def _text(model: nn.Module, traced: Traced, program: Program) -> Found:
    for where, stage, module in _graphs(program):
        if stage is not None and not (isinstance(module, StageModule) and is_current(module)):
            yield Violation(f"the text that {where} runs is not that of its graph")


RULES = (
    Rule("defined-before-use", "a value is computed before it is read", _defined),
    Rule("complete", "every operation of the model is in one stage", _complete),
    Rule("interface", "the runtime hands values over by the names that the stages declare", _interface),
    Rule(
        "same-graph",
        "the stages put together must be the traced graph: operations, targets, arguments, order of effects",
        _same_graph,
    ),
    Rule(
        "contexts",
        "a stage that begins inside of no_grad or autocast enters it again, and leaves it",
        _contexts,
    ),
    Rule("acyclic", "a stage may only read from stages before it", _acyclic),
    Rule(
        "effects-together",
        "an in-place write and all that see it are in one stage: values that travel are copies",
        _effects_together,
    ),
    Rule("effects-known", "the runtime keeps effects in order by what a stage says it does", _effects_known),
    Rule("repeatable", "what is recomputed must not change state twice, nor draw other numbers", _repeatable),
    Rule(
        "minimal-transfers",
        "one transfer for each value that changes device, none where nothing crosses",
        _transfers,
    ),
    Rule("devices-follow", "what was on the example's device is on the stage's", _devices_follow),
    Rule("own-objects", "a stage computes with the model's own modules and parameters", _own_objects),
    Rule("one-home", "a parameter or buffer has one home", _one_home),
    Rule("text", "what is shown is what runs", _text),
)
