"""Stages whose micro-batches meet: those with modules that talk to their copies, and those that normalise the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import ModelError, PlanError
from ..graph.ir import Program, Stage
from ..graph.nodes import is_within, region_modules, resolve
from ..modules.callbacks import callbacks_of
from ..plan.plan import Plan

# The functions that update the running statistics of batch normalisation.
BATCH_NORMS: tuple[Any, ...] = (F.batch_norm, torch.batch_norm, torch.ops.aten.batch_norm.default)
NORM_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NORM_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def modules_of(model: nn.Module, stage: Stage) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a stage calls, and those inside of them."""
    for fqn in stage.paths.values():
        value = resolve(model, fqn)
        if isinstance(value, nn.Module):
            yield from value.named_modules(prefix=fqn)


def owners_of(model: nn.Module, stage: Stage) -> dict[str, nn.Module]:
    """Those of them that want to be told of their copies."""
    return {path: module for path, module in modules_of(model, stage) if callbacks_of(module)}


def copied_modules(model: nn.Module) -> set[int]:
    """Ids of the modules that have copies because they want to be told: they, what is in them, and what they are in."""
    owners = [m for m in model.modules() if callbacks_of(m)]
    inside = {id(m) for owner in owners for m in owner.modules()}
    around = {id(m) for m in model.modules() if any(id(part) in inside for part in m.modules())}
    return inside | around


def _layers(model: nn.Module, stage: Stage) -> list[nn.Module]:
    """The modules of a stage that may normalise batches: layers, and modules that are not looked into."""
    return [
        module
        for _, module in modules_of(model, stage)
        if isinstance(module, NORM_LAYERS) or not type(module).__module__.startswith("torch.nn.")
    ]


def _calls_a_norm(stage: Stage) -> bool:
    graphs = [stage.module, *region_modules(stage.module)]
    nodes = [node for module in graphs for node in module.graph.nodes]
    return any(node.op == "call_function" and node.target in BATCH_NORMS for node in nodes)


def _is_on(layer: nn.Module) -> bool:
    """Whether it normalises by the batch, in the mode that it is in."""
    return layer.training or (isinstance(layer, NORM_LAYERS) and layer.running_mean is None)


def _is_put_off(model: nn.Module, name: str) -> bool:
    """Whether a buffer has the running statistics of a layer whose forward is known to leave writing them to a function."""
    path, _, buffer = name.rpartition(".")
    holder = model.get_submodule(path)
    forwards = [layer.forward for layer in NORM_LAYERS]
    return buffer in _NORM_BUFFERS and isinstance(holder, NORM_LAYERS) and type(holder).forward in forwards


def meets_of(model: nn.Module, plan: Plan, program: Program, micro_batches: int) -> dict[int, int]:
    """Stage → how many of its micro-batches meet: all of them to normalise the batch, or one for each copy of a module.

    In the modes in which the modules are now: where no layer normalises by the batch, nobody waits for that.
    """
    possible = _possible_meets(model, plan, program, micro_batches)
    off = {
        stage.index
        for stage in program.stages
        if not owners_of(model, stage)
        and not _calls_a_norm(stage)
        and not any(_is_on(layer) for layer in _layers(model, stage))
    }
    return {stage: count for stage, count in possible.items() if stage not in off}


def _possible_meets(model: nn.Module, plan: Plan, program: Program, micro_batches: int) -> dict[int, int]:
    """The same in any mode."""
    meets = {}
    for stage in program.stages:
        if plan.sync_batch_norm and (_layers(model, stage) or _calls_a_norm(stage)):
            meets[stage.index] = micro_batches
        elif owners_of(model, stage):
            meets[stage.index] = len(stage.row)
    return {stage: count for stage, count in meets.items() if count > 1}


def check_replicas(model: nn.Module, plan: Plan, program: Program) -> None:
    """Refuse replicas that could not compute what the model computes.

    Raises:
        PlanError: names the stage, and what in it is in the way.
        ModelError: the model itself wants to be told of its copies.
    """
    if callbacks_of(model):
        raise ModelError(
            f"{type(model).__name__} itself has a replication callback, but is cut into stages, and so has no copies that "
            "could be told",
            remedy="compile nn.Sequential(model): as a child it stays whole; or move the callback to a child",
        )
    meets = _possible_meets(model, plan, program, plan.micro_batches)
    _check_owners(model, program)
    for stage in program.stages:
        owners = owners_of(model, stage)
        owner, count = next(iter(owners), ""), len(stage.row)
        if owner and plan.micro_batches % count:
            raise PlanError(
                f"micro_batches={plan.micro_batches}, but {owner!r} has a replication callback, and the {count} replicas of "
                f"stage {stage.index} would be called an unequal number of times: copies that wait for each other would "
                "wait for ever",
                remedy=f"micro_batches={-(-plan.micro_batches // count) * count}",
            )
        if owner and meets.get(stage.index, count) != count:
            raise PlanError(
                f"sync_batch_norm= lets all {plan.micro_batches} micro-batches of stage {stage.index} meet, but {owner!r} "
                f"has a replication callback and {count} copies",
                remedy=f"micro_batches={count}, or cut the module off into a stage of its own",
            )
        changing = [p for p in stage.changes if not any(is_within(p, path) for path in owners)]
        if changing and (stage.is_apart or stage.index in meets):
            raise PlanError(
                f"stage {stage.index} changes attributes that are no tensors, in {changing[0] or 'the model'!r}, and "
                + ("its replicas on several devices" if stage.is_apart else "its micro-batches, which meet,")
                + " would each change their own",
                remedy="replicas on one device" if stage.is_apart else "cut= the two apart",
            )
        own = [name for name in stage.writes if not any(is_within(name, path) for path in owners)]
        if plan.sync_batch_norm or plan.deferred_batch_norm:
            own = [name for name in own if not _is_put_off(model, name)]
        if own and stage.index in meets:
            raise PlanError(
                f"stage {stage.index} writes to {own[0]!r}, but its micro-batches meet"
                + (f" in {owner!r}" if owner else "")
                + " and would write at the same time",
                remedy="deferred_batch_norm=True, or cut= the two apart"
                if _is_put_off(model, own[0])
                else "cut= the two apart",
            )


def _check_owners(model: nn.Module, program: Program) -> None:
    """Every copy is called by one replica of one stage, or there is nothing to tell it."""
    called: dict[int, list[Stage]] = {}
    for stage in program.stages:
        for module in owners_of(model, stage).values():
            called.setdefault(id(module), []).append(stage)
    for path, module in model.named_modules():
        stages = called.get(id(module), [])
        if len(stages) > 1 and any(len(stage.row) > 1 for stage in stages):
            raise PlanError(
                f"{path!r} has a replication callback, and is called in stages {', '.join(str(s.index) for s in stages)}: "
                "its copies would talk to each other in both at once",
                remedy="replicas=1 for these stages, or one stage for both calls",
            )
        if not path or stages or not callbacks_of(module):
            continue
        if any(is_within(name, path) for s in program.stages for name in (*s.parameters, *s.paths.values())):
            raise ModelError(
                f"{path!r} has a replication callback, but only its parts are used and its forward is not called, so it "
                "has no copies that could be told",
                remedy="the callback on a module that is called, such as its children",
            )
