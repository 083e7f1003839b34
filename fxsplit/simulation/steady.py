"""Steps of many micro-batches from one of fewer, where the schedule repeats itself and the times do too.

A schedule in its steady state does the same with every period of P micro-batches, so that its rows for m + P
micro-batches are those for m with one period put in. Let D(i) be what has to be done before the last stage goes backward
with micro-batch i, and D(i) and D(i + P) the same but for one period. All that is done later depends only on when the
last instructions in D of each worker, and those that later ones read, have ended. If from D(i) to D(i + P) all of these
ends grow by the same λ, everything after D(i + P) comes λ later with every further period: a step takes
T(m + n P) = T(m) + n λ, exactly. Where they do not grow alike (yet), more micro-batches are simulated, at most all.
This is the cyclicity of max-plus linear systems (Baccelli et al., Synchronization and Linearity, 1992), seen as it begins.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..schedules.schedule import Action
from .chain import Chain, chain_of

# Every longest path goes through equally many instructions but those of the stages in which it stays, and it can stay in
# the heaviest: from two micro-batches on (the first of them may have costs of its own) each takes as much longer.
AFFINE = ("gpipe",)
SAME = 1e-11  # of a step: what rounding leaves of equal differences


@dataclass(frozen=True, eq=False)
class Steady:
    """A chain long enough to have a steady state.

    Attributes:
        period: P, in micro-batches.
        earlier, later: numbers of the instructions on which all later ones depend, after D(i) and after D(i + P).
    """

    chain: Chain
    period: int
    earlier: torch.Tensor
    later: torch.Tensor

    def growth(self, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Per variant the seconds of one more period, and whether every further one takes as long."""
        grown = ends[self.later] - ends[self.earlier]
        low, high = grown.amin(0), grown.amax(0)
        return (low + high) / 2, high - low <= SAME * ends.amax(0)


def period_of(name: str, workers: int) -> int | None:
    """After how many micro-batches a schedule of the catalogue repeats itself; None where it has no steady state."""
    if name in ("gpipe", "breadth_first"):
        return None  # all of a stage's forwards, or of a worker's, go before its backwards
    return workers if name.startswith("interleaved") else 1


def enough(name: str, micro_batches: int, workers: int) -> int | None:
    """So many micro-batches, a whole number of periods fewer, have a steady state where costs are usual; or None."""
    period = period_of(name, workers)
    if period is None:
        return None
    least = (2 if name in ("1f1b", "zb_h1") else 4) * workers + 4
    return least + (micro_batches - least) % period


@functools.lru_cache(maxsize=64)
def steady(name: str, stages: int, micro_batches: int, workers: int) -> Steady | None:
    """That of so many micro-batches, or None where they are too few."""
    period = period_of(name, workers)
    if period is None or micro_batches <= 2 * period:
        return None
    chain = chain_of(name, stages, micro_batches, workers)
    shorter = chain_of(name, stages, micro_batches - period, workers)
    repeated = [_repeated(a, b, period) for a, b in zip(shorter.rows, chain.rows, strict=True)]
    order = _Order(chain)
    for behind in (0, workers - 1, workers):  # what is not in a V, and what is
        last = micro_batches - 1 - behind
        if last <= 2 * period:
            break
        first, second = order.needs(last - period), order.needs(last)
        inside = all(
            begin <= there <= end and there - here == length
            for here, there, (begin, end, length) in zip(first, second, repeated, strict=True)
        )
        lengths = [length for _, _, length in repeated]
        pairs = order.state(first, period, lengths) if inside and min(first) > 0 else None
        if pairs is not None:
            return Steady(chain, period, *map(torch.tensor, zip(*pairs, strict=True)))
    return None


def _repeated(short: Sequence[Action], long: Sequence[Action], period: int) -> tuple[int, int, int]:
    """Where a period may be put in again: after how many actions of `long` at least and at most; and its length."""
    count = len(short)
    head = next((k for k in range(count) if short[k] != long[k]), count)
    tail = 0
    while tail < count:
        kind, stage, i = short[-1 - tail]
        if long[-1 - tail] != (kind, stage, i + period):
            break
        tail += 1
    length = len(long) - count
    return count - tail + length, head + length, length


class _Order:
    """Where each instruction of a chain is: in which worker, and after how many others."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        total = len(chain.code)
        lengths = torch.tensor([len(row) for row in chain.rows])
        begins = lengths.cumsum(0) - lengths
        position = torch.arange(total) - begins[chain.worker]
        self.begins, self.place = begins.tolist(), chain.place.tolist()
        self.worker, self.position = (
            torch.empty(total, dtype=torch.long).index_copy_(0, chain.place, column).tolist()
            for column in (chain.worker, position)
        )
        self.source = chain.source.tolist()

    def needs(self, micro_batch: int) -> list[int]:
        """Per worker how much is done before the last stage goes backward with a micro-batch."""
        last = self.chain.stages - 1
        w = int(self.chain.home[last])
        row = self.chain.rows[w]
        k = next(k for k in range(len(row)) if row[k][0] in "BI" and row[k][1:] == (last, micro_batch))
        needed = [0] * len(self.chain.rows)
        needed[w] = k
        worker, position, source, total = self.worker, self.position, self.source, len(self.source)
        for number in range(self.place[self.begins[w] + k] - 1, -1, -1):  # by level: sources come first
            there = source[number]
            if there < total and position[number] < needed[worker[number]]:
                other = worker[there]
                if position[there] >= needed[other]:
                    needed[other] = position[there] + 1
        return needed

    def state(self, done: Sequence[int], period: int, lengths: Sequence[int]) -> list[tuple[int, int]] | None:
        """What later instructions depend on once so much is done, with the same one period later; None if that is another."""
        rows, total = self.chain.rows, len(self.source)
        reached = {(w, k - 1) for w, k in enumerate(done)}
        for w, row in enumerate(rows):
            for k in range(done[w], len(row)):
                if row[k].micro_batch == 0:  # its costs may be its own
                    return None
                there = self.source[self.place[self.begins[w] + k]]
                if there < total and self.position[there] < done[self.worker[there]]:
                    reached.add((self.worker[there], self.position[there]))
        pairs = []
        for w, k in sorted(reached):
            later = k + lengths[w]
            kind, stage, i = rows[w][k]
            if later >= len(rows[w]) or rows[w][later] != (kind, stage, i + period):
                return None
            pairs.append((self.place[self.begins[w] + k], self.place[self.begins[w] + later]))
        return pairs
