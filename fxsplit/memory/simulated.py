"""The memory of each stage, by simulation of what is alive: better than the sums that the planner counts with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ..cost.saved import live_bytes, measured_saved
from ..graph.ir import Assignment, Traced
from ..graph.nodes import compute_nodes
from ..plan.plan import Plan
from ..schedules.catalog import kept_shares
from .regions import Runs


def with_simulated_memory(
    model: nn.Module,
    traced: Traced,
    assignment: Assignment,
    plan: Plan,
    runs: Sequence[Runs],
    inputs: Sequence[torch.Tensor],
) -> Assignment:
    """The assignment with the memory of its forecast as simulated for a batch like the example, where it was counted."""
    if any(s.state is None for s in assignment.forecast.stages) or plan.optimizer_states is None:
        return assignment
    saved = measured_saved(model, traced, inputs)
    nodes = {node.name: node for node in compute_nodes(traced.graph)}
    count = plan.micro_batches
    schedule = plan.schedule_for(len(assignment.stages), count, assignment.replicas)
    shares, busiest = (kept_shares(schedule, len(assignment.stages), count, of) for of in (sum, max))
    found = []
    for stage, names in enumerate(assignment.stages):
        said = assignment.forecast.stages[stage]
        here = [nodes[name] for name in names]
        live = live_bytes(saved, [here], [runs[stage]], plan.micro_batches)
        if plan.recomputation.first_whole:
            plain = live_bytes(saved, [here], [[]], plan.micro_batches).kept
            live = live.except_last(plain, plan.micro_batches)
        apart = len(set(assignment.rows[stage])) > 1
        share = (busiest if apart else shares)[stage]
        assert said.state is not None
        found.append(replace(said, memory=said.state + round(live.kept * share) + live.peak - live.kept))
    return replace(assignment, forecast=replace(assignment.forecast, stages=tuple(found)))
