"""The activations that each device keeps for backward, by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..cost.saved import Live, Saved, live_bytes
from ..graph import region_runs
from ..ir import Stage, Traced


def kept_by_device(
    saved: Saved,
    traced: Traced,
    stages: Sequence[Stage],
    shares: Sequence[float],
    micro_batches: int,
    checkpoint: Any,
) -> dict[torch.device, Live]:
    """Per device the bytes of activations that a batch like the example keeps.

    Args:
        saved: what one forward of the example leaves behind.
        shares: per stage the part of the micro-batches that is kept at once.
        checkpoint: the plan's policy.
    """
    order = {n.name: n for n in traced.graph.nodes}
    found: dict[torch.device, Live] = {}
    for device in dict.fromkeys(stage.device for stage in stages):
        here = [s for s in stages if s.device == device]
        # Stages that keep all micro-batches share storages; of others each is counted for itself.
        groups = [here] if all(shares[s.index] == 1 for s in here) else [[s] for s in here]
        kept = work = 0
        for group in groups:
            nodes = [[order[name] for name in stage.nodes] for stage in group]
            live = live_bytes(saved, nodes, [region_runs(stage) for stage in group], micro_batches)
            if checkpoint == "except_last":
                plain = live_bytes(saved, nodes, [[] for _ in group], micro_batches).kept
                live = live.except_last(plain, micro_batches)
            kept += round(live.kept * shares[group[0].index])
            work = max(work, live.peak - live.kept)
        found[device] = Live(kept, kept + work)
    return found
