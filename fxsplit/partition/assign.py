"""`Traced` + `Plan` → `Assignment`: the one place that reads how the plan says to cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..batch.dims import BatchDims
from ..cost.model import figures_of, work_of
from ..errors import PartitionError, PlanError, did_you_mean
from ..graph.ir import Assignment, Forecast, StageForecast, Traced
from ..graph.nodes import compute_nodes, is_within
from ..plan.plan import Plan
from .device_map import place_nodes
from .explain import better, explanation, predicted_bubble, shortage, simulator
from .model import Figures, build_problem, replica_counts, stage_nodes
from .planner import plan_stages
from .problem import Cut, StageFigures, lower_bound, travels
from .problem import figures as stage_figures
from .reorder import reordered
from .units import Unit, balance_starts, bonds, find_units


def partition(
    model: nn.Module,
    traced: Traced,
    plan: Plan,
    inputs: Sequence[torch.Tensor],
    room: float = 1.0,
) -> tuple[Traced, Assignment]:
    """Assign every node to a stage and every stage to a device.

    *Requires* a traced model; `inputs` are the flat example inputs. *Ensures* stages that are contiguous in the order of
    the program that is returned, and separate nothing that `units.bonds` holds together. That is the traced program, or,
    where another order of its nodes allows a better cut, the same one in that order.

    Args:
        room: the part of each memory limit that may be planned with.

    Raises:
        PartitionError: the plan asks for more stages than there are units, cuts where nothing may be cut,
            names a module that does not exist, or fits in no memory.
        PlanError: the plan's lists are of other lengths than it has stages, or its cost cannot be had.
    """
    units = find_units(traced)
    said = _said(model, traced, plan, units)
    count = len(said.starts) + 1 if said is not None else plan.stages or 1
    devices = (
        said.devices if said is not None and said.devices else _stage_devices(model, traced, plan, count)
    )
    _check_lengths(plan, count)
    if said is None:
        _check_count(count, units)
    names = [str(d) for d in devices]
    _check_limits(plan, names)
    figures = weigh_nodes(model, traced, plan, units, inputs)
    problem = build_problem(model, traced, plan, figures, names, room)
    if said is None:
        planned = plan_stages(problem, simulator(plan), search=plan.effort == "search")
        if planned is None:
            raise shortage(model, traced, plan, figures, names, room)
        cut, how, advice = planned.cut, explanation(planned), better(planned)
    else:
        begins = {unit.start: i for i, unit in enumerate(units)}
        slots = tuple(moves[0][1] for moves in problem.moves[:count])
        order = tuple(range(len(units)))
        cut = Cut(order, (0, *(begins[start] for start in said.starts)), slots)
        how, advice = f"as {plan.ways_to_cut()[0]}= says", ""
    stages = stage_nodes(traced, units, cut)
    if cut.order != tuple(range(len(units))):
        traced = reordered(traced, [name for names in stages for name in names])
    rows = _rows(plan, cut, devices)
    reads = {node.name for node in compute_nodes(traced.graph) if node.op == "get_attr"}
    counted = any(any(work.values()) for work in figures.works)
    moving = travels(problem, cut)
    found = stage_figures(problem, cut, moving)
    return traced, Assignment(
        stages=stages,
        devices=tuple(row[0] for row in rows),
        loads=tuple(f.load for f in found),
        cost=plan.weighing.name if counted else "nodes",
        costs={name: work for name, work in figures.works[0].items() if work or name not in reads},
        rows=rows,
        forecast=Forecast(
            unit=plan.weighing.unit if counted else "nodes",
            bound=lower_bound(problem),
            stages=_stage_forecasts(figures, cut, stages, found, room),
            cut_bytes=int(sum(len(readers) * nbytes for _, readers, nbytes in moving)),
            bubble=predicted_bubble(traced, plan, stages, rows, found, moving),
            how=how,
            advice=advice,
        ),
    )


@dataclass(frozen=True)
class _Said:
    """Where the user says to cut: positions at which stages 1, 2, … begin, and the devices if they are said too."""

    starts: list[int]
    devices: list[torch.device] | None = None


def _said(model: nn.Module, traced: Traced, plan: Plan, units: Sequence[Unit]) -> _Said | None:
    if plan.device_map is not None:
        return _Said(*_by_device_map(model, traced, plan, units))
    if plan.cut is not None:
        return _Said(_by_paths(model, traced, plan.cut, units))
    if plan.balance is not None:
        return _Said(_by_balance(model, traced, plan.balance, units))
    return None


def weigh_nodes(
    model: nn.Module, traced: Traced, plan: Plan, units: Sequence[Unit], inputs: Sequence[torch.Tensor]
) -> Figures:
    """What the nodes cost; the example is run only where the plan asks for more than parameters."""
    costs, saved = figures_of(model, traced, plan, inputs)
    described = plan.described() if plan.weighing.rates else plan.described()[:1]
    kinds = list(dict.fromkeys(described))
    works = tuple(work_of(model, traced, plan, costs, kind) for kind in kinds)
    rows = BatchDims.of_example(traced.signature, inputs, plan.batch_dims).batch_size(inputs)
    return Figures(units, works, tuple(kinds.index(d) for d in described), saved, rows or 1)


def _stage_forecasts(
    figures: Figures,
    cut: Cut,
    stages: Sequence[Sequence[str]],
    found: Sequence[StageFigures],
    room: float,
) -> tuple[StageForecast, ...]:
    saved = figures.saved
    return tuple(
        StageForecast(
            int(f.bytes_in),
            int(f.bytes_out),
            sum(saved.flops[name] for name in names) if saved is not None else None,
            round(f.parameters * slot.room.parameters) if saved is not None else None,
            round(f.memory) if saved is not None else None,
            round(slot.memory / room) if slot.memory < math.inf else None,
        )
        for f, slot, names in zip(found, cut.slots, stages, strict=True)
    )


def _rows(plan: Plan, cut: Cut, devices: Sequence[torch.device]) -> tuple[tuple[torch.device, ...], ...]:
    """The devices of the replicas of each stage."""
    if plan.replicas == "auto":
        return tuple(tuple(devices[i] for i in slot.devices) for slot in cut.slots)
    counts = replica_counts(plan, len(cut.starts))
    return tuple(
        tuple(torch.device(d) for d in plan.row_of(stage) or (device,) * counts[stage])
        for stage, device in enumerate(devices)
    )


def _check_count(count: int, units: Sequence[Unit]) -> None:
    if count > len(units):
        raise PartitionError(
            f"stages={count}, but the graph has only {len(units)} unit{'s' if len(units) != 1 else ''} that can be cut apart",
            remedy=f"stages={len(units)} or fewer",
        )


def _check_limits(plan: Plan, names: Sequence[str]) -> None:
    every = dict.fromkeys(d for stage, name in enumerate(names) for d in plan.row_of(stage) or (name,))
    odd = [d for d in plan.max_memory or () if d not in every] if plan.device_map is None else []
    if odd:
        raise PlanError(
            f"max_memory= limits {odd[0]}, but the plan's devices are {', '.join(every)}",
            remedy="name devices of the plan, as they are written there",
        )


def _check_lengths(plan: Plan, count: int) -> None:
    """For a device map the number of stages is known only now."""
    for field in ("replicas", "hardware"):
        value = getattr(plan, field)
        if isinstance(value, tuple) and plan.replicas != "auto" and len(value) != count:
            raise PlanError(
                f"{field}= lists {len(value)}, but {plan.ways_to_cut()[0]}= makes {count} stages",
                remedy=f"list {count}, or a single one for all",
            )


def _by_balance(model: nn.Module, traced: Traced, balance: Sequence[int], units: Sequence[Unit]) -> list[int]:
    counted = balance_starts(model, traced, units)
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
    firsts = [0, *itertools.accumulate(balance)]
    bounds = [*(counted[i] for i in firsts[:-1]), len(compute_nodes(traced.graph))]
    legal = {unit.start for unit in units}
    for stage, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start == end:
            raise PartitionError(
                f"balance={list(balance)} gives stage {stage} nothing to compute: children {firsts[stage]} to "
                f"{firsts[stage + 1] - 1} of {type(model).__name__} have no operation",
                remedy=f"put them with their neighbours, or stages={len(balance)} for an automatic cut",
            )
        if stage and start not in legal:
            _refuse_cut(traced, start, f"balance={list(balance)} cuts where the program may not be cut")
    return bounds[1:-1]


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
    where = " … ".join(
        f"{node.name} ({traced.facts[node.name].source or traced.facts[node.name].module_path})"
        for node in (first, last)
    )
    raise PartitionError(
        f"{what}: {writer.name!r} writes in place to a value that both sides see"
        if bond.writer
        else f"{what}: it is inside a context such as no_grad, or between a parameter and its reader",
        where=where,
        remedy=f"cut before {first.name!r} or after {last.name!r}, or write out of place",
    )


def _stage_devices(model: nn.Module, traced: Traced, plan: Plan, count: int) -> list[torch.device]:
    if isinstance(plan.devices, tuple):
        # one for each stage, or those that are shared out
        return [torch.device(d[0] if isinstance(d, tuple) else d) for d in plan.devices]
    if plan.devices is not None:
        return [torch.device(plan.devices)] * count  # type: ignore[arg-type]
    homes = {t.device for t in (*model.parameters(), *model.buffers())}
    home = next(iter(homes), torch.device("cpu")) if len(homes) < 2 else traced.signature.arguments[0].device
    return [torch.device("cpu") if home.type == "meta" else home] * count  # weights come there
