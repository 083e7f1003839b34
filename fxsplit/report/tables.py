"""The stage table: what the plan came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from ..ir import Assignment, Program, Traced
from ..plan import Budget, Plan


def stage_table(
    plan: Plan,
    traced: Traced,
    assignment: Assignment,
    program: Program,
    sizes: Mapping[str, int],
    bubble: float,
) -> str:
    """One row a stage, and the predicted bubble below. The same bytes for the same plan, in every process.

    Args:
        sizes: parameter FQN → bytes.
        bubble: predicted idle share of the workers.
    """
    made_by = program.producers()
    seen: set[str] = set()
    rows = []
    for stage, load in zip(program.stages, assignment.loads, strict=True):
        shared = [p for p in stage.parameters if p in seen]
        seen.update(stage.parameters)
        owned = sum(sizes[p] for p in stage.parameters if p not in shared)
        crossing = [v for v in stage.inputs if made_by[v] >= 0]
        rows.append(
            {
                "stage": stage.index,
                "device": str(stage.device),
                "modules": _span(stage.modules),
                "nodes": len(stage.nodes),
                "parameters": _bytes(owned) + (f" + {len(shared)} shared" if shared else ""),
                "load": f"{load * 1e3:.2f} ms"
                if assignment.cost == "time"
                else _share(load, assignment.loads),
                "in": _bytes(sum(traced.facts[v].nbytes for v in crossing)),
                "out": _bytes(sum(traced.facts[v].nbytes for v in stage.outputs)),
            }
        )
    lines = [tabulate(rows, headers="keys", disable_numparse=True)]
    lines.append(
        f"weighed by {assignment.cost}; {plan.schedule} with {plan.micro_batches} micro-batches, "
        f"{plan.replicas} replica{'s' if plan.replicas != 1 else ''}, checkpoint {_policy(plan.checkpoint)}; "
        f"predicted bubble {bubble:.1%}"
    )
    lines += [f"kept whole: {path} ({why})" for path, why in traced.kept_whole.items()]
    return "\n".join(lines)


def _span(modules: tuple[str, str]) -> str:
    first, last = (m or "(model)" for m in modules)
    return first if first == last else f"{first} … {last}"


def _bytes(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    unit, scale = next((u, 1024**i) for i, u in ((3, "GiB"), (2, "MiB"), (1, "KiB")) if count >= 1024**i)
    return f"{count / scale:.1f} {unit}"


def _share(load: float, loads: Sequence[float]) -> str:
    return f"{load / sum(loads):.1%}" if sum(loads) else "0.0%"


def _policy(checkpoint: Any) -> str:
    if isinstance(checkpoint, tuple):
        return ", ".join(checkpoint)
    if isinstance(checkpoint, Budget):
        return f"within {checkpoint.nbytes:_} bytes a device"
    return "by a function" if callable(checkpoint) else str(checkpoint)
