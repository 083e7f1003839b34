"""Which parameters and buffers a node reads, how many bytes that makes on each device, and whether they fit."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

import torch
from torch import fx, nn

from ..errors import PartitionError
from ..graph.ir import Assignment, Traced
from ..graph.nodes import compute_nodes, resolve


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of the model under each of its names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def weights_read(model: nn.Module, tensors: Mapping[str, torch.Tensor], node: fx.Node) -> list[torch.Tensor]:
    """The parameters and buffers that are where `node` runs: those of its module, or the one that it reads."""
    target = str(node.target)
    if node.op == "get_attr" and target in tensors:
        return [tensors[target]]
    if node.op == "call_module" or (node.op == "get_attr" and target in dict(model.named_modules())):
        return list(tensors_of(resolve(model, target)).values())
    return []


def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors, each counted once."""
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def free_memory(model: nn.Module) -> dict[str, int]:
    """Accelerators of this machine → free bytes, the weights of the model that are there already included.

    ``{"cpu": …}`` without a limit where there is none.
    """
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return {"cpu": sys.maxsize}
    library = torch.get_device_module(kind)
    found = {}
    for index in range(torch.accelerator.device_count()):
        device = torch.device(kind.type, index)
        own = nbytes(t for t in tensors_of(model).values() if t.device == device)
        free = library.mem_get_info(index)[0] if hasattr(library, "mem_get_info") else sys.maxsize
        found[str(device)] = free + own
    return found


def check_fits(
    model: nn.Module, traced: Traced, assignment: Assignment, max_memory: Mapping[str, int]
) -> None:
    """Each device of the assignment holds its weights; a shared one is on the device that reads it first.

    Raises:
        PartitionError: names the device, what it needs and its limit. A device that is not in `max_memory` has none.
    """
    stage_of = assignment.stage_of()
    tensors = tensors_of(model)
    homes: dict[int, torch.device] = {}
    held: dict[torch.device, list[torch.Tensor]] = {}
    for node in compute_nodes(traced.graph):
        device = assignment.devices[stage_of[node.name]]
        for tensor in weights_read(model, tensors, node):
            if homes.setdefault(id(tensor), device) == device:
                held.setdefault(device, []).append(tensor)
    for device, here in held.items():
        need, limit = nbytes(here), max_memory.get(str(device))
        if limit is not None and need > limit:
            raise PartitionError(
                f"device_map puts {need:,} bytes of weights on {device}, but max_memory allows {limit:,}",
                remedy=f"max_memory={{{str(device)!r}: {need}}}, or move modules to another device",
            )
