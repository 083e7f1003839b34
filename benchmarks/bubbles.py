"""How much of the time ranks wait, by simulation: nothing is run.

Stages take equally long, a backward twice as long as a forward, and sends take no time. Interleaved 1F1B and ZB-V have
two stages on a rank.
"""

from __future__ import annotations

from fxsplit.schedules.catalog import schedule_of
from fxsplit.schedules.lower import Flow, lower
from fxsplit.schedules.simulate import bubble

from .part import Options
from .report import Report

QUESTION = "How many stages, how many replicas?"
MINUTES = 0.1
MICRO_BATCHES = 2048  # of a global batch
WAYS = (("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zb_v", 2))


def share(name: str, ranks: int, micro_batches: int, each: int) -> str:
    """Idle share of the ranks of one pipeline."""
    stages = ranks * each
    schedule = schedule_of(name, stages, micro_batches, ranks if each > 1 else None)
    flow = Flow(stages, [(s, s + 1) for s in range(stages - 1)], outputs=frozenset({stages - 1}))
    return f"{bubble(lower(schedule, flow), [1.0] * stages):.1%}"


def measure(options: Options) -> Report:
    """A row for each way to arrange so many ranks."""
    rows = []
    for total in (4096,) if options.quick else (8, 64, 512, 4096):
        for stages in (4, 8, 16, 32):
            micro_batches = MICRO_BATCHES * stages // total
            if stages > total or not 1 <= micro_batches <= 1024:
                continue
            found = [share(name, stages, micro_batches, each) for name, each in WAYS]
            rows.append([total, stages, total // stages, micro_batches, *found])
    return Report(("ranks", "stages", "replicas", "micro-batches", *(name for name, _ in WAYS)), rows)
