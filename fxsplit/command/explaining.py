"""The command that explains: a saved plan, or a class of errors."""

from __future__ import annotations

import argparse
import dataclasses
import os

from ..errors import ArgumentError, did_you_mean, sections
from ..plan.plan import Plan
from ..schedules.lower import Flow, lower
from ..schedules.simulate import staircase
from . import options
from .output import print_json


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument(
        "what", metavar="PLAN.json|ERROR", help="a saved plan, or an error such as GuardError"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_explain)


def _explain(given: argparse.Namespace) -> None:
    known = sections()
    name = given.what.rpartition(".")[2]  # as a traceback has it: fxsplit.errors.GuardError
    if name in known:
        _explain_error(name, known[name], given.json)
    elif name.endswith("Error") and not os.path.exists(given.what):
        raise ArgumentError(f"fxsplit has no error {name!r}", remedy=did_you_mean(name, known))
    else:
        _explain_plan(Plan.load(given.what), given.json)


def _explain_error(name: str, text: str, as_json: bool) -> None:
    if as_json:
        print_json({"error": name, "text": text})
    else:
        print(f"{name}\n\n{text}")


def _explain_plan(plan: Plan, as_json: bool) -> None:
    """What the plan says, field by field, and its schedule as a staircase."""
    usual = {field.name: field.default for field in dataclasses.fields(Plan)}
    rows = [(name, getattr(plan, name)) for name in options.OPTIONS if getattr(plan, name) != usual[name]]
    stages = plan.stage_count()
    schedule = plan.schedule_for(stages, plan.micro_batches) if stages and plan.replicas != "auto" else None
    if as_json:
        print_json({"plan": plan.to_dict(), "schedule": str(schedule) if schedule else None})
        return
    print(plan)
    for name, value in rows:
        print(f"  {name} = {value!r}: {options.OPTIONS[name].help}")
    if schedule is not None and stages is not None:
        chain = Flow(stages, [(i, i + 1) for i in range(stages - 1)], outputs=frozenset({stages - 1}))
        print(f"\n{staircase(lower(schedule, chain, loss=not schedule.forward_first))}")
