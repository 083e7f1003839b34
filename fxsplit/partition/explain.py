"""What is said about a plan: how good it is, what would be better, and what would make it fit."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from torch import nn

from ..errors import PartitionError
from ..graph.ir import Traced
from ..graph.nodes import module_paths
from ..plan.plan import Plan
from ..plan.sizes import in_units
from ..schedules.catalog import schedule_of
from ..schedules.lower import Flow, lower
from ..schedules.simulate import bubble, timeline
from .model import Figures, build_problem, memory_limit, stage_nodes
from .planner import Planned, roomiest
from .problem import Cut, Problem, Simulate, StageFigures, Travel, figures, travels


def simulator(plan: Plan) -> Simulate:
    """Seconds of a step under the plan's schedule and micro-batches; backward is twice as long as forward."""
    m = plan.micro_batches

    @functools.cache
    def step(
        loads: tuple[float, ...], chains: tuple[tuple[int, ...], ...], replicas: tuple[int, ...]
    ) -> float:
        chosen = plan.schedule
        if not plan.plays(len(loads)):  # what fewer stages would come to; a V plays no other number
            if isinstance(chosen, str):
                return math.inf
            chosen = "1f1b"
        schedule = schedule_of(chosen, len(loads), m, plan.workers, replicas)
        # A load is of the micro-batches that the busiest replica gets.
        each = [load / math.ceil(m / r) / 3 for load, r in zip(loads, replicas, strict=True)]
        tape = lower(schedule, Flow(len(loads), chains))
        times = timeline(tape, lambda x: each[x.stage] * (2 if x.kind == "backward" else 1))
        return max(end for _, end in times)

    return lambda loads, chains, replicas: step(tuple(loads), tuple(map(tuple, chains)), tuple(replicas))


def predicted_bubble(
    traced: Traced,
    plan: Plan,
    stages: Sequence[Sequence[str]],
    rows: Sequence[Sequence[object]],
    found: Sequence[StageFigures],
    moving: Sequence[Travel],
) -> float:
    """Simulated idle share of the workers. Gradients of arguments and shared parameters wait for each other too."""
    replicas = [len(row) for row in rows]
    stage_of = {name: i for i, names in enumerate(stages) for name in names}
    readers: dict[str, list[int]] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            readers[node.name] = [stage_of[user.name] for user in node.users if user.name in stage_of]
        elif node.name in stage_of:
            for parameter in traced.facts[node.name].parameters:
                readers.setdefault(parameter, []).append(stage_of[node.name])
    gradients = [sorted(set(stages)) for stages in readers.values()]
    chains = [(home, *others) for home, others, _ in moving]
    schedule = plan.schedule_for(len(stages), plan.micro_batches, replicas)
    loads = [f.load / math.ceil(plan.micro_batches / r) for f, r in zip(found, replicas, strict=True)]
    return bubble(lower(schedule, Flow(len(stages), chains, gradients)), loads)


def explanation(planned: Planned) -> str:
    """How the cut was found, and so what may be claimed of it."""
    orders = "the program's order" if planned.tried == 1 else f"{planned.tried} orders of the program"
    where = "" if planned.order == "program order" else f", here {planned.order}"
    apart = planned.bottleneck / planned.lightest - 1 if planned.lightest else 0.0
    kind = "the lightest" if apart < 5e-5 else f"within {max(apart, 1e-4):.2%} of the lightest"
    kind += "" if planned.exact else " that was found (positions were thinned out)"
    return f"{kind} of all contiguous cuts of {orders}{where}"


def better(planned: Planned) -> str:
    """What the user might rather ask for."""
    if planned.fewer is None:
        return ""
    fewer = planned.fewer
    gain = 1 - fewer.step / planned.step
    return f"stages={fewer.stages} would be better: its step is {gain:.1%} shorter, because " + (
        "more stages do not make the heaviest one lighter"
        if fewer.bottleneck <= planned.bottleneck * 1.005
        else "what is won by more stages is lost by waiting and by bytes that travel"
    )


def shortage(
    model: nn.Module,
    traced: Traced,
    plan: Plan,
    figures_: Figures,
    devices: Sequence[str],
    room: float,
) -> PartitionError:
    """The error for a plan that fits in no memory: what is missing where, and what would help, with the figures.

    Args:
        room: the part of each memory limit that may be planned with: a plan that used more was over it by simulation.
    """
    problem = build_problem(model, traced, plan, figures_, devices, room)
    cut, needs = _least(problem)
    stage = max(range(len(needs)), key=lambda s: needs[s].memory / cut.slots[s].memory)
    need, limit = needs[stage].memory, cut.slots[stage].memory
    nodes = stage_nodes(traced, figures_.units, cut)[stage]
    first, last = (path or type(model).__name__ for path in module_paths(traced.facts, nodes))
    tried = []
    for words, variant, others in _variants(plan, devices, figures_.batch):
        if len(others) > len(figures_.units):
            continue
        other = build_problem(model, traced, variant, figures_, others, room)
        slots, then = _least(other)
        part, most = max((f.memory / s.memory, f.memory) for f, s in zip(then, slots.slots, strict=True))
        tried.append((part > 1, f"{words} ({in_units(most)}, {_verdict(part)})"))
    numbers = cut.slots[stage].devices if plan.replicas == "auto" else (stage,)
    where = devices[min(numbers, key=lambda i: memory_limit(plan, i, devices))]
    span = first if first == last else f"{first} … {last}"
    return PartitionError(
        f"no cut into {len(cut.starts)} stage{'s' if len(cut.starts) != 1 else ''} fits the memory: at best, stage {stage} "
        f"({span}) needs {in_units(need)} of {in_units(limit)} on {where}, "
        f"{in_units(need - limit)} too much"
        + (f" ({1 - room:.0%} of the memory are left for what only a simulation counts)" if room < 1 else ""),
        remedy=", or ".join(text for _, text in sorted(tried, key=lambda pair: pair[0]))
        or "a smaller batch or model",
    )


def _verdict(part: float) -> str:
    """The sums are compared with a margin: the simulation of what is alive has the last word."""
    return "fits" if part <= 0.95 else "fits barely" if part <= 1 else "does not fit"


def _least(problem: Problem) -> tuple[Cut, tuple[StageFigures, ...]]:
    cut = roomiest(problem)
    return cut, figures(problem, cut, travels(problem, cut))


def _variants(plan: Plan, devices: Sequence[str], batch: int) -> list[tuple[str, Plan, list[str]]]:
    """Plans that need less memory, and what to type for them."""
    found = []
    training = plan.optimizer_states is not None
    checkpointing = plan.recomputation.everything
    m = plan.micro_batches
    same = list(devices)
    if training and not checkpointing:
        found.append(('checkpoint="always"', plan.replace(checkpoint="always"), same))
    for factor in (2, 4):
        if (checkpointing or not training) and m * factor <= batch:
            found.append((f"micro_batches={m * factor}", plan.replace(micro_batches=m * factor), same))
    if training and not checkpointing and 4 * m <= batch:
        both = plan.replace(checkpoint="always", micro_batches=4 * m)
        found.append((f'checkpoint="always", micro_batches={4 * m}', both, same))
    if training and plan.optimizer_states:
        found.append(("optimizer_states=0, with plain SGD", plan.replace(optimizer_states=0), same))
    # More stages are on more devices of the same kinds.
    alone = len(set(devices)) == len(devices) or plan.devices is None
    if plan.replicas == 1 and plan.stages is not None and not isinstance(plan.hardware, tuple) and alone:
        for factor in (2, 4):
            more = [d for d in devices for _ in range(factor)]
            limits = plan.max_memory and {
                d: size * devices.count(d) * factor for d, size in plan.max_memory.items()
            }
            bigger = plan.replace(stages=len(more), devices=None, max_memory=limits)
            found.append((f"stages={len(more)} on {len(more)} such devices", bigger, more))
    return found
