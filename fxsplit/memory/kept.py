"""The activations that stages and devices keep for backward, by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..cost.saved import Live, Saved, live_bytes
from ..graph.ir import Stage, Traced
from ..graph.nodes import region_runs
from ..plan.checkpoint import Checkpoint
from ..schedules.catalog import most_kept
from ..schedules.schedule import Action, Schedule


class Kept:
    """What stages keep of the micro-batches of a batch like the example, from their forward to the end of their backward.

    Args:
        saved: what one forward of the example leaves behind.
        checkpoint: the plan's policy.
    """

    def __init__(
        self,
        saved: Saved,
        traced: Traced,
        stages: Sequence[Stage],
        micro_batches: int,
        checkpoint: Checkpoint,
    ) -> None:
        self._stages, self._micro_batches, self._checkpoint = stages, micro_batches, checkpoint
        self._runs = [region_runs(stage) for stage in stages]
        order = {n.name: n for n in traced.graph.nodes}
        # Device → stage → bytes of the whole batch that it keeps beyond those before it (they keep a value that they
        # give at least as long): with regions that are computed again, and without.
        self._added: dict[torch.device, dict[int, tuple[int, int]]] = {}
        self._work: dict[torch.device, int] = {}  # bytes of the largest region while it is computed again

        def simulated(group: Sequence[Stage], *, again: bool) -> Live:
            nodes = [[order[name] for name in stage.nodes] for stage in group]
            runs: Sequence[Any] = [self._runs[stage.index] if again else [] for stage in group]
            return live_bytes(saved, nodes, runs, micro_batches)

        for device in dict.fromkeys(d for stage in stages for d in stage.row):
            here = [s for s in stages if device in s.row]
            again = [simulated(here[:k], again=True) for k in range(len(here) + 1)]
            whole = [simulated(here[:k], again=False) for k in range(len(here) + 1)]
            self._added[device] = {
                stage.index: (again[k + 1].kept - again[k].kept, whole[k + 1].kept - whole[k].kept)
                for k, stage in enumerate(here)
            }
            self._work[device] = again[-1].peak - again[-1].kept

    def nbytes(self, action: Action) -> float:
        """Bytes that a stage keeps of a micro-batch."""
        return self._nbytes(action, first_whole=self._checkpoint.first_whole)

    def to_the_end(self, action: Action) -> bool:
        """Whether it is kept to the end of a backward in two halves; else to the end of the first one."""
        return self._halved(action, first_whole=self._checkpoint.first_whole)

    def by_device(self, schedule: Schedule) -> dict[torch.device, Live]:
        """The most that each device keeps.

        Where workers of a device keep only some of the micro-batches, what each of them keeps at most is added up.

        Args:
            schedule: its workers keep a micro-batch from its forward to the end of its backward.
        """
        found: dict[torch.device, Live] = {}
        # With one stage on each worker, what was kept whole has gone before anything is computed again.
        alone = all(len({a.stage for a in actions}) <= 1 for actions in schedule.workers)
        for device, work in self._work.items():
            kept = self._most(schedule, device, first_whole=self._checkpoint.first_whole)
            peak = self._most(schedule, device, first_whole=False) + work if alone else kept + work
            found[device] = Live(kept, max(kept, peak))
        return found

    def _most(self, schedule: Schedule, device: torch.device, *, first_whole: bool) -> int:
        def nbytes(action: Action) -> float:
            here = self._stages[action.stage].device_of(action.micro_batch) == device
            return self._nbytes(action, first_whole=first_whole) if here else 0.0

        def halved(action: Action) -> bool:
            return self._halved(action, first_whole=first_whole)

        return round(sum(most_kept(actions, nbytes, halved) for actions in schedule.workers))

    def _nbytes(self, action: Action, *, first_whole: bool) -> float:
        added = self._added[self._stages[action.stage].device_of(action.micro_batch)]
        return added[action.stage][first_whole and action.micro_batch == 0] / self._micro_batches

    def _halved(self, action: Action, *, first_whole: bool) -> bool:
        return (first_whole and action.micro_batch == 0) or not any(self._runs[action.stage])
