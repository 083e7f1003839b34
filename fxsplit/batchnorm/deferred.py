"""Running statistics of batch normalisation that are those of the whole batch, whatever the micro-batches.

Each micro-batch is normalised by its own statistics, as ever; what is put off is the update of the running ones. The
count, mean and sum of squared deviations of each micro-batch are kept under its index, merged in the order of indices
by the formula of Chan, Golub and LeVeque (1979), which does not cancel where the mean is large, and written once, when
all has gone well: as if the layer had seen the whole batch. torchgpipe's deferred batch normalisation is the model.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ..graph.ir import Stage
from ..replicas.meet import BATCH_NORMS

# What the functions that update running statistics call their arguments.
_FUNCTIONAL = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_ATEN = (
    "input",
    "weight",
    "bias",
    "running_mean",
    "running_var",
    "training",
    "momentum",
    "eps",
    "cudnn_enabled",
)
_NAMES = {func: _FUNCTIONAL if func is F.batch_norm else _ATEN for func in BATCH_NORMS}
_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}


@dataclass(frozen=True)
class Moments:
    """Of each channel: how many values, their mean, and the sum of squared deviations from it; in double precision."""

    count: int
    mean: torch.Tensor
    squares: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor) -> Moments:
        """Of a tensor whose dimension 1 is the channels."""
        dims = [d for d in range(x.dim()) if d != 1]
        x = x.detach().double()
        mean = x.mean(dims)
        shape = [1, -1, *([1] * (x.dim() - 2))]
        return cls(x.numel() // x.size(1), mean, (x - mean.view(shape)).square().sum(dims))

    def to(self, device: torch.device) -> Moments:
        """The same on a device."""
        return Moments(self.count, self.mean.to(device), self.squares.to(device))

    def merged(self, other: Moments) -> Moments:
        """Of both together."""
        count = self.count + other.count
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        squares = self.squares + other.squares + apart.square() * (self.count * other.count / count)
        return Moments(count, mean, squares)


@dataclass
class _Layer:
    """The running statistics of one layer, and what the micro-batches give to them: a list each, a call each."""

    mean: torch.Tensor
    variance: torch.Tensor | None
    moments: dict[int, list[tuple[float, Moments]]]


def batch_counters(model: nn.Module) -> list[torch.Tensor]:
    """The buffers that count batches."""
    named = model.named_buffers(remove_duplicate=False)
    return [buffer for name, buffer in named if name.rpartition(".")[2] == "num_batches_tracked"]


class DeferredNorms:
    """What the layers of one call of a pipeline have seen.

    Args:
        counters: the buffers that count the batches (``num_batches_tracked``): they count one.
    """

    def __init__(self, counters: Sequence[torch.Tensor]) -> None:
        self._counters = {id(c) for c in counters}
        self._originals: Mapping[int, torch.Tensor] = {}
        self._layers: dict[int, _Layer] = {}
        self._counts: dict[int, dict[int, int]] = {}  # counter → micro-batch → its calls of the layer
        self._counted: dict[int, int] = {}  # counter → calls that it has counted
        self._lock = threading.Lock()

    def around(self, stage: Stage, micro_batch: int, *, meets: bool) -> Norming:
        """While this thread computes a micro-batch, its batch normalisation writes to no running statistics.

        Args:
            meets: other micro-batches are in the stage at the same time.
        """
        return Norming(self, micro_batch, meets=meets, again=False)

    def follow(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Copies of buffers on other devices: what is said of them is of those that they follow.

        Args:
            copies: id of the copy → the buffer.
        """
        self._originals = copies
        self._counters |= {i for i, buffer in copies.items() if id(buffer) in self._counters}

    def close(self) -> None:
        """Nobody waits for others any more."""

    def count(self, counter: torch.Tensor, micro_batch: int, *, meets: bool) -> bool:
        """Let a layer count a batch: once for each time that a forward calls it, by whichever micro-batch comes first.

        Args:
            meets: micro-batches are there at the same time, so that copies are not brought up to date between them.

        Returns whether this is such a counter.
        """
        if id(counter) not in self._counters:
            return False
        original = self._original(counter)
        assert original is not None
        with self._lock:
            counts = self._counts.setdefault(id(original), {})
            counts[micro_batch] = number = counts.get(micro_batch, 0) + 1
            if number > self._counted.get(id(original), 0):
                self._counted[id(original)] = number
                (original if meets else counter).add_(1)
            if meets and counter is not original:
                counter.copy_(original)
        return True

    def add(self, arguments: Mapping[str, Any], micro_batch: int) -> None:
        """What a layer has seen of a micro-batch."""
        mean, variance = (self._original(arguments[name]) for name in ("running_mean", "running_var"))
        assert mean is not None
        moments = Moments.of(arguments["input"])
        with self._lock:
            layer = self._layers.setdefault(id(mean), _Layer(mean, variance, {}))
            layer.moments.setdefault(micro_batch, []).append((float(arguments["momentum"]), moments))

    def _original(self, buffer: torch.Tensor | None) -> torch.Tensor | None:
        return self._originals.get(id(buffer), buffer)

    def commit(self) -> None:
        """Update the running statistics, once for each time that a forward calls the layer."""
        with torch.no_grad():
            for layer in self._layers.values():
                parts = [part for _, part in sorted(layer.moments.items())]
                for number in range(max(map(len, parts))):
                    _update(layer, [part[number] for part in parts if number < len(part)])


def _update(layer: _Layer, parts: Sequence[tuple[float, Moments]]) -> None:
    # One that is the inverse of a count was read by the micro-batch that counted, or by others when more had been counted.
    momentum = max(momentum for momentum, _ in parts)
    whole = parts[0][1]
    for _, part in parts[1:]:
        whole = whole.merged(part.to(whole.mean.device))
    whole = whole.to(layer.mean.device)
    layer.mean.copy_(layer.mean.double() * (1 - momentum) + whole.mean * momentum)
    if layer.variance is not None:
        unbiased = whole.squares / max(whole.count - 1, 1)
        layer.variance.copy_(layer.variance.double() * (1 - momentum) + unbiased * momentum)


class Norming(TorchFunctionMode):
    """Around the computation of a micro-batch, the first one or a later one (again: what it gives is known)."""

    def __init__(self, norms: DeferredNorms, micro_batch: int, *, meets: bool, again: bool) -> None:
        super().__init__()
        self.norms, self.micro_batch, self.meets, self.is_again = norms, micro_batch, meets, again

    def again(self) -> Callable[[], contextlib.AbstractContextManager[Any]]:
        """What is to be around a later computation of what comes now."""
        return functools.partial(Norming, self.norms, self.micro_batch, meets=self.meets, again=True)

    def normalised(self, func: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        """One layer, in training, without an update of running statistics."""
        given = {**given, "running_mean": None, "running_var": None}
        if func is not F.batch_norm:
            return func(*(given[name] for name in _ATEN))
        return func(**given)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        counts = (
            func is torch.Tensor.add_ and not self.is_again
        )  # again, it does: buffers are put back afterwards
        if counts and self.norms.count(args[0], self.micro_batch, meets=self.meets):
            return args[0]
        if func in _NAMES:
            given = {**_DEFAULTS, **dict(zip(_NAMES[func], args, strict=False)), **kwargs}
            if given["training"]:
                if given["running_mean"] is not None and not self.is_again:
                    self.norms.add(given, self.micro_batch)
                return self.normalised(func, given)
        return func(*args, **kwargs)
