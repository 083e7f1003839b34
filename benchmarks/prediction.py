"""Does a step take what the simulator says? python benchmarks/prediction.py [--rounds 12]

4 models in 2 stages with 8 micro-batches, under 3 schedules, on the CPU with a worker for each stage and one intra-op
thread each. Every pipeline is profiled by `fxsplit.profile`: steps whose instructions are timed and steps that are
predicted take turns, and the ratio is the predicted step to the measured ones: of the median, and its quartiles. The last
column predicts the same steps from the instructions that were timed under GPipe, which is what one asks before a schedule
is chosen; a backward in two is taken to be two halves there.
"""

from __future__ import annotations

import argparse
import copy
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


def main() -> None:
    """Print a row for each model and schedule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = []
    for name, model, x, target, loss in tasks():
        first = None
        for schedule in SCHEDULES:
            plan = fxsplit.Plan(stages=2, micro_batches=8, schedule=schedule, cost="time")
            pipe = fxsplit.compile(copy.deepcopy(model), plan, example_args=(x,))
            reduction = "mean" if name == "GPT" and schedule != "gpipe" else None
            found = fxsplit.profile(
                pipe,
                x,
                target=target,
                loss_fn=loss,
                rounds=rounds,
                **({"reduction": reduction} if reduction else {}),
            )
            print(f"{name} {schedule}\n{found}", file=sys.stderr, flush=True)
            first = first or found
            low, high = found.spread
            other = first.predict(pipe) / found.measured
            predicted, measured = f"{found.predicted * 1e3:.1f}", f"{found.measured * 1e3:.1f}"
            rows.append(
                (
                    name,
                    schedule,
                    predicted,
                    measured,
                    f"{found.ratio:.3f}",
                    f"{low:.3f} to {high:.3f}",
                    f"{other:.3f}",
                )
            )
    heads = ("model", "schedule", "predicted ms", "measured ms", "ratio", "quartiles", "ratio, from gpipe")
    print(tabulate(rows, heads, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
