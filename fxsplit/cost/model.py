"""What the partitioner weighs: figures of every node, and the work that a plan's cost makes of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import PlanError
from ..graph import compute_nodes
from ..hardware import Device
from ..ir import Traced
from ..plan import Plan
from .measured import measured_seconds
from .saved import Saved
from .static import parameter_bytes

# Backward computes a gradient for each of the two operands of a product.
BACKWARD = 2


@dataclass(frozen=True)
class NodeCost:
    """The figures of one node, for the whole example batch.

    Attributes:
        name: of the node.
        module_path: FQN of the module that runs it.
        parameters: bytes of the parameters that it reads, those that an earlier node has read not counted.
        output: bytes of its value.
        moved: bytes that it reads and writes: operands, parameters and its value; 0 for a view.
        saved: bytes that are kept for its backward, those that an earlier node keeps not counted.
        flops: floating point operations of its forward.
    """

    name: str
    module_path: str
    parameters: int
    output: int
    moved: int
    saved: int
    flops: int


def node_costs(model: nn.Module, traced: Traced, saved: Saved) -> dict[str, NodeCost]:
    """The figures of each node.

    Args:
        saved: what one forward of the example leaves behind.
    """
    facts, parameters = traced.facts, parameter_bytes(model, traced)
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    kept: set[int] = set()
    found = {}
    for node in compute_nodes(traced.graph):
        fact, here = facts[node.name], saved.by_node[node.name]
        read = {key for operand in node.all_input_nodes for key in saved.values.get(operand.name, {})}
        writes = sum(size for key, size in saved.values[node.name].items() if key not in read)
        operands = sum(facts[operand.name].nbytes for operand in node.all_input_nodes)
        own = sum(sizes[p] for p in fact.parameters) if node.op == "call_module" else 0
        in_place = any(fact.writes)
        found[node.name] = NodeCost(
            node.name,
            fact.module_path,
            int(parameters[node.name]),
            fact.nbytes,
            operands + own + fact.nbytes if (writes or in_place) and node.op != "get_attr" else 0,
            sum(size for key, size in here.items() if key not in kept),
            saved.flops[node.name],
        )
        kept |= set(here)
    return found


def roofline_seconds(cost: NodeCost, device: Device) -> float:
    """Forward and backward of a node: computing or moving bytes, whichever takes longer (Williams et al., 2009)."""
    assert device.flops is not None and device.bandwidth is not None
    return (1 + BACKWARD) * max(cost.flops / device.flops, cost.moved / device.bandwidth)


def work_of(
    model: nn.Module,
    traced: Traced,
    plan: Plan,
    inputs: Sequence[torch.Tensor],
    figures: Mapping[str, NodeCost] | None,
    device: Device,
) -> dict[str, float]:
    """Node name → what it adds to the load of its stage on this device.

    Args:
        figures: of each node; None is enough for the costs ``"params"`` and ``"time"`` and for given seconds.

    Raises:
        PlanError: the cost can't be had for this model, or is no number.
    """
    cost = plan.cost
    nodes = [node.name for node in compute_nodes(traced.graph)]
    if cost == "params":
        return parameter_bytes(model, traced)
    if cost == "time":
        if any(t.is_meta for t in (*inputs, *model.parameters())):
            raise PlanError(
                'cost="time" runs the model, and a model on the meta device cannot be run',
                remedy='cost="roofline", hardware="A100-80GB"',
            )
        return measured_seconds(model, traced, inputs)
    if isinstance(cost, Mapping):
        free = {node.name for node in compute_nodes(traced.graph) if node.op == "get_attr"}
        missing = [name for name in nodes if name not in cost and name not in free]
        if missing:
            raise PlanError(
                f"cost= has no seconds for {missing[0]!r} and {len(missing) - 1} more nodes of the graph",
                remedy="the costs of a pipeline of the same model: cost=pipe.assignment.costs",
            )
        return {name: float(cost.get(name, 0.0)) for name in nodes}
    assert figures is not None
    if cost == "flops":
        return {name: float((1 + BACKWARD) * figures[name].flops) for name in nodes}
    if cost == "memory":
        copies = parameter_copies(plan.optimizer_states)
        training = plan.optimizer_states is not None
        return {n: float(copies * figures[n].parameters + training * figures[n].saved) for n in nodes}
    if cost == "roofline":
        return {name: roofline_seconds(figures[name], device) for name in nodes}
    assert callable(cost)
    found = {}
    for name in nodes:
        seconds = cost(figures[name])
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not number or not 0 <= seconds < math.inf:
            raise PlanError(
                f"cost= returned {seconds!r} for {figures[name]}", remedy="a function that returns seconds"
            )
        found[name] = float(seconds)
    return found


def needs_figures(plan: Plan) -> bool:
    """Whether the plan asks for more than parameters and times: then the example is run once to count."""
    limited = plan.max_memory is not None or any(d.memory is not None for d in plan.described())
    counted = callable(plan.cost) or plan.cost in ("flops", "memory", "roofline")
    return counted or (limited and plan.device_map is None)


def unit_of(plan: Plan) -> str:
    """What the loads of this plan are in: ``"bytes"``, ``"FLOPs"`` or ``"s"``."""
    if isinstance(plan.cost, str):
        return {"params": "bytes", "memory": "bytes", "flops": "FLOPs"}.get(plan.cost, "s")
    return "s"


def name_of(plan: Plan) -> str:
    """The cost in one word."""
    if isinstance(plan.cost, str):
        return plan.cost
    return "given seconds" if isinstance(plan.cost, Mapping) else getattr(plan.cost, "__name__", "a function")


def parameter_copies(optimizer_states: int | None) -> int:
    """How many values are kept for each parameter: itself, its gradient and the optimizer's."""
    return 1 if optimizer_states is None else 2 + optimizer_states
