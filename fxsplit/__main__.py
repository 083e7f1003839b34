"""The command line: ``python -m fxsplit``, also installed as ``fxsplit``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .compiler import preview
from .demo.run import run_demo
from .errors import ArgumentError, FxsplitError
from .plan.checkpoint import WORDS as CHECKPOINTS
from .plan.costs import CATALOG as COSTS
from .plan.hardware import ACCELERATORS, Device, described
from .plan.plan import EFFORTS, Plan
from .schedules.catalog import IN_V, SHARED, usual_workers
from .schedules.catalog import NAMES as SCHEDULES


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time: give a number above 0, such as 8")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, or 2 for a mistake in the arguments."""
    parser = argparse.ArgumentParser(
        prog="fxsplit", description="Split an unchanged PyTorch model into stages."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands)
    _add_plan(commands)
    options = parser.parse_args(arguments)
    try:
        if options.command == "plan":
            _plan(options)
        else:
            _demo(options)
    except (FxsplitError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo", help="split a small GPT, print its stages, train it beside its unsplit twin"
    )
    demo.add_argument("--stages", type=int, default=3)
    demo.add_argument("--micro-batches", type=int, default=4)
    demo.add_argument("--schedule", choices=SCHEDULES, default="gpipe")
    demo.add_argument("--workers", type=int, help="that share the stages, for schedules with several on each")
    demo.add_argument("--checkpoint", choices=CHECKPOINTS, default="never")
    demo.add_argument("--replicas", type=int, default=1, help="workers for each stage (default: 1)")
    demo.add_argument("--cost", choices=COSTS, default="params", help="what the automatic cut balances")
    demo.add_argument("--devices", help="one device, or one for each stage: cuda:0,cuda:1 (default: cpu)")
    demo.add_argument("--batch", type=int, default=16, help="rows of 64 characters in a step (default: 16)")
    demo.add_argument("--layers", type=int, default=6, help="blocks of the GPT (default: 6)")
    demo.add_argument("--timeline", metavar="FILE", help="write a step as a page (.html) or trace (.json)")
    demo.add_argument("--seconds", type=_seconds, default=8.0, help="how long to train (default: 8)")


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="print how a model would be cut, without generating or moving anything",
        description="Print how a model would be cut. MODEL names a function that returns (model, example arguments) or "
        "(model, example arguments, example keyword arguments).",
    )
    plan.add_argument("model", help="package.module:factory")
    plan.add_argument("--stages", type=int, default=2, help="how many (default: 2)")
    plan.add_argument("--cost", choices=COSTS, default="params", help="what a stage weighs (default: params)")
    plan.add_argument("--hardware", help=f"one or one for each stage: {', '.join(ACCELERATORS)}")
    plan.add_argument(
        "--link", type=float, help="bytes per second between devices, instead of the hardware's"
    )
    plan.add_argument("--memory", help="of each device, such as 40GB, instead of the hardware's")
    plan.add_argument("--micro-batches", type=int, default=1)
    plan.add_argument("--schedule", choices=SCHEDULES, default="gpipe")
    plan.add_argument("--workers", type=int, help="that share the stages, each with a device of its own")
    plan.add_argument("--checkpoint", choices=CHECKPOINTS, default="never")
    plan.add_argument(
        "--optimizer-states", type=int, default=2, help="values for each parameter; Adam: 2 (default)"
    )
    plan.add_argument("--inference", action="store_true", help="no gradients, no optimizer, nothing kept")
    plan.add_argument(
        "--auto-replicas", action="store_true", help="share --stages devices out to stages and replicas"
    )
    plan.add_argument("--effort", choices=EFFORTS, default="normal")
    plan.add_argument(
        "--meta", action="store_true", help="make the model on the meta device: it needs no memory"
    )
    plan.add_argument("--save", help="write the plan to this JSON file")


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


def _plan(options: argparse.Namespace) -> None:
    """Make the model, plan, print."""
    hardware = _hardware(options)
    if options.workers is None and options.schedule in IN_V:
        options.workers = usual_workers(options.schedule, options.stages)
    each = options.workers or options.stages
    numbers = [i % each for i in range(options.stages)] if options.auto_replicas else range(each)
    plan = Plan(
        stages=None if options.auto_replicas and options.stages > 0 else options.stages,
        cost=options.cost,
        hardware=hardware[0] if len(hardware) == 1 else hardware or None,
        # Numbered, so that each has a memory of its own; they need not be there.
        devices=[f"cuda:{i}" for i in numbers] or None,
        micro_batches=options.micro_batches,
        schedule=options.schedule,
        workers=options.workers,
        checkpoint=options.checkpoint,
        optimizer_states=None if options.inference else options.optimizer_states,
        replicas="auto" if options.auto_replicas else 1,
        effort=options.effort,
    )
    factory = _named(options.model)
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ArgumentError(f"{options.model}: {error}", remedy="a function without arguments") from None
    with torch.device("meta") if options.meta else contextlib.nullcontext():
        made = factory()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], torch.nn.Module):
        raise ArgumentError(
            f"{options.model} did not return a model and its example arguments",
            remedy="return model, (x,), or model, (), {'x': x}",
        )
    model, args, kwargs = made if len(made) == 3 else (*made, {})
    print(preview(model, plan, example_args=args, example_kwargs=kwargs))
    if options.save:
        plan.save(options.save)


def _hardware(options: argparse.Namespace) -> list[Device]:
    names = options.hardware.split(",") if options.hardware else []
    changes = {key: getattr(options, key) for key in ("link", "memory") if getattr(options, key) is not None}
    found = [described("--hardware", name) for name in names]
    if changes and not found:
        found = [Device()]
    return [dataclasses.replace(device, **changes) for device in found]


def _named(name: str) -> Callable[[], Any]:
    """The function that ``package.module:factory`` names; modules of the working directory can be named too."""
    module, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentError(f"{name!r} names no function: {error}", remedy="package.module:factory") from None
    if not callable(found):
        raise ArgumentError(f"{name!r} is no function", remedy="package.module:factory")
    return found  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.exit(main())
