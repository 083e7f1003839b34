"""What a GPU sees: the cost of the split, copies that overlap, memory, compiled stages, a model on CPU and GPU.

Run where torch finds CUDA, or on ``--devices``; with a single GPU both stages are on it. Encoders of width 1024, batch 32 × 128,
forward, mean squared error and backward; every step ends when all devices are done. What is compared takes turns, and
agrees with eager's gradients first. Memory is the allocator's peak of a step over what was there before, summed over the
devices. Copies: the weights stay on the CPU and come stage by stage (`offload=True`), beside the same copies and steps one
after the other.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

import fxsplit

from .measuring import quartiles
from .part import Options
from .report import LeftOutError, Report
from .tasks import Task, loss_of

QUESTION = "What does a GPU see of it?"
MINUTES = 3.0
MIB = 2**20
Way = tuple[str, Callable[[], Any], nn.Module]


def task_of(quick: bool) -> Task:
    """A model on the CPU and a batch."""
    torch.manual_seed(0)
    width, rows, length = (16, 8, 4) if quick else (1024, 32, 128)
    sizes = {"nhead": 4 if quick else 16, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True}
    model = nn.Sequential(*(nn.TransformerEncoderLayer(width, **sizes) for _ in range(4 if quick else 8)))
    return Task(model, torch.randn(rows, length, width), torch.randn(rows, length, width))


def wait(devices: Sequence[str]) -> None:
    """Until all of them are done."""
    for device in devices:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)


def eager(task: Task, device: str, name: str = "eager", micro_batches: int = 1, wrap: Any = None) -> Way:
    """The model on one device."""
    model = copy.deepcopy(task.model).to(device)
    call = wrap(model) if wrap else model
    pairs = [
        (x, t)
        for x, t in zip(
            task.x.to(device).chunk(micro_batches), task.target.to(device).chunk(micro_batches), strict=True
        )
    ]

    def step():
        for x, target in pairs:
            (loss_of(call(x), target) / len(pairs)).backward()

    return name, step, model


def split(task: Task, name: str, devices: Any, compiled: bool = False, **plan: Any) -> Way:
    """fxsplit's stages on these devices; the batch is where the first stage is, the target where the last one is."""
    model = copy.deepcopy(task.model)
    first, last = (devices, devices) if isinstance(devices, str) else (devices[0], devices[-1])
    pipe = fxsplit.compile(model, fxsplit.Plan(devices=devices, **plan), example_args=(task.x,))
    if compiled:
        pipe.compile_stages()
    x, target = task.x.to(first), task.target.to(last)
    return name, lambda: pipe.step(x, target=target, loss_fn=loss_of), model


def copied(task: Task, device: str, stages: int) -> Way:
    """By hand: each stage's weights are copied before it computes, and nothing overlaps; forward and backward."""
    model = copy.deepcopy(task.model)
    per = len(model) // stages
    parts = [model[i * per : (i + 1) * per] for i in range(stages)]
    x, target = task.x.to(device), task.target.to(device)

    def call(part: nn.Module, value: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(part, weights, (value,))

    def there(part: nn.Module) -> dict[str, torch.Tensor]:
        found = {name: p.detach().to(device).requires_grad_() for name, p in part.named_parameters()}
        wait([device])
        return found

    def step():
        values = [x]
        with torch.no_grad():
            for part in parts[:-1]:
                values.append(call(part, values[-1], there(part)))
        gradient = None
        for part, value in zip(reversed(parts), reversed(values), strict=True):
            weights, value = there(part), value.detach().requires_grad_()
            out = call(part, value, weights)
            loss_of(out, target).backward() if gradient is None else out.backward(gradient)
            gradient = value.grad
            for name, parameter in part.named_parameters():
                parameter.grad = weights[name].grad.to(parameter.device)

    return "weights copied, recomputed, one after the other", step, model


def comparisons(task: Task, devices: Sequence[str], quick: bool) -> Iterator[tuple[str, list[Way]]]:
    """What is compared, the first one of each with the others."""
    first, last = devices[0], devices[-1]
    pair, two = [first, last], {"stages": 2}
    pieces = {"stages": 2, "micro_batches": 4}
    yield (
        "the split",
        [
            eager(task, first),
            split(task, "fxsplit, 1 stage", first),
            split(task, "fxsplit, 2 stages", pair, **two),
            eager(task, first, "eager on 4 micro-batches", 4),
            split(task, "fxsplit, 2 stages × 4", pair, **pieces),
            split(task, "fxsplit, 2 stages × 4, 1F1B", pair, schedule="1f1b", **pieces),
        ],
    )
    policies = ("never", "except_last", "always")
    yield (
        "recomputation",
        [eager(task, first)]
        + [split(task, f"fxsplit, `{policy}`", pair, checkpoint=policy, **pieces) for policy in policies],
    )
    ways = [copied(task, first, 4)]
    if torch.device(first).type != "cpu":  # there is nothing to fetch
        plan = {"stages": 4, "offload": True, "checkpoint": "always"}
        ways.append(split(task, "fxsplit, `offload=True`", first, **plan))
    yield "copies of weights", ways
    if not quick:
        yield (
            "compiled stages",
            [
                eager(task, first),
                eager(task, first, "torch.compile", wrap=torch.compile),
                split(task, "fxsplit, `compile_stages()`", pair, compiled=True, **two),
            ],
        )
    yield (
        "CPU and GPU",
        [
            eager(task, "cpu", "eager on the CPU"),
            split(task, "fxsplit, first half on the CPU", ["cpu", last], **two),
            split(task, "fxsplit, the same × 4, 1F1B", ["cpu", last], schedule="1f1b", **pieces),
        ],
    )


def measured(ways: Sequence[Way], devices: Sequence[str], rounds: int) -> tuple[dict, dict]:
    """Name → seconds by round; name → MiB at the highest."""
    wanted, seconds, peaks = None, {name: [] for name, _, _ in ways}, {}
    gpus = [device for device in dict.fromkeys(devices) if torch.device(device).type == "cuda"]
    for turn in range(rounds + 2):
        for name, step, model in ways:
            for parameter in model.parameters():
                parameter.grad = None
            wait(devices)
            before = sum(map(torch.cuda.memory_allocated, gpus))
            for device in gpus:
                torch.cuda.reset_peak_memory_stats(device)
            start = time.perf_counter()
            step()
            wait(devices)
            if turn > 1:  # memory, kernels and threads are there
                seconds[name].append(time.perf_counter() - start)
            if turn == 1 and gpus:
                peaks[name] = (sum(map(torch.cuda.max_memory_allocated, gpus)) - before) / MIB
            if turn == 0:
                found = [p.grad.to("cpu", torch.float64) for p in model.parameters()]
                wanted = wanted or found
                off = max(
                    ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, wanted, strict=True)
                )
                if off > 5e-3:  # reduced precision in matrix products is the user's choice
                    raise ValueError(f"{name}: a gradient is {off:.1e} off")
    return seconds, peaks


def measure(options: Options) -> Report:
    """A row for each way of each comparison."""
    devices = options.devices or tuple(f"cuda:{i}" for i in range(min(2, torch.cuda.device_count())))
    if not devices:
        raise LeftOutError("torch finds no CUDA device")
    task, rows, left_out = task_of(options.quick), [], []
    for subject, ways in comparisons(task, devices, options.quick):
        seconds, peaks = measured(ways, devices, 2 if options.quick else 15)
        base = ways[0][0]
        for name, _, _ in ways:
            low, middle, high = quartiles([a / b for a, b in zip(seconds[name], seconds[base], strict=True)])
            milliseconds = f"{quartiles(seconds[name])[1] * 1e3:.2f}"
            peak = f"{peaks[name]:.0f}" if name in peaks else "-"
            shown = f"**{name}**" if "fxsplit" in name else name
            rows.append((subject, shown, milliseconds, f"{middle:.3f}", f"{low:.3f} to {high:.3f}", peak))
    header = ("what", "variant", "ms", "ratio to its first row", "quartiles", "peak of a step, MiB")
    used = "Devices: " + ", ".join(key for key, _ in itertools.groupby(devices)) + "."
    return Report(header, rows, [used], left_out)
