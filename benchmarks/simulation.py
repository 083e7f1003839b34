"""How long does it take to simulate many ways to run a step? python benchmarks/simulation.py [--most 512]

64 stages, in groups of as many as 8, 16, 32 or all, under every schedule of the catalogue, with 64 micro-batches and twice
as many up to `--most`, 7 numbers of replicas and 3 checkpoint policies. Once stages are equal, and once each is up to 10 %
off, which puts off or prevents steady states, so that most is simulated in full. Seconds are of the processor.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
from tabulate import tabulate

import fxsplit
from fxsplit.schedules.catalog import NAMES
from fxsplit.simulation.chain import chain_of
from fxsplit.simulation.steady import steady


def main() -> None:
    """Print a row for each kind of costs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=512)
    most = parser.parse_args().most
    torch.set_num_threads(1)
    numbers = random.Random(0)
    figures = {
        "kept": [8e9] * 64,
        "parameters": [1e9] * 64,
        "sent": [1e8] * 63,
        "link": 1e10,
    }
    rows = []
    for name, forward in (
        ("equal", [1.0] * 64),
        ("up to 10 % off", [numbers.uniform(0.9, 1.1) for _ in range(64)]),
    ):
        chain_of.cache_clear()
        steady.cache_clear()
        begin = time.process_time()
        found = fxsplit.simulate(
            fxsplit.StageCosts(forward, **figures),
            micro_batches=[64 * 2**k for k in range(10) if 64 * 2**k <= most],
            schedules=NAMES,
            stages=(8, 16, 32, 64),
            replicas=(1, 2, 4, 8, 16, 32, 64),
            checkpoint=("never", "always", "except_last"),
            memory="80GB",
        )
        taken = time.process_time() - begin
        rows.append((name, len(found.rows), f"{taken:.1f}", f"{taken / len(found.rows) * 5000:.1f}"))
    print(tabulate(rows, ("stages", "ways", "seconds", "seconds for 5,000"), tablefmt="github"))


if __name__ == "__main__":
    main()
