"""MiB that are kept for backward at the highest, by schedule and recomputation, as `pipe.memory()` simulates them.

16 encoders in 4 stages, or in 8 on 4 workers, a batch of 16 × 64, 8 micro-batches. What autograd keeps is seen on the CPU:
on the meta device attention is computed by other kernels, which keep more.
The simulation is within 5 % of what is measured for every schedule and recomputation, which is a test
(``pytest tests/memory/test_simulated.py -k what_is_kept``); `memory` has measured figures beside peers.
"""

from __future__ import annotations

import fxsplit

from .memory import MIB, POLICIES
from .part import Options
from .report import Report
from .tasks import transformer

QUESTION = "What does each schedule keep for backward?"
MINUTES = 1.0
SCHEDULES = {
    "GPipe": ("gpipe", 1),
    "1F1B": ("1f1b", 1),
    "ZB-H1": ("zb_h1", 1),
    "interleaved 1F1B, 8 stages on 4 workers": ("interleaved_1f1b", 2),
    "breadth-first, 8 on 4": ("breadth_first", 2),
    "interleaved zero-bubble, 8 on 4": ("interleaved_zero_bubble", 2),
}


def measure(options: Options) -> Report:
    """A row for each schedule."""
    layers, rows = 8 if options.quick else 16, []
    task = transformer(layers, options.quick)
    x = task.x[:16]
    for name, (schedule, each) in list(SCHEDULES.items())[: 1 if options.quick else None]:
        cut = [str(i * layers // (4 * each)) for i in range(1, 4 * each)]
        row = []
        for policy in POLICIES:
            workers = {"workers": 4} if each > 1 else {}
            plan = fxsplit.Plan(cut=cut, micro_batches=8, schedule=schedule, checkpoint=policy, **workers)
            pipe = fxsplit.compile(task.model, plan, example_args=(x,), check=False)
            row.append(sum(live.kept for live in pipe.memory().values()) / MIB)
        rows.append((name, *(f"{mib:.1f}" for mib in row)))
    return Report(("schedule", *(f"`{policy}`, MiB" for policy in POLICIES)), rows)
