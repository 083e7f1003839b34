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
    needs = _Needs(chain)
    for behind in (0, workers - 1, workers):  # what is not in a V, and what is
        last = micro_batches - 1 - behind
        if last <= 2 * period:
            break
        first, second = needs.of(last - period), needs.of(last)
        inside = all(
            begin <= there <= end and there - here == length
            for here, there, (begin, end, length) in zip(first, second, repeated, strict=True)
        )
        lengths = [length for _, _, length in repeated]
        pairs = _state(chain, first, period, lengths) if inside and min(first) > 0 else None
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


class _Needs:
    """What has to be done before an instruction, as a number of actions of each worker."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        total = len(chain.code)
        self.worker, self.position = [0] * total, [0] * total
        begin = 0
        places = chain.place.tolist()
        for w, row in enumerate(chain.rows):
            for k in range(len(row)):
                self.worker[places[begin + k]], self.position[places[begin + k]] = w, k
            begin += len(row)
        self.source = chain.source.tolist()

    def of(self, micro_batch: int) -> list[int]:
        """Of the last stage's backward with it, which is left out."""
        chain = self.chain
        last = chain.stages - 1
        end = chain.number.get(Action("B", last, micro_batch))
        if end is None:
            end = chain.number[Action("I", last, micro_batch)]
        needed = [0] * len(chain.rows)
        needed[self.worker[end]] = self.position[end]
        for number in range(end - 1, -1, -1):  # numbers go up with levels, so that sources come first
            w = self.worker[number]
            source = self.source[number]
            if self.position[number] < needed[w] and source < len(self.source):
                there = self.worker[source]
                needed[there] = max(needed[there], self.position[source] + 1)
        return needed


def _state(
    chain: Chain, done: Sequence[int], period: int, lengths: Sequence[int]
) -> list[tuple[int, int]] | None:
    """What later instructions depend on once so much is done, with the same one period later; None if that is another."""
    number, source = chain.number, chain.source.tolist()
    places = {number[a]: (w, k) for w, row in enumerate(chain.rows) for k, a in enumerate(row)}
    actions = {n: a for a, n in number.items()}
    reached = [row[k - 1] for row, k in zip(chain.rows, done, strict=True)]
    for row, k in zip(chain.rows, done, strict=True):
        for action in row[k:]:
            if action.micro_batch == 0:  # its costs may be its own
                return None
            n = source[number[action]]
            if n in places and places[n][1] < done[places[n][0]]:
                reached.append(actions[n])
    pairs = []
    for action in dict.fromkeys(reached):
        later = number.get(action._replace(micro_batch=action.micro_batch + period))
        if later is None:
            return None
        w, k = places[number[action]]
        if places[later] != (w, k + lengths[w]):
            return None
        pairs.append((number[action], later))
    return pairs
