"""100 linear layers of width 64 with a ReLU each, 512 rows: operations that take less time than it takes to call them.

Python calls them one at a time, whatever the number of threads. With micro-batches a ratio is to eager on the same
micro-batches: what the runtime adds, and not what small operands cost.
"""

from __future__ import annotations

from .measuring import HEADER, measure_steps, ratio_rows, verdicts
from .part import Options
from .peers import threaded_peers
from .report import Report
from .tasks import small_operations
from .variants import eager, split

QUESTION = "What do small operations cost?"
MINUTES = 0.7
PIECES = "eager on 8 micro-batches"


def measure(options: Options) -> Report:
    """A row for each variant."""
    task, left_out = small_operations(8 if options.quick else 100), []
    plan = {"base": PIECES, "stages": 2, "micro_batches": 8}
    ours = [
        split(task, "fxsplit, 2 stages × 8", **plan),
        split(task, "fxsplit, 2 stages × 8, 1F1B", schedule="1f1b", **plan),
        split(task, "fxsplit, 2 stages × 8 in one thread", serial=True, **plan),
    ]
    theirs = threaded_peers(task, left_out, base=PIECES)
    variants = [
        eager(task),
        eager(task, 8, PIECES),
        split(task, "fxsplit, 1 stage", stages=1, micro_batches=1),
        *ours,
        *theirs,
    ]
    found, agreed = measure_steps(variants, 2 if options.quick else 21)
    said = verdicts(found, [ours[0].name], [v.name for v in theirs])
    return Report(HEADER, ratio_rows(variants, found), [agreed, *said], left_out)
