"""Of a whole model: 2 replicas in threads that share the parameters, beside DistributedDataParallel with 2 processes.

Encoders and rounds as in `step`. Each worker has 32 rows. Under GPipe replicas wait for each other's forward and the loss
of the whole batch, under 1F1B each computes its own part of it. `DistributedDataParallel` has two gloo processes, its
all-reduce of all gradients included; ``gradient_as_bucket_view`` saves it a copy. No two workers take less than 0.5 of
one.
"""

from __future__ import annotations

from .measuring import HEADER, measure_steps, ratio_rows, verdicts
from .part import Options
from .processes import data_parallel
from .report import Report
from .tasks import transformer
from .variants import eager, split

QUESTION = "What do replicas of a whole model win?"
MINUTES = 1.7
PEERS = {
    "DistributedDataParallel": {},
    "DistributedDataParallel, bucket views": {"gradient_as_bucket_view": True},
}


def measure(options: Options) -> Report:
    """A row for each variant."""
    task = transformer(2 if options.quick else 8, options.quick)
    with data_parallel(task, PEERS) as theirs:
        ours = [
            split(task, f"fxsplit, 2 replicas, {name}", replicas=2, schedule=schedule)
            for name, schedule in (("1F1B", "1f1b"), ("GPipe", "gpipe"))
        ]
        variants = [eager(task), eager(task, 2, "eager on 2 micro-batches"), *ours, *theirs]
        found, agreed = measure_steps(variants, 2 if options.quick else 11)
    said = verdicts(found, [v.name for v in ours], [v.name for v in theirs])
    return Report(HEADER, ratio_rows(variants, found), [agreed, " ".join(said)])
