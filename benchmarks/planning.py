"""Seconds that planning takes for synthetic programs of many units, in 8 stages with links of 20 GB/s.

The last row is `build_problem` and the cut from a captured graph. The peers' partitioners take a list of costs, where
program order is all there is: they are beside it for the same number of units.
"""

from __future__ import annotations

import gc
import random
import statistics
import time

import torch
from torch import nn

import fxsplit
from fxsplit.graph.nodes import compute_nodes
from fxsplit.partition.assign import weigh_nodes
from fxsplit.partition.explain import simulator
from fxsplit.partition.model import build_problem, stage_nodes
from fxsplit.partition.planner import plan_stages
from fxsplit.partition.problem import Item, Problem, Slot, Weights
from fxsplit.partition.units import find_units
from fxsplit.trace.front import TRACING, trace

from .cuts.captured import MICRO_BATCHES
from .part import Options
from .partitioners import PARTITIONERS, heaviest, lightest
from .peers import installed
from .report import Report

QUESTION = "How long does planning take?"
MINUTES = 1.5
LINK = 20e9
MOST = {"torchgpipe": 50_000, "deepspeed": 1_000}  # units


class Program:
    """A synthetic program, unit by unit."""

    def __init__(self, seed=0):
        self.choose, self.reads = random.Random(seed), []

    def add(self, *reads):
        """A unit that reads the values of these; its number."""
        self.reads.append([r for r in reads if r is not None])
        return len(self.reads) - 1

    def problem(self, stages=8, link=20e9):
        """With random works and bytes."""
        count, choose = len(self.reads), self.choose
        readers = [[] for _ in range(count)]
        for unit, reads in enumerate(self.reads):
            for other in set(reads):
                readers[other].append(unit)
        work = tuple(choose.lognormvariate(-9, 1) for _ in range(count))
        values = tuple(
            Item((unit, *found), choose.choice((1e6, 4e6, 16e6)))
            for unit, found in enumerate(readers)
            if found
        )
        before = tuple(tuple(sorted(set(reads))) for reads in self.reads)
        slots = [Slot(0, Weights(work=1.0, traffic=1 / link), devices=(s,)) for s in range(stages)]
        moves = (*(((s + 1, slot),) for s, slot in enumerate(slots)), ())
        return Problem((work,), values, (), (), before, moves, (stages,))


def residual(program, units, x=None):
    """A chain with a residual connection around every five units."""
    while units > 0:
        kept = x = program.add(x) if x is None else x
        for _ in range(4):
            x = program.add(x)
        x = program.add(x, kept)
        units -= 5
    return x


def attention(program, units, x=None):
    """Blocks with three parallel branches."""
    x = program.add(x)
    for _ in range(max(1, units // 12)):
        norm = program.add(x)
        q, k, v = (program.add(program.add(norm)) for _ in range(3))
        x = program.add(x, program.add(program.add(program.add(q, k), v)))
        y = program.add(program.add(x))
        x = program.add(x, y)
    return x


def u_net(program, units):
    """A chain; each unit of the second half, in steps of four, reads one of the first half too."""
    x, kept = None, []
    for i in range(units // 2):
        x = program.add(x)
        if i % 4 == 0:
            kept.append(x)
    for i in range(units // 2):
        x = program.add(x, kept.pop() if i % 4 == 0 and kept else None)


def two_towers(program, units):
    """Two chains with residual connections, one after the other, that meet."""
    program.add(residual(program, units // 2), residual(program, units // 2))


def mixed_towers(program, units):
    """Two towers of attention whose second one reads the first one's result in places, as a decoder does."""
    first = attention(program, units // 2)
    x = None
    for _ in range(max(1, units // 200)):
        x = program.add(attention(program, 90, x), first)


PROGRAMS = {
    "residual": residual,
    "attention": attention,
    "U-Net": u_net,
    "two towers": two_towers,
    "encoder-decoder": mixed_towers,
}


class Deep(nn.Module):
    """As many residual blocks as it takes for a graph of that size."""

    def __init__(self, nodes):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(nodes // 3)])

    def forward(self, x):
        """Three nodes each."""
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


def median_seconds(run, times=5):
    """The median of several runs, and the last result."""
    took = []
    for _ in range(times):
        gc.collect()
        start = time.perf_counter()
        result = run()
        took.append(time.perf_counter() - start)
    return statistics.median(took), result


def captured_seconds(size: int) -> tuple[float, float]:
    """Seconds from a captured graph to its stages, and those of the cut alone."""
    with torch.device("meta"):
        model, x = Deep(size), torch.zeros(4, 8)
    with TRACING, torch.inference_mode(False), torch.enable_grad():
        traced = trace(model, (x,), {}, check=False)
    works = {node.name: 1e-4 for node in compute_nodes(traced.graph)}
    plan = fxsplit.Plan(stages=8, cost=works, hardware=fxsplit.Device(link=LINK), micro_batches=MICRO_BATCHES)

    cuts = []

    def both():
        units = find_units(traced)
        found = weigh_nodes(model, traced, plan, units, [x])
        problem = build_problem(model, traced, plan, found, ["meta"] * 8)
        start = time.perf_counter()
        planned = plan_stages(problem, simulator(plan))
        cuts.append(time.perf_counter() - start)
        return stage_nodes(traced, units, planned.cut)

    seconds, _ = median_seconds(both)
    return seconds, statistics.median(cuts)


def measure(options: Options) -> Report:
    """A row for each program, and for each peer that is installed."""
    sizes, rows, left_out = (100,) if options.quick else (100, 1_000, 10_000, 50_000), [], []
    plan, works = fxsplit.Plan(stages=8, micro_batches=MICRO_BATCHES), {}
    for name, make in PROGRAMS.items():
        row = []
        for size in sizes:
            program = Program()
            make(program, size)
            problem = program.problem(link=LINK)
            times = 1 if options.quick else 5 if size < 10_000 else 3
            seconds, planned = median_seconds(lambda p=problem: plan_stages(p, simulator(plan)), times)
            thinned = "" if planned.exact else ", thinned"
            row.append(f"{seconds:.3f} ({planned.bottleneck / planned.bound:.3f}{thinned})")
            works[size] = list(problem.work[0])
        rows.append((name, *row))
    row = []
    for size in sizes:
        if size > 1000:  # its capture takes longer than all of the rest
            row.append("-")
            continue
        seconds, alone = captured_seconds(size)
        row.append(f"{seconds:.3f}, of it the cut {alone:.3f}")
    rows.append(("captured, with `build_problem`", *row))
    for name, solve in PARTITIONERS.items():
        if not installed(name, left_out):
            continue
        solve([1.0] * 9, 8)  # its imports
        row = []
        for size in sizes:
            if size > MOST[name]:
                row.append("-")
                continue
            seconds, counts = median_seconds(lambda s=size, f=solve: f(works[s], 8), 1)
            row.append(f"{seconds:.3f} ({heaviest(works[size], counts) / lightest(works[size], 8):.3f})")
        rows.append((f"{name}, of the times alone", *row))
    said = (
        "In brackets the heaviest load to a bound that no cut can beat; of the peers to the best cut of the times. "
        "A peer has a dash where it takes minutes."
    )
    return Report(("program", *(f"{size:,} units, s" for size in sizes)), rows, [said], left_out)
