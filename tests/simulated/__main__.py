"""Many interleavings, one after the other, until one fails; then the command that plays just that one again."""

import argparse
import collections
import sys
import time

from . import numbers, ranks, tensors
from .installed import installed

WORLDS = {
    "numbers": (numbers.Run, numbers.numbers),
    "tensors": (tensors.Run, tensors.tensors),
    "ranks": (ranks.Run, ranks.ranks),
}
EVERY = 10.0  # seconds between two lines


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tests.simulated", description=__doc__)
    parser.add_argument("world", nargs="?", default="numbers", choices=WORLDS)
    parser.add_argument("--interleavings", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others count on")
    asked = parser.parse_args(arguments)
    make, around = WORLDS[asked.world]
    begin = said = time.monotonic()
    kinds, steps = collections.Counter(), 0
    with installed(), around():
        for done, seed in enumerate(range(asked.seed, asked.seed + asked.interleavings), start=1):
            run = make(seed)
            try:
                run.run()
            except AssertionError as error:
                print(
                    f"{run}\n{error}\n\nreplay: python -m tests.simulated {asked.world} --interleavings 1 --seed {seed}"
                )
                return 1
            kinds[run.faults.kind] += 1
            steps += run.simulation.steps
            now = time.monotonic()
            if now - said > EVERY or done == asked.interleavings:
                said, seconds = now, now - begin
                print(
                    f"{done} interleavings, {steps} steps, {seconds:.0f} s, {done / seconds:.0f} a second; faults: "
                    + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())),
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
