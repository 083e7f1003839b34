"""What threads lose to processes is memory that glibc gives back: page faults of a step, and its seconds.

Threads take memory from heaps that glibc unmaps as soon as they are free, so each step faults its activations in again; a
process has a main thread, whose heap is kept. 2 stages, 8 micro-batches, 4 encoders of the size of `step`'s; a fresh process
for each row, which takes its turns with eager in it. "glibc's defaults": what fxsplit does about it is left out.
"""

from __future__ import annotations

import resource
import statistics

from .children import in_child
from .measuring import quartiles, seconds_of
from .part import Options
from .report import Report
from .tasks import transformer
from .variants import eager, split, two_threads

QUESTION = "What do threads lose to processes?"
MINUTES = 1.8
SCHEDULES = {"fxsplit GPipe": "gpipe", "fxsplit 1F1B": "1f1b"}


def steps_of(name: str, remedy: bool, quick: bool) -> tuple[float, list[float]]:
    """Page faults of a step, and ratios to eager, in this process."""
    import fxsplit.runtime.allocator as allocator

    if not remedy:
        allocator._GLIBC = {}
    task = transformer(2 if quick else 4, quick)
    if name in SCHEDULES:
        variant = split(task, name, stages=2, micro_batches=8, schedule=SCHEDULES[name])
    else:
        variant = two_threads(task, name)
        if remedy:
            allocator.keep_pages(variant.model)
    beside = eager(task)
    faults, ratios = [], []
    for turn in range(2 if quick else 7):
        eager_seconds = seconds_of(beside)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        seconds = seconds_of(variant)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        if turn:  # the first one makes what is kept
            ratios.append(seconds / eager_seconds)
    return statistics.median(faults[1:]), ratios


def measure(options: Options) -> Report:
    """A row for each way to do a step, with and without the remedy."""
    rows = []
    for name in (*SCHEDULES, "two threads, half each"):
        for remedy, words in ((False, "glibc's defaults"), (True, "what fxsplit sets")):
            if options.quick and not (remedy and name == "fxsplit 1F1B"):
                continue
            faults, ratios = in_child(steps_of, name, remedy, options.quick, fresh=not options.quick)
            low, middle, high = quartiles(ratios)
            rows.append((name, words, f"{faults:,.0f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}"))
    return Report(("variant", "allocator", "page faults a step", "ratio to eager", "quartiles"), rows)
