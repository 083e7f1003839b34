"""Seconds of one core in which many ways to run a step are simulated.

64 stages, in groups of as many as 8, 16, 32 or all, under every schedule of the catalogue, with 64 to 512
micro-batches, 7 numbers of replicas and 3 checkpoint policies. Once stages are equal, and once each is up to 10 % off,
which puts off or prevents steady states, so that most is simulated in full.
"""

from __future__ import annotations

import random
import time

import fxsplit
from fxsplit.schedules.catalog import NAMES
from fxsplit.simulation.chain import chain_of
from fxsplit.simulation.steady import steady

from .part import Options
from .report import Report

QUESTION = "How long does it take to simulate many ways to run a step?"
MINUTES = 0.6


def measure(options: Options) -> Report:
    """A row for each kind of costs."""
    stages = 8 if options.quick else 64
    numbers = random.Random(0)
    figures = {
        "kept": [8e9] * stages,
        "parameters": [1e9] * stages,
        "sent": [1e8] * (stages - 1),
        "link": 1e10,
    }
    rows = []
    for name, forward in (
        ("equal", [1.0] * stages),
        ("up to 10 % off", [numbers.uniform(0.9, 1.1) for _ in range(stages)]),
    ):
        chain_of.cache_clear()
        steady.cache_clear()
        begin = time.process_time()
        found = fxsplit.simulate(
            fxsplit.StageCosts(forward, **figures),
            micro_batches=[stages * 2**k for k in range(1 if options.quick else 4)],
            schedules=NAMES,
            stages=[stages // k for k in (8, 4, 2, 1)][-2 if options.quick else 0 :],
            replicas=(1, 2) if options.quick else (1, 2, 4, 8, 16, 32, 64),
            checkpoint=("never", "always", "except_last"),
            memory="80GB",
        )
        taken = time.process_time() - begin
        count = len(found.rows)
        rows.append((name, count, f"{taken:.1f}", f"{taken / count * 5000:.1f}"))
    return Report((f"{stages} stages", "ways", "seconds", "seconds for 5,000"), rows)
