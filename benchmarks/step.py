"""A training step of 2 stages and 8 micro-batches, beside eager, the peers, and what two cores can do at that moment.

All variants take turns in each round of one process; a ratio is to eager, in one thread on the whole batch, in the same
round. That is done under glibc's defaults, and with the settings under which every variant keeps the memory that it had
(`machine.KEPT`). The ceilings are two threads, and two processes, that train on half of the batch each and never wait.
"""

from __future__ import annotations

from typing import Any

from .children import in_child
from .machine import KEPT
from .measuring import HEADER, measure_steps, ratio, ratio_rows, verdicts
from .part import Options
from .peers import threaded_peers
from .processes import pipelining
from .report import Report
from .tasks import transformer
from .variants import eager, split, two_threads

QUESTION = "How fast is a step?"
MINUTES = 5.2
CEILINGS = ("two threads, half each", "two processes, half each")
SCHEDULES = {"fxsplit 1F1B": "1f1b", "fxsplit GPipe": "gpipe"}


def rounds_of(quick: bool) -> dict[str, Any]:
    """Rows for `HEADER`, and what is said of them, under the allocator that this process has."""
    task, left_out = transformer(2 if quick else 8, quick), []
    with pipelining(task, CEILINGS[1]) as (processes, by_torch):
        theirs = [*threaded_peers(task, left_out), *by_torch]
        ours = [
            split(task, name, stages=2, micro_batches=8, schedule=schedule)
            for name, schedule in SCHEDULES.items()
        ]
        variants = [
            eager(task),
            eager(task, 8, "eager on 8 micro-batches"),
            two_threads(task, CEILINGS[0]),
            processes,
            *ours,
            *theirs,
        ]
        found, agreed = measure_steps(variants, 2 if quick else 9)
    bounds = [
        f"{name} takes "
        + " and ".join(f"{ratio(found, name, ceiling)[1]:.2f} of {ceiling}" for ceiling in CEILINGS)
        for name in SCHEDULES
    ]
    same = {name: [v.name for v in theirs if name.split()[-1] in v.name] for name in SCHEDULES}
    same["fxsplit GPipe"] += [v.name for v in theirs if v not in by_torch]
    return {
        "rows": ratio_rows(variants, found),
        "said": [
            agreed,
            *(line for name in SCHEDULES for line in verdicts(found, [name], same[name])),
            f"{'; '.join(bounds)}.",
        ],
        "left_out": left_out,
    }


def measure(options: Options) -> Report:
    """A row for each variant; under the defaults, and beside that with memory that is kept."""
    if options.quick:
        defaults = kept = rounds_of(True)
    else:
        defaults, kept = (in_child(rounds_of, False, environment=s, limit=900) for s in ({}, KEPT))
    rows = [(*a[:2], *a[3:], b[1], *b[3:]) for a, b in zip(defaults["rows"], kept["rows"], strict=True)]
    names = (*HEADER[:2], *HEADER[3:])
    header = (*names, *(f"{name}, memory kept" for name in names[1:]))
    summary = [
        f"Under the allocator's {words}: {' '.join(found['said'])}"
        for words, found in (("defaults", defaults), ("settings that keep memory", kept))
    ]
    return Report(header, rows, summary, defaults["left_out"])
