"""The ranks: stages × replicas, as a `DeviceMesh` of torch's."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import RankError
from .watch import watch_of_process

_TORCH: Any = dist  # has its stores without saying so to mypy
_MESHES: dict[tuple[Any, str, int, int], DeviceMesh] = {}


def init(*, pp: int, dp: int = 1, device: str | None = None, patience: float = 600.0) -> DeviceMesh:
    """Join the ranks that torchrun has started, and arrange them: `pp` in a pipeline, `dp` pipelines beside each other.

    The ranks of one pipeline are neighbours (ranks 0, `dp`, 2 `dp`, … are the first pipeline's), and each rank of a host
    has the device of its ``LOCAL_RANK``.

    Args:
        pp: ranks that share the stages.
        dp: replicas of the pipeline; their gradients are averaged.
        device: ``"cpu"`` or ``"cuda"``; ``"cuda"`` where each rank of this host can have one.
        patience: seconds that one instruction may take before the others give the rank up. A rank that is gone or does not
            answer is noticed within some seconds, whatever this is.

    Returns:
        The mesh, with dimensions ``"pp"`` and ``"dp"``: a loader shares its batches out by ``mesh["dp"]``.

    Raises:
        RankError: nobody says what rank this is, or there are not `pp` × `dp`.
    """
    for name, count in (("pp", pp), ("dp", dp)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise RankError(f"{name}={count!r} is no number of ranks", remedy="init(pp=2, dp=1), say")
    if not dist.is_available():
        raise RankError(
            "this build of torch has no torch.distributed", remedy="pip install torch, from its own site"
        )
    if not dist.is_initialized() and "RANK" not in os.environ:
        raise RankError(
            "this process does not know its rank",
            remedy=f"torchrun --nproc-per-node {pp * dp} train.py, or torch.distributed.init_process_group(...) before",
        )
    local = int(os.environ.get("LOCAL_RANK", "0"))
    kind = device or ("cuda" if torch.cuda.is_available() and local < torch.cuda.device_count() else "cpu")
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if world != pp * dp:
        raise RankError(
            f"pp={pp} × dp={dp} are {pp * dp} ranks, and there are {world}",
            remedy=f"torchrun --nproc-per-node {pp * dp}, or init(pp={max(world // dp, 1)}, dp={dp})",
        )
    if kind == "cuda":
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        _join("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", world)
    # Every group has threads that look for messages, and so they are made once.
    mesh = _MESHES.get((dist.group.WORLD, kind, pp, dp)) or init_device_mesh(
        kind, (pp, dp), mesh_dim_names=("pp", "dp")
    )
    _MESHES[dist.group.WORLD, kind, pp, dp] = mesh
    watch_of_process().be_patient(patience)
    return mesh


def _join(backend: str, world: int) -> None:
    """Into the ranks of this attempt: torchrun's store may have the addresses of the last one still, under the same keys."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend)
        return
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = _TORCH.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, is_master=False)
    mine = _TORCH.PrefixStore(f"fxsplit/attempt/{attempt}", store)
    dist.init_process_group(backend, store=mine, rank=int(os.environ["RANK"]), world_size=world)
