"""The stage table: what the plan came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tabulate import tabulate
from torch import nn

from ..graph.ir import Assignment, Traced
from ..graph.nodes import module_paths
from ..plan.plan import Plan
from ..plan.sizes import in_units


def stage_rows(traced: Traced, assignment: Assignment, sizes: Mapping[str, int]) -> list[dict[str, str]]:
    """What each stage has and costs: heading → text.

    Args:
        sizes: parameter FQN → bytes.
    """
    forecast = assignment.forecast
    seen: set[str] = set()
    rows = []
    for index, (names, load, said) in enumerate(
        zip(assignment.stages, assignment.loads, forecast.stages, strict=True)
    ):
        read = list(dict.fromkeys(p for name in names for p in traced.facts[name].parameters))
        shared = [p for p in read if p in seen]
        seen.update(read)
        owned = sum(sizes[p] for p in read if p not in shared)
        row = {
            "stage": str(index),
            "device": _devices(assignment.rows[index]),
            "modules": _span(module_paths(traced.facts, names)),
            "nodes": str(len(names)),
            "parameters": in_units(owned) + (f" + {len(shared)} shared" if shared else ""),
        }
        if said.flops is not None:
            row["FLOP"] = _scaled(said.flops)
        if said.memory is not None:
            limit = f" of {in_units(said.limit)}" if said.limit is not None else ""
            row["memory"] = in_units(said.memory) + limit
        row["in"], row["out"] = in_units(said.bytes_in), in_units(said.bytes_out)
        row["load"] = _load(load, forecast.unit)
        rows.append(row)
    return rows


def stage_table(plan: Plan, traced: Traced, assignment: Assignment, sizes: Mapping[str, int]) -> str:
    """One row a stage, and below what may be claimed. The same bytes for the same plan, in every process.

    Args:
        sizes: parameter FQN → bytes.
    """
    forecast = assignment.forecast
    rows = stage_rows(traced, assignment, sizes)
    heaviest = max(assignment.loads)
    gap = heaviest / forecast.bound - 1 if forecast.bound else 0.0
    lines = [
        tabulate(rows, headers="keys", disable_numparse=True),
        f"load: {assignment.cost}; heaviest {_load(heaviest, forecast.unit)}, no partition below "
        f"{_load(forecast.bound, forecast.unit)}, gap {gap:.1%}; {forecast.how}",
        f"{plan.schedule_name} with {plan.micro_batches} micro-batch{'es' if plan.micro_batches != 1 else ''}, "
        f"{f'{plan.workers} workers for the stages, ' if plan.workers else ''}"
        f"{_replicas(assignment.replicas)}, checkpoint {plan.checkpoint}; "
        f"predicted bubble {forecast.bubble:.1%}; {in_units(forecast.cut_bytes)} travel between stages",
    ]
    lines += [forecast.advice] if forecast.advice else []
    lines += [f"kept whole: {path} ({why})" for path, why in traced.kept_whole.items()]
    return "\n".join(lines)


def sizes_of(model: nn.Module) -> dict[str, int]:
    """Parameter FQN → bytes."""
    return {name: p.numel() * p.element_size() for name, p in model.named_parameters()}


def html_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows with the same headings, as HTML."""
    return str(tabulate(rows, headers="keys", tablefmt="html", disable_numparse=True))


def _devices(row: Sequence[torch.device]) -> str:
    """One device, or those of the replicas."""
    names = list(dict.fromkeys(map(str, row)))
    return ", ".join(names) + (f" x {len(row)}" if len(row) > 1 and len(names) == 1 else "")


def _replicas(counts: Sequence[int]) -> str:
    if len(set(counts)) == 1:
        return f"{counts[0]} replica{'s' if counts[0] != 1 else ''}"
    return f"{', '.join(map(str, counts))} replicas"


def _load(load: float, unit: str) -> str:
    if unit == "s":
        return in_seconds(load)
    if unit == "nodes":
        return f"{load:g} node{'s' if load != 1 else ''}"
    return in_units(load) if unit == "bytes" else f"{_scaled(load)}FLOP"


def in_seconds(seconds: float) -> str:
    """``3.100 ms``."""
    scale, name = next(((s, n) for s, n in ((1, "s"), (1e3, "ms")) if seconds * s >= 1), (1e6, "µs"))
    return f"{seconds * scale:.3f} {name}"


def _scaled(count: float) -> str:
    """``3.1 G``."""
    for scale, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{count / scale:.1f} {prefix}"
    return f"{count:.0f} "


def _span(modules: tuple[str, str]) -> str:
    first, last = (m or "(model)" for m in modules)
    return first if first == last else f"{first} … {last}"
