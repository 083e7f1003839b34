"""Random plans over all fields of `Plan`."""

from __future__ import annotations

import copy
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import nn

from ..compiler import compile
from ..errors import PartitionError, PlanError
from ..pipeline import Pipeline
from ..plan.checkpoint import WORDS as CHECKPOINTS
from ..plan.checkpoint import Budget
from ..plan.hardware import Device
from ..plan.plan import EFFORTS, Plan
from ..schedules.catalog import IN_V, NAMES, SHARED
from .programs import Choose

Fields = dict[str, Any]
_WAYS = ("stages", "balance", "cut", "device_map")


def odd_seconds(node: Any) -> float:
    """Seconds that follow from a node's name alone: a cost that no model has, and so cuts at odd places."""
    return float(zlib.crc32(node.name.encode()) % 7)


def _cut(choose: Choose, paths: list[str]) -> Fields:
    """One of the ways to say where."""
    way = choose.choice(("stages", "stages", "stages", "balance", "cut", "device_map", "word", "nothing"))
    if way == "balance":
        return {"balance": [choose.randint(1, 3) for _ in range(choose.randint(1, 3))]}
    if way == "cut" and paths:
        return {"cut": sorted({choose.choice(paths) for _ in range(choose.randint(1, 2))})}
    if way == "device_map" and paths:
        return {"device_map": {"": "cpu", choose.choice(paths): choose.choice(("cpu", "cpu:0"))}}
    if way == "word":
        word = choose.choice(("auto", "balanced", "balanced_low_0", "sequential"))
        return {"device_map": word, "max_memory": {"cpu": choose.choice(("1KB", "1MB"))}}
    return {} if way == "nothing" else {"stages": choose.randint(1, 4)}


def _schedule(choose: Choose, fields: Fields) -> Fields:
    name = choose.choice(NAMES)
    stages = fields.get("stages")
    if name in IN_V:
        return {"schedule": name, "workers": stages // 2} if stages in (2, 4) else {}
    if name in SHARED:
        return {"schedule": name, "workers": choose.randint(1, stages)} if stages else {}
    return {"schedule": name}


def _checkpoint(choose: Choose, paths: list[str]) -> Any:
    kind = choose.choice((*CHECKPOINTS, *CHECKPOINTS, "paths", "budget"))
    if kind == "paths":
        return [choose.choice(paths)] if paths else "always"
    return Budget(choose.choice((100, 1000, 100_000))) if kind == "budget" else kind


def _replicas(choose: Choose, fields: Fields) -> Fields:
    kind = choose.choice(("number", "number", "list", "auto"))
    if kind == "auto" and not set(fields) - {"stages"}:
        return {"replicas": "auto", "devices": ["cpu"] * choose.randint(fields.get("stages", 1), 5)}
    if kind == "list" and "stages" in fields:
        return {"replicas": [choose.randint(1, 3) for _ in range(fields["stages"])]}
    return {"replicas": choose.randint(1, 3)}


def _weight(choose: Choose) -> Fields:
    kind = choose.choice(("params", "memory", "flops", "roofline", "odd", "time"))
    if kind == "roofline":
        return {"cost": kind, "hardware": "T4"}
    if kind == "odd":
        return {"cost": odd_seconds, "hardware": Device(link=choose.choice((1.0, 30.0, 1000.0)))}
    return {"cost": kind}


# field of a plan → what it may be, given the paths of modules and what was chosen before
_ALSO: Mapping[str, Callable[[Choose, list[str], Fields], Fields]] = {
    "cost": lambda c, p, f: _weight(c),
    "optimizer_states": lambda c, p, f: {"optimizer_states": c.choice((None, 0, 2))},
    "effort": lambda c, p, f: {"effort": c.choice(EFFORTS)},
    "micro_batches": lambda c, p, f: {"micro_batches": c.randint(1, 5)},
    "replicas": lambda c, p, f: _replicas(c, f),
    "schedule": lambda c, p, f: _schedule(c, f),
    "checkpoint": lambda c, p, f: {"checkpoint": _checkpoint(c, p)},
    "gather": lambda c, p, f: {"gather": c.choice((True, False))},
    "threads": lambda c, p, f: {"threads": c.choice((None, 1, 2))},
    "deferred_batch_norm": lambda c, p, f: {"deferred_batch_norm": c.choice((False, True))},
    "sync_batch_norm": lambda c, p, f: {"sync_batch_norm": c.choice((False, False, True))},
    "detect_anomaly": lambda c, p, f: {"detect_anomaly": c.choice((None, None, "nan", "inf"))},
    "no_split_module_classes": lambda c, p, f: {"no_split_module_classes": ["Pack"]},
    "offload": lambda c, p, f: {"offload": c.choice((False, True))},
    "devices": lambda c, p, f: {"devices": "cpu"},
    "batch_dims": lambda c, p, f: {"batch_dims": {"x": 0}},
}


def random_fields(
    choose: Choose,
    model: nn.Module,
    *,
    batch_dims: Mapping[str, int] | None = None,
    fixed: Mapping[str, Any] | None = None,
) -> Fields:
    """Fields that make a plan, of all that there are; what does not go with those before it is left out.

    Args:
        batch_dims: what may be said of the model's arguments.
        fixed: fields that are as they are here.
    """
    paths = [path for path, module in model.named_modules() if path and not isinstance(module, nn.ModuleList)]
    fields = {**_cut(choose, paths), **(fixed or {})}
    if any(way in (fixed or {}) for way in _WAYS):
        fields = dict(fixed or {})
    for name, more in _ALSO.items():
        if name == "batch_dims" and not batch_dims:
            continue
        if name not in (fixed or {}) and choose.randint(0, 2) == 0:  # most plans say a few things
            new = (
                {"batch_dims": dict(batch_dims or {})}
                if name == "batch_dims"
                else more(choose, paths, fields)
            )
            merged = {**fields, **{n: value for n, value in new.items() if n not in (fixed or {})}}
            try:
                Plan(**merged)
            except PlanError:
                continue
            fields = merged
    return fields


def compiled_under(
    model: nn.Module,
    fields: Mapping[str, Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    keep: Collection[str] = (),
) -> Pipeline:
    """A copy of a model, compiled under as much of a plan as it can have: an error that names a field leaves it out.

    Args:
        keep: fields that are not left out.

    Raises:
        FxsplitError: it cannot be compiled under what is left.
    """
    fields = dict(fields)
    while True:
        try:
            return compile(copy.deepcopy(model), Plan(**fields), example_args=args, example_kwargs=kwargs)
        except (PartitionError, PlanError) as error:
            name = re.split(r"[= ]", error.what)[0]
            if name not in fields or name in keep:
                raise
            if name == "stages" and fields["stages"] > 1 and "workers" not in fields:
                fields["stages"] -= 1
                if isinstance(fields.get("replicas"), list):
                    fields["replicas"] = fields["replicas"][:-1]
            else:
                del fields[name]
