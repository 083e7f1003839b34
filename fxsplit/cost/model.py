"""What the partitioner weighs: the figures of every node, and the loads that a plan's cost makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx, nn

from ..errors import PlanError
from ..graph.ir import Traced
from ..graph.nodes import compute_nodes, is_within
from ..plan.costs import Cost, NodeCost, Passes
from ..plan.hardware import Device
from ..plan.plan import Plan
from .measured import measured_seconds
from .saved import Saved, measured_saved


def figures_of(
    model: nn.Module, traced: Traced, plan: Plan, inputs: Sequence[torch.Tensor]
) -> tuple[dict[str, NodeCost], Saved | None]:
    """The figures of each node, as far as the plan asks for them, and what one forward leaves behind if it was run."""
    cost = plan.weighing
    saved = measured_saved(model, traced, inputs) if cost.needs == "counts" or _limited(plan) else None
    seconds = _seconds(model, traced, inputs) if cost.needs == "seconds" else {}
    return node_costs(model, traced, saved, seconds), saved


def _limited(plan: Plan) -> bool:
    """Whether there is a limit of memory that the stages have to keep."""
    limited = plan.max_memory is not None and plan.device_map is None
    return limited or any(d.memory is not None for d in plan.described())


def _seconds(model: nn.Module, traced: Traced, inputs: Sequence[torch.Tensor]) -> dict[str, float]:
    if any(t.is_meta for t in (*inputs, *model.parameters())):
        raise PlanError(
            'cost="time" runs the model, and a model on the meta device cannot be run',
            remedy='cost="roofline", hardware="A100-80GB"',
        )
    return measured_seconds(model, traced, inputs)


def node_costs(
    model: nn.Module, traced: Traced, saved: Saved | None, seconds: Mapping[str, float] | None = None
) -> dict[str, NodeCost]:
    """The figures of each node.

    Args:
        saved: what one forward of the example leaves behind; without it the counts are 0.
        seconds: of forward and backward, measured.
    """
    facts = traced.facts
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    kept: set[int] = set()
    known: set[str] = set()
    found = {}
    for node in compute_nodes(traced.graph):
        fact = facts[node.name]
        new = [p for p in fact.parameters if p not in known]
        known.update(new)
        here = saved.by_node[node.name] if saved is not None else {}
        found[node.name] = NodeCost(
            name=node.name,
            module_path=fact.module_path,
            parameters=sum(sizes[p] for p in new),
            output=fact.nbytes,
            moved=_moved(traced, node, saved, sizes) if saved is not None else 0,
            saved=sum(size for key, size in here.items() if key not in kept),
            flops=saved.flops[node.name] if saved is not None else 0,
            trained=sum(sizes[p] for p in new if p in trained),
            seconds=(seconds or {}).get(node.name, 0.0),
        )
        kept |= set(here)
    return found


def _moved(traced: Traced, node: fx.Node, saved: Saved, sizes: Mapping[str, int]) -> int:
    """The bytes that a node reads and writes."""
    fact = traced.facts[node.name]
    read = {key for operand in node.all_input_nodes for key in saved.values.get(operand.name, {})}
    writes = sum(size for key, size in saved.values[node.name].items() if key not in read)
    if node.op == "get_attr" or not (writes or any(fact.writes)):
        return 0
    operands = sum(traced.facts[operand.name].nbytes for operand in node.all_input_nodes)
    return (
        operands + fact.nbytes + (sum(sizes[p] for p in fact.parameters) if node.op == "call_module" else 0)
    )


def work_of(
    model: nn.Module, traced: Traced, plan: Plan, figures: Mapping[str, NodeCost], device: Device
) -> dict[str, float]:
    """Node name → what it adds to the load of its stage on this device.

    Raises:
        PlanError: the user's seconds do not fit the nodes, or are no numbers.
    """
    cost: Cost = plan.weighing
    reads = [node.name for node in compute_nodes(traced.graph) if node.op == "get_attr"]
    return cost.loads(figures, reads, _passes(model, traced, plan), device)


def _passes(model: nn.Module, traced: Traced, plan: Plan) -> dict[str, Passes]:
    """What a step does with each node, by the checkpoint policy as far as it is known beforehand."""
    share, chosen = plan.recomputation.share(plan.micro_batches), plan.recomputation.paths(model)
    training, copies = plan.optimizer_states is not None, parameter_copies(plan.optimizer_states)
    facts, found = traced.facts, dict[str, Passes]()
    for node in compute_nodes(traced.graph):
        again = share or float(any(is_within(facts[node.name].module_path, path) for path in chosen))
        found[node.name] = Passes(training, copies, again)
    return found


def parameter_copies(optimizer_states: int | None) -> int:
    """How many values are kept for each parameter: itself, its gradient and the optimizer's."""
    return 1 if optimizer_states is None else 2 + optimizer_states
