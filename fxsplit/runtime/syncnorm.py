"""Batch normalisation by the statistics of the whole batch: micro-batches meet at every layer.

Each micro-batch gives its count, mean and sum of squared deviations; merged (Chan, Golub and LeVeque, 1979) they are
those of the batch, with a graph through all micro-batches, so that gradients are the batch's too. What
torch.nn.SyncBatchNorm does between processes, for the micro-batches and replicas of one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import ModelError
from ..ir import Stage
from .batchnorm import DeferredNorms, Norming
from .meeting import Door


class SyncNorms(DeferredNorms):
    """The layers of one call. Running statistics are updated once, by those of the whole batch.

    Args:
        counters: as of `DeferredNorms`.
        rounds: stage → how many micro-batches meet there.
    """

    def __init__(self, counters: Sequence[torch.Tensor], rounds: Mapping[int, int]) -> None:
        super().__init__(counters)
        self._rounds = rounds
        self._rooms: dict[tuple[int, int], _Room] = {}
        self._closed = False

    def around(self, stage: Stage, micro_batch: int, *, meets: bool) -> Norming:
        """While this thread computes a micro-batch, its batch normalisation waits for the other micro-batches."""
        return _Meet(self, stage.index, micro_batch, meets=meets, number=0, again=False)

    def room(self, stage: int, number: int) -> _Room:
        """Where the micro-batches of a stage meet, in its n-th batch normalisation."""
        with self._lock:
            if (stage, number) not in self._rooms:
                self._rooms[stage, number] = _Room(self._rounds[stage])
            room = self._rooms[stage, number]
            if self._closed:
                room.close()
            return room

    def close(self) -> None:
        """Nobody waits for others any more."""
        with self._lock:
            self._closed = True
            for room in self._rooms.values():
                room.close()


@dataclass
class _Room:
    parties: int
    parts: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    whole: tuple[torch.Tensor, torch.Tensor] | None = None  # mean and biased variance

    def __post_init__(self) -> None:
        self._doors = Door(self.parties), Door(self.parties)

    def statistics(
        self, micro_batch: int, part: tuple[int, torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of all micro-batches, once they are there."""
        self.parts[micro_batch] = part
        there, merged = self._doors
        there.enter()
        # Not whoever comes last: autograd goes backward in the order in which each thread has made its nodes, and so
        # would add gradients in an order that depends on timing.
        if micro_batch == min(self.parts):
            try:
                self._merge()
            except BaseException:
                self.close()
                raise
        merged.enter()
        assert self.whole is not None
        return self.whole

    def close(self) -> None:
        """Nobody waits here any more."""
        for door in self._doors:
            door.close()

    def _merge(self) -> None:
        # One does this for all: a recomputed region of its own must not take it for its own.
        with torch.autograd.graph.saved_tensors_hooks(_same, _same):
            parts = [part for _, part in sorted(self.parts.items())]
            home = parts[0][1].device
            count = sum(n for n, _, _ in parts)
            means = [mean.to(home) for _, mean, _ in parts]
            mean = _sum([m * (n / count) for m, (n, _, _) in zip(means, parts, strict=True)])
            apart = [(m - mean).square() * n for m, (n, _, _) in zip(means, parts, strict=True)]
            within = [squares.to(home) for _, _, squares in parts]
            self.whole = mean, (_sum(within) + _sum(apart)) / count


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _sum(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, terms)


class _Meet(Norming):
    def __init__(
        self, norms: SyncNorms, stage: int, micro_batch: int, *, meets: bool, number: int, again: bool
    ) -> None:
        super().__init__(norms, micro_batch, meets=meets, again=again)
        self.sync, self.stage, self.number = norms, stage, number

    def again(self) -> Callable[[], contextlib.AbstractContextManager[Any]]:
        """What is around a later computation of what comes now."""
        return functools.partial(
            _Meet,
            self.sync,
            self.stage,
            self.micro_batch,
            meets=self.meets,
            number=self.number,
            again=True,
        )

    def normalised(self, func: Callable[..., Any], given: Mapping[str, Any]) -> torch.Tensor:
        """One layer, in training."""
        if not self.meets:
            raise ModelError(
                f"stage {self.stage} normalises a batch where no such layer was seen, so its micro-batches do not meet",
                remedy="deferred_batch_norm=True instead of sync_batch_norm=True",
            )
        x: torch.Tensor = given["input"]
        room = self.sync.room(self.stage, self.number)
        self.number += 1
        with torch.autocast(x.device.type, enabled=False):
            y = x.to(torch.promote_types(x.dtype, torch.float32))
            dims = [d for d in range(y.dim()) if d != 1]
            shape = [1, -1, *([1] * (y.dim() - 2))]
            count = y.numel() // y.size(1)
            own = y.mean(dims)
            squares = (y - own.view(shape)).square().sum(dims)
            if self.is_again:
                assert room.whole is not None
                mean, variance = (t.detach().requires_grad_(t.requires_grad) for t in room.whole)
            else:
                mean, variance = room.statistics(self.micro_batch, (count, own, squares))
            mean, variance = mean.to(y.device), variance.to(y.device)
            scale = torch.rsqrt(variance + given["eps"])
            if given["weight"] is not None:
                scale = scale * given["weight"]
            y = (y - mean.view(shape)) * scale.view(shape)
            if given["bias"] is not None:
                y = y + given["bias"].view(shape)
        return y.to(x.dtype)
