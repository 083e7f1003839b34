"""Commands that run nothing: plan and simulate."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from ..batch.dims import BatchDims
from ..compiler import Preview, preview
from ..errors import PartitionError, PlanError
from ..plan.checkpoint import WORDS as CHECKPOINTS
from ..plan.hardware import Device
from ..plan.plan import Plan
from ..schedules.catalog import IN_V, SHARED, usual_workers
from ..schedules.catalog import NAMES as SCHEDULES
from ..simulation.costs import StageCosts
from ..simulation.simulate import Simulation, simulate
from . import model as models
from . import options
from .output import print_json, working

_TO_TELL = 5e-6  # seconds: of one operation, by Python and the dispatcher of PyTorch
_TRIED = 20  # the fastest ways
_SHOWN = 10  # rows of a simulation, where a plan is chosen by it


# -- plan -------------------------------------------------------------------------------------------------------------


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    models.add_to(parser)
    options.add_to(parser)
    _add_hardware(parser)
    parser.add_argument(
        "--best",
        action="store_true",
        help="choose schedule, micro-batches and checkpoint by simulation, except what is given, within the memory",
    )
    _add_overhead(parser)
    parser.add_argument("--save", metavar="PLAN.json", help="write the plan to this file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_plan)


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--link", type=float, help="bytes per second between devices, instead of the hardware's"
    )
    parser.add_argument(
        "--memory", type=_size, help="of each device, such as 40GB, instead of the hardware's"
    )


def _size(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _add_overhead(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--overhead",
        type=float,
        help="seconds that an instruction takes whatever its size (default: 5 µs for each node of the largest stage)",
    )


def _costs(given: argparse.Namespace, shown: Preview) -> StageCosts:
    """With what an operation takes to be told, without which more micro-batches would always be better."""
    most = max(len(stage) for stage in shown.assignment.stages)
    overhead = _TO_TELL * most if given.overhead is None else given.overhead
    return dataclasses.replace(StageCosts.of(shown), overhead=overhead)


def _plan(given: argparse.Namespace) -> None:
    plan = _on_hardware(given, _planned(given))
    call = models.call_of(given)
    if given.best:
        plan, shown, ways = _best(given, call, plan)
        if not given.json:
            print(ways, end="\n\n")
    else:
        shown = _preview(call, plan)
    if given.save:
        plan.save(given.save)
    if given.json:
        assignment = shown.assignment
        print_json(
            {
                "plan": plan.to_dict(),
                "devices": [str(d) for d in assignment.devices],
                "loads": assignment.loads,
                "unit": assignment.forecast.unit,
                "memory": [stage.memory for stage in assignment.forecast.stages],
                "stages": assignment.stages,
            }
        )
    else:
        print(shown)


def _planned(given: argparse.Namespace) -> Plan:
    """What the options say; two stages and numbered devices, which need not be there, if they say nothing."""
    also: dict[str, Any] = {}
    cuts = any(getattr(given, name) for name in ("stages", "balance", "cut", "device_map"))
    if not (cuts or given.plan or given.replicas == "auto"):
        also["stages"] = 2
    if given.schedule in IN_V and not (given.workers or given.devices):
        stages = options.OPTIONS["stages"].value("--stages", given.stages or 2)
        also["workers"] = usual_workers(given.schedule, stages)
    plan = options.plan_of(given, **also)
    workers = plan.workers or plan.stage_count()
    if plan.devices is not None or plan.device_map is not None or workers is None or plan.replicas != 1:
        return plan
    return plan.replace(devices=[f"cuda:{i}" for i in range(workers)])


def _on_hardware(given: argparse.Namespace, plan: Plan) -> Plan:
    changes = {name: getattr(given, name) for name in ("link", "memory") if getattr(given, name) is not None}
    if not changes:
        return plan
    devices: list[Device] = [dataclasses.replace(device, **changes) for device in plan.described()]
    return plan.replace(hardware=devices[0] if len(devices) == 1 else devices)


def _preview(call: models.Call, plan: Plan) -> Preview:
    model, args, kwargs = call
    with working("planning"):
        return preview(model, plan, example_args=args, example_kwargs=kwargs)


def _best(given: argparse.Namespace, call: models.Call, plan: Plan) -> tuple[Plan, Preview, Simulation]:
    """The fastest way to run the cut that the plan makes, of those that fit."""
    plan = _in_seconds(given, plan)
    names = [plan.schedule_name] if given.schedule else [n for n in SCHEDULES if n not in SHARED]
    policies = [str(plan.checkpoint)] if given.checkpoint else list(CHECKPOINTS)
    shown = _preview(
        call, plan.replace(schedule="gpipe", micro_batches=1, checkpoint="never", **_unlimited(plan))
    )
    rows = _rows_of(call, shown)
    counts = [plan.micro_batches] if given.micro_batches else [1 << k for k in range(11) if 1 << k <= rows]
    with working("simulating"):
        found = simulate(
            _costs(given, shown),
            micro_batches=counts,
            schedules=names,
            checkpoint=policies,
            memory=_memory(plan),
        )
    first = found.best
    fitting = [first, *(row for row in found.rows if row.fits and row is not first)]
    for i, row in enumerate(fitting):
        chosen = plan.replace(
            schedule=row.schedule, micro_batches=row.micro_batches, checkpoint=row.checkpoint
        )
        try:
            shown = _preview(call, chosen)
        except PartitionError:  # counts what a simulation of stages does not
            if i + 1 == min(len(fitting), _TRIED):
                raise
            continue
        return chosen, shown, dataclasses.replace(found, rows=tuple(fitting[i : i + _SHOWN]))
    raise AssertionError("one fits")


def _unlimited(plan: Plan) -> dict[str, Any]:
    """Without memory as a limit of the cut, which simulation is to respect."""
    devices = [dataclasses.replace(device, memory=1 << 60) for device in plan.described()]
    return {"hardware": devices[0] if len(devices) == 1 else devices}


def _memory(plan: Plan) -> int | None:
    """Of the device with the least."""
    return min((int(d.memory) for d in plan.described() if d.memory is not None), default=None)


def _in_seconds(given: argparse.Namespace, plan: Plan) -> Plan:
    """Seconds of the described hardware, or else of this machine."""
    if given.cost:
        return plan
    return plan.replace(cost="roofline" if any(d.flops for d in plan.described()) else "time")


def _rows_of(call: models.Call, shown: Preview) -> int:
    signature = shown.traced.signature
    inputs = signature.flatten(*call[1:])
    return BatchDims.of_example(signature, inputs, shown.plan.batch_dims).batch_size(inputs) or 1


# -- simulate ---------------------------------------------------------------------------------------------------------


def add_simulate(parser: argparse.ArgumentParser) -> None:
    """Its options: several of each, separated by commas."""
    models.add_to(parser)
    parser.add_argument("--stages", type=options.numbers, default=[2], help="such as 2,4,8 (default: 2)")
    parser.add_argument(
        "--micro-batches", type=options.numbers, default=[8], help="of a batch: 8,16 (default: 8)"
    )
    parser.add_argument(
        "--schedules",
        "--schedule",
        type=options.words,
        default=["gpipe", "1f1b", "zb_h1"],
        help=f"of {', '.join(SCHEDULES)}",
    )
    parser.add_argument(
        "--checkpoint", type=options.words, default=["never"], help=f"of {', '.join(CHECKPOINTS)}"
    )
    parser.add_argument("--replicas", type=options.numbers, help="of the pipeline: 1,2,4")
    parser.add_argument("--ranks", type=int, help="stages × replicas must be so many, at most 4096")
    parser.add_argument(
        "--each", type=int, default=2, help="stages on a worker, where schedules share them (default: 2)"
    )
    parser.add_argument(
        "--cost", help="time, measured here (default), or roofline, of the hardware (default with --hardware)"
    )
    parser.add_argument("--hardware", help="a known device, such as A100-80GB")
    parser.add_argument(
        "--optimizer-states", default="2", help="values for each parameter (default: 2, Adam)"
    )
    _add_overhead(parser)
    parser.add_argument("--top", type=int, help="print only so many rows")
    _add_hardware(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_simulate)


def _simulate(given: argparse.Namespace) -> None:
    if not given.stages:
        raise PlanError("--stages lists none", remedy="--stages 2,4,8")
    plan = Plan(
        stages=max(given.stages),
        hardware=given.hardware,
        cost=given.cost or ("roofline" if given.hardware else "time"),
        optimizer_states=options.OPTIONS["optimizer_states"].value(
            "--optimizer-states", given.optimizer_states
        ),
        devices=[f"cuda:{i}" for i in range(max(given.stages))] if max(given.stages) > 0 else None,
    )
    plan = _on_hardware(given, plan)
    shown = _preview(models.call_of(given), plan.replace(**_unlimited(plan)))
    with working("simulating"):
        found = simulate(
            _costs(given, shown),
            micro_batches=given.micro_batches,
            schedules=given.schedules,
            stages=given.stages,
            each=given.each,
            replicas=given.replicas,
            checkpoint=given.checkpoint,
            memory=_memory(plan),
            ranks=given.ranks,
        )
    if given.json:
        best = next((row for row in found.rows if row.fits), None)
        print_json(
            {
                "best": dataclasses.asdict(best) if best else None,
                "rows": [dataclasses.asdict(row) for row in found.rows[: given.top]],
            }
        )
    else:
        print(dataclasses.replace(found, rows=found.rows[: given.top]))
