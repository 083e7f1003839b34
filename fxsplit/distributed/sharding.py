"""Stages whose parameters are sharded over replicas by torch's FSDP2: what it has to be told, and asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..errors import PlanError
from ..graph.ir import Stage


def sharded(
    stages: Iterable[Stage], parallelize: Callable[..., Any], mesh: DeviceMesh, schedule: str, *, halves: bool
) -> dict[int, nn.Module]:
    """Let `parallelize` have the modules of the stages; those that it has sharded.

    Raises:
        PlanError: backward is in two halves, or two stages of this rank have a parameter together.
    """
    if halves:
        raise PlanError(
            f"schedule={schedule!r} goes backward in two halves, which FSDP's hooks do not know",
            remedy="schedule='1f1b', or dp= without parallelize=",
        )
    found: dict[int, nn.Module] = {}
    readers: dict[str, int] = {}
    for stage in stages:
        for fqn in stage.parameters:
            if readers.setdefault(fqn, stage.index) != stage.index:
                raise PlanError(
                    f"{fqn} is read by stages {readers[fqn]} and {stage.index}, and FSDP shards for one module",
                    remedy="dp= without parallelize=, or untie the parameter",
                )
        parallelize(stage.module, mesh=mesh)
        if isinstance(stage.module, FSDPModule):
            stage.module.set_reshard_after_backward(False)
            found[stage.index] = stage.module
    return found


def synchronizes(module: nn.Module, *, last: bool) -> None:
    """Before a backward: whether it is the stage's last one of a step, after which gradients are reduced."""
    assert isinstance(module, FSDPModule)
    module.set_is_last_backward(last)
    module.set_requires_gradient_sync(last)
    module.set_reshard_after_backward(last)


def local(tensor: Any) -> Any:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sharded(tensor: Any) -> bool:
    """Whether other replicas have the rest of it."""
    return isinstance(tensor, DTensor)
