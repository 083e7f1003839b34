"""A tape of stages in a chain as arrays, played with many costs at once.

`schedules.simulate.timeline` plays the instructions of a tape one after the other. Here all instructions with equally
many others before them are a level; a level is one operation for all its instructions and all variants of the costs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..schedules.catalog import schedule_of
from ..schedules.schedule import Action, Schedule

KINDS = {"F": 0, "B": 1, "I": 2, "W": 3}
_MOST = 2**22  # numbers in one array: variants beyond are played in turns


@dataclass(frozen=True, eq=False)
class Chain:
    """Stages that each read what the one before gives, played by a schedule. Instructions are numbered by level.

    Attributes:
        stages: how many.
        rows: per worker its actions.
        levels: where each level begins, and the end of the last one.
        before: per instruction the number of the one before it in its worker, or the number of all if there is none.
        source: the same for that of the neighbouring stage whose value or gradient it reads.
        cut: number of the cut over which that comes from another worker, or `stages` if it does not.
        code: which cost it has: (kind * stages + stage) * 2 + whether it is of micro-batch 0.
        place: numbers of the instructions of all workers, in their order, one worker after the other.
        worker: of the instruction in each such place.
        home: per stage its worker.
    """

    stages: int
    rows: tuple[tuple[Action, ...], ...]
    levels: tuple[int, ...]
    before: torch.Tensor
    source: torch.Tensor
    cut: torch.Tensor
    code: torch.Tensor
    place: torch.Tensor
    worker: torch.Tensor
    home: torch.Tensor

    def ends(self, seconds: torch.Tensor, travel: torch.Tensor) -> torch.Tensor:
        """When each instruction ends, if each begins as soon as its worker is free and what it reads is there.

        Args:
            seconds: (variants, 4, stages, 2) of F, B, I and W, of other micro-batches and of micro-batch 0.
            travel: (variants, cuts) that values take over each cut, and their gradients too.

        Returns:
            (instructions + 1, variants), by number; the last row is 0.
        """
        count = len(self.code)
        share = max(1, _MOST // (count + 1))
        parts = zip(torch.split(seconds, share), torch.split(travel, share), strict=True)
        return torch.cat([self._ends(*part) for part in parts], dim=1)

    def _ends(self, seconds: torch.Tensor, travel: torch.Tensor) -> torch.Tensor:
        table = seconds.flatten(1).t().contiguous()
        none = travel.new_zeros(len(travel), self.stages + 1 - travel.shape[1])
        lengths = [b - a for a, b in zip(self.levels, self.levels[1:], strict=False)]
        cost = torch.split(table[self.code], lengths)
        delay = torch.split(torch.cat([travel, none], dim=1).t().contiguous()[self.cut], lengths)
        before, source = torch.split(self.before, lengths), torch.split(self.source, lengths)
        ends = table.new_zeros(len(self.code) + 1, table.shape[1])
        for k, row in enumerate(torch.split(ends[:-1], lengths)):
            there = ends.index_select(0, source[k]).add_(delay[k])
            torch.maximum(ends.index_select(0, before[k]), there, out=there)
            torch.add(there, cost[k], out=row)
        return ends

    def workers_end(self, ends: torch.Tensor) -> torch.Tensor:
        """(variants, workers) when each has done its last instruction, of what `ends` gives."""
        lengths = torch.tensor([len(row) for row in self.rows])
        return ends[self.place[lengths.cumsum(0) - 1]].t()

    def most_kept(self, change: torch.Tensor) -> torch.Tensor:
        """The most that each worker keeps at once.

        Args:
            change: (variants, 4, stages, 2) bytes that an action begins to keep, or with a minus ends to; all of a
                micro-batch add up to 0.

        Returns:
            (variants, workers) bytes.
        """
        found = []
        for part in torch.split(change, max(1, _MOST // len(self.code))):
            now = part.flatten(1)[:, self.code[self.place]].cumsum(1)
            most = now.new_zeros(len(part), len(self.rows))
            found.append(most.scatter_reduce_(1, self.worker.expand_as(now), now, "amax"))
        return torch.cat(found)

    @functools.cached_property
    def kinds(self) -> list[int]:
        """Which rows of the costs its instructions have."""
        return sorted({KINDS[action.kind] for row in self.rows for action in row})


@functools.lru_cache(maxsize=32)
def chain_of(name: str, stages: int, micro_batches: int, workers: int) -> Chain:
    """The chain of a schedule of the catalogue."""
    return chained(schedule_of(name, stages, micro_batches, workers))


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """No garbage is looked for: each time, all actions that there are so far would be looked at."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def chained(schedule: Schedule) -> Chain:
    """The chain of a schedule that ends and plays each stage in one worker."""
    rows = schedule.workers
    lengths = torch.tensor([len(row) for row in rows])
    letters, *columns = zip(*itertools.chain.from_iterable(rows), strict=True)
    kind = torch.tensor(list(map(KINDS.__getitem__, letters)))
    stage, micro_batch = map(torch.tensor, columns)
    stages, size = int(stage.max()) + 1, int(micro_batch.max()) + 1
    worker = torch.repeat_interleave(lengths)
    home = torch.empty(stages, dtype=torch.long)
    home[stage] = worker
    total, first = len(kind), kind == 0
    gives = kind < 3  # what another stage reads: values, or gradients of inputs
    key = (stage + stages * ~first) * size + micro_batch
    at = torch.full((2 * stages * size,), total)  # what gives a value or gradient → its place
    at[key[gives]] = torch.arange(total)[gives]
    neighbour = torch.where(first, stage - 1, stage + 1)
    reads = gives & (neighbour >= 0) & (neighbour < stages)
    source = torch.full((total + 1,), total)
    source[:-1][reads] = at[(key + (neighbour - stage) * size)[reads]]
    before = torch.arange(-1, total)
    before[lengths.cumsum(0)[:-1]] = before[0] = total
    cut = torch.full((total,), stages)
    away = reads & (home[neighbour.clamp(0, stages - 1)] != worker)
    cut[away] = torch.minimum(stage, neighbour)[away]
    deep = torch.tensor(_depths(source.tolist(), lengths.tolist()))
    order = deep.argsort(stable=True)
    number = torch.empty(total + 1, dtype=torch.long)
    number[order], number[total] = torch.arange(total), total
    return Chain(
        stages,
        rows,
        (0, *deep.bincount().cumsum(0).tolist()),
        number[before[:-1][order]],
        number[source[:-1][order]],
        cut[order],
        ((kind * stages + stage) * 2 + (micro_batch == 0))[order],
        number[:-1],
        worker,
        home,
    )


def _depths(source: list[int], lengths: Sequence[int]) -> list[int]:
    """By place, how many instructions have to be done one after the other before."""
    total = len(source) - 1
    depth = [-1] * (total + 1)
    waiting = [-1] * (total + 1)  # place → who waits for it
    ends = list(itertools.accumulate(lengths))
    following = [end - length for end, length in zip(ends, lengths, strict=True)]
    level = [-1] * len(ends)
    able = list(range(len(ends)))
    while able:
        w = able.pop()
        now = level[w]
        for k in range(following[w], ends[w]):
            there = source[k]
            if there != total:
                deep = depth[there]
                if deep < 0:
                    waiting[there] = w
                    following[w] = k
                    break
                if deep > now:
                    now = deep
            now += 1
            depth[k] = now
            if waiting[k] >= 0:
                able.append(waiting[k])
        level[w] = now
    return depth[:-1]
