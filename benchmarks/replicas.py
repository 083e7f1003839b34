"""What do replicas win: of a whole model, and of the heavier of two stages?

    python benchmarks/replicas.py data [--layers 8] [--rounds 15]
    python benchmarks/replicas.py unbalanced [--rounds 15]

Model, step, rounds, ratios and environment are those of runtime.py: encoders of width 256, a batch of 64, forward, mean
squared error and backward; every variant computes the gradients of the same batch, which are compared with eager's
before anything is timed; a worker has one intra-op thread.

``data``: one stage with 2 replicas, which are threads that share the parameters, each with a micro-batch of 32 rows,
against eager in one thread on the whole batch; under GPipe they wait for each other's forward and the loss of the whole
batch, under 1F1B each computes its own part of it. No two workers take less than 0.5 of it. `DistributedDataParallel` has
two gloo processes with 32 rows each, timed from the word to start to the last one's word that it is done, its
all-reduce of all gradients included; ``gradient_as_bucket_view`` saves it a copy.

``unbalanced``: 6 encoders in two stages of 4 and 2, so that the first is twice as heavy; with one replica of each
(``[1, 1]``), and with two of the first (``[2, 1]``). The simulations take the median seconds of each stage's forwards
and backwards, measured with everything in one thread: with a core for each worker, and with as many as there are, which
the actions that run at the same time share evenly. Transfers, the loss and memory bandwidth cost nothing there.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics

from peers import eager, replicas, split, transformer
from runtime import measure, print_environment, ratio_table, show, spread, with_allocator

import fxsplit
from fxsplit.schedules.simulate import timeline

PEERS = {"DistributedDataParallel": {}, "the same, bucket views": {"gradient_as_bucket_view": True}}


def data(options):
    """A model with 2 replicas."""
    task = transformer(options.layers)
    processes, peers = replicas(task, PEERS)
    try:
        variants = [
            eager(task),
            eager(task, 2, "eager, 2 micro-batches"),
            *(
                split(task, f"fxsplit {schedule}, 2 replicas", replicas=2, schedule=schedule)
                for schedule in ("gpipe", "1f1b")
            ),
            *peers,
        ]
        ratio_table(variants, measure(variants, options.rounds))
    finally:
        processes.close()
    print("ideal bound: 0.5")


def unbalanced(options):
    """A stage that is twice as heavy as the next, with 1 and 2 replicas."""
    task, counts, rows = transformer(6), (4, 8), []
    plans = {
        (m, r): {"cut": ["4"], "micro_batches": m, "replicas": list(r)}
        for m in counts
        for r in ((1, 1), (2, 1))
    }
    names = {(m, r): f"{list(r)}, {m} micro-batches" for m, r in plans}
    variants = [
        eager(task),
        *(split(task, names[m, r], base=names[m, (1, 1)], **plan) for (m, r), plan in plans.items()),
    ]
    found = measure(variants, options.rounds)
    ratio_table(variants, found)
    cores = len(os.sched_getaffinity(0))
    for m in counts:
        seconds = seconds_of_actions(task, plans[m, (1, 1)])
        few, many, bubbles = [], [], []
        for r in ((1, 1), (2, 1)):
            pipe = fxsplit.compile(task.model, fxsplit.Plan(**plans[m, r]), example_args=(task.x,))
            few.append(simulated(pipe, seconds, cores))
            many.append(simulated(pipe, seconds, len(pipe.schedule.workers)))
            bubbles += re.findall("predicted bubble ([^;]*)", pipe.report())
        middle, low, high = spread(found, names[m, (2, 1)], names[m, (1, 1)])
        heavier = sum(seconds[k, 0] for k in "FB") / sum(seconds[k, 1] for k in "FB")
        simulations = (f"{many[1] / many[0]:.3f}", f"{few[1] / few[0]:.3f}")
        measured = f"{middle:.3f} ({low:.3f} to {high:.3f})"
        rows.append((m, f"{heavier:.2f}", " → ".join(bubbles), *simulations, measured))
    header = (
        "m",
        "stage 0 : stage 1",
        "predicted bubble",
        "simulated, a core each",
        f"simulated, {cores} cores",
        "measured",
    )
    print(f"a step with replicas [2, 1], as a ratio to [1, 1]; {cores} cores for 3 workers and 2")
    show(header, rows)


def seconds_of_actions(task, plan, steps=5):
    """(kind, stage) → median seconds of one action, with everything in one thread."""
    variant = split(task, "serial", serial=True, **plan)
    found = {}

    def note(event):
        found.setdefault((event.action.kind, event.action.stage), []).append(event.end - event.begin)

    variant.step()
    with variant.pipe.register_action_hook(note):
        for _ in range(steps):
            variant.step()
            variant.clear()
    return {key: statistics.median(values) for key, values in found.items()}


def simulated(pipe, seconds, cores):
    """Seconds of a step whose actions share the cores evenly."""
    tape = pipe.tape

    def length(instruction):
        return sum(seconds[a.kind, a.stage] for a in instruction.actions)  # the loss is outside of actions

    waiting = [list(row) for row in tape.workers]
    running, done, now = {}, set(), 0.0
    while running or any(waiting):
        for worker, row in enumerate(waiting):
            if worker not in running and row and done.issuperset(row[0].after):
                running[worker] = [row[0].number, length(row[0])]
                del row[0]
        speed = min(1.0, cores / len(running))
        passed = min(left for _, left in running.values())
        now += passed / speed
        for worker, state in list(running.items()):
            state[1] -= passed
            if state[1] <= 1e-12:
                done.add(state[0])
                del running[worker]
    if cores >= len(waiting):
        assert abs(now - max(end for _, end in timeline(tape, length))) < 1e-6
    return now


PARTS = {"data": data, "unbalanced": unbalanced}


def main() -> None:
    """Run one of the parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    for name, run in PARTS.items():
        part = parts.add_parser(name, help=run.__doc__)
        part.add_argument("--rounds", type=int, default=15, help="how often each variant has its turn")
        if name == "data":
            part.add_argument("--layers", type=int, default=8, help="of the model")
    options = parser.parse_args()
    with_allocator("glibc")
    print_environment("glibc")
    PARTS[options.part](options)


if __name__ == "__main__":
    main()
