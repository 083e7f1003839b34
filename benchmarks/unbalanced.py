"""Replicas of the heavier of two stages, 4 encoders and 2: a step with `replicas=[2, 1]` as a ratio to one with `[1, 1]`.

The simulations take the median seconds of each stage's forwards and backwards, measured with everything in one thread:
with a core for each worker, and with as many as there are, which the actions that run at the same time share evenly.
Transfers, the loss and memory bandwidth cost nothing there.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Mapping
from typing import Any

import fxsplit
from fxsplit.schedules.simulate import timeline

from .measuring import measure_steps, ratio
from .part import Options
from .report import Report
from .tasks import Task, transformer
from .variants import eager, split

QUESTION = "What do replicas of a heavier stage win?"
MINUTES = 1.5
ARRANGED = ((1, 1), (2, 1))


def measure(options: Options) -> Report:
    """A row for each number of micro-batches."""
    task, counts, rows = transformer(6, options.quick), (4, 8), []
    plans = {
        (m, r): {"cut": ["4"], "micro_batches": m, "replicas": list(r)} for m in counts for r in ARRANGED
    }
    names = {(m, r): f"{list(r)}, {m} micro-batches" for m, r in plans}
    variants = [
        eager(task),
        *(split(task, names[m, r], base=names[m, (1, 1)], **plan) for (m, r), plan in plans.items()),
    ]
    found, agreed = measure_steps(variants, 2 if options.quick else 9)
    cores = len(os.sched_getaffinity(0))
    for m in counts:
        seconds = seconds_of_actions(task, plans[m, (1, 1)])
        few, many, bubbles = [], [], []
        for r in ARRANGED:
            pipe = fxsplit.compile(task.model, fxsplit.Plan(**plans[m, r]), example_args=(task.x,))
            few.append(simulated(pipe, seconds, cores))
            many.append(simulated(pipe, seconds, len(pipe.schedule.workers)))
            bubbles += re.findall("predicted bubble ([^;]*)", pipe.report())
        low, middle, high = ratio(found, names[m, (2, 1)], names[m, (1, 1)])
        heavier = sum(seconds[k, 0] for k in "FB") / sum(seconds[k, 1] for k in "FB")
        simulations = (f"{many[1] / many[0]:.3f}", f"{few[1] / few[0]:.3f}")
        rows.append(
            (
                *(m, f"{heavier:.2f}", " → ".join(bubbles), *simulations),
                *(f"{middle:.3f}", f"{low:.3f} to {high:.3f}"),
            )
        )
    header = (
        *("micro-batches", "stage 0 : stage 1", "predicted bubble", "simulated, a core for each worker"),
        *(f"simulated, {cores} cores", f"measured, {cores} cores", "quartiles"),
    )
    return Report(header, rows, [agreed])


def seconds_of_actions(task: Task, plan: Mapping[str, Any], steps: int = 3) -> dict[tuple[str, int], float]:
    """(kind, stage) → median seconds of one action, with everything in one thread."""
    variant = split(task, "serial", serial=True, **plan)
    found: dict[tuple[str, int], list[float]] = {}

    def note(event):
        found.setdefault((event.action.kind, event.action.stage), []).append(event.end - event.begin)

    variant.step()
    with variant.pipe.register_action_hook(note):
        for _ in range(steps):
            variant.step()
            variant.clear()
    return {key: statistics.median(values) for key, values in found.items()}


def simulated(pipe: fxsplit.Pipeline, seconds: Mapping[tuple[str, int], float], cores: int) -> float:
    """Seconds of a step whose actions share the cores evenly."""
    tape = pipe.tape

    def length(instruction):
        return sum(seconds[a.kind, a.stage] for a in instruction.actions)  # the loss is outside of actions

    waiting = [list(row) for row in tape.workers]
    running, done, now = {}, set(), 0.0
    while running or any(waiting):
        for worker, row in enumerate(waiting):
            if worker not in running and row and done.issuperset(row[0].after):
                running[worker] = [row[0].number, length(row[0])]
                del row[0]
        speed = min(1.0, cores / len(running))
        passed = min(left for _, left in running.values())
        now += passed / speed
        for worker, state in list(running.items()):
            state[1] -= passed
            if state[1] <= 1e-12:
                done.add(state[0])
                del running[worker]
    if cores >= len(waiting):
        assert abs(now - max(end for _, end in timeline(tape, length))) < 1e-6
    return now
