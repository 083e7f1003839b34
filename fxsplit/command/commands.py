"""The commands: each makes what it is asked for, prints it, and says by its exit status whether it could."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence

import torch

from ..demo.run import run_demo
from ..errors import FxsplitError
from ..plan.checkpoint import WORDS as CHECKPOINTS
from ..plan.costs import CATALOG as COSTS
from ..plan.plan import Plan
from ..schedules.catalog import NAMES as SCHEDULES
from ..schedules.catalog import SHARED, usual_workers
from .compiling import add_check, add_profile, add_show
from .explaining import add_explain
from .planning import add_plan, add_simulate

_FINE, _MISTAKE, _INTERRUPTED, _NOBODY_READS = 0, 2, 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit status: 0; 1 where `check` finds that the split is refused or not the model; 2 for a mistake in the
        arguments; 130 after Ctrl-C; 141 where nobody reads what is printed.
    """
    given = _parser().parse_args(arguments)
    try:
        status: int | None = given.run(given)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the end
        return _NOBODY_READS
    except (FxsplitError, OSError) as error:
        if given.debug:
            traceback.print_exc()
        else:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return _MISTAKE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    return status or _FINE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fxsplit", description="Split an unchanged PyTorch model into stages."
    )
    version = vars(sys.modules["fxsplit"])["__version__"]
    parser.add_argument(
        "--version", action="version", version=f"fxsplit {version}, torch {torch.__version__}"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (add, help) in _COMMANDS.items():
        add(commands.add_parser(name, help=help, description=help))
    return parser


# -- demo -------------------------------------------------------------------------------------------------------------


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time: give a number above 0, such as 8")
    return value


def _add_demo(demo: argparse.ArgumentParser) -> None:
    demo.add_argument("--stages", type=int, default=2, help="(default: 2)")
    demo.add_argument("--micro-batches", type=int, default=8, help="(default: 8)")
    demo.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    demo.add_argument("--workers", type=int, help="that share the stages, for schedules with several on each")
    demo.add_argument("--checkpoint", choices=CHECKPOINTS, default="never")
    demo.add_argument("--replicas", type=int, default=1, help="workers for each stage (default: 1)")
    demo.add_argument("--cost", choices=COSTS, default="flops", help="what the automatic cut balances")
    demo.add_argument("--devices", help="one device, or one for each stage: cuda:0,cuda:1 (default: cpu)")
    demo.add_argument("--batch", type=int, default=32, help="rows of 64 characters in a step (default: 32)")
    demo.add_argument("--layers", type=int, default=6, help="blocks of the GPT (default: 6)")
    demo.add_argument(
        "--timeline",
        metavar="FILE",
        default="fxsplit-demo.html",
        help="where a step is drawn: a page (.html) or a trace (.json) (default: fxsplit-demo.html)",
    )
    demo.add_argument("--seconds", type=_seconds, default=8.0, help="how long to train (default: 8)")
    demo.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> None:
    devices = options.devices.split(",") if options.devices else None
    if options.workers is None and options.schedule in SHARED:
        options.workers = usual_workers(options.schedule, options.stages)
    plan = Plan(
        stages=options.stages,
        cost=options.cost,
        devices=devices[0] if devices and len(devices) == 1 else devices,
        micro_batches=options.micro_batches,
        schedule=options.schedule,
        workers=options.workers,
        checkpoint=options.checkpoint,
        replicas=options.replicas,
    )
    run_demo(
        plan,
        batch=options.batch,
        seconds=options.seconds,
        layers=options.layers,
        timeline=options.timeline,
    )


_COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str]] = {
    "demo": (_add_demo, "split a small GPT, print its stages, train it beside its unsplit twin"),
    "plan": (add_plan, "print how a model would be cut, without generating or moving anything"),
    "show": (add_show, "print the generated code of each stage, and the stage table"),
    "check": (add_check, "compile a model under a plan and prove that the split is the model: for CI"),
    "simulate": (add_simulate, "print what a step would take in many ways, the best marked"),
    "profile": (add_profile, "run steps under a plan, and compare them with what is predicted"),
    "explain": (add_explain, "say what a saved plan says, or what an error means"),
}
