"""Does a step take what the simulator says? python benchmarks/prediction.py [--turns 3] [--rounds 5]

4 models in 2 stages with 8 micro-batches, under 3 schedules, on the CPU with a worker for each stage and one intra-op
thread each. Every pipeline is profiled by `fxsplit.profile`: steps whose instructions are timed and steps that are
predicted take turns, and so do the schedules. The ratio is a predicted step to the one measured right after: the median,
and the quartiles. The last column predicts the same steps from the instructions that were timed under GPipe, which is what
one asks before a schedule is chosen; a backward in two is taken to be two halves there.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys

import torch
from tabulate import tabulate
from torch import nn

import fxsplit
from fxsplit.demo.gpt import GPT

SCHEDULES = ("gpipe", "1f1b", "zb_h1")


class Residual(nn.Module):
    """Two convolutions and a way past them. Input and output: (batch, channels, height, width)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        convolution = {"kernel_size": 3, "padding": 1, "bias": False}
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, **convolution),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, **convolution),
            nn.GroupNorm(4, channels),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


def tasks():
    """Name → model, its input, the target and the loss."""
    torch.manual_seed(0)

    def tokens_loss(output, target):
        return nn.functional.cross_entropy(output.transpose(1, 2), target)

    yield (
        "GPT",
        GPT(96, width=192, layers=6, context=64),
        torch.randint(96, (16, 64)),
        torch.randint(96, (16, 64)),
        tokens_loss,
    )
    layers = [part for _ in range(8) for part in (nn.Linear(512, 512), nn.ReLU())]
    yield "MLP", nn.Sequential(*layers), torch.randn(2048, 512), torch.randn(2048, 512), nn.MSELoss()
    resnet = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *(Residual(32) for _ in range(6)))
    yield "ResNet", resnet, torch.randn(32, 3, 32, 32), torch.randn(32, 32, 32, 32), nn.MSELoss()
    layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    yield "TransformerEncoder", encoder, torch.randn(32, 64, 256), torch.randn(32, 64, 256), nn.MSELoss()


def profiles(pipes, x, target, loss, turns, rounds):
    """Schedule → its profiles. The schedules take turns."""
    found = {schedule: [] for schedule in pipes}
    for _ in range(turns):
        for schedule, pipe in pipes.items():
            reduction = None if schedule == "gpipe" or isinstance(loss, nn.Module) else "mean"
            said = {} if reduction is None else {"reduction": reduction}
            found[schedule].append(
                fxsplit.profile(pipe, x, target=target, loss_fn=loss, rounds=rounds, **said)
            )
            print(f"{schedule}\n{found[schedule][-1]}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Print a row for each model and schedule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, model, x, target, loss in tasks():
        pipes = {}
        for schedule in SCHEDULES:
            plan = fxsplit.Plan(stages=2, micro_batches=8, schedule=schedule, cost="time")
            pipes[schedule] = fxsplit.compile(copy.deepcopy(model), plan, example_args=(x,))
        found = profiles(pipes, x, target, loss, options.turns, options.rounds)
        for schedule, turns in found.items():
            ratios = [a / b for p in turns for a, b in zip(p.predictions, p.steps, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            predicted, measured = (
                statistics.median(getattr(p, kind) for p in turns) * 1e3 for kind in ("predicted", "measured")
            )
            others = [
                first.predict(pipes[schedule]) / p.measured
                for first, p in zip(found["gpipe"], turns, strict=True)
            ]
            row = (f"{predicted:.1f}", f"{measured:.1f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}")
            rows.append((name, schedule, *row, f"{statistics.median(others):.3f}"))
    heads = ("model", "schedule", "predicted ms", "measured ms", "ratio", "quartiles", "ratio, from gpipe")
    print(tabulate(rows, heads, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
