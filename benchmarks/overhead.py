"""What the runtime costs where nothing overlaps: everything is played in the calling thread.

Encoders and rounds as in `step`. With micro-batches a ratio is to eager on the same micro-batches, one after the other.
The peers play 4 stages too: their forward is in a thread for the device, their backward in the calling thread.
"""

from __future__ import annotations

from .measuring import HEADER, measure_steps, ratio_rows, verdicts
from .part import Options
from .peers import threaded_peers
from .report import Report
from .tasks import transformer
from .variants import eager, split

QUESTION = "What does the runtime cost where nothing overlaps?"
MINUTES = 1.1
PIECES = "eager on 8 micro-batches"


def measure(options: Options) -> Report:
    """A row for each variant."""
    task, left_out = transformer(4, options.quick), []
    in_pieces = split(
        task, "fxsplit, 4 stages × 8 in one thread", serial=True, base=PIECES, stages=4, micro_batches=8
    )
    theirs = threaded_peers(task, left_out, stages=4, base=PIECES)
    variants = [
        eager(task),
        eager(task, 8, PIECES),
        split(task, "fxsplit, 1 stage", stages=1, micro_batches=1),
        split(task, "fxsplit, 4 stages", stages=4, micro_batches=1),
        in_pieces,
        *theirs,
    ]
    found, agreed = measure_steps(variants, 2 if options.quick else 9)
    said = verdicts(found, [in_pieces.name], [v.name for v in theirs])
    return Report(HEADER, ratio_rows(variants, found), [agreed, *said], left_out)
