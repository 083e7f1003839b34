"""Running statistics of batch normalisation that are those of the whole batch, whatever the micro-batches.

Each micro-batch is normalised by its own statistics, as ever; what is put off is the update of the running ones. The
count, mean and sum of squared deviations of each micro-batch are kept under its index, merged in the order of indices
by the formula of Chan, Golub and LeVeque (1979), which does not cancel where the mean is large, and written once, when
all has gone well: as if the layer had seen the whole batch. torchgpipe's deferred batch normalisation is the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

# The functions that update running statistics, and the names of their arguments.
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
_NAMES: dict[Any, tuple[str, ...]] = {
    F.batch_norm: _FUNCTIONAL,
    torch.batch_norm: _ATEN,
    torch.ops.aten.batch_norm.default: _ATEN,
}
_DEFAULTS = {"training": False, "momentum": 0.1}


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


class DeferredNorms:
    """What the layers of one call of a pipeline have seen.

    Args:
        counters: the buffers that count the batches (``num_batches_tracked``): they count one.
    """

    def __init__(self, counters: Sequence[torch.Tensor]) -> None:
        self._counters = {id(c) for c in counters}
        self._layers: dict[int, _Layer] = {}
        self._lock = threading.Lock()

    @classmethod
    def of_model(cls, model: nn.Module) -> DeferredNorms:
        """For all batch normalisation of a model."""
        named = model.named_buffers(remove_duplicate=False)
        return cls([b for name, b in named if name.rpartition(".")[2] == "num_batches_tracked"])

    def recording(self, micro_batch: int) -> TorchFunctionMode:
        """While this thread computes a micro-batch, its batch normalisation writes to no running statistics."""
        return _PutOff(self, micro_batch, again=False)

    def recomputing(self, micro_batch: int) -> TorchFunctionMode:
        """The same while a micro-batch is computed again: what it gives is known."""
        return _PutOff(self, micro_batch, again=True)

    def is_counted_already(self, tensor: Any, micro_batch: int) -> bool:
        """Whether this is a count of batches, and not the first of their parts."""
        return micro_batch > 0 and id(tensor) in self._counters

    def add(self, arguments: Mapping[str, Any], micro_batch: int) -> None:
        """What a layer has seen of a micro-batch."""
        mean, moments = arguments["running_mean"], Moments.of(arguments["input"])
        with self._lock:
            layer = self._layers.setdefault(id(mean), _Layer(mean, arguments["running_var"], {}))
            layer.moments.setdefault(micro_batch, []).append((float(arguments["momentum"]), moments))

    def commit(self) -> None:
        """Update the running statistics, once for each time that a forward calls the layer."""
        with torch.no_grad():
            for layer in self._layers.values():
                parts = [part for _, part in sorted(layer.moments.items())]
                for number in range(max(map(len, parts))):
                    _update(layer, [part[number] for part in parts if number < len(part)])


def _update(layer: _Layer, parts: Sequence[tuple[float, Moments]]) -> None:
    momentum, whole = parts[0]
    for _, part in parts[1:]:
        whole = whole.merged(part)
    layer.mean.copy_(layer.mean.double() * (1 - momentum) + whole.mean * momentum)
    if layer.variance is not None:
        unbiased = whole.squares / max(whole.count - 1, 1)
        layer.variance.copy_(layer.variance.double() * (1 - momentum) + unbiased * momentum)


class _PutOff(TorchFunctionMode):
    def __init__(self, norms: DeferredNorms, micro_batch: int, *, again: bool) -> None:
        super().__init__()
        self.norms, self.micro_batch, self.again = norms, micro_batch, again

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.add_ and self.norms.is_counted_already(args[0], self.micro_batch):
            return args[0]
        if func in _NAMES:
            given = {**_DEFAULTS, **dict(zip(_NAMES[func], args, strict=False)), **kwargs}
            if given["training"] and given["running_mean"] is not None:
                if not self.again:
                    self.norms.add(given, self.micro_batch)
                given = {**given, "running_mean": None, "running_var": None}
                if func is not F.batch_norm:
                    return func(*(given[name] for name in _ATEN))
                return func(**given)
        return func(*args, **kwargs)
