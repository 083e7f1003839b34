"""How long does a pipelined training step take, what does the runtime itself cost, and what does a step keep?

    python benchmarks/runtime.py speed [--layers 8] [--rounds 15] [--allocator kept]
    python benchmarks/runtime.py overhead [--layers 8] [--rounds 21]
    python benchmarks/runtime.py micro-batches [--layers 8] [--rounds 15]
    python benchmarks/runtime.py small [--rounds 21]
    python benchmarks/runtime.py memory [--steps 3]
    python benchmarks/runtime.py fingerprint [--rounds 21]

A step is forward, mean squared error and backward of one batch on the CPU. The model is a stack of
`nn.TransformerEncoderLayer` (width 256, 4 heads, feed-forward 512, no dropout), a batch 64 rows of 64 tokens. All
variants of a part take turns in each round. A ratio is a variant's seconds to those of eager in the same round; the
tables have its median and its quartiles. Before that, the gradients of every variant are compared with eager's. Each
worker has one intra-op thread. Peers that are not installed are left out.

``speed``: 2 stages and 8 micro-batches against eager in one thread. No schedule of 2 equal stages takes less than
(8 + 1) / (2 * 8) = 0.5625 of it. What two cores can do at that moment is measured too: two threads, and two processes,
that train on half of the batch each and never wait; a pipeline cannot take less than 1.125 of that. torchgpipe and fairscale.nn.Pipe are GPipe in threads, whose backward on the CPU is
all in the calling thread; torch.distributed.pipelining has a process for each stage, timed from the word to start to the
last one's word that it is done.

``overhead``: fxsplit where nothing overlaps: everything is played in the calling thread.

``micro-batches``: the speed-up of 2 stages over eager with m micro-batches, whose bound is 2 m / (m + 1).

``small``: 100 linear layers of width 64 with a ReLU each, 512 rows: operations that take less time than it takes to
call them. Python calls them one at a time, whatever the number of threads.

``memory``: bytes at their highest during one step, the most of `--steps`, of 16 layers in 4 equal stages with 8
micro-batches. See `LiveBytes` for what is counted.

``fingerprint``: what each call takes to see that the model is still what was compiled, for 501 modules: 125 blocks of
four, whose forward reads two numbers, a dict and a type.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import timeit
import warnings
import weakref

import torch
from peers import (
    LIBRARIES,
    eager,
    installed_peers,
    small_operations,
    split,
    stages,
    threaded_peer,
    transformer,
    two_processes,
    two_threads,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fxsplit

# glibc gives large blocks back to the kernel as soon as they are free, and each step then faults its activations in
# again, page by page: eager's whole batch more than micro-batches. With `--allocator kept`, all variants alike keep what
# they had; by default they have what users have, and this process what fxsplit sets (fxsplit/runtime/allocator.py).
ALLOCATOR = {
    "MALLOC_TRIM_THRESHOLD_": "-1",
    "MALLOC_TOP_PAD_": "268435456",
    "MALLOC_MMAP_MAX_": "0",
}
CEILINGS = ("two threads, half each", "two processes, half each")
MIB = 2**20
CLOSE = 1e-4  # of a parameter's largest gradient


# Seconds --------------------------------------------------------------------------------------------------------------


def seconds_of(variant):
    """Seconds of one step; gradients are dropped outside of them."""
    torch.set_num_threads(variant.threads)
    start = time.perf_counter()
    variant.step()
    taken = time.perf_counter() - start
    variant.clear()
    torch.set_num_threads(1)
    return taken


def check_gradients(variants):
    """Compare every variant's gradients with those of the first.

    Raises:
        AssertionError: one is further away than rounding explains.
    """
    wanted, worst = None, 0.0
    for variant in variants:
        torch.set_num_threads(variant.threads)
        variant.step()
        torch.set_num_threads(1)
        found = [gradient.clone() for gradient in variant.gradients()]
        variant.clear()
        wanted = wanted or found
        for a, b in zip(found, wanted, strict=True):
            difference = ((a - b).abs().max() / b.abs().max()).item()
            assert difference <= CLOSE, f"{variant.name}: a gradient is {difference:.1e} off"
            worst = max(worst, difference)
    print(
        f"gradients of all {len(variants)} variants are eager's, to within {worst:.1e} of the largest",
        end="\n\n",
    )


def measure(variants, rounds):
    """Variant → seconds by round. They take turns, a different one first each time."""
    check_gradients(variants)
    for variant in variants:
        seconds_of(variant)  # memory, caches and threads are there
    found = {variant.name: [] for variant in variants}
    for turn in range(rounds):
        first = turn % len(variants)
        for variant in (*variants[first:], *variants[:first]):
            found[variant.name].append(seconds_of(variant))
        print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
    return found


def spread(found, name, base):
    """Median and quartiles of the ratio to `base` in the same round."""
    ratios = [a / b for a, b in zip(found[name], found[base], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return statistics.median(ratios), low, high


def ratio_table(variants, found):
    """Each variant against the one it is compared with."""
    rows = []
    for variant in variants:
        middle, low, high = spread(found, variant.name, variant.base)
        median = statistics.median(found[variant.name])
        rows.append(
            (variant.name, f"{median * 1e3:.1f}", variant.base, f"{middle:.3f}", f"{low:.3f} to {high:.3f}")
        )
    show(("variant", "ms", "against", "ratio", "quartiles"), rows)


def speed(options):
    """2 stages and 8 micro-batches, and the peers."""
    task = transformer(options.layers)
    processes, pipelining = stages(task)
    others, ceiling = two_processes(task, CEILINGS[1])
    try:
        variants = [
            eager(task),
            eager(task, 8, "eager, 8 micro-batches"),
            two_threads(task, CEILINGS[0]),
            ceiling,
            *(
                split(task, f"fxsplit {schedule}", stages=2, micro_batches=8, schedule=schedule)
                for schedule in ("gpipe", "1f1b")
            ),
            *installed_peers(task),
            *pipelining,
        ]
        found = measure(variants, options.rounds or 15)
        ratio_table(variants, found)
    finally:
        processes.close()
        others.close()
    print("ideal bound: (8 + 1) / (2 * 8) = 0.5625 of eager, 1.125 of what two cores reach without waiting:")
    for name in CEILINGS:
        reached = {
            v.name: spread(found, v.name, name)[0] for v in variants if v.threads > 1 or v in pipelining
        }
        print(f"of {name}:", ", ".join(f"{each} {middle:.3f}" for each, middle in reached.items()))


def overhead(options):
    """What is played in one thread."""
    task = transformer(options.layers)
    pieces = "eager, 8 micro-batches"
    variants = [
        eager(task),
        eager(task, 8, pieces),
        split(task, "fxsplit, 1 stage", stages=1, micro_batches=1),
        split(task, "fxsplit, 4 stages", stages=4, micro_batches=1),
        split(
            task,
            "fxsplit, 4 stages x 8 in one thread",
            serial=True,
            base=pieces,
            stages=4,
            micro_batches=8,
        ),
    ]
    ratio_table(variants, measure(variants, options.rounds or 21))


def micro_batches(options):
    """Speed-up over eager, on the whole batch and on the same micro-batches."""
    task, counts = transformer(options.layers), (2, 4, 8, 16)
    variants = [
        eager(task),
        *(eager(task, m, f"eager {m}") for m in counts),
        *(split(task, f"fxsplit {m}", stages=2, micro_batches=m) for m in counts),
    ]
    found = measure(variants, options.rounds or 15)
    rows = []
    for m in counts:
        middle, low, high = spread(found, f"fxsplit {m}", "eager")
        same, _, _ = spread(found, f"fxsplit {m}", f"eager {m}")
        bound = 2 * m / (m + 1)
        speeds = (f"{1 / middle:.3f}", f"{1 / high:.3f} to {1 / low:.3f}", f"{1 / same:.3f}", f"{bound:.3f}")
        rows.append((m, *speeds, f"{1 / middle / bound:.1%}"))
    header = ("m", "speed-up", "quartiles", "over eager on m micro-batches", "bound", "of the bound")
    show(header, rows)


def small(options):
    """Many small operations."""
    task = small_operations()
    pieces = "eager, 8 micro-batches"
    variants = [
        eager(task),
        eager(task, 8, pieces),
        split(task, "fxsplit, 1 stage", stages=1, micro_batches=1),
        split(task, "fxsplit, 2 stages x 8", base=pieces, stages=2, micro_batches=8),
        split(
            task,
            "fxsplit, 2 stages x 8 in one thread",
            serial=True,
            base=pieces,
            stages=2,
            micro_batches=8,
        ),
        *installed_peers(task, ("torchgpipe",)),
    ]
    for variant in variants[5:]:
        variant.base = pieces
    ratio_table(variants, measure(variants, options.rounds or 21))


# Bytes ----------------------------------------------------------------------------------------------------------------


class LiveBytes:
    """Bytes of the tensors that a step made and that something still holds, whoever it is: autograd or a runtime.

    A dispatch mode in the calling thread and in every `threading.Thread` sees the results of all operations, those
    that recompute too; a weak reference to each storage sees its end. The model, its gradients, which are there before,
    and the batch are not counted. Temporaries inside of an operation are not seen.

    Attributes:
        activations: the most bytes at a time without gradients: without what operations of a backward formula made
            (they run in a graph task and without grad mode) and without tensors that are shaped like a parameter.
        all: the most bytes at a time of everything, with gradients.
    """

    def __init__(self):
        self.lock, self.live, self.known = threading.RLock(), {}, set()
        self.shapes, self.on = set(), False
        self.activations, self.all, self.now = 0, 0, [0, 0]
        counter = self

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                result = function(*args, **(kwargs or {}))
                if counter.on:
                    counter.add(result)
                return result

        self.watch, run = Watch, threading.Thread.run

        def watched(thread):
            with Watch():
                run(thread)

        threading.Thread.run = watched

    def add(self, result):
        """Count the storages that are new."""
        formula = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            with self.lock:
                if key in self.live or key in self.known:
                    continue
                gradient = formula or tuple(tensor.shape) in self.shapes
                sizes = (0 if gradient else storage.nbytes(), storage.nbytes())
                self.live[key] = weakref.ref(storage, lambda _, k=key, s=sizes: self.drop(k, s))
                self.change(sizes, 1)

    def drop(self, key, sizes):
        """A storage has gone."""
        with self.lock:
            self.live.pop(key, None)
            self.change(sizes, -1)

    def change(self, sizes, sign):
        """Add to what is live, and note the peaks."""
        self.now = [now + sign * size for now, size in zip(self.now, sizes, strict=True)]
        self.activations, self.all = max(self.activations, self.now[0]), max(self.all, self.now[1])

    def count(self, step, model, *others):
        """Do a step and count; the model, its gradients and `others` are there before."""
        parameters = list(model.parameters())
        self.shapes = {shape for p in parameters for shape in (tuple(p.shape), tuple(p.shape)[::-1])}
        kept = [t.untyped_storage() for t in (*parameters, *(p.grad for p in parameters), *others)]
        self.known = {storage._cdata for storage in kept}
        gc.collect()
        self.on = True
        with self.watch():
            step()
        self.on = False


MEASURED = ("fxsplit gpipe", "fxsplit 1f1b", "torchgpipe", "fairscale")
POLICIES = ("except_last", "never", "always")


def bytes_of(name, checkpoint, steps):
    """Print both peaks of a variant as JSON."""
    counter, task = LiveBytes(), transformer(16)
    library, _, schedule = name.partition(" ")
    if name == "eager":
        variant = eager(task)
    elif library == "fxsplit":
        variant = split(
            task, name, cut=["4", "8", "12"], micro_batches=8, schedule=schedule, checkpoint=checkpoint
        )
    else:
        variant = threaded_peer(task, library, stages=4, checkpoint=checkpoint)
    for _ in range(steps):
        variant.clear()
        variant.step()  # gradients are there before
        counter.count(variant.step, variant.model, task.x, task.target)
    print("ROW" + json.dumps([counter.activations / MIB, counter.all / MIB]), flush=True)


def memory(options):
    """A process for each variant and policy."""
    rows, names = [], list(MEASURED)
    for library in LIBRARIES:
        if importlib.util.find_spec(library) is None:
            print(f"{library} is not installed")
            names.remove(library)
    for name, policy in [("eager", "-"), *((n, p) for p in POLICIES for n in names)]:
        command = [sys.executable, __file__, "memory", "--one", name, policy, "--steps", str(options.steps)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            output, errors = process.communicate()
        found = [json.loads(line[3:]) for line in output.splitlines() if line.startswith("ROW")]
        if found:
            rows.append((name, policy, *(f"{value:.1f}" for value in found[0])))
        else:
            print(f"{name} is left out: {(errors.strip().splitlines() or ['crashed'])[-1][:200]}")
        print(f"{name}, {policy} is done", file=sys.stderr, flush=True)
    show(("variant", "checkpoint", "activations, MiB", "with gradients, MiB"), rows)


# The command ----------------------------------------------------------------------------------------------------------


def show(header, rows):
    """A table."""
    from tabulate import tabulate

    print(tabulate(rows, headers=header, disable_numparse=True), end="\n\n", flush=True)


class Flagged(torch.nn.Module):
    """A block whose forward reads plain attributes."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.scale, self.gated, self.options = 0.5, True, {"shift": 0.0}

    def forward(self, x):
        """A gated feed-forward layer."""
        h = self.up(self.norm(x))
        h = h * h.sigmoid() if self.gated else h
        return x + self.down(h).to(x.dtype) * self.scale + self.options["shift"]


def fingerprint(options):
    """What a call takes to see that nothing has changed."""
    model, x = torch.nn.Sequential(*(Flagged() for _ in range(125))), torch.randn(4, 8)
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=2), example_args=(x,))
    pipe(x)
    watch, rounds = pipe._now.watch, options.rounds or 21
    for name, look in (
        ("attributes", watch.use_current_modules),
        ("types", lambda: watch.circumstances([x])),
    ):
        seconds = [timeit.timeit(look, number=100) / 100 for _ in range(rounds)]
        low, middle, high = statistics.quantiles(seconds, n=4)
        print(
            f"{name}: {middle * 1e6:.0f} µs a call ({low * 1e6:.0f} to {high * 1e6:.0f}), {len(list(model.modules()))} modules"
        )


PARTS = {
    "speed": speed,
    "overhead": overhead,
    "micro-batches": micro_batches,
    "small": small,
    "memory": memory,
    "fingerprint": fingerprint,
}


def arguments():
    """What the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    for name, run in PARTS.items():
        part = parts.add_parser(name, help=run.__doc__)
        if name == "memory":
            part.add_argument("--steps", type=int, default=3, help="measured in each process")
            part.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
        else:
            part.add_argument("--rounds", type=int, help="how often each variant has its turn")
        part.add_argument(
            "--allocator",
            choices=("glibc", "kept"),
            default="kept" if name == "memory" else "glibc",
            help="settings",
        )
        if name in ("speed", "overhead", "micro-batches"):
            part.add_argument("--layers", type=int, default=8, help="of the model")
    return parser.parse_args()


def with_allocator(allocator):
    """Begin the process again with the settings of its allocator, unless it has them."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    wanted = {**others, **(ALLOCATOR if allocator == "kept" else {})}
    if wanted != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.argv], wanted)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)


def print_environment(allocator):
    """What the figures were taken with."""
    settings = (
        " ".join(f"{name}={value}" for name, value in ALLOCATOR.items())
        if allocator == "kept"
        else "allocator as it is"
    )
    print(f"environment: torch {torch.__version__}, {os.cpu_count()} cores, {settings}", flush=True)


def main() -> None:
    """Run one of the parts."""
    options = arguments()
    with_allocator(options.allocator)
    if getattr(options, "one", None):
        bytes_of(*options.one, options.steps)
    else:
        print_environment(options.allocator)
        PARTS[options.part](options)
    gc.collect()  # fairscale's pipe waits for its threads in __del__: forever, if the interpreter is ending


if __name__ == "__main__":
    main()
