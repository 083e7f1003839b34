"""What compiling takes by depth, with and without its checks, beside torch.export and torch's own pipeline splitter.

GPTs of width 128 (`fxsplit.demo.gpt`) in 4 stages, a batch of 4 rows of 16 characters. `check=False` compares no numbers; the structural proof
is made in any case, and is timed on its own too. `torch.distributed.pipelining.pipeline()` begins with the same
`torch.export`, is given the split points, and compares nothing. Every repetition has a new model; variants take turns.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fxsplit
from fxsplit.demo.gpt import GPT
from fxsplit.proof.structure import verify_structure

from .measuring import quartiles, verdict
from .part import Options
from .report import Report

QUESTION = "What does compiling cost, and the proof in it?"
MINUTES = 1.3
OURS, UNCHECKED = "fxsplit", "fxsplit without comparing numbers"
EXPORT, PIPELINE = "torch.export", "torch.export and pipeline()"


def model_of(layers: int) -> nn.Module:
    """A GPT of which nothing stays whole."""
    torch.manual_seed(0)
    return GPT(96, width=128, layers=layers, context=16)


def by_fxsplit(layers: int, x: torch.Tensor, check: bool) -> Callable[[], Any]:
    """A call that compiles a new model."""
    model, plan = model_of(layers), fxsplit.Plan(stages=4, micro_batches=2)
    return lambda: fxsplit.compile(model, plan, example_args=(x,), check=check)


def by_export(layers: int, x: torch.Tensor) -> Callable[[], Any]:
    """A call that exports a new model."""
    model = model_of(layers)
    return lambda: torch.export.export(model, (x,), strict=False)


def by_pipeline(layers: int, x: torch.Tensor) -> Callable[[], Any]:
    """A call that splits a new model at every quarter."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    model = model_of(layers)
    spec = {f"h.{layers * i // 4}": SplitPoint.BEGINNING for i in (1, 2, 3)}
    return lambda: pipeline(model, mb_args=(x,), split_spec=spec)


def proof_of(pipe: fxsplit.Pipeline, times: int = 3) -> float:
    """Seconds of the structural proof."""
    traced, found = pipe.traced, []
    for _ in range(times):
        start = time.perf_counter()
        verify_structure(pipe._now.model, traced, pipe._now.compiled.program)
        found.append(time.perf_counter() - start)
    return quartiles(found)[1]


def measure(options: Options) -> Report:
    """A row for each depth."""
    x, rows, said, left_out = torch.randint(96, (4, 16)), [], [], []
    ways = {
        OURS: functools.partial(by_fxsplit, check=True),
        UNCHECKED: functools.partial(by_fxsplit, check=False),
        EXPORT: by_export,
        PIPELINE: by_pipeline,
    }
    rounds = 1 if options.quick else 3
    for layers in (4,) if options.quick else (4, 12, 36):
        found: dict[str, list[float]] = {name: [] for name in ways}
        proof, nodes = 0.0, 0
        late = not rows and not options.quick  # what torch imports late, in a first turn
        for turn in range(rounds + late):
            for name, way in list(ways.items()):
                gc.collect()
                try:
                    call = way(layers, x)
                    start = time.perf_counter()
                    result = call()
                except Exception as error:
                    left_out.append(f"{name}: {type(error).__name__}")
                    del ways[name], found[name]
                    continue
                if turn or not late:
                    found[name].append(time.perf_counter() - start)
                if name == OURS:
                    proof, nodes = proof_of(result), len(result.traced.graph.nodes)
        entries = [f"{quartiles(found[name])[1]:.2f}" if name in found else "-" for name in ways]
        rows.append((layers, nodes, *entries, f"{proof * 1e3:.1f}"))
        peers = [name for name in (EXPORT, PIPELINE) if name in found]
        for name in (OURS, UNCHECKED):
            words = "; ".join(verdict(found, name, peer) for peer in peers)
            said += [f"With {layers} layers {name} is {words}."] if peers else []
    header = ("layers", "nodes", "**fxsplit**, s", "**fxsplit, `check=False`**, s")
    header += (f"{EXPORT}, s", f"{PIPELINE}, s", "structural proof, ms")
    return Report(header, rows, [" ".join(said)], left_out)
