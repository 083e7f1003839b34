"""Buffers that go from replica to replica with the micro-batches, where each replica has buffers of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from ..graph.ir import Stage
from ..replicas.replicas import Replica
from .device import Lanes


class Travelling:
    """What stages have written to their buffers in one call.

    Through ``.data``, as the kernels that write running statistics do: without a trace in the version counter.
    """

    def __init__(self, replicas: Mapping[int, Sequence[Replica]], lanes: Lanes) -> None:
        self._replicas, self._lanes = replicas, lanes
        self._written: dict[int, dict[str, torch.Tensor]] = {}  # by the last replica that computed

    @contextlib.contextmanager
    def carried(self, stage: Stage, micro_batch: int) -> Iterator[None]:
        """While a replica computes: it begins with what the one before has written."""
        row, before = self._replicas[stage.index], self._written.get(stage.index, {})
        replica = row[micro_batch % len(row)]
        self._lanes.uses(stage.index, micro_batch, before.values())
        for name, value in before.items():
            replica.buffers[name].data.copy_(self._lanes.move(value, replica.device))
        yield
        if replica.buffers:
            self._written[stage.index] = {name: b.detach().clone() for name, b in replica.buffers.items()}

    def arrive(self) -> None:
        """The model's own buffers have what the last replica wrote."""
        for stage, written in self._written.items():
            for name, value in written.items():
                self._replicas[stage][0].buffers[name].data.copy_(value)
        self._written.clear()
