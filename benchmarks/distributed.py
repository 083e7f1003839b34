"""A step over ranks beside torch.distributed.pipelining's hand-made stages on the same cut.

    torchrun --nproc-per-node 2 benchmarks/distributed.py [--layers 8] [--rounds 15]

Encoders of width 256, a batch of 64 × 32, forward, mean squared error and backward, 8 micro-batches, one intra-op thread a
rank, gloo. Both play 1F1B (and GPipe); rounds are interleaved, each begins at a barrier and ends when the last rank is done. The gradients of
both are compared before anything is timed. Bytes are those of one step of rank 0, headers with them.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import fxsplit
import fxsplit.distributed

MICRO_BATCHES = 8


def model_of(layers: int) -> nn.Sequential:
    """Encoders."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True) for _ in range(layers))
    )


def seconds(step: Callable[[], object]) -> float:
    """Of one step, until the last rank is done."""
    dist.barrier()
    begin = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - begin


def main() -> None:
    """Time both, and print medians, their ratio round by round, bytes and set-up."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--schedule", choices=["1f1b", "gpipe"], default="1f1b")
    given = parser.parse_args()
    torch.set_num_threads(1)
    mesh = fxsplit.distributed.init(pp=2)
    rank, cut = dist.get_rank(), given.layers // 2
    model, x = model_of(given.layers), torch.randn(64, 32, 256)
    y = torch.randn(64, 32, 256)

    begin = time.perf_counter()
    plan = fxsplit.Plan(cut=[str(cut)], micro_batches=MICRO_BATCHES, schedule=given.schedule)
    pipe = fxsplit.distributed.compile(
        lambda: model_of(given.layers), plan, mesh, example_args=(x,), weights=model.state_dict()
    )
    ours_setup = time.perf_counter() - begin

    begin = time.perf_counter()
    half = copy.deepcopy(model[:cut] if rank == 0 else model[cut:])
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))
    kind = Schedule1F1B if given.schedule == "1f1b" else ScheduleGPipe
    schedule = kind(stage, MICRO_BATCHES, loss_fn=F.mse_loss)

    def ours() -> None:
        pipe.zero_grad()
        pipe.step(x, target=y, loss_fn=F.mse_loss)

    def theirs() -> None:
        half.zero_grad()
        schedule.step(x) if rank == 0 else schedule.step(target=y, losses=[])

    theirs()
    theirs_setup = time.perf_counter() - begin
    ours()
    for mine, other in zip(pipe.parameters(), half.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)
    before = pipe.sent
    ours()
    sent = pipe.sent - before
    rows = [(seconds(ours), seconds(theirs)) for _ in range(given.rounds)]
    if rank == 0:
        ratios = sorted(a / b for a, b in rows)
        mine, other = (statistics.median(row) * 1e3 for row in zip(*rows, strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        print(f"{given.schedule}, {given.layers} encoders, {given.rounds} rounds, torch {torch.__version__}")
        print(f"fxsplit {mine:.1f} ms, torch.distributed.pipelining {other:.1f} ms a step")
        print(f"ratio {statistics.median(ratios):.3f} (quartiles {low:.3f} to {high:.3f})")
        print(f"sent by rank 0: {sent} bytes a step, of which activations {64 * 32 * 256 * 4}")
        print(
            f"set-up: {ours_setup:.2f} s (capture and proof with it), {theirs_setup:.2f} s (its first step with it)"
        )


if __name__ == "__main__":
    main()
