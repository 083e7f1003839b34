"""Costs that are known without running anything."""

from __future__ import annotations

from torch import nn

from ..graph import compute_nodes
from ..ir import Traced


def parameter_bytes(model: nn.Module, traced: Traced, *, copies: int = 1) -> dict[str, float]:
    """Bytes of the parameters that each node reads first; a shared parameter counts once.

    Args:
        copies: how many values are kept for each that is trained: with its gradient and the optimizer's.
    """
    sizes = {
        name: p.numel() * p.element_size() * (copies if p.requires_grad else 1)
        for name, p in model.named_parameters()
    }
    costs, seen = {}, set()
    for node in compute_nodes(traced.graph):
        new = [name for name in traced.facts[node.name].parameters if name not in seen]
        seen.update(new)
        costs[node.name] = float(sum(sizes[name] for name in new))
    return costs
