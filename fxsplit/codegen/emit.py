"""Write the graph of a stage: placeholders, transfers, the model's own nodes, checkpoint regions, output."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import fx, nn

from ..compat import tree_leaves
from ..graph.effects import rated_layers
from ..graph.ir import Assignment, Program, Stage, TensorSpec, Traced
from ..graph.nodes import (
    bind,
    compute_nodes,
    device_constants,
    enters,
    module_paths,
    open_contexts,
    output_values,
    plain_tensors,
)
from ..inserted.ops import checkpoint, transfer
from ..memory.regions import Runs
from ..passes import named
from .extract import Part, extract


@named("generate", lambda program: "\n\n".join(stage.code for stage in program.stages))
def generate(
    model: nn.Module, traced: Traced, assignment: Assignment, regions: Sequence[Runs] | None = None
) -> Program:
    """Generate the stages and the root.

    *Requires* an assignment of every node. *Ensures* that the stages, put back into one graph without
    transfer and checkpoint nodes, are the traced graph (`verify` proves it).

    Args:
        regions: per stage the runs of its nodes that become checkpoint regions; by default none.
    """
    parts = extract(traced, assignment)
    names = traced.names
    devices = dict(zip((p.index for p in parts), assignment.devices, strict=True))
    rows = dict(zip((p.index for p in parts), assignment.rows, strict=True))
    made_by = {node.name: part.index for part in parts for node in part.nodes}
    plain = plain_tensors(model, traced)
    stages = []
    for part in parts:
        writer = _StageWriter(traced, part, rows, made_by, names, plain)
        module = writer.write(regions[part.index] if regions is not None else [])
        facts = [traced.facts[n.name] for n in part.nodes]
        parameters = tuple(dict.fromkeys(p for fact in facts for p in fact.parameters))
        used = dict.fromkeys(str(n.target) for n in part.nodes if n.op in ("call_module", "get_attr"))
        modules = module_paths(traced.facts, [n.name for n in part.nodes])
        stage = Stage(
            index=part.index,
            module=module,
            device=devices[part.index],
            inputs=tuple(n.name for n in part.inputs),
            outputs=tuple(n.name for n in part.outputs),
            paths={names[fqn]: fqn for fqn in used if fqn not in traced.constants},
            nodes=tuple(n.name for n in part.nodes),
            parameters=parameters,
            writes=tuple(dict.fromkeys(b for fact in facts for b in fact.buffers)),
            changes=tuple(dict.fromkeys(fact.module_path for fact in facts if fact.stateful)),
            random=any(fact.random for fact in facts),
            rates=_rates(traced, part),
            rng_state=any(fact.rng_state for fact in facts),
            modules=modules,
            header=_header(model, part, assignment, devices, made_by, modules, parameters),
            row=tuple(rows[part.index]),
            offloaded=assignment.offload and devices[part.index].type != "cpu",
        )
        stages.append(stage)
    inputs = tuple(n.name for n in traced.graph.nodes if n.op == "placeholder")
    outputs = tuple(v.name if isinstance(v, fx.Node) else (v,) for v in output_values(traced.graph))
    aliases = _aliases(traced, parts, inputs)
    return Program(tuple(stages), _root(traced, stages), inputs, outputs, aliases, assignment.homes)


def _aliases(traced: Traced, parts: Sequence[Part], inputs: Sequence[str]) -> dict[str, str]:
    crossing = dict.fromkeys((*inputs, *(n.name for part in parts for n in (*part.inputs, *part.outputs))))
    first: dict[str, str] = {}
    found = {}
    for node in traced.graph.nodes:
        if node.name in crossing:
            tensor = node.name
            while (alias := traced.facts[tensor].alias) is not None:
                tensor = alias
            if first.setdefault(tensor, node.name) != node.name:
                found[node.name] = first[tensor]
    return found


def _rates(traced: Traced, part: Part) -> tuple[str, ...]:
    drawing = [n for n in part.nodes if traced.facts[n.name].random]
    layers = [
        getattr(traced.module, traced.names[str(n.target)], None) if n.op == "call_module" else None
        for n in drawing
    ]
    if not all(isinstance(layer, nn.Module) and rated_layers(layer) for layer in layers):
        return ()
    return tuple(dict.fromkeys(str(n.target) for n in drawing))


class _StageWriter:
    """Writes one stage; `values` maps each traced node to the node that holds its value in this stage."""

    def __init__(
        self,
        traced: Traced,
        part: Part,
        rows: Mapping[int, Sequence[torch.device]],
        made_by: Mapping[str, int],
        names: Mapping[str, str],
        plain: Set[str],
    ) -> None:
        self.plain = plain
        self.traced, self.part, self.made_by, self.names = traced, part, made_by, names
        self.rows, self.here = rows, rows[part.index][0]
        self.attributes: dict[str, object] = {}
        every = compute_nodes(traced.graph)
        contexts = open_contexts(every)
        first = every.index(part.nodes[0])
        self.open = contexts[first], contexts[first + len(part.nodes)]

    def write(self, runs: Runs) -> fx.GraphModule:
        graph = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        for node in self.part.inputs:
            values[node] = _placeholder(graph, node.name)
        for node in self.part.inputs:
            if self._crosses(node):
                self._transfer(graph, values, node)
        for context in self.open[0]:
            self._enter_again(graph, values, context)
        nodes = self.part.nodes
        position = 0
        for number, (start, end) in enumerate(runs):
            for node in nodes[position:start]:
                self._copy(graph, values, self.attributes, node)
            self._checkpoint(graph, values, nodes[start:end], number)
            position = end
        for node in nodes[position:]:
            self._copy(graph, values, self.attributes, node)
        for context in reversed(self.open[1]):
            left = graph.call_method("__exit__", (values[context], None, None, None))
            left.meta["again"] = True
        graph.output(_bare_if_single([values[n] for n in self.part.outputs]))
        return bind(graph, self.attributes, f"Stage{self.part.index}")

    def _enter_again(self, graph: fx.Graph, values: dict[fx.Node, fx.Node], context: fx.Node) -> None:
        """A stage that begins inside of a context enters it as the model did; the stage before has left it."""
        self._copy(graph, values, self.attributes, context)
        made = [values[context]]
        if enters(context) is None:
            made.append(graph.call_method("__enter__", (values[context],)))
        for node in made:
            node.meta["again"] = True

    def _crosses(self, node: fx.Node) -> bool:
        """Whether any replica reads it on another device than where it may have been made."""
        here = set(self.rows[self.part.index])
        specs = [s for s in tree_leaves(self.traced.facts[node.name].value) if isinstance(s, TensorSpec)]
        if node.name in self.made_by:
            return bool(specs) and len(here.union(self.rows[self.made_by[node.name]])) > 1
        return any(here != {s.device} for s in specs)

    def _copy(
        self, graph: fx.Graph, values: dict[fx.Node, fx.Node], attributes: dict[str, object], node: fx.Node
    ) -> None:
        copy = graph.node_copy(node, lambda operand: values[operand])
        if device_constants(node) & self.traced.devices:
            copy.args = fx.node.map_aggregate(copy.args, self._follow)
            copy.kwargs = fx.node.map_aggregate(copy.kwargs, self._follow)
        if node.op in ("call_module", "get_attr"):
            copy.target = self.names[str(node.target)]
            attributes[copy.target] = getattr(self.traced.module, copy.target)
        values[node] = copy
        if node.op == "get_attr" and str(node.target) in self.plain and self._may_be_elsewhere(node):
            self._transfer(graph, values, node)

    def _transfer(self, graph: fx.Graph, values: dict[fx.Node, fx.Node], node: fx.Node) -> None:
        name = f"{node.name}_{str(self.here).replace(':', '_')}"
        operands = (values[node], self.here)
        values[node] = graph.create_node("call_function", transfer, operands, name=name)

    def _may_be_elsewhere(self, node: fx.Node) -> bool:
        """Whether a tensor that nobody moves is on another device, or may be after it was set anew."""
        spec = self.traced.facts[node.name].value
        return len({spec.device}.union(*self.rows.values())) > 1

    def _follow(self, value: Any) -> Any:
        """`x.device` was the example's device when it was captured: it is the stage's now."""
        return self.here if isinstance(value, torch.device) and value in self.traced.devices else value

    def _checkpoint(
        self, graph: fx.Graph, values: dict[fx.Node, fx.Node], run: Sequence[fx.Node], number: int
    ) -> None:
        inside = set(run)
        order = {node: i for i, node in enumerate(self.traced.graph.nodes)}
        reads = sorted({o for n in run for o in n.all_input_nodes if o not in inside}, key=order.__getitem__)
        wanted, outside = set(self.part.outputs), set(self.part.nodes) - inside
        gives = [n for n in run if n in wanted or not outside.isdisjoint(n.users)]
        region_graph = fx.Graph()
        inner = {node: _placeholder(region_graph, values[node].name) for node in reads}
        attributes: dict[str, object] = {}
        for node in run:
            self._copy(region_graph, inner, attributes, node)
        region_graph.output(_bare_if_single([inner[n] for n in gives]))
        name = f"checkpoint_{number}"
        region = bind(region_graph, attributes, f"Stage{self.part.index}Checkpoint{number}")
        facts = [self.traced.facts[n.name] for n in run]
        region.meta["random"] = any(fact.random for fact in facts)
        region.meta["writes"] = [_local_buffer(b, run, self.names) for fact in facts for b in fact.buffers]
        region.meta["paths"] = {n: fqn for fqn, n in self.names.items() if n in attributes}
        self.attributes[name] = region
        owner = graph.create_node("get_attr", name, name=f"{name}_region")
        operands = (owner, *(values[n] for n in reads))
        single = gives[0].name if len(gives) == 1 else f"{name}_values"
        result = graph.create_node("call_function", checkpoint, operands, name=single)
        if len(gives) == 1:
            values[gives[0]] = result
        else:
            for i, node in enumerate(gives):
                values[node] = graph.create_node(
                    "call_function", operator.getitem, (result, i), name=node.name
                )


def _placeholder(graph: fx.Graph, name: str) -> fx.Node:
    return graph.create_node("placeholder", name, name=name)  # graph.placeholder would change CamelCase


def _local_buffer(fqn: str, run: Sequence[fx.Node], names: Mapping[str, str]) -> str:
    """The name under which a region finds the buffer `fqn`."""
    targets = [str(n.target) for n in run if n.op in ("call_module", "get_attr")]
    owner = max((t for t in targets if fqn == t or fqn.startswith(t + ".")), key=len)
    return names[owner] + fqn[len(owner) :]


def _bare_if_single(values: Sequence[fx.Node]) -> fx.Node | tuple[fx.Node, ...]:
    return values[0] if len(values) == 1 else tuple(values)


def _root(traced: Traced, stages: Sequence[Stage]) -> fx.GraphModule:
    graph = fx.Graph()
    values = {n.name: _placeholder(graph, n.name) for n in traced.graph.nodes if n.op == "placeholder"}
    for stage in stages:
        name = f"stage_{stage.index}"
        call = graph.create_node("call_module", name, tuple(values[v] for v in stage.inputs), name=name)
        if len(stage.outputs) == 1:
            values[stage.outputs[0]] = call
        else:
            for i, output in enumerate(stage.outputs):
                values[output] = graph.create_node("call_function", operator.getitem, (call, i), name=output)
    graph.output(tuple(values[v.name] if isinstance(v, fx.Node) else v for v in output_values(traced.graph)))
    return bind(graph, {f"stage_{s.index}": s.module for s in stages}, "Program")


def _header(
    model: nn.Module,
    part: Part,
    assignment: Assignment,
    devices: Mapping[int, torch.device],
    made_by: Mapping[str, int],
    modules: tuple[str, str],
    parameters: Sequence[str],
) -> str:
    sizes = dict(model.named_parameters())
    nbytes = sum(sizes[p].numel() * sizes[p].element_size() for p in parameters)
    first, last = (m or type(model).__name__ for m in modules)
    reads = ", ".join(f"{n.name} ({_origin(n, made_by)})" for n in part.inputs) or "nothing"
    gives = ", ".join(n.name for n in part.outputs) or "nothing"
    total = sum(assignment.loads)
    share = assignment.loads[part.index] / total if total else 1 / len(assignment.loads)
    span = first if first == last else f"{first} … {last}"
    others = list(dict.fromkeys(str(d) for d in assignment.rows[part.index] if d != devices[part.index]))
    where = f"{devices[part.index]} (replicas on {', '.join(others)})" if others else str(devices[part.index])
    if assignment.offload and devices[part.index].type != "cpu" and parameters:
        where += " (weights on cpu, fetched)"
    return (
        f"# stage {part.index} of {len(assignment.loads)} · {where} · {span} · "
        f"{nbytes / 1e6:.3f} MB parameters · {share:.0%} of {assignment.cost}\n"
        f"# reads {reads} · gives {gives}"
    )


def _origin(node: fx.Node, made_by: Mapping[str, int]) -> str:
    return f"stage {made_by[node.name]}" if node.name in made_by else "input"
