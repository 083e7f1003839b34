"""Simulated seconds of a step of 8 micro-batches: the chosen cut, beside the lightest in program order.

Models whose branches can be filled into each other's stages: CLIP and T5 at real sizes, where transformers is installed,
and two synthetic towers. Loads are those of `cut`; a step is simulated with the loads and the links of each cut.
"""

from __future__ import annotations

import numpy as np

from fxsplit.partition.explain import simulator
from fxsplit.partition.planner import plan_stages
from fxsplit.partition.problem import Cut, figures, travels

from .children import in_child
from .cuts.captured import LINKS, STAGES, Captured
from .cuts.certify import CLOSE
from .cuts.orders import Orders
from .models import TOWERS, available, load_torchvision
from .part import Options
from .report import Report

QUESTION = "Is a step shorter than with the lightest cut?"
MINUTES = 1.0


def rows_of(name: str, quick: bool) -> list[tuple[object, ...]]:
    """Model, stages, GB/s, load and step in ms of the lightest cut and of fxsplit's, and how much shorter that is."""
    load_torchvision()
    captured, rows = Captured(TOWERS[name][1]), []
    plain = np.arange(len(captured.units))
    for link in LINKS[-1 if quick else 0 :]:
        orders = Orders(captured.work, captured.values, link)
        for stages in STAGES[: 1 if quick else None]:
            problem, plan = captured.problem(stages, link), captured.plan(stages, link)
            planned = plan_stages(problem, simulator(plan))
            load, stage_of = orders.lightest(plain, stages)
            starts = tuple(int(np.searchsorted(stage_of, s)) for s in range(stages))
            cut = Cut(tuple(map(int, plain)), starts, planned.cut.slots)
            moving = travels(problem, cut)
            chains = list(dict.fromkeys((home, *readers) for home, readers, _ in moving))
            loads = [found.load for found in figures(problem, cut, moving)]
            step = simulator(plan)(loads, chains, [1] * stages)
            rows.append((name, stages, link / 1e9, load, planned.bottleneck, step, planned.step))
    return rows


def measure(options: Options) -> Report:
    """A row for each model, number of stages and link."""
    left_out: list[str] = []
    names = ["towers"] if options.quick else list(available(TOWERS, left_out))
    found = [row for name in names for row in in_child(rows_of, name, options.quick, fresh=not options.quick)]
    rows = [
        (
            *(name, stages, f"{link:.0f}"),
            *(f"{seconds * 1e3:.3f}" for seconds in (load, planned_load, step, planned_step)),
            f"{1 - planned_step / step:.1%}",
        )
        for name, stages, link, load, planned_load, step, planned_step in found
    ]
    header = (
        *("model", "stages", "GB/s", "lightest in order: load, ms", "**fxsplit**: load, ms"),
        *("lightest: step, ms", "**fxsplit**: step, ms", "shorter by"),
    )
    shorter = [1 - row[6] / row[5] for row in found]
    said = (
        f"Shorter in {sum(part > CLOSE for part in shorter)} of {len(shorter)} cases, by up to {max(shorter):.1%}; "
        f"longer in {sum(part < -CLOSE for part in shorter)}; up to 0.01 % is no difference."
    )
    return Report(header, rows, [said], left_out)
