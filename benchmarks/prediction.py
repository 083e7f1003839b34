"""Does a step take what the simulator says? Predicted steps, each beside the one that is measured right after it.

4 models in 2 stages with 8 micro-batches, under 3 schedules, on the CPU with a worker for each stage and one intra-op
thread each. Every pipeline is profiled by `fxsplit.profile`: steps whose instructions are timed and steps that are
predicted take turns, and so do the schedules. The last column predicts the same steps from the instructions that were
timed under GPipe, which is what one asks before a schedule is chosen; a backward in two is taken to be two halves there.
"""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import fxsplit
from fxsplit.demo.gpt import GPT

from .measuring import quartiles
from .part import Options
from .report import Report

QUESTION = "Does a step take what the simulator says?"
MINUTES = 2.9
SCHEDULES = ("gpipe", "1f1b", "zb_h1")


class Residual(nn.Module):
    """Two convolutions and a way past them. Input and output: (batch, channels, height, width)."""

    def __init__(self, channels: int):
        super().__init__()
        convolution = {"kernel_size": 3, "padding": 1, "bias": False}
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, channels, **convolution), nn.GroupNorm(4, channels), nn.ReLU()),
            *(nn.Conv2d(channels, channels, **convolution), nn.GroupNorm(4, channels)),
        )

    def forward(self, x):
        """The sum of both ways, rectified."""
        return torch.relu(x + self.body(x))


def tasks(quick: bool) -> Iterator[tuple[Any, ...]]:
    """Name, model, its input, the target and the loss of each."""
    torch.manual_seed(0)

    def tokens_loss(output, target):
        return nn.functional.cross_entropy(output.transpose(1, 2), target)

    width = 16 if quick else 512
    layers = [part for _ in range(8) for part in (nn.Linear(width, width), nn.ReLU())]
    rows = [torch.randn(4 * width, width) for _ in range(2)]
    yield "MLP", nn.Sequential(*layers), *rows, nn.MSELoss()
    if quick:
        return
    tokens = [torch.randint(96, (16, 64)) for _ in range(2)]
    yield "GPT", GPT(96, width=192, layers=6, context=64), *tokens, tokens_loss
    resnet = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *(Residual(32) for _ in range(6)))
    yield "ResNet", resnet, torch.randn(32, 3, 32, 32), torch.randn(32, 32, 32, 32), nn.MSELoss()
    layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    yield "TransformerEncoder", encoder, torch.randn(32, 64, 256), torch.randn(32, 64, 256), nn.MSELoss()


def profiles(pipes, x, target, loss, turns: int, rounds: int) -> dict[str, list[fxsplit.Profile]]:
    """Schedule → its profiles. The schedules take turns."""
    found = {schedule: [] for schedule in pipes}
    for _ in range(turns):
        for schedule, pipe in pipes.items():
            derived = schedule == "gpipe" or isinstance(loss, nn.Module)
            said = {} if derived else {"reduction": "mean"}
            profile = fxsplit.profile(pipe, x, target=target, loss_fn=loss, rounds=rounds, **said)
            found[schedule].append(profile)
            print(f"{schedule}\n{profile}", file=sys.stderr, flush=True)
    return found


def measure(options: Options) -> Report:
    """A row for each model and schedule."""
    rows, close, count = [], 0, 0
    for name, model, x, target, loss in tasks(options.quick):
        pipes = {}
        for schedule in SCHEDULES[: 2 if options.quick else None]:
            plan = fxsplit.Plan(stages=2, micro_batches=8, schedule=schedule, cost="time")
            pipes[schedule] = fxsplit.compile(copy.deepcopy(model), plan, example_args=(x,))
        turns, rounds = (1, 2) if options.quick else (2, 5)
        found = profiles(pipes, x, target, loss, turns, rounds)
        for schedule, profiled in found.items():
            ratios = [a / b for p in profiled for a, b in zip(p.predictions, p.steps, strict=True)]
            low, middle, high = quartiles(ratios)
            predicted, measured = (
                statistics.median(getattr(p, kind) for p in profiled) * 1e3
                for kind in ("predicted", "measured")
            )
            others = [
                first.predict(pipes[schedule]) / p.measured
                for first, p in zip(found["gpipe"], profiled, strict=True)
            ]
            row = (f"{predicted:.1f}", f"{measured:.1f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}")
            rows.append((name, schedule, *row, f"{statistics.median(others):.3f}"))
            close, count = close + (abs(middle - 1) <= 0.1), count + 1
    header = (
        "model",
        "schedule",
        "predicted ms",
        "measured ms",
        "ratio",
        "quartiles",
        "from GPipe's instructions",
    )
    return Report(header, rows, [f"{close} of {count} medians are within 10 %."])
