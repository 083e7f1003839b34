"""Ways to do a training step of a task: eager, two threads, fxsplit. Each has a copy of the model of its own.

A step is forward, mean squared error and backward of one batch; gradients are added to ``.grad``.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fxsplit

from .tasks import Task, loss_of


@dataclass
class Variant:
    """One way to do a step.

    Attributes:
        step: does it; gradients are added to ``.grad``.
        gradients: those of all parameters, in the model's order.
        clear: drops them.
        threads: intra-op threads of the calling thread; fxsplit shares them out to its workers.
        base: the variant that it is compared with.
        ours: whether it is fxsplit's.
        model: what has the gradients, unless other processes have it.
        pipe: fxsplit's.
    """

    name: str
    step: Callable[[], Any]
    gradients: Callable[[], list[torch.Tensor]]
    clear: Callable[[], Any]
    threads: int = 1
    base: str = "eager"
    ours: bool = False
    model: nn.Module | None = None
    pipe: fxsplit.Pipeline | None = None


def on_model(name: str, model: nn.Module, step: Callable[[], Any], **more: Any) -> Variant:
    """A variant whose gradients are in this process."""

    def clear():
        for parameter in model.parameters():
            parameter.grad = None

    return Variant(name, step, lambda: [p.grad for p in model.parameters()], clear, model=model, **more)


def train(model: nn.Module, pairs: list[tuple[torch.Tensor, torch.Tensor]], count: int) -> None:
    """One micro-batch after the other, of `count` of the batch."""
    for x, target in pairs:
        (loss_of(model(x), target) / count).backward()


def pairs_of(task: Task, micro_batches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batch in micro-batches."""
    return list(zip(task.x.chunk(micro_batches), task.target.chunk(micro_batches), strict=True))


def eager(task: Task, micro_batches: int = 1, name: str = "eager") -> Variant:
    """The model itself; micro-batches one after the other."""
    model, pairs = copy.deepcopy(task.model), pairs_of(task, micro_batches)
    return on_model(name, model, lambda: train(model, pairs, len(pairs)))


def two_threads(task: Task, name: str, micro_batches: int = 8) -> Variant:
    """What two cores can do: two threads that know nothing of each other, each with a model and half of the batch."""
    first, second = models = [copy.deepcopy(task.model) for _ in range(2)]
    pairs = pairs_of(task, micro_batches)
    half = len(pairs) // 2

    def step():
        parts = zip(models, (pairs[:half], pairs[half:]), strict=True)
        threads = [threading.Thread(target=train, args=(m, part, len(pairs))) for m, part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    found = on_model(name, nn.ModuleList(models), step)
    parameters = list(zip(first.parameters(), second.parameters(), strict=True))
    found.gradients = lambda: [a.grad + b.grad for a, b in parameters]
    return found


def split(task: Task, name: str, *, serial: bool = False, base: str = "eager", **plan: Any) -> Variant:
    """fxsplit under a plan; `serial` plays all stages in the calling thread."""
    model = copy.deepcopy(task.model)
    pipe = fxsplit.compile(model, fxsplit.Plan(**plan), example_args=(task.x,))
    pipe._begun.common.serial = serial
    workers = 1 if serial or pipe.plan.micro_batches == 1 else len(pipe.schedule.workers)
    return on_model(
        name,
        model,
        lambda: pipe.step(task.x, target=task.target, loss_fn=loss_of),
        threads=workers,
        base=base,
        ours=True,
        pipe=pipe,
    )
