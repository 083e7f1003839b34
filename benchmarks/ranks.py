"""A step over two ranks, beside hand-made stages of torch.distributed.pipelining on the same cut, in the same processes.

Encoders of width 256, a batch of 64 × 32, forward, mean squared error and backward, 8 micro-batches, gloo on one host, one
intra-op thread a rank. Rounds are interleaved; each begins at a barrier and ends when the last rank is done. The gradients
of both are compared before anything is timed. Bytes are those of one step of rank 0, headers with them. Set-up is capture
and proof here, and the first step there.
"""

from __future__ import annotations

import copy
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import distributed

from .children import in_child
from .measuring import ratio, verdict
from .part import Options
from .report import Report
from .tasks import loss_of, transformer

QUESTION = "What does a step over ranks take?"
MINUTES = 1.3
SCHEDULES = {"1F1B": ("1f1b", "Schedule1F1B"), "GPipe": ("gpipe", "ScheduleGPipe")}
PEER = "torch.distributed.pipelining"


def seconds_of(step: Callable[[], Any]) -> float:
    """Of one step, until the last rank is done."""
    distributed.barrier()
    begin = time.perf_counter()
    step()
    distributed.barrier()
    return time.perf_counter() - begin


def rank_of(rank: int, store: str, schedule: str, theirs: str, quick: bool) -> dict[str, Any]:
    """What one of two ranks has found."""
    from torch.distributed import pipelining

    import fxsplit
    import fxsplit.distributed

    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = fxsplit.distributed.init(pp=2)
    layers = 2 if quick else 8
    task = transformer(layers, quick, length=32)
    model, cut = task.model, layers // 2

    begin = time.perf_counter()
    plan = fxsplit.Plan(cut=[str(cut)], micro_batches=8, schedule=schedule)
    make = functools.partial(_model, layers, quick)
    pipe = fxsplit.distributed.compile(make, plan, mesh, example_args=(task.x,), weights=model.state_dict())
    setup = time.perf_counter() - begin

    begin = time.perf_counter()
    half = copy.deepcopy(model[:cut] if rank == 0 else model[cut:])
    stage = pipelining.PipelineStage(half, rank, 2, torch.device("cpu"))
    played = getattr(pipelining, theirs)(stage, 8, loss_fn=loss_of)

    def our_step():
        pipe.zero_grad()
        pipe.step(task.x, target=task.target, loss_fn=loss_of)

    def their_step():
        half.zero_grad()
        played.step(task.x) if rank == 0 else played.step(target=task.target, losses=[])

    their_step()
    their_setup = time.perf_counter() - begin
    our_step()
    for mine, other in zip(pipe.parameters(), half.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)
    before = pipe.sent
    our_step()
    sent = pipe.sent - before
    steps, found = {"fxsplit": our_step, PEER: their_step}, {"fxsplit": [], PEER: []}
    for turn in range(2 if quick else 15):
        for name in sorted(steps, reverse=bool(turn % 2)):
            found[name].append(seconds_of(steps[name]))
    activations = 2 * task.x.nbytes if rank else task.x.nbytes
    distributed.destroy_process_group()
    return {"seconds": found, "set-up": (setup, their_setup), "sent": sent, "activations": activations}


def _model(layers: int, quick: bool) -> torch.nn.Module:
    return transformer(layers, quick, length=32).model


def measure(options: Options) -> Report:
    """A row for each schedule."""
    rows, said = [], []
    for name, (schedule, theirs) in list(SCHEDULES.items())[: 1 if options.quick else None]:
        with tempfile.NamedTemporaryFile() as store, ThreadPoolExecutor(2) as pool:
            given = (store.name, schedule, theirs, options.quick)
            first, _ = pool.map(lambda rank, given=given: in_child(rank_of, rank, *given), range(2))
        low, middle, high = ratio(first["seconds"], "fxsplit", PEER)
        ours, others = (statistics.median(first["seconds"][who]) * 1e3 for who in ("fxsplit", PEER))
        rows.append(
            (
                *(name, f"{ours:.0f}", f"{others:.0f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}"),
                *(f"{first['sent'] - first['activations']:,}", f"{first['activations']:,}"),
                *(f"{seconds:.1f}" for seconds in first["set-up"]),
            )
        )
        said.append(f"{name}: fxsplit is {verdict(first['seconds'], 'fxsplit', PEER)}.")
    header = (
        *("schedule", "fxsplit, ms", f"{PEER}, ms", "ratio", "quartiles"),
        *("bytes beside activations", "bytes of activations", "set-up, s", "theirs, s"),
    )
    return Report(header, rows, [" ".join(said)])
