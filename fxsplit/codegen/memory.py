"""The memory of each stage, by simulation of what is alive: better than the sums that the planner counts with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ..cost.saved import Live, live_bytes, measured_saved
from ..graph import compute_nodes
from ..ir import Assignment, Traced
from ..plan import Plan
from ..schedules.catalog import SCHEDULES, in_flight
from .checkpoints import Runs


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
    found = []
    for stage, names in enumerate(assignment.stages):
        said = assignment.forecast.stages[stage]
        here = [nodes[name] for name in names]
        live = live_bytes(saved, [here], [runs[stage]], plan.micro_batches)
        if plan.checkpoint == "except_last":
            plain = live_bytes(saved, [here], [[]], plan.micro_batches).kept
            live = except_last(live, plain, plan.micro_batches)
        share = kept_share(plan, assignment, stage)
        assert said.state is not None
        found.append(replace(said, memory=said.state + round(live.kept * share) + live.peak - live.kept))
    return replace(assignment, forecast=replace(assignment.forecast, stages=tuple(found)))


def kept_share(plan: Plan, assignment: Assignment, stage: int) -> float:
    """The part of what a batch keeps for backward that one device of a stage has at once, by the schedule."""
    schedule = SCHEDULES[plan.schedule](len(assignment.stages), plan.micro_batches, assignment.replicas)
    kept = [n for (s, _), n in zip(schedule.labels, in_flight(schedule), strict=True) if s == stage]
    apart = len(set(assignment.rows[stage])) > 1
    return (max(kept) if apart else min(sum(kept), plan.micro_batches)) / plan.micro_batches


def except_last(again: Live, plain: int, micro_batches: int) -> Live:
    """What is alive if all micro-batches but the last are recomputed.

    Args:
        again: if all of them were.
        plain: bytes that are kept if none is.
    """
    kept = again.kept * (micro_batches - 1) // micro_batches + plain // micro_batches
    return Live(kept, max(kept, again.peak - again.kept + kept))
