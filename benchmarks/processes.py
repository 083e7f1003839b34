"""Peers and ceilings with two processes over gloo, one intra-op thread each, which block on a pipe between steps.

A step is timed from the word to start to the last one's word that it is done.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from .tasks import Task, loss_of
from .variants import Variant, pairs_of, train

PIPELINING = {
    "torch.distributed.pipelining 1F1B": "Schedule1F1B",
    "torch.distributed.pipelining GPipe": "ScheduleGPipe",
}


class Processes:
    """Two processes.

    Args:
        work: ``work(rank, folder, pipe)``, which answers what it is asked.
    """

    def __init__(self, task: Task, work: Callable[[int, str, Connection], None]):
        self.folder = tempfile.TemporaryDirectory()
        torch.save(task, Path(self.folder.name) / "task")
        context = multiprocessing.get_context("spawn")
        self.pipes, self.children = [], []
        for rank in range(2):
            here, there = context.Pipe()
            child = context.Process(target=work, args=(rank, self.folder.name, there), daemon=True)
            child.start()
            there.close()
            self.pipes.append(here)
            self.children.append(child)

    def ask(self, *words: str) -> list[Any]:
        """Say the same to both, and wait until both have answered."""
        for pipe in self.pipes:
            pipe.send(words)
        return [pipe.recv() for pipe in self.pipes]

    def variant(self, name: str, gradients: Callable[[list[Any]], list[Any]]) -> Variant:
        """One way to do a step; `gradients` makes those of the model of what both ranks answer."""
        return Variant(
            name,
            lambda: self.ask("step", name),
            lambda: [torch.from_numpy(g) for g in gradients(self.ask("gradients", name))],
            lambda: self.ask("clear", name),
        )

    def close(self) -> None:
        """End both."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # it has died
                pipe.send(("end", ""))
        for child in self.children:
            child.join(10)
            child.kill()
        self.folder.cleanup()


@contextlib.contextmanager
def pipelining(task: Task, ceiling: str) -> Iterator[tuple[Variant, list[Variant]]]:
    """torch.distributed.pipelining, a process for each of two stages.

    Yields:
        What two cores can do in the same processes, called `ceiling`: half of the batch each, and nothing to say; and a
        variant for each schedule.
    """
    with contextlib.closing(Processes(task, functools.partial(_stage_process, ceiling))) as processes:
        yield (
            processes.variant(ceiling, lambda answers: [a + b for a, b in zip(*answers, strict=True)]),
            [
                processes.variant(name, lambda answers: [g for part in answers for g in part])
                for name in PIPELINING
            ],
        )


@contextlib.contextmanager
def data_parallel(task: Task, names: Mapping[str, Mapping[str, Any]]) -> Iterator[list[Variant]]:
    """DistributedDataParallel, half of the batch in each process: a variant for each name with its options."""
    with contextlib.closing(Processes(task, functools.partial(_replica_process, names))) as processes:
        yield [processes.variant(name, _agreed) for name in names]


def _agreed(answers: list[list[Any]]) -> list[Any]:
    """The gradients of one rank, which are the other's too."""
    first, second = answers
    if not all((a == b).all() for a, b in zip(first, second, strict=True)):
        raise ValueError("the ranks' gradients differ")
    return first


def _stage_process(ceiling: str, rank: int, folder: str, pipe: Connection, micro_batches: int = 8) -> None:
    """One rank, with its half of the model, and a whole one that trains on half of the batch."""
    from torch.distributed import pipelining

    task = _join(rank, folder)
    half = len(task.model) // 2
    modules, steps = {}, {}
    for name, schedule in PIPELINING.items():
        modules[name] = copy.deepcopy(task.model[half * rank : half * (rank + 1)])
        stage = pipelining.PipelineStage(modules[name], rank, 2, torch.device("cpu"))
        play = getattr(pipelining, schedule)(stage, n_microbatches=micro_batches, loss_fn=loss_of).step
        given = {"target": task.target, "return_outputs": False}
        steps[name] = functools.partial(play, **given) if rank else functools.partial(play, task.x)
    pairs, count = pairs_of(task, micro_batches), micro_batches // 2
    part = pairs[count * rank : count * (rank + 1)]
    modules[ceiling] = copy.deepcopy(task.model)
    steps[ceiling] = lambda: train(modules[ceiling], part, len(pairs))
    _serve(pipe, modules, steps)


def _replica_process(
    names: Mapping[str, Mapping[str, Any]], rank: int, folder: str, pipe: Connection
) -> None:
    """One rank, with its half of the batch."""
    task = _join(rank, folder)
    x, target = task.x.chunk(2)[rank], task.target.chunk(2)[rank]
    modules = {
        name: nn.parallel.DistributedDataParallel(copy.deepcopy(task.model), **options)
        for name, options in names.items()
    }
    steps = {name: lambda m=module: loss_of(m(x), target).backward() for name, module in modules.items()}
    _serve(pipe, modules, steps)


def _join(rank: int, folder: str) -> Task:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    return torch.load(Path(folder) / "task", weights_only=False)


def _serve(pipe: Connection, modules: Mapping[str, nn.Module], steps: Mapping[str, Callable]) -> None:
    """Answer what `Processes` asks for, until the end."""
    while True:
        what, name = pipe.recv()
        if what == "end":
            break
        if what == "step":
            steps[name]()
        parameters = list(modules[name].parameters()) if name else []
        if what == "clear":
            for parameter in parameters:
                parameter.grad = None
        pipe.send([p.grad.numpy() for p in parameters] if what == "gradients" else None)
    distributed.destroy_process_group()
