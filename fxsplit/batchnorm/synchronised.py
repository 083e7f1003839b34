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
from torch import nn

from ..errors import ModelError
from ..graph.ir import Stage
from ..replicas.meeting import Door, StoppedError
from .deferred import DeferredNorms, Norming


class SyncNorms(DeferredNorms):
    """The layers of one call. Running statistics are updated once, by those of the whole batch.

    Args:
        counters: as of `DeferredNorms`.
        meets: stage → how many micro-batches meet there.
    """

    def __init__(self, counters: Sequence[torch.Tensor], meets: Mapping[int, int]) -> None:
        super().__init__(counters)
        self._meets = meets
        self._rooms: dict[tuple[int, int], _Room] = {}
        self._ended: dict[int, dict[int, int]] = {}  # stage → micro-batch → how often it has normalised
        self._buffers: dict[int, set[int]] = {}
        self._closed = False

    def around(self, stage: Stage, micro_batch: int, *, meets: bool) -> Norming:
        """While this thread computes a micro-batch, its batch normalisation waits for the other micro-batches."""
        with self._lock:
            if stage.index not in self._buffers:
                self._buffers[stage.index] = {id(b) for b in stage.module.buffers()}
        return _Meet(self, stage.index, micro_batch, meets=meets, number=0, again=False)

    def ended(self, stage: int, micro_batch: int, number: int) -> None:
        """A micro-batch has gone forward, and normalised this often: who waits for more of it, waits for ever."""
        with self._lock:
            self._ended.setdefault(stage, {})[micro_batch] = number
            for (where, n), room in self._rooms.items():
                if where == stage and n >= number:
                    room.give_up(micro_batch, number)

    def layer(self, stage: int, given: Mapping[str, Any]) -> Layer:
        """Which layer it is that normalises, as far as arguments tell."""
        mean, weight = given["running_mean"], given["weight"]
        buffer = self._original(mean) if isinstance(mean, torch.Tensor) else None
        return Layer(
            given["input"].size(1),
            given["eps"],
            # what is computed anew has another id in each micro-batch
            id(buffer) if id(buffer) in self._buffers[stage] else None,
            (weight.device, id(weight)) if isinstance(weight, nn.Parameter) else None,
        )

    def room(self, stage: int, number: int) -> _Room:
        """Where the micro-batches of a stage meet, in its n-th batch normalisation."""
        with self._lock:
            if (stage, number) not in self._rooms:
                self._rooms[stage, number] = _Room(self._meets[stage], stage, number)
            room = self._rooms[stage, number]
            for micro_batch, often in self._ended.get(stage, {}).items():
                if often <= number:
                    room.give_up(micro_batch, often)
            if self._closed:
                room.close()
            return room

    def close(self) -> None:
        """Nobody waits for others any more."""
        with self._lock:
            self._closed = True
            for room in self._rooms.values():
                room.close()


@dataclass(frozen=True)
class Layer:
    """What the micro-batches that meet have to agree in: they are called in the same layer.

    Attributes:
        buffer: id of the running mean, where it is one of the model's.
        weight: id of the parameter, and its device; copies on other devices have other ids.
    """

    channels: int
    eps: float
    buffer: int | None
    weight: tuple[torch.device, int] | None

    def is_another(self, other: Layer) -> bool:
        """Whether these are certainly two layers."""
        here = (self.channels, self.eps, self.buffer, self.weight is None)
        if here != (other.channels, other.eps, other.buffer, other.weight is None):
            return True
        if self.weight is None or other.weight is None or self.weight[0] != other.weight[0]:
            return False
        return self.weight != other.weight


@dataclass
class _Part:
    layer: Layer
    count: int
    mean: torch.Tensor
    squares: torch.Tensor


@dataclass
class _Room:
    parties: int
    stage: int
    number: int
    parts: dict[int, _Part] = field(default_factory=dict)
    whole: tuple[torch.Tensor, torch.Tensor] | None = None  # mean and biased variance
    missing: tuple[int, int] | None = (
        None  # a micro-batch that does not come, and how often it came to others
    )

    def __post_init__(self) -> None:
        self._doors = Door(self.parties), Door(self.parties)

    def statistics(self, micro_batch: int, part: _Part) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of all micro-batches, once they are there."""
        self.parts[micro_batch] = part
        there, merged = self._doors
        try:
            there.enter()
        except StoppedError:
            if self.missing is None:
                raise
            other, often = self.missing
            raise ModelError(
                f"a layer of batch normalisation in stage {self.stage} waits for all micro-batches, but they are unequal: "
                f"micro-batch {micro_batch} comes to the layers {self.number + 1} times or more, micro-batch {other} {often}"
                " times",
                remedy="deferred_batch_norm=True, or a forward that calls the same layers whatever the data",
            ) from None
        # Not whoever comes last: autograd goes backward in the order in which each thread has made its nodes, and so
        # would add gradients in an order that depends on timing.
        if micro_batch == min(self.parts):
            try:
                self._check(micro_batch)
                self._merge()
            except BaseException:
                self.close()
                raise
        merged.enter()
        assert self.whole is not None
        return self.whole

    def _check(self, micro_batch: int) -> None:
        layer = self.parts[micro_batch].layer
        for other, part in sorted(self.parts.items()):
            if layer.is_another(part.layer):
                raise ModelError(
                    f"micro-batches {micro_batch} and {other} of stage {self.stage} meet in different layers of batch "
                    f"normalisation, their {self.number + 1}. ones: of {layer.channels} channels with eps={layer.eps}, and of "
                    f"{part.layer.channels} with eps={part.layer.eps}",
                    remedy="deferred_batch_norm=True, or a forward that calls the same layers whatever the data",
                )

    def give_up(self, micro_batch: int, often: int) -> None:
        """A micro-batch does not come, and has come to others this often."""
        if self.missing is None:
            self.missing = micro_batch, often
        self.close()

    def close(self) -> None:
        """Nobody waits here any more."""
        for door in self._doors:
            door.close()

    def _merge(self) -> None:
        # One does this for all: a recomputed region of its own must not take it for its own.
        with torch.autograd.graph.saved_tensors_hooks(_same, _same):
            parts = [part for _, part in sorted(self.parts.items())]
            home = parts[0].mean.device
            count = sum(part.count for part in parts)
            means = [part.mean.to(home) for part in parts]
            mean = _sum([m * (part.count / count) for m, part in zip(means, parts, strict=True)])
            apart = [(m - mean).square() * part.count for m, part in zip(means, parts, strict=True)]
            within = [part.squares.to(home) for part in parts]
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

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if kind is None and self.meets and not self.is_again:
            self.sync.ended(self.stage, self.micro_batch, self.number)

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
                mean, variance = room.statistics(
                    self.micro_batch, _Part(self.sync.layer(self.stage, given), count, own, squares)
                )
            mean, variance = mean.to(y.device), variance.to(y.device)
            scale = torch.rsqrt(variance + given["eps"])
            if given["weight"] is not None:
                scale = scale * given["weight"]
            y = (y - mean.view(shape)) * scale.view(shape)
            if given["bias"] is not None:
                y = y + given["bias"].view(shape)
        return y.to(x.dtype)
