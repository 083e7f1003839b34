"""`Traced` + `Plan` → `Assignment`: the one place that reads how the plan says to cut."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ..cost.measured import measured_seconds
from ..cost.static import parameter_bytes
from ..errors import PartitionError, did_you_mean
from ..graph import compute_nodes, cut_bytes, is_within
from ..ir import Assignment, Traced
from ..plan import Plan
from .balance import balanced_cut
from .device_map import place_nodes
from .units import Unit, bonds, find_units, sequential_units


def partition(model: nn.Module, traced: Traced, plan: Plan, inputs: Sequence[torch.Tensor]) -> Assignment:
    """Assign every node to a stage and every stage to a device.

    *Requires* a traced model; `inputs` are the flat example inputs. *Ensures* stages that are contiguous in
    program order and separate nothing that `units.bonds` holds together.

    Raises:
        PartitionError: the plan asks for more stages than there are units, cuts where nothing may be cut, or
            names a module that does not exist.
    """
    nodes = compute_nodes(traced.graph)
    units = find_units(traced)
    devices: list[torch.device] | None = None
    if plan.device_map is not None:
        starts, devices = _by_device_map(model, traced, plan, units)
    elif plan.cut is not None:
        starts = _by_paths(model, traced, plan.cut, units)
    elif plan.balance is not None:
        starts = _by_balance(model, traced, plan.balance, units)
    else:
        starts = None
    costs = measured_seconds(model, traced, inputs) if plan.cost == "time" else parameter_bytes(model, traced)
    if starts is None:
        starts = _automatic(traced, plan.stages or 1, units, costs)
    bounds = [0, *starts, len(nodes)]
    stages = tuple(tuple(n.name for n in nodes[a:b]) for a, b in itertools.pairwise(bounds))
    if devices is None:
        devices = _stage_devices(model, plan, len(stages))
    return Assignment(
        stages, tuple(devices), tuple(sum(costs[n] for n in names) for names in stages), plan.cost
    )


def _automatic(traced: Traced, count: int, units: Sequence[Unit], costs: dict[str, float]) -> list[int]:
    if count > len(units):
        raise PartitionError(
            f"stages={count}, but the graph has only {len(units)} unit{'s' if len(units) != 1 else ''} that can be cut apart",
            remedy=f"stages={len(units)} or fewer",
        )
    nodes = compute_nodes(traced.graph)
    weights = [sum(costs[n.name] for n in nodes[u.start : u.end]) for u in units]
    if not any(weights):
        weights = [float(u.end - u.start) for u in units]  # a model without parameters: count its nodes
    across = cut_bytes(traced, nodes)
    paths = [traced.facts[n.name].module_path for n in nodes]
    penalties = [(float(across[u.start]), float(_shared_depth(paths, u.start))) for u in units]
    return [units[i].start for i in balanced_cut(weights, penalties, count)]


def _shared_depth(paths: Sequence[str], position: int) -> int:
    """How many module levels a cut before this node would go through: whole modules read better."""
    if position == 0:
        return 0
    before, after = paths[position - 1].split("."), paths[position].split(".")
    return next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
        min(len(before), len(after)),
    )


def _by_balance(model: nn.Module, traced: Traced, balance: Sequence[int], units: Sequence[Unit]) -> list[int]:
    counted = sequential_units(model, traced, units)
    if sum(balance) != len(counted):
        kind = (
            "children"
            if isinstance(model, nn.Sequential)
            else "units (groups of graph nodes that can be cut apart)"
        )
        raise PartitionError(
            f"balance={list(balance)} adds up to {sum(balance)}, but {type(model).__name__} has {len(counted)} {kind}",
            remedy=f"counts that add up to {len(counted)}, or stages={len(balance)} for an automatic cut",
        )
    starts, position = [], 0
    for count in balance[:-1]:
        position += count
        starts.append(counted[position].start)
    return starts


def _by_paths(model: nn.Module, traced: Traced, paths: Sequence[str], units: Sequence[Unit]) -> list[int]:
    nodes = compute_nodes(traced.graph)
    modules = dict(model.named_modules(remove_duplicate=False))
    first_name = {id(module): name for name, module in model.named_modules()}
    legal = {unit.start for unit in units}
    starts: dict[int, str] = {}
    for path in paths:
        if path not in modules:
            raise PartitionError(
                f"cut= names {path!r}, which {type(model).__name__} does not have",
                remedy=did_you_mean(path, [n for n in modules if n]),
            )
        name = first_name[id(modules[path])]
        start = next(
            (i for i, n in enumerate(nodes) if is_within(traced.facts[n.name].module_path, name)), None
        )
        if start is None:
            whole = next((k for k in traced.kept_whole if is_within(name, k)), None)
            raise PartitionError(
                f"cut= names {path!r}, which "
                + (f"is inside {whole!r}, kept whole" if whole else "the model does not call"),
                remedy=f"cut at {whole!r}" if whole else "name a module that runs in forward",
            )
        if start == 0:
            raise PartitionError(
                f"cut= names {path!r}, with which the program begins: stage 0 would be empty",
                remedy="leave it out",
            )
        if start in starts:
            raise PartitionError(
                f"cut= names {path!r} and {starts[start]!r}, which begin at the same place", remedy="keep one"
            )
        if start not in legal:
            _refuse_cut(traced, start, f"cut= names {path!r}, but the program may not be cut there")
        starts[start] = path
    return sorted(starts)


def _by_device_map(
    model: nn.Module, traced: Traced, plan: Plan, units: Sequence[Unit]
) -> tuple[list[int], list[torch.device]]:
    assert isinstance(plan.device_map, Mapping)  # a word has been resolved before
    nodes = compute_nodes(traced.graph)
    placed = place_nodes(model, traced, plan.device_map)
    legal = {unit.start for unit in units}
    starts, devices = [], [placed[nodes[0].name]]
    for i, node in enumerate(nodes):
        if placed[node.name] == devices[-1]:
            continue
        if i not in legal:
            _refuse_cut(
                traced,
                i,
                f"device_map moves from {devices[-1]} to {placed[node.name]} where the program may not be cut",
            )
        starts.append(i)
        devices.append(placed[node.name])
    return starts, devices


def _refuse_cut(traced: Traced, position: int, what: str) -> None:
    nodes = compute_nodes(traced.graph)
    bond = next(b for b in bonds(traced) if b.first < position <= b.last)
    first, last = (nodes[i] for i in (bond.first, bond.last))
    writer = bond.writer or last
    where = (
        f"{first.name} ({traced.facts[first.name].source}) … {last.name} ({traced.facts[last.name].source})"
    )
    raise PartitionError(
        f"{what}: {writer.name!r} writes in place to a value that both sides see"
        if bond.writer
        else f"{what}: it is inside a context such as no_grad, or between a parameter and its reader",
        where=where,
        remedy=f"cut before {first.name!r} or after {last.name!r}, or write out of place",
    )


def _stage_devices(model: nn.Module, plan: Plan, count: int) -> list[torch.device]:
    if isinstance(plan.devices, tuple):
        return [torch.device(d) for d in plan.devices]
    if plan.devices is not None:
        return [torch.device(plan.devices)] * count  # type: ignore[arg-type]
    parameter = next(iter([*model.parameters(), *model.buffers()]), None)
    return [parameter.device if parameter is not None else torch.device("cpu")] * count
