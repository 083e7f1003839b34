"""Commands that compile a model: show, check, profile."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..compat import tree_leaves
from ..compiler import compile
from ..errors import ArgumentError, FxsplitError
from ..graph.ir import Stage
from ..graph.place import has_no_values
from ..pipeline import Pipeline
from ..plan.plan import Plan
from ..simulation.profile import profile
from ..testing.equivalence import assert_equivalent
from . import model as models
from . import options
from .draw import draw
from .output import print_json, working


def add_show(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    _add(parser, _show)
    parser.add_argument("--stage", type=int, help="only the code of this one")
    parser.add_argument("--graph", metavar="FILE.dot|FILE.svg", help="also draw the stages")


def add_check(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    _add(parser, _check)
    parser.add_argument(
        "--atol", type=float, default=0.0, help="absolute difference allowed (default: 0, bit for bit)"
    )
    parser.add_argument("--rtol", type=float, default=0.0, help="relative difference allowed (default: 0)")


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    _add(parser, _profile)
    parser.add_argument("--rounds", type=int, default=10, help="steps (default: 10)")
    parser.add_argument(
        "--loss",
        metavar="FACTORY",
        help="package.module:function of (output, target) or (output); default: mean of squares",
    )
    parser.add_argument("--target", metavar="TYPE[SIZES]", help="of the loss, of random numbers: int64[8]<10")
    parser.add_argument("--timeline", metavar="FILE", help="write a step as a page (.html) or trace (.json)")


def _add(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int | None]) -> None:
    models.add_to(parser)
    options.add_to(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def _pipe(call: models.Call, plan: Plan, *, check: bool = True) -> Pipeline:
    model, args, kwargs = call
    with working("compiling"):
        return compile(model, plan, example_args=args, example_kwargs=kwargs, check=check)


# -- show -------------------------------------------------------------------------------------------------------------


def _show(given: argparse.Namespace) -> None:
    pipe = _pipe(models.call_of(given), options.plan_of(given))
    if given.graph:
        draw(pipe, given.graph)
    stages = [pipe[given.stage]] if given.stage is not None else list(pipe.stages)
    if given.json:
        print_json(
            {
                "model": type(pipe.model).__name__,
                "plan": _plain(pipe.plan),
                "stages": [_described(pipe, stage) for stage in stages],
            }
        )
        return
    if given.stage is None:
        print(pipe.report(), end="\n\n")
    print("\n\n".join(stage.code.rstrip() for stage in stages))


def _plain(plan: Plan) -> Any:
    try:
        return plan.to_dict()
    except FxsplitError:  # functions of the user's own
        return repr(plan)


def _described(pipe: Pipeline, stage: Stage) -> dict[str, Any]:
    facts = pipe.traced.facts
    return {
        "index": stage.index,
        "device": str(stage.device),
        "modules": list(stage.modules),
        "inputs": list(stage.inputs),
        "outputs": {name: facts[name].nbytes for name in stage.outputs if name in facts},
        "parameters": list(stage.parameters),
        "load": pipe.assignment.loads[stage.index],
        "code": stage.code,
    }


# -- check ------------------------------------------------------------------------------------------------------------


def _check(given: argparse.Namespace) -> int:
    """0 where the split is the model, 1 where it is not or cannot be made."""
    call, plan = models.call_of(given), options.plan_of(given)
    try:
        shown = _proved(call, plan, given.atol, given.rtol)
    except FxsplitError as error:
        if given.json:
            print_json({"equivalent": False, "error": type(error).__name__, "message": str(error)})
        if given.debug:
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if given.json:
        print_json({"equivalent": True, "shown": shown})
    else:
        print("\n".join(shown))
    return 0


def _proved(call: models.Call, plan: Plan, atol: float, rtol: float) -> list[str]:
    model, args, kwargs = call
    pipe = _pipe(call, plan)
    shown = pipe.verify().splitlines()
    if has_no_values(model):
        return shown
    with working("comparing"):
        found = assert_equivalent(model, pipe, *args, atol=atol, rtol=rtol, **kwargs)
    return [*shown, *str(found).splitlines()]


# -- profile ----------------------------------------------------------------------------------------------------------


def _profile(given: argparse.Namespace) -> None:
    call, plan = models.call_of(given), options.plan_of(given)
    loss = models.named(given.loss) if given.loss else _mean_of_squares
    # Of a loss that fxsplit does not know it does not matter here: steps are timed, and their gradients are dropped.
    reduction = None if loss.__module__.startswith("torch.") else "mean"
    target = None if given.target is None else models.value_of("--target", given.target)
    _, args, kwargs = call
    pipe = _pipe(call, plan)
    step = {"loss_fn": loss, "target": target, "reduction": reduction}
    with working(f"timing {2 * given.rounds} steps"):
        found = profile(pipe, *args, **step, rounds=given.rounds, **kwargs)  # type: ignore[arg-type]
    if given.timeline:
        with pipe.timeline() as recorded:
            for _ in range(2):
                pipe.step(*args, **step, **kwargs)  # type: ignore[arg-type]
        recorded.save(given.timeline)
    if given.json:
        print_json(
            {
                "predicted": found.predicted,
                "measured": found.measured,
                "ratio": found.ratio,
                "spread": found.spread,
                "instructions": {f"{kind}{stage}": t for (kind, stage), t in found.instructions.items()},
                **{name: getattr(found, name) for name in ("own", "wake", "loss", "head", "middle", "tail")},
            }
        )
    else:
        print(found)


def _mean_of_squares(output: Any) -> torch.Tensor:
    leaves = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    if not leaves:
        raise ArgumentError(
            "no output of the model is a number with gradients", remedy="--loss file.py:function"
        )
    total = leaves[0].square().mean()
    for leaf in leaves[1:]:
        total = total + leaf.square().mean()
    return total
