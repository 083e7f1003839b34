"""What ranks do with the gradients of parameters that others have, too.

A parameter of several stages (a tied one) has its gradient where its first stage is, which hands it on. Replicas of the
pipeline average theirs, as DistributedDataParallel does: those of a stage begin to travel when it has gone backward for the
last time, while the stages before it still compute::

    rank 0, stage 1   B B B ─sums begin──────────────┐
            stage 0         B B B ─sums begin────────┴─▶ all have ended ─▶ .grad
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..graph.ir import Stage
from ..runtime.call import Call
from ..schedules.tape import Tape
from .channel import Channel

Gradients = dict[str, torch.Tensor | None]


def chains(stages: Sequence[Stage]) -> dict[str, list[int]]:
    """Parameters that several stages read → these."""
    found: dict[str, list[int]] = {}
    for stage in stages:
        for fqn in stage.parameters:
            found.setdefault(fqn, []).append(stage.index)
    return {fqn: chain for fqn, chain in found.items() if len(chain) > 1}


def handed_on(
    channel: Channel, rank_of: Sequence[int], digest: int, stages: Sequence[Stage], gradients: Gradients
) -> None:
    """The whole gradient of a parameter that several ranks have: its first stage's rank has it, and hands it on."""
    ways = dict[tuple[int, int], list[str]]()
    for fqn, chain in chains(stages).items():
        source = rank_of[chain[0]]
        for target in sorted({rank_of[s] for s in chain} - {source}):
            ways.setdefault((source, target), []).append(fqn)
    for (source, target), fqns in sorted(ways.items()):
        if channel.rank == source:
            rows = [(f, 0, None, gradients[f]) for f in fqns if f in gradients]
            channel.send(target, ("tied", *fqns), digest, rows)
        elif channel.rank == target:
            channel.expect(source, [("tied", *fqns)], digest)
            for fqn, _, _, gradient in channel.receive(source):
                if fqn in gradients:
                    gradients[fqn] = gradient


def last_backwards(tape: Tape) -> dict[int, list[int]]:
    """Number of an instruction → the stages that have all their gradients after it.

    Stages come in the same order whatever the number of micro-batches, which replicas may not have alike.
    """
    place = {x.number: k for k, x in enumerate(tape.order)}
    last: dict[int, int] = {}
    for x in tape.order:
        if x.kind in ("backward", "weights"):
            last[x.stage] = x.number
    found: dict[int, list[int]] = {}
    after = -1
    for stage in sorted(last, reverse=True):
        after = max(after, last[stage], key=lambda n: place.get(n, -1))
        found.setdefault(after, []).append(stage)
    return found


@dataclass(frozen=True)
class _Bucket:
    """Gradients of one type that travel together; behind them, how many replicas have each."""

    flat: torch.Tensor
    names: Sequence[str]
    sizes: Sequence[int]
    work: Any


class Averages:
    """Of one step, over the replicas of the pipeline."""

    def __init__(self, group: dist.ProcessGroup, channel: Channel) -> None:
        self._group, self._channel = group, channel
        self._buckets: list[_Bucket] = []
        self._begun: set[str] = set()

    def begin(self, call: Call, stage: int) -> None:
        """A stage has gone backward for the last time."""
        names = list(call.owned(stage, 0).alone)
        if names:
            found = call.sums[stage].total()
            if call.lanes.has_queues:
                call.lanes.leaves(found)
            self._start({name: (call.parameters[name], g) for name, g in zip(names, found, strict=True)})

    def _start(self, gradients: dict[str, tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        self._begun |= gradients.keys()
        rows: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for name, (p, _) in gradients.items():
            rows.setdefault((p.dtype, p.device), []).append(name)
        for names in rows.values():
            parts, there = [], list[float]()
            for name in names:
                p, g = gradients[name]
                dense = torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
                parts.append(dense.detach().reshape(-1))
                there.append(float(g is not None))
            flat = torch.cat([*parts, torch.tensor(there, dtype=parts[0].dtype, device=parts[0].device)])
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            self._buckets.append(_Bucket(flat, names, [part.numel() for part in parts], work))

    def end(
        self, loss: torch.Tensor, parameters: Mapping[str, torch.Tensor], gradients: Gradients
    ) -> torch.Tensor:
        """Wait for all of them; averages are in `gradients` then. Returns the average of the loss.

        Raises:
            RankError: a rank has failed.
        """
        rest = {name: (parameters[name], g) for name, g in gradients.items() if name not in self._begun}
        if rest:
            self._start(rest)
        total, size = loss.detach().clone(), self._group.size()
        of_loss = dist.all_reduce(total, group=self._group, async_op=True)

        def ended() -> None:
            for work in (*(bucket.work for bucket in self._buckets), of_loss):
                work.wait()
            if total.is_cuda:
                torch.cuda.current_stream(total.device).synchronize()

        self._channel.awaited(ended, "the sums over replicas")
        for bucket in self._buckets:
            count = len(bucket.names)
            pieces = torch.split(bucket.flat[:-count] / size, list(bucket.sizes))
            for name, piece, there in zip(bucket.names, pieces, bucket.flat[-count:].tolist(), strict=True):
                gradients[name] = piece.view(parameters[name].shape) if there else None
        return total / size
