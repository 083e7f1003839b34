"""The command line: ``python -m fxsplit``, also installed as ``fxsplit``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .demo.run import run_demo
from .errors import FxsplitError
from .plan import CHECKPOINTS, COSTS, SCHEDULES, Plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, or 2 for a mistake in the arguments."""
    parser = argparse.ArgumentParser(
        prog="fxsplit", description="Split an unchanged PyTorch model into stages."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo", help="split a small GPT, print its stages, train it beside its unsplit twin"
    )
    demo.add_argument("--stages", type=int, default=3)
    demo.add_argument("--micro-batches", type=int, default=4)
    demo.add_argument("--schedule", choices=SCHEDULES, default="gpipe")
    demo.add_argument("--checkpoint", choices=CHECKPOINTS, default="never")
    demo.add_argument("--replicas", type=int, default=1, help="workers for each stage (default: 1)")
    demo.add_argument("--cost", choices=COSTS, default="params", help="what the automatic cut balances")
    demo.add_argument("--devices", help="one device, or one for each stage: cuda:0,cuda:1 (default: cpu)")
    demo.add_argument("--batch", type=int, default=16, help="rows of 64 characters in a step (default: 16)")
    demo.add_argument("--layers", type=int, default=6, help="blocks of the GPT (default: 6)")
    demo.add_argument("--seconds", type=float, default=8.0, help="how long to train (default: 8)")
    options = parser.parse_args(arguments)
    devices = options.devices.split(",") if options.devices else None
    try:
        plan = Plan(
            stages=options.stages,
            cost=options.cost,
            devices=devices[0] if devices and len(devices) == 1 else devices,
            micro_batches=options.micro_batches,
            schedule=options.schedule,
            checkpoint=options.checkpoint,
            replicas=options.replicas,
        )
        run_demo(plan, batch=options.batch, seconds=options.seconds, layers=options.layers)
    except FxsplitError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
