"""The speed-up of 2 stages over eager with m micro-batches under GPipe, whose bound is 2 m / (m + 1).

4 encoders and rounds as in `step`. torchgpipe takes its turns where it is installed, or else fairscale, its fork.
"""

from __future__ import annotations

from .measuring import measure_steps, ratio, verdicts
from .part import Options
from .peers import THREADED, installed, threaded_peer
from .report import Report
from .tasks import transformer
from .variants import eager, split

QUESTION = "How does the speed-up grow with micro-batches?"
MINUTES = 1.6
COUNTS = (2, 4, 8, 16)


def measure(options: Options) -> Report:
    """A row for each number of micro-batches."""
    task, left_out = transformer(2 if options.quick else 4, options.quick), []
    peers = [name for name in THREADED if installed(name, left_out)][:1]  # fairscale is torchgpipe's fork
    variants = [
        eager(task),
        *(eager(task, m, f"eager {m}") for m in COUNTS),
        *(split(task, f"fxsplit with {m} micro-batches", stages=2, micro_batches=m) for m in COUNTS),
    ]
    for name in peers:
        for m in COUNTS:
            variants.append(threaded_peer(task, name, chunks=m))
            variants[-1].name = f"{name} with {m}"
    found, agreed = measure_steps(variants, 2 if options.quick else 7)
    rows = []
    for m in COUNTS:
        low, middle, high = ratio(found, f"fxsplit with {m} micro-batches", "eager")
        same = ratio(found, f"fxsplit with {m} micro-batches", f"eager {m}")[1]
        bound = 2 * m / (m + 1)
        theirs = [1 / ratio(found, f"{name} with {m}", "eager")[1] for name in peers]
        rows.append(
            (
                *(m, f"{1 / middle:.2f}", f"{1 / high:.2f} to {1 / low:.2f}", f"{1 / same:.2f}"),
                *(f"{bound:.2f}", f"{1 / middle / bound:.0%}", *(f"{speed:.2f}" for speed in theirs)),
            )
        )
    header = (
        *("micro-batches", "**speed-up over eager**", "quartiles", "over eager on the same micro-batches"),
        *("bound", "of the bound", *peers),
    )
    said = []
    for m in COUNTS:
        said += verdicts(found, [f"fxsplit with {m} micro-batches"], [f"{name} with {m}" for name in peers])
    return Report(header, rows, [" ".join([agreed, *said])], left_out)
