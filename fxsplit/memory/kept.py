"""The activations that each device keeps for backward, by simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..cost.saved import Live, Saved, live_bytes
from ..graph.ir import Stage, Traced
from ..graph.nodes import region_runs
from ..plan.checkpoint import Checkpoint
from ..schedules.catalog import most_kept
from ..schedules.schedule import Action, Schedule


def kept_by_device(
    saved: Saved,
    traced: Traced,
    stages: Sequence[Stage],
    schedule: Schedule,
    micro_batches: int,
    checkpoint: Checkpoint,
) -> dict[torch.device, Live]:
    """Per device the bytes of activations that a batch like the example keeps.

    Where workers of a device keep only some of the micro-batches, what each of them keeps at most is added up.

    Args:
        saved: what one forward of the example leaves behind.
        schedule: its workers keep a micro-batch from its forward to the end of its backward.
        checkpoint: the plan's policy.
    """
    order = {n.name: n for n in traced.graph.nodes}

    def simulated(group: Sequence[Stage], *, again: bool) -> Live:
        nodes = [[order[name] for name in stage.nodes] for stage in group]
        runs: Sequence[Any] = [region_runs(stage) if again else [] for stage in group]
        return live_bytes(saved, nodes, runs, micro_batches)

    def most(added: Mapping[int, tuple[int, int]], device: torch.device, *, first_whole: bool) -> int:
        def is_whole(action: Action) -> bool:
            return first_whole and action.micro_batch == 0

        def nbytes(action: Action) -> float:
            if stages[action.stage].device_of(action.micro_batch) != device:
                return 0.0
            return added.get(action.stage, (0, 0))[is_whole(action)] / micro_batches

        def halved(action: Action) -> bool:
            return is_whole(action) or not any(region_runs(stages[action.stage]))

        return round(sum(most_kept(actions, nbytes, halved) for actions in schedule.workers))

    found: dict[torch.device, Live] = {}
    for device in dict.fromkeys(d for stage in stages for d in stage.row):
        here = [s for s in stages if device in s.row]
        again = [simulated(here[:k], again=True) for k in range(len(here) + 1)]
        whole = [simulated(here[:k], again=False) for k in range(len(here) + 1)]
        # What a stage keeps beyond those before it: they keep a value that they give at least as long.
        added = {
            stage.index: (again[k + 1].kept - again[k].kept, whole[k + 1].kept - whole[k].kept)
            for k, stage in enumerate(here)
        }

        kept, work = (
            most(added, device, first_whole=checkpoint.first_whole),
            again[-1].peak - again[-1].kept,
        )
        # With one stage on each worker, what was kept whole has gone before anything is computed again.
        alone = all(len({a.stage for a in actions}) <= 1 for actions in schedule.workers)
        found[device] = Live(
            kept, max(kept, most(added, device, first_whole=False) + work) if alone else kept + work
        )
    return found
