"""How much of the time ranks wait, by simulation: python benchmarks/ranks.py. Nothing is run."""

from __future__ import annotations

from tabulate import tabulate

from fxsplit.schedules.catalog import schedule_of
from fxsplit.schedules.lower import Flow, lower
from fxsplit.schedules.simulate import bubble

MICRO_BATCHES = 2048  # of a global batch


def share(name: str, ranks: int, micro_batches: int, each: int) -> str:
    """Idle share of the ranks of one pipeline whose stages take equally long; sends take no time."""
    stages = ranks * each
    schedule = schedule_of(name, stages, micro_batches, ranks if each > 1 else None)
    flow = Flow(stages, [(s, s + 1) for s in range(stages - 1)], outputs=frozenset({stages - 1}))
    return f"{bubble(lower(schedule, flow), [1.0] * stages):.1%}"


def main() -> None:
    """Print a row for each way to arrange so many ranks."""
    rows = []
    for total in (8, 64, 512, 4096):
        for stages in (4, 8, 16, 32):
            micro_batches = MICRO_BATCHES * stages // total
            if stages > total or not 1 <= micro_batches <= 1024:
                continue
            found = [
                share(name, stages, micro_batches, each)
                for name, each in (("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zb_v", 2))
            ]
            rows.append([total, stages, total // stages, micro_batches, *found])
    names = ["ranks", "stages", "replicas", "micro-batches", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"]
    print(tabulate(rows, names, tablefmt="github"))


if __name__ == "__main__":
    main()
