"""Layers balanced by their parameters, by each library in its own way: the heaviest stage as a ratio to the best.

Sequences of layers on the meta device, in 2, 4 and 8 stages; the best is that of whole layers in a row. fxsplit is asked
by `Plan(stages=k, cost="params")`, and may cut inside of a layer: then it is below 1. Accelerate gets the limits that its
`get_balanced_memory` computes for k devices with room for everything, and no block is split; what does not fit any more
it leaves to the CPU, which counts as one of the stages. torch.distributed.pipelining leaves the cut to its users: as many
layers in each stage stands for it.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import fxsplit
from fxsplit.demo.gpt import Block

from .part import Options
from .partitioners import by_deepspeed, by_torchgpipe, evenly, heaviest, lightest
from .peers import installed
from .report import Report

QUESTION = "How well are layers balanced?"
MINUTES = 0.7
OURS = "fxsplit"


def gpt(layers: int = 24, width: int = 1024, vocabulary: int = 50257) -> tuple[nn.Sequential, torch.Tensor]:
    """Embedding, blocks, norm, head: light and many between two heavy ones."""
    blocks = (Block(width, 16) for _ in range(layers))
    ends = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
    return nn.Sequential(nn.Embedding(vocabulary, width), *blocks, *ends), torch.zeros(
        2, 16, dtype=torch.long
    )


def vgg() -> tuple[nn.Sequential, torch.Tensor]:
    """VGG-16: one linear layer has most of it."""
    layers: list[nn.Module] = []
    before = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
            before = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(25088, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(4096, 1000)), torch.zeros(2, 3, 224, 224)


def widths(seed: int) -> tuple[nn.Sequential, torch.Tensor]:
    """Linear layers of random widths."""
    choose = random.Random(seed)
    sizes = [choose.choice((64, 256, 512, 1024, 2048)) for _ in range(33)]
    layers = (nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
    return nn.Sequential(*layers), torch.zeros(2, sizes[0])


class Bottleneck(nn.Module):
    """A residual block of ResNet-50. Input and output: (batch, channels, height, width)."""

    def __init__(self, before: int, width: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)),
        )
        same = before == 4 * width and stride == 1
        self.way = nn.Identity() if same else nn.Conv2d(before, 4 * width, 1, stride, bias=False)

    def forward(self, x):
        """The sum of both ways, rectified."""
        return torch.relu(self.way(x) + self.body(x))


def resnet() -> tuple[nn.Sequential, torch.Tensor]:
    """ResNet-101 as a sequence: it grows heavier to the end."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    before = 64
    for width, count in ((64, 3), (128, 4), (256, 23), (512, 3)):
        for i in range(count):
            layers.append(Bottleneck(before, width, 2 if i == 0 and width > 64 else 1))
            before = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    return nn.Sequential(*layers), torch.zeros(2, 3, 224, 224)


MODELS = {"GPT-2 medium": gpt, "VGG-16": vgg, "ResNet-101": resnet}
MODELS |= {f"widths {seed}": lambda seed=seed: widths(seed) for seed in range(4)}


def by_fxsplit(model: nn.Sequential, x: torch.Tensor, stages: int) -> float:
    """Parameters of the heaviest stage."""
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=stages, cost="params"), example_args=(x,))
    return max(sum(p.numel() for p in stage.module.parameters()) for stage in pipe.stages)


def by_accelerate(model: nn.Sequential, x: torch.Tensor, stages: int) -> float:
    """Parameters of the heaviest device."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    whole = ["Block", "Bottleneck"]
    room = dict.fromkeys(range(stages), 4 * sum(p.numel() for p in model.parameters()))
    limits = get_balanced_memory(model, room, no_split_module_classes=whole)
    places = infer_auto_device_map(model, limits, no_split_module_classes=whole, verbose=False)
    loads: dict[object, int] = {}
    for path, device in places.items():
        loads[device] = loads.get(device, 0) + sum(p.numel() for p in model.get_submodule(path).parameters())
    return max(loads.values())


def of_costs(partition: Callable[[list[float], int], list[int]]) -> Callable[..., float]:
    """A way that only knows costs."""

    def found(model: nn.Sequential, x: torch.Tensor, stages: int) -> float:
        costs = costs_of(model)
        return heaviest(costs, partition(costs, stages))

    return found


def costs_of(model: nn.Sequential) -> list[float]:
    """Parameters of each layer."""
    return [float(sum(p.numel() for p in layer.parameters())) for layer in model]


WAYS = {
    OURS: (OURS, by_fxsplit),
    "torchgpipe's block partition": ("torchgpipe", of_costs(by_torchgpipe)),
    "DeepSpeed's `partition_balanced`": ("deepspeed", of_costs(by_deepspeed)),
    "Accelerate's `infer_auto_device_map`": ("accelerate", by_accelerate),
    "as many layers in each stage": ("torch", of_costs(evenly)),
}


def measure(options: Options) -> Report:
    """A row for each way."""
    left_out: list[str] = []
    ways = {name: way for name, (library, way) in WAYS.items() if installed(library, left_out)}
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for name, make in list(MODELS.items())[-1 if options.quick else 0 :]:
        for stages in (2, 4, 8):
            for way, heaviest_of in ways.items():
                with torch.device("meta"):
                    model, x = make()
                start = time.perf_counter()
                load = heaviest_of(model, x, stages)
                seconds[way].append(time.perf_counter() - start)
                ratios[way].append(load / lightest(costs_of(model), stages))
                print(f"{name}, {stages} stages, {way}: {ratios[way][-1]:.3f}", flush=True)
    rows = []
    for way, found in ratios.items():
        mean = math.exp(statistics.fmean(map(math.log, found)))
        best = sum(ratio <= 1 + 1e-9 for ratio in found)
        name = f"**{way}**, with its capture" if way == OURS else way
        rows.append(
            (name, f"{mean:.3f}", f"{max(found):.3f}", f"{best} of {len(found)}", f"{max(seconds[way]):.2f}")
        )
    header = (
        "heaviest stage, to that of the best whole layers",
        "geometric mean",
        "worst",
        "best",
        "longest, s",
    )
    return Report(header, rows, [], left_out)
