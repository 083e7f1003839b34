"""A parameter that is read on two devices: it has one home, and travels to the other readers like any value.

Its home is the device of the key of the user's map that names it, and otherwise where it is read first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from ..graph.ir import Assignment, NodeFacts, TensorSpec, Traced
from ..graph.nodes import compute_nodes, resolve, run_under
from ..inserted.ops import call_with
from ..modules.names import local_names
from ..plan.plan import Plan
from .assign import partition
from .device_map import output_homes, said_homes
from .weights import check_fits, free_memory
from .words import device_map_for
from .written import written_as_map


def partition_with_homes(
    model: nn.Module,
    traced: Traced,
    plan: Plan,
    inputs: Sequence[torch.Tensor],
    room: float = 1.0,
) -> tuple[Traced, Assignment]:
    """The partition, and the program with one home for each parameter.

    Args:
        room: the part of each memory limit that may be planned with.

    Raises:
        PartitionError: as `partition`; or the weights do not fit where a device map puts them.
    """
    if isinstance(plan.device_map, str):
        limits = plan.max_memory or free_memory(model)
        no_split = [str(name) for name in plan.no_split_module_classes or ()]  # type: ignore[union-attr]
        placed = device_map_for(model, traced, plan.device_map, limits, no_split)
        plan = plan.replace(device_map=placed, no_split_module_classes=None)
    ordered, assignment = partition(model, traced, plan, inputs, room)
    apart = on_two_devices(traced, assignment)
    if apart:
        traced = passed_by_value(model, traced, apart, _early(model, traced, assignment, apart, plan))
        ordered, assignment = partition(model, traced, plan, inputs, room)
    if plan.device_map is not None and plan.max_memory is not None:
        check_fits(model, ordered, assignment, plan.max_memory)
    device_map = _as_map(model, traced, ordered, assignment, plan)
    homes = output_homes(model, ordered, device_map)
    return ordered, replace(assignment, device_map=device_map, homes=homes, offload=plan.offload)


def _as_map(
    model: nn.Module, traced: Traced, ordered: Traced, assignment: Assignment, plan: Plan
) -> Mapping[str, Any] | str:
    if isinstance(plan.device_map, Mapping):
        return dict(plan.device_map)
    if ordered is not traced and len(set(assignment.devices)) > 1:
        return "it runs the program in another order"
    return written_as_map(model, ordered, assignment)


def on_two_devices(traced: Traced, assignment: Assignment) -> list[str]:
    """The parameters that stages on different devices read."""
    homes: dict[str, set[torch.device]] = {}
    for device, names in zip(assignment.devices, assignment.stages, strict=True):
        for name in names:
            for parameter in traced.facts[name].parameters:
                homes.setdefault(parameter, set()).add(device)
    return [parameter for parameter, devices in homes.items() if len(devices) > 1]


Early = Mapping[str, tuple[torch.device, str | None]]


def _early(
    model: nn.Module, traced: Traced, assignment: Assignment, parameters: Sequence[str], plan: Plan
) -> Early:
    """The parameters whose home the user's map names, and that another device reads first: that home, and after which
    node on it they are read; None for at the very beginning."""
    stages, found = assignment.stage_of(), dict[str, tuple[torch.device, str | None]]()
    nodes = [(n.name, assignment.devices[stages[n.name]]) for n in compute_nodes(traced.graph)]
    for parameter, home in said_homes(model, plan.device_map).items():
        readers = [i for i, (name, _) in enumerate(nodes) if parameter in traced.facts[name].parameters]
        if parameter in parameters and nodes[readers[0]][1] != home:
            before = [name for name, device in nodes[: readers[0]] if device == home]
            found[parameter] = (home, before[-1] if before else None)
    return found


def passed_by_value(
    model: nn.Module, traced: Traced, parameters: Sequence[str], early: Early | None = None
) -> Traced:
    """The same program in which each of `parameters` is read once, where it is needed first, and then handed on.

    Those in `early` are read before that, where their home is.

    A module that holds such a parameter is called with it: ``call_with(self.head, {"weight": wte_weight}, x)``. There
    is one Parameter with one gradient; nothing is copied but what crosses.
    """
    missing = [p for p in parameters if p not in traced.names]
    names = local_names([*traced.names, *missing])  # those that are there keep theirs
    graph, facts = fx.Graph(), dict(traced.facts)
    values: dict[fx.Node, fx.Node] = {}
    shared: dict[str, fx.Node] = {}

    def home(parameter: str, reader: fx.Node) -> fx.Node:
        if parameter not in shared:
            node = graph.get_attr(parameter)
            node.meta.update(reader.meta, shared=True)
            if early and parameter in early:
                node.meta["home"] = early[parameter][0]
            tensor = resolve(model, parameter)
            spec = TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.device)
            fact = traced.facts[reader.name]
            facts[node.name] = NodeFacts(fact.module_path, fact.source, value=spec, parameters=(parameter,))
            shared[parameter] = node
        return shared[parameter]

    def readers(parameter: str) -> Iterator[fx.Node]:
        return (n for n in traced.graph.nodes if parameter in traced.facts[n.name].parameters)

    begins = next(iter(compute_nodes(traced.graph)), None)
    for node in traced.graph.nodes:
        if node is begins:
            for parameter in [p for p, (_, after) in (early or {}).items() if after is None]:
                home(parameter, next(readers(parameter)))
        read = (
            [p for p in traced.facts[node.name].parameters if p in parameters] if node.op != "output" else []
        )
        if not read:
            values[node] = graph.node_copy(node, values.__getitem__)
        elif node.op == "get_attr":
            values[node] = home(read[0], node)
        else:
            values[node] = _called_with(model, graph, node, values, {p: home(p, node) for p in read}, facts)
        for parameter in [p for p, (_, after) in (early or {}).items() if after == node.name]:
            home(parameter, next(readers(parameter)))
    objects = {
        t: getattr(traced.module, traced.names[t]) if t in traced.names else resolve(model, t) for t in names
    }
    used = {str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr")}
    objects = {target: value for target, value in objects.items() if target in used}
    kept = {target: names[target] for target in objects}
    return replace(traced, graph=graph, facts=facts, names=kept, module=run_under(graph, kept, objects))


def _called_with(
    model: nn.Module,
    graph: fx.Graph,
    node: fx.Node,
    values: dict[fx.Node, fx.Node],
    read: dict[str, fx.Node],
    facts: dict[str, NodeFacts],
) -> fx.Node:
    module = resolve(model, str(node.target))
    tensors = {id(resolve(model, p)): value for p, value in read.items()}
    given = {
        name: tensors[id(t)]
        for name, t in module.named_parameters(remove_duplicate=False)
        if id(t) in tensors
    }
    owner = graph.create_node("get_attr", str(node.target), name=f"{node.name}_module")
    owner.meta.update(node.meta)
    fact = facts[node.name]
    facts[owner.name] = NodeFacts(fact.module_path, fact.source)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    call = graph.create_node("call_function", call_with, (owner, given, *args), kwargs, name=node.name)
    call.meta.update(node.meta)
    facts[call.name] = replace(fact, parameters=tuple(p for p in fact.parameters if p not in read))
    return call
