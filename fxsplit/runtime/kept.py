"""The activations that each device keeps for backward, by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..actions import Schedule
from ..cost.saved import Live, Saved, live_bytes
from ..graph import region_runs
from ..ir import Stage, Traced
from ..schedules.catalog import most_kept


def kept_by_device(
    saved: Saved,
    traced: Traced,
    stages: Sequence[Stage],
    schedule: Schedule,
    micro_batches: int,
    checkpoint: Any,
) -> dict[torch.device, Live]:
    """Per device the bytes of activations that a batch like the example keeps.

    Where workers of a device keep only some of the micro-batches, what each of them keeps at most is added up.

    Args:
        saved: what one forward of the example leaves behind.
        schedule: its workers keep a micro-batch from its forward to the end of its backward.
        checkpoint: the plan's policy.
    """
    order = {n.name: n for n in traced.graph.nodes}

    def simulated(group: Sequence[Stage]) -> Live:
        nodes = [[order[name] for name in stage.nodes] for stage in group]
        live = live_bytes(saved, nodes, [region_runs(stage) for stage in group], micro_batches)
        if checkpoint == "except_last":
            plain = live_bytes(saved, nodes, [[] for _ in group], micro_batches).kept
            live = live.except_last(plain, micro_batches)
        return live

    found: dict[torch.device, Live] = {}
    for device in dict.fromkeys(stage.device for stage in stages):
        here = [s for s in stages if s.device == device]
        if schedule.forward_first:  # stages that keep everything share storages
            found[device] = simulated(here)
            continue
        each = {stage.index: simulated([stage]) for stage in here}
        nbytes = [each[s].kept / micro_batches if s in each else 0.0 for s in range(len(stages))]
        kept = round(sum(most_kept(actions, nbytes) for actions in schedule.workers))
        found[device] = Live(kept, kept + max(live.peak - live.kept for live in each.values()))
    return found
