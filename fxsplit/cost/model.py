"""What the partitioner weighs: figures of every node, and the work that a plan's cost makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import PlanError
from ..graph import compute_nodes, is_within
from ..hardware import Device
from ..ir import Traced
from ..plan import Plan
from .measured import measured_seconds
from .saved import Saved
from .static import parameter_bytes

# Backward computes a gradient for each of the two operands of a product.
BACKWARD = 2
MOST_SECONDS = 1e15  # a sum of them is still a number


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
    """Forward of a node: computing or moving bytes, whichever takes longer (Williams et al., 2009)."""
    assert device.flops is not None and device.bandwidth is not None
    return max(cost.flops / device.flops, cost.moved / device.bandwidth)


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
    reads = {node.name for node in compute_nodes(traced.graph) if node.op == "get_attr"}  # they take no time
    if cost == "params":
        return parameter_bytes(model, traced)
    if isinstance(cost, Mapping):
        return _given(traced, cost)
    again = _recomputation(model, traced, plan)
    if cost == "time":
        if any(t.is_meta for t in (*inputs, *model.parameters())):
            raise PlanError(
                'cost="time" runs the model, and a model on the meta device cannot be run',
                remedy='cost="roofline", hardware="A100-80GB"',
            )
        seconds = measured_seconds(model, traced, inputs)
        times = {name: 1 + again[name] / (1 + BACKWARD) for name in nodes}
        return {name: 0.0 if name in reads else seconds[name] * times[name] for name in nodes}
    assert figures is not None
    if cost == "memory":
        copies, training = parameter_copies(plan.optimizer_states), plan.optimizer_states is not None
        states = parameter_bytes(model, traced, copies=copies)
        return {name: states[name] + training * figures[name].saved for name in nodes}
    backward = BACKWARD if plan.optimizer_states is not None else 0
    passes = {name: 1 + backward + (again[name] if backward else 0) for name in nodes}
    if cost == "flops":
        return {name: float(passes[name] * figures[name].flops) for name in nodes}
    if cost == "roofline":
        return {name: passes[name] * roofline_seconds(figures[name], device) for name in nodes}
    assert callable(cost)
    return _checked({name: 0.0 if name in reads else _called(cost, figures[name]) for name in nodes})


def _given(traced: Traced, cost: Mapping[str, float]) -> dict[str, float]:
    """The user's seconds; to read a parameter takes none."""
    nodes = {node.name: node for node in compute_nodes(traced.graph)}
    unknown = [name for name in cost if name not in nodes]
    missing = [name for name, node in nodes.items() if node.op != "get_attr" and name not in cost]
    if unknown or missing:
        raise PlanError(
            f"cost= names {unknown[0]!r}, which is no node of the graph"
            if unknown
            else f"cost= has no seconds for {len(missing)} of the graph's nodes, first {missing[0]!r}",
            remedy='the costs of a pipeline of the same model that was planned in seconds, such as by cost="time": '
            "cost=pipe.assignment.costs",
        )
    return _checked({name: float(cost.get(name, 0.0)) for name in nodes})


def _called(cost: Callable[[NodeCost], float], figures: NodeCost) -> float:
    try:
        seconds = float(cost(figures))
    except Exception as error:
        error.add_note(f"fxsplit: in cost=, for {figures}")
        raise
    if not 0 <= seconds < MOST_SECONDS:
        raise PlanError(f"cost= returned {seconds!r} for {figures}", remedy="a function that returns seconds")
    return seconds


def _checked(seconds: dict[str, float]) -> dict[str, float]:
    if not any(seconds.values()):
        raise PlanError("cost= is 0 seconds for every node", remedy='seconds, or cost="params"')
    return seconds


def _recomputation(model: nn.Module, traced: Traced, plan: Plan) -> dict[str, float]:
    """Node name → how often its forward is computed again, by the checkpoint policy as far as it is known beforehand."""
    share, chosen = plan.recomputation.share(plan.micro_batches), plan.recomputation.paths(model)
    facts = traced.facts
    return {
        node.name: share or float(any(is_within(facts[node.name].module_path, path) for path in chosen))
        for node in compute_nodes(traced.graph)
    }


def needs_figures(plan: Plan) -> bool:
    """Whether the plan asks for more than parameters and times: then the example is run once to count."""
    limited = plan.max_memory is not None and plan.device_map is None
    limited = limited or any(d.memory is not None for d in plan.described())
    return limited or callable(plan.cost) or plan.cost in ("flops", "memory", "roofline")


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
