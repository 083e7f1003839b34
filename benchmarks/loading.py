"""A model that is made without memory and loaded from a sharded checkpoint: seconds, and the peak of the host's memory.

A stack of `nn.TransformerEncoderLayer` (width 1024, feed-forward 4096) with float32 weights in shards of 0.4 GiB, in a
folder as transformers writes it. Each variant is a process of its own, and they take turns; seconds are from the imports
of its library to the first output of 2 rows of 16 tokens. The peak is `VmHWM` of the process (`getrusage`'s begins with
that of the parent), beside that of one that has only imported what it needs.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from .children import ChildError, in_child
from .measuring import quartiles, verdicts
from .part import Options
from .peers import installed
from .report import LeftOutError, Report

QUESTION = "How long from nothing to running, and in how much memory?"
MINUTES = 1.5
GIB = 2**30
OURS = ("fxsplit", "fxsplit, check=False")
PEERS = {"accelerate": "Accelerate, load_checkpoint_and_dispatch"}


def model_of(layers: int, width: int) -> nn.Sequential:
    """The model, in eval mode."""
    sizes = {"nhead": 16, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True}
    return nn.Sequential(*(nn.TransformerEncoderLayer(width, **sizes) for _ in range(layers))).eval()


def batch(width: int) -> torch.Tensor:
    """2 rows of 16 tokens."""
    return torch.randn(2, 16, width, generator=torch.Generator().manual_seed(0))


def write(folder: Path, layers: int, width: int, shard: float) -> int:
    """A sharded checkpoint; the bytes of its weights."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    part, size, total, files, number = {}, 0, 0, {}, 0
    for i in range(layers):
        for name, tensor in model_of(1, width)[0].state_dict().items():
            part[f"{i}.{name}"] = tensor
            size += tensor.nbytes
        if size >= shard or i == layers - 1:
            number += 1
            file = f"model-{number:05}.safetensors"
            save_file(part, folder / file, metadata={"format": "pt"})
            files.update(dict.fromkeys(part, file))
            part, size, total = {}, 0, total + size
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def with_fxsplit(folder: Path, layers: int, width: int, check: bool = True) -> torch.Tensor:
    """Compiled on meta in 4 stages, proven, each weight to its stage."""
    import fxsplit

    with torch.device("meta"):
        model = model_of(layers, width)
    plan, x = fxsplit.Plan(stages=min(4, layers)), batch(width)
    pipe = fxsplit.compile(model, plan, example_args=(x,), weights=folder, check=check)
    with torch.no_grad():
        return pipe(x)


def with_accelerate(folder: Path, layers: int, width: int) -> torch.Tensor:
    """`load_checkpoint_and_dispatch`, all on the CPU."""
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    with init_empty_weights():
        model = model_of(layers, width)
    model = load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"})
    with torch.no_grad():
        return model(batch(width))


def by_hand(folder: Path, layers: int, width: int) -> torch.Tensor:
    """`load_state_dict` shard by shard into a model that has memory."""
    from safetensors.torch import load_file

    model = model_of(layers, width)
    for file in sorted(folder.glob("*.safetensors")):
        model.load_state_dict(load_file(file), strict=False)
    with torch.no_grad():
        return model(batch(width))


def only_imports(folder: Path, layers: int, width: int) -> torch.Tensor:
    """What importing takes."""
    import safetensors  # noqa: F401

    import fxsplit  # noqa: F401

    return torch.zeros(1)


VARIANTS = {
    "imports": only_imports,
    "fxsplit": with_fxsplit,
    "fxsplit, check=False": lambda *given: with_fxsplit(*given, check=False),
    "by hand, shard by shard into a model with memory": by_hand,
    PEERS["accelerate"]: with_accelerate,
}


def one(name: str, *given: object) -> tuple[float, int, float]:
    """Seconds, bytes at the highest, and the sum of the output."""
    start = time.perf_counter()
    out = VARIANTS[name](*given)
    seconds = time.perf_counter() - start
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return seconds, int(status["VmHWM"].split()[0]) * 1024, float(out.double().sum())


def measure(options: Options) -> Report:
    """A row for each variant."""
    left_out: list[str] = []
    if not installed("safetensors") or not Path("/proc/self/status").exists():
        raise LeftOutError("it needs safetensors, and Linux")
    names = [name for name in VARIANTS if name not in PEERS.values()]
    names += [words for library, words in PEERS.items() if installed(library, left_out)]
    layers, width = (2, 64) if options.quick else (43, 1024)
    found: dict[str, list[tuple[float, int, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        given = (Path(folder), layers, width)
        total = write(*given, shard=0.4 * GIB)
        for _ in range(1 if options.quick else 3):
            for name in names[: 2 if options.quick else None]:
                try:
                    found[name].append(in_child(one, name, *given, fresh=not options.quick))
                except ChildError as error:
                    left_out.append(f"{name}: {error}")
    base = quartiles([peak for _, peak, _ in found.pop("imports")])[1]
    found = {name: runs for name, runs in found.items() if runs}
    if len({output for runs in found.values() for _, _, output in runs}) != 1:
        raise ValueError("the outputs differ")
    rows = []
    for name, runs in found.items():
        low, middle, high = quartiles([seconds for seconds, _, _ in runs])
        peak = quartiles([peak for _, peak, _ in runs])[1]
        shown = f"**{name}**" if name in OURS else name
        figures = (
            f"{middle:.1f}",
            f"{low:.1f} to {high:.1f}",
            f"{peak / GIB:.2f}",
            f"{(peak - base) / total:.2f}",
        )
        rows.append((shown, *figures))
    seconds = {name: [s for s, _, _ in runs] for name, runs in found.items()}
    said = verdicts(seconds, ["fxsplit"], [name for name in found if name not in OURS])
    header = (
        "variant",
        "s",
        "quartiles",
        "peak, GiB",
        "over one that has imported, as a share of the weights",
    )
    weights = f"{layers} layers, {total / GIB:.2f} GiB of weights."
    return Report(header, rows, [" ".join([weights, *said])], left_out)
