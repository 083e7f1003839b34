"""A model that is made without memory and loaded from a sharded checkpoint: seconds, and the host's memory at its highest.

    python benchmarks/loading.py [--gib 2] [--stages 4]

The model is a stack of `nn.TransformerEncoderLayer` (width 1024, feed-forward 4096) with float32 weights in shards of
0.4 GiB, in a folder as transformers writes it. Each variant is a process of its own, from the start of the interpreter to
the first output of 2 rows of 16 tokens; the figure is its peak of resident memory, and the same without the memory of a
process that has only imported what it needs. Accelerate is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

GIB = 2**30
SHARD = 0.4 * GIB


def model_of(layers):
    """The model."""
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True) for _ in range(layers))
    ).eval()


def write(folder, layers):
    """A sharded checkpoint; the bytes of its weights."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    part, size, total, files, number = {}, 0, 0, {}, 0
    for i in range(layers):
        for name, tensor in nn.TransformerEncoderLayer(1024, 16, 4096).state_dict().items():
            part[f"{i}.{name}"] = tensor
            size += tensor.nbytes
        if size >= SHARD or i == layers - 1:
            number += 1
            file = f"model-{number:05}.safetensors"
            save_file(part, folder / file)
            files.update(dict.fromkeys(part, file))
            part, size, total = {}, 0, total + size
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def with_fxsplit(folder, layers, stages):
    """Compiled on meta, each weight to its stage."""
    import fxsplit

    with torch.device("meta"):
        model = model_of(layers)
    x = torch.randn(2, 16, 1024, generator=torch.Generator().manual_seed(0))
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=stages), example_args=(x,), weights=folder)
    with torch.no_grad():
        return pipe(x)


def with_accelerate(folder, layers, stages):
    """`load_checkpoint_and_dispatch`, all on the CPU."""
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    with init_empty_weights():
        model = model_of(layers)
    model = load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"})
    x = torch.randn(2, 16, 1024, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(x)


def by_hand(folder, layers, stages):
    """`load_state_dict` shard by shard into a model that has memory."""
    from safetensors.torch import load_file

    model = model_of(layers)
    for file in sorted(folder.glob("*.safetensors")):
        model.load_state_dict(load_file(file), strict=False)
    x = torch.randn(2, 16, 1024, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(x)


def nothing(folder, layers, stages):
    """What importing takes."""
    import safetensors  # noqa: F401

    import fxsplit  # noqa: F401

    return torch.zeros(1)


VARIANTS = {
    "imports only": nothing,
    "fxsplit": with_fxsplit,
    "accelerate": with_accelerate,
    "by hand": by_hand,
}


def main() -> None:
    """Measure every variant in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=2.0, help="of weights")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, folder, layers, stages = options.one
        torch.set_num_threads(1)
        start = time.perf_counter()
        out = VARIANTS[name](Path(folder), int(layers), int(stages))
        seconds = time.perf_counter() - start
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        peak = int(status["VmHWM"].split()[0]) * 1024  # getrusage's begins with that of the parent process
        print(json.dumps([seconds, peak, float(out.double().sum())]))
        return
    layer = sum(t.nbytes for t in nn.TransformerEncoderLayer(1024, 16, 4096).state_dict().values())
    layers = max(1, round(options.gib * GIB / layer))
    with tempfile.TemporaryDirectory() as folder:
        total = write(Path(folder), layers)
        print(
            f"torch {torch.__version__}; {layers} layers, {total / GIB:.2f} GiB of weights, {options.stages} stages"
        )
        found: dict[str, list[list[float]]] = {name: [] for name in VARIANTS}
        for _ in range(options.rounds):
            for name in VARIANTS:
                command = [sys.executable, __file__, "--one", name, folder, str(layers), str(options.stages)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    print(f"{name} is left out: {(done.stderr.splitlines() or [''])[-1]}")
                else:
                    found[name].append(json.loads(done.stdout.splitlines()[-1]))
    rows = {
        name: [sorted(column)[len(column) // 2] for column in zip(*runs, strict=True)]
        for name, runs in found.items()
        if runs
    }
    base = rows.pop("imports only")[1]
    assert len({total for _, _, total in rows.values()}) == 1, "the outputs differ"
    print(f"{'variant':12} {'s':>6} {'peak, GiB':>10} {'of the weights, without imports':>32}")
    for name, (seconds, peak, _) in rows.items():
        print(f"{name:12} {seconds:6.1f} {peak / GIB:10.2f} {(peak - base) / total:32.2f}")


if __name__ == "__main__":
    main()
