"""Stages whose micro-batches meet: those with modules that talk to their copies, and those that normalise the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..errors import ModelError, PlanError
from ..graph import is_within, region_modules, resolve
from ..ir import Program, Stage
from ..plan import Plan
from ..replication import callbacks_of

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


def _normalises(model: nn.Module, stage: Stage) -> bool:
    """Whether a stage may normalise batches: by a layer, by the function, or in a module that is not looked into."""
    for _, module in modules_of(model, stage):
        if isinstance(module, NORM_LAYERS) or not type(module).__module__.startswith("torch.nn."):
            return True
    graphs = [stage.module, *region_modules(stage.module)]
    return any(node.target in BATCH_NORMS for module in graphs for node in _calls(module))


def _is_put_off(model: nn.Module, name: str) -> bool:
    """Whether a buffer has the running statistics of a layer whose forward is known to leave writing them to a function."""
    path, _, buffer = name.rpartition(".")
    holder = model.get_submodule(path)
    forwards = [layer.forward for layer in NORM_LAYERS]
    return buffer in _NORM_BUFFERS and isinstance(holder, NORM_LAYERS) and type(holder).forward in forwards


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


def rounds_of(model: nn.Module, plan: Plan, program: Program, micro_batches: int) -> dict[int, int]:
    """Stage → how many of its micro-batches meet: all of them to normalise the batch, or one for each copy of a module."""
    rounds = {}
    for stage in program.stages:
        if plan.sync_batch_norm and _normalises(model, stage):
            rounds[stage.index] = micro_batches
        elif owners_of(model, stage):
            rounds[stage.index] = len(stage.row)
    return {stage: count for stage, count in rounds.items() if count > 1}


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
    rounds = rounds_of(model, plan, program, plan.micro_batches)
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
        if owner and rounds.get(stage.index, count) != count:
            raise PlanError(
                f"sync_batch_norm= lets all {plan.micro_batches} micro-batches of stage {stage.index} meet, but {owner!r} "
                f"has a replication callback and {count} copies",
                remedy=f"micro_batches={count}, or cut the module off into a stage of its own",
            )
        if stage.stateful and not owner and (stage.is_apart or stage.index in rounds):
            raise PlanError(
                f"stage {stage.index} ({stage.modules[0] or 'the model'} …) changes attributes that are no tensors, and "
                + ("its replicas on several devices" if stage.is_apart else "its micro-batches, which meet,")
                + " would each change their own",
                remedy="replicas on one device" if stage.is_apart else "deferred_batch_norm=True",
            )
        own = [name for name in stage.writes if not any(is_within(name, path) for path in owners)]
        if plan.sync_batch_norm or plan.deferred_batch_norm:
            own = [name for name in own if not _is_put_off(model, name)]
        if own and stage.index in rounds:
            raise PlanError(
                f"stage {stage.index} writes to {own[0]!r}, but its micro-batches meet"
                + (f" in {owner!r}" if owner else "")
                + " and would write at the same time",
                remedy="deferred_batch_norm=True, or cut= the two apart"
                if _is_put_off(model, own[0])
                else "cut= the two apart",
            )
