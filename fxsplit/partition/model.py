"""`Traced` + `Plan` + costs → the planner's `Problem`."""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from ..compat import tree_leaves
from ..cost.model import parameter_copies
from ..cost.saved import Saved
from ..graph.ir import NodeFacts, TensorSpec, Traced
from ..graph.nodes import compute_nodes, is_within, open_contexts, resolve
from ..plan.hardware import Device
from ..plan.plan import Plan
from ..schedules.catalog import kept_shares
from .problem import Cut, Item, Problem, Slot, Weights
from .units import Unit

Before = tuple[tuple[int, ...], ...]  # for each unit the units that have to come before it


@dataclass(frozen=True)
class Figures:
    """All that is known of the nodes of one model.

    Attributes:
        units: what may not be cut apart.
        works: per kind of device, node name → load.
        kinds: per described device its place in `works`.
        saved: what is kept for backward; None where it was not counted.
        batch: rows of the example.
    """

    units: Sequence[Unit]
    works: tuple[Mapping[str, float], ...]
    kinds: tuple[int, ...]
    saved: Saved | None
    batch: int


def build_problem(
    model: nn.Module,
    traced: Traced,
    plan: Plan,
    figures: Figures,
    devices: Sequence[str],
    room: float = 1.0,
) -> Problem:
    """The problem of cutting the graph into stages.

    Args:
        devices: for each stage, or, with ``replicas="auto"``, those that are shared out. Their number is the number
            of stages.
        room: the part of each memory limit that may be planned with.
    """
    nodes = compute_nodes(traced.graph)
    unit_of_node = {
        nodes[i].name: u for u, unit in enumerate(figures.units) for i in range(unit.start, unit.end)
    }
    work = tuple(
        tuple(math.fsum(row[nodes[i].name] for i in range(u.start, u.end)) for u in figures.units)
        for row in figures.works
    )
    if not any(map(any, work)):  # a model without parameters: count its nodes
        work = tuple(tuple(float(u.end - u.start) for u in figures.units) for _ in work)
    values, before = _values(model, traced, unit_of_node)
    fixed = "" if not any(open_contexts(nodes)) else "a context such as no_grad or autocast is entered"
    moves, ends = _moves(plan, devices, figures.kinds)
    if room != 1.0:
        moves = tuple(
            tuple((target, replace(slot, memory=slot.memory * room)) for target, slot in row) for row in moves
        )
    return Problem(
        work,
        values,
        _parameters(model, traced, plan, unit_of_node),
        _saved(model, traced, plan, unit_of_node, figures.saved),
        before if not fixed else tuple(tuple(range(max(u - 1, 0), u)) for u in range(len(before))),
        moves,
        ends,
        tuple(
            (traced.facts[nodes[u.start].name].module_path, traced.facts[nodes[u.end - 1].name].module_path)
            for u in figures.units
        ),
        fixed,
    )


def stage_nodes(traced: Traced, units: Sequence[Unit], cut: Cut) -> tuple[tuple[str, ...], ...]:
    """The names of the nodes of each stage, in the order of execution."""
    nodes = compute_nodes(traced.graph)
    pieces = [[nodes[i].name for i in range(units[u].start, units[u].end)] for u in cut.order]
    return tuple(
        tuple(itertools.chain.from_iterable(pieces[a:b]))
        for a, b in itertools.pairwise([*cut.starts, len(pieces)])
    )


def _values(model: nn.Module, traced: Traced, unit_of: Mapping[str, int]) -> tuple[tuple[Item, ...], Before]:
    """What units hand to each other, and which have to come before which.

    Beyond the data, the order is kept among nodes that draw random numbers or change something, and among those from
    which three or more gradients of one tensor come: autograd adds them in the reverse of that order, and a sum of three
    depends on it.
    """
    facts = traced.facts
    before: list[set[int]] = [set() for _ in range(max(unit_of.values()) + 1)]
    values = []
    effects: list[int] = []
    gradients: dict[
        str, list[int]
    ] = {}  # tensor or parameter → the unit that each of its gradients comes from
    for node in traced.graph.nodes:
        fact = facts[node.name]
        if node.op != "output":
            for operand in node.all_input_nodes:
                if fact.alias != operand.name and _is_differentiable(facts[operand.name]):
                    gradients.setdefault(_tensor_of(operand, facts), []).extend(
                        [unit_of[node.name]] * _contributions(node, operand)
                    )
            for parameter in fact.parameters:
                gradients.setdefault(parameter, []).extend(
                    [unit_of[node.name]] * (2 if node.op == "call_module" else 1)
                )
        if node.name not in unit_of:
            continue
        home = unit_of[node.name]
        elsewhere = sorted({unit_of[user.name] for user in node.users if user.name in unit_of} - {home})
        for unit in elsewhere:
            before[unit].add(home)
        travels = node.op != "get_attr" or node.meta.get("shared")
        if elsewhere and travels:
            values.append(Item((home, *elsewhere), fact.nbytes))
        if fact.random or fact.stateful or fact.buffers or _may_do_more(model, traced, node):
            effects.append(home)
    _keep_in_order(sorted(set(effects)), before)
    given = {
        _tensor_of(n, facts) for n in traced.graph.output_node().all_input_nodes
    }  # the loss gives them one more
    for tensor, units in gradients.items():
        if len(units) + (tensor in given) > 2:
            _keep_in_order(sorted(set(units)), before)
    return tuple(values), tuple(tuple(sorted(earlier)) for earlier in before)


def _is_differentiable(fact: NodeFacts) -> bool:
    specs = [leaf for leaf in tree_leaves(fact.value) if isinstance(leaf, TensorSpec)]
    return any(spec.dtype.is_floating_point or spec.dtype.is_complex for spec in specs)


def _tensor_of(node: fx.Node, facts: Mapping[str, NodeFacts]) -> str:
    """The first name of the tensor: ``contiguous()`` and dropout may hand on what they were given."""
    name = node.name
    while (alias := facts[name].alias) is not None:
        name = alias
    return name


def _contributions(node: fx.Node, operand: fx.Node) -> int:
    """How many gradients of `operand` come from `node`, or more: a module may use its argument several times."""
    if node.op == "call_module" or isinstance(
        node.target, types.FunctionType
    ):  # of Python, it may use it again
        return 2
    count = 0

    def look(value: fx.Node) -> fx.Node:
        nonlocal count
        count += value is operand
        return value

    fx.node.map_arg((node.args, node.kwargs), look)
    return count


def _may_do_more(model: nn.Module, traced: Traced, node: fx.Node) -> bool:
    """Whether a module may change or draw what nothing shows: one that stays whole, or has hooks."""
    if node.op != "call_module":
        return False
    owner = resolve(model, str(node.target))
    return str(node.target) in traced.kept_whole or any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in owner.modules()
    )


def _keep_in_order(units: Sequence[int], before: list[set[int]]) -> None:
    for a, b in itertools.pairwise(units):
        before[b].add(a)


def _parameters(model: nn.Module, traced: Traced, plan: Plan, unit_of: Mapping[str, int]) -> tuple[Item, ...]:
    """Parameters and buffers, each with the units that read it.

    A frozen parameter and a buffer have no gradient and no optimizer states: their bytes are scaled down, so that one
    factor fits all.
    """
    copies = parameter_copies(plan.optimizer_states)
    tensors: dict[int, torch.Tensor] = {}
    readers: dict[int, set[int]] = {}
    for node in compute_nodes(traced.graph):
        if node.op not in ("call_module", "get_attr") or node.target in traced.constants:
            continue
        owner = resolve(model, str(node.target))
        owned = [*owner.parameters(), *owner.buffers()] if isinstance(owner, nn.Module) else [owner]
        for tensor in owned:
            if isinstance(tensor, torch.Tensor):
                tensors[id(tensor)] = tensor
                readers.setdefault(id(tensor), set()).add(unit_of[node.name])
    return tuple(
        Item(
            tuple(sorted(readers[key])),
            t.numel() * t.element_size() / (1 if isinstance(t, nn.Parameter) and t.requires_grad else copies),
        )
        for key, t in tensors.items()
    )


def _saved(
    model: nn.Module, traced: Traced, plan: Plan, unit_of: Mapping[str, int], saved: Saved | None
) -> tuple[Item, ...]:
    """Each storage that is kept for backward, with the units that keep it."""
    if saved is None:
        return ()
    chosen = plan.recomputation.paths(model)
    nodes = compute_nodes(traced.graph)
    inside = {
        n.name for n in nodes if any(is_within(traced.facts[n.name].module_path, path) for path in chosen)
    }
    keepers: dict[int, set[int]] = {}
    sizes: dict[int, int] = {}
    for node in nodes:
        kept = dict(saved.by_node[node.name]) if node.name not in inside else {}
        if node.name in inside:  # what enters a region is kept to compute it again
            for operand in node.all_input_nodes:
                if operand.name not in inside:
                    kept.update(saved.values.get(operand.name, {}))
        for key, size in kept.items():
            keepers.setdefault(key, set()).add(unit_of[node.name])
            sizes[key] = size
    return tuple(Item(tuple(sorted(units)), sizes[key]) for key, units in keepers.items())


def _moves(
    plan: Plan, devices: Sequence[str], rows: Sequence[int]
) -> tuple[tuple[tuple[tuple[int, Slot], ...], ...], tuple[int, ...]]:
    count = len(devices)
    if plan.replicas != "auto":
        moves = [((j + 1, _said_slot(plan, j, devices, rows)),) for j in range(count)]
        return (*moves, ()), (count,)
    if plan.stages is None:
        free = [
            tuple((d + r, _slot(plan, range(d, d + r), devices, rows)) for r in range(1, count - d + 1))
            for d in range(count + 1)
        ]
        return tuple(free), (count,)
    layers = [
        (s, d) for s in range(plan.stages + 1) for d in range(count + 1)
    ]  # stages and devices used so far
    place = {layer: i for i, layer in enumerate(layers)}
    fixed = [
        tuple(
            (place[s + 1, d + r], _slot(plan, range(d, d + r), devices, rows))
            for r in range(1, count - d + 1)
            if s < plan.stages
        )
        for s, d in layers
    ]
    return tuple(fixed), (place[plan.stages, count],)


def _slot(plan: Plan, numbers: Sequence[int], devices: Sequence[str], rows: Sequence[int]) -> Slot:
    """What a stage weighs and needs that is replicated on these devices.

    PipeDream's model of replication (Narayanan et al., 2019): r replicas share the work and the traffic, and a ring of
    them moves each gradient 2 (r - 1) / r times over the link. Of unequal replicas the slowest decides, because
    micro-batches are dealt out one by one.
    """
    described = plan.described()
    slowest = max(numbers, key=lambda i: _slowness(described[i % len(described)]))
    r = len(numbers)
    per_byte = _seconds_per_byte(plan, slowest)
    apart = len({devices[i] for i in numbers}) > 1  # on one device they share the parameters and its memory
    share = replica_share(plan, r)
    load = Weights(share, per_byte * share, _ring(r, per_byte) if apart else 0.0)
    limits = [memory_limit(plan, i, devices) for i in numbers]
    memory = min(limits) if apart else sum(limits)
    return Slot(
        rows[slowest % len(rows)],
        load,
        _room(plan, _kept_share(plan, numbers[0], [r] * len(devices), max if apart else sum)),
        memory,
        tuple(numbers),
    )


def _ring(replicas: int, per_byte: float) -> float:
    return 2 * (replicas - 1) / replicas * per_byte


def _said_slot(plan: Plan, stage: int, devices: Sequence[str], rows: Sequence[int]) -> Slot:
    """The same where the plan says how many replicas there are: on one device, or each on that of its row."""
    counts = replica_counts(plan, len(devices))
    first = sum(counts[:stage])
    share, per_byte = replica_share(plan, counts[stage]), _seconds_per_byte(plan, stage)
    row = plan.row_of(stage) or (devices[stage],)
    apart = len(set(row)) > 1
    load = Weights(share, per_byte * share, _ring(counts[stage], per_byte) if apart else 0.0)
    workers = tuple(range(first, first + counts[stage]))
    others = [d for s, d in enumerate(devices) if s != stage]
    limit = min(memory_limit(plan, 0, [d, *others], described=stage) for d in row)
    room = _room(plan, _kept_share(plan, stage, counts, max if apart else sum))
    return Slot(rows[stage % len(rows)], load, room, limit, workers)


def _seconds_per_byte(plan: Plan, number: int) -> float:
    described = plan.described()
    link = described[number % len(described)].link
    return 1 / link if link is not None and plan.weighing.unit == "s" else 0.0


def _slowness(device: Device) -> float:
    return (1 / device.flops if device.flops else 0.0) + (1 / device.bandwidth if device.bandwidth else 0.0)


def replica_share(plan: Plan, replicas: int) -> float:
    """The part of the micro-batches that the busiest of the replicas gets."""
    return math.ceil(plan.micro_batches / replicas) / plan.micro_batches


def replica_counts(plan: Plan, stages: int) -> tuple[int, ...]:
    """How many replicas the plan gives to each stage, where it says so."""
    if isinstance(plan.replicas, tuple):
        return plan.replicas
    return (plan.replicas,) * stages if isinstance(plan.replicas, int) else (1,) * stages


def memory_limit(plan: Plan, number: int, devices: Sequence[str], described: int | None = None) -> float:
    """How much memory one stage may take: an equal part of that of its device, where stages are placed together.

    A device map's `max_memory` is for its weights alone, as in Accelerate, and is not looked at here.

    Args:
        described: where its description is in the plan's; by default at `number`.
    """
    descriptions, device = plan.described(), devices[number]
    if plan.max_memory is not None and device in plan.max_memory and plan.device_map is None:
        return max(float(plan.max_memory[device]), 1.0) / devices.count(device)
    memory = descriptions[(number if described is None else described) % len(descriptions)].memory
    if memory is None:
        return math.inf
    together = devices.count(device) if plan.devices is not None or plan.device_map is not None else 1
    return int(memory) / together


def _kept_share(plan: Plan, stage: int, replicas: Sequence[int], of: Callable[[Iterable[int]], int]) -> float:
    """The part of the micro-batches that a stage keeps on one device; an earlier stage keeps no less."""
    count = len(replicas)
    schedule = plan.schedule_for(count, plan.micro_batches, replicas)
    return kept_shares(schedule, count, plan.micro_batches, of)[stage]


def _room(plan: Plan, share: float) -> Weights:
    """What a stage needs: parameters with their copies, and what is kept for the micro-batches in flight.

    Args:
        share: the part of what a batch like the example keeps.
    """
    m = plan.micro_batches
    copies = float(parameter_copies(plan.optimizer_states))
    if plan.optimizer_states is None:
        return Weights(parameters=copies, traffic=1 / m)
    if plan.recomputation.limit is not None:
        return Weights(parameters=copies, fixed=float(plan.recomputation.limit))
    if plan.recomputation.everything:
        return Weights(parameters=copies, traffic=share, saved=1 / m)
    # What crosses is held by both sides. Some of it is among what is kept, and so counted twice: rather too much.
    return Weights(parameters=copies, saved=share, traffic=share)
