"""Training steps of one model for runtime.py and replicas.py: eager, fxsplit, and its peers where they are installed.

Each variant has a copy of the model of its own. One step is forward, mean squared error and backward of one batch.
"""

from __future__ import annotations

import copy
import functools
import importlib
import multiprocessing
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed, nn

import fxsplit

LIBRARIES = {"torchgpipe": ("torchgpipe", "GPipe"), "fairscale": ("fairscale.nn", "Pipe")}
loss_of = nn.functional.mse_loss


@dataclass
class Task:
    """A model that is a sequence of children, and one batch."""

    model: nn.Sequential
    x: torch.Tensor
    target: torch.Tensor

    def halves(self, parts=2):
        """How many children each of equal parts has."""
        return [len(self.model) // parts] * parts


def transformer(layers):
    """Encoder layers of width 256; 64 rows of 64 tokens."""
    torch.manual_seed(0)
    sizes = {"d_model": 256, "nhead": 4, "dim_feedforward": 512, "dropout": 0.0, "batch_first": True}
    model = nn.Sequential(*(nn.TransformerEncoderLayer(**sizes) for _ in range(layers)))
    return Task(model, torch.randn(64, 64, 256), torch.randn(64, 64, 256))


def small_operations(layers=100):
    """Linear layers of width 64, each with a ReLU; 512 rows."""
    torch.manual_seed(0)
    children = (child for _ in range(layers) for child in (nn.Linear(64, 64), nn.ReLU()))
    return Task(nn.Sequential(*children), torch.randn(512, 64), torch.randn(512, 64))


@dataclass
class Variant:
    """One way to do a step.

    Attributes:
        step: does it; gradients are added to ``.grad``.
        gradients: those of all parameters, in the model's order.
        clear: drops them.
        threads: intra-op threads of the calling thread; fxsplit shares them out to its workers.
        base: the variant that it is compared with.
        model: what has the gradients, unless other processes have it.
        pipe: fxsplit's.
    """

    name: str
    step: Callable
    gradients: Callable
    clear: Callable
    threads: int = 1
    base: str = "eager"
    model: nn.Module | None = None
    pipe: fxsplit.Pipeline | None = None


def on_model(name, model, step, **more):
    """A variant whose gradients are in this process."""

    def clear():
        for parameter in model.parameters():
            parameter.grad = None

    return Variant(
        name,
        step,
        lambda: [p.grad for p in model.parameters()],
        clear,
        model=model,
        **more,
    )


def train(model, pairs, count):
    """One micro-batch after the other, of `count` of the batch."""
    for x, target in pairs:
        (loss_of(model(x), target) / count).backward()


def pairs_of(task, micro_batches):
    """The batch in micro-batches."""
    return list(zip(task.x.chunk(micro_batches), task.target.chunk(micro_batches), strict=True))


def eager(task, micro_batches=1, name="eager"):
    """The model itself; micro-batches one after the other."""
    model, pairs = copy.deepcopy(task.model), pairs_of(task, micro_batches)
    return on_model(name, model, lambda: train(model, pairs, len(pairs)))


def two_threads(task, name, micro_batches=8):
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


def split(task, name, *, serial=False, base="eager", **plan):
    """fxsplit; `serial` plays all stages in the calling thread."""
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
        pipe=pipe,
    )


def threaded_peer(task, library, stages=2, checkpoint="never", chunks=8):
    """torchgpipe or fairscale.nn.Pipe, all stages on the CPU.

    Raises:
        ImportError: it is not installed.
    """
    module, attribute = LIBRARIES[library]
    wrap = getattr(importlib.import_module(module), attribute)
    model = copy.deepcopy(task.model)
    pipe = wrap(model, task.halves(stages), devices=["cpu"] * stages, chunks=chunks, checkpoint=checkpoint)
    return on_model(library, model, lambda: loss_of(pipe(task.x), task.target).backward())


def installed_peers(task, libraries=tuple(LIBRARIES), **options):
    """The threaded peers; a line is printed for one that is not installed."""
    found = []
    for library in libraries:
        try:
            found.append(threaded_peer(task, library, **options))
        except ImportError:
            print(f"{library} is not installed")
    return found


# torch.distributed: two processes -------------------------------------------------------------------------------------

SCHEDULES = {"pipelining GPipe": "ScheduleGPipe", "pipelining 1F1B": "Schedule1F1B"}


class Processes:
    """Two processes over gloo, one intra-op thread each; they block on a pipe between steps.

    Args:
        work: ``work(rank, folder, pipe)``, which answers what it is asked.
    """

    def __init__(self, task, work):
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

    def ask(self, *words):
        """Say the same to both, and wait until both have answered."""
        for pipe in self.pipes:
            pipe.send(words)
        return [pipe.recv() for pipe in self.pipes]

    def variant(self, name, gradients):
        """One way to do a step; `gradients` makes those of the model of what both ranks answer."""
        return Variant(
            name,
            lambda: self.ask("step", name),
            lambda: [torch.from_numpy(g) for g in gradients(self.ask("gradients", name))],
            lambda: self.ask("clear", name),
        )

    def close(self):
        """End both."""
        for pipe in self.pipes:
            pipe.send(("end", ""))
        for child in self.children:
            child.join()
        self.folder.cleanup()


def stages(task):
    """torch.distributed.pipelining, a process for each stage: the processes, and a variant for each schedule."""
    processes = Processes(task, _stage_process)
    return processes, [
        processes.variant(name, lambda answers: [g for part in answers for g in part]) for name in SCHEDULES
    ]


def two_processes(task, name):
    """The same with two processes."""
    processes = Processes(task, functools.partial(_half_process, name))
    return processes, processes.variant(name, lambda answers: [a + b for a, b in zip(*answers, strict=True)])


def replicas(task, names):
    """DistributedDataParallel, half of the batch in each process: the processes, and a variant for each of `names`.

    Args:
        names: name → its options.
    """
    processes = Processes(task, functools.partial(_replica_process, names))
    return processes, [processes.variant(name, agreed) for name in names]


def agreed(answers):
    """The gradients of one rank.

    Raises:
        AssertionError: the other rank has others.
    """
    first, second = answers
    assert all((a == b).all() for a, b in zip(first, second, strict=True))
    return first


def _stage_process(rank, folder, pipe):
    """One rank, with its half of the model."""
    from torch.distributed import pipelining

    task = _join(rank, folder)
    half = len(task.model) // 2
    modules, steps = {}, {}
    for name, schedule in SCHEDULES.items():
        modules[name] = copy.deepcopy(task.model[half * rank : half * (rank + 1)])
        stage = pipelining.PipelineStage(modules[name], rank, 2, torch.device("cpu"))
        play = getattr(pipelining, schedule)(stage, n_microbatches=8, loss_fn=loss_of).step
        given = {"target": task.target, "return_outputs": False}
        steps[name] = functools.partial(play, **given) if rank else functools.partial(play, task.x)
    _serve(pipe, modules, steps)


def _half_process(name, rank, folder, pipe, micro_batches=8):
    """One process, with a model and half of the batch; it says nothing to the other."""
    task = _join(rank, folder)
    model, pairs = copy.deepcopy(task.model), pairs_of(task, micro_batches)
    half = len(pairs) // 2
    part = pairs[half * rank : half * (rank + 1)]
    _serve(pipe, {name: model}, {name: lambda: train(model, part, len(pairs))})


def _replica_process(names, rank, folder, pipe):
    """One rank, with its half of the batch."""
    task = _join(rank, folder)
    x, target = task.x.chunk(2)[rank], task.target.chunk(2)[rank]
    modules = {
        name: nn.parallel.DistributedDataParallel(copy.deepcopy(task.model), **options)
        for name, options in names.items()
    }
    steps = {name: lambda m=module: loss_of(m(x), target).backward() for name, module in modules.items()}
    _serve(pipe, modules, steps)


def _join(rank, folder):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    return torch.load(Path(folder) / "task", weights_only=False)


def _serve(pipe, modules, steps):
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
