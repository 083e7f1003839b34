"""A model that fits nowhere: captured, cut into 16 stages by roofline, proven, and written as code, without a weight.

Shapes of published models, in bfloat16 on the meta device, for inference on 4,096 tokens; one thread, a process for each.
The peer is the first half of what torch's own splitter does with it, `torch.export`, which cuts nothing.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .children import ChildError, in_child
from .models import load_torchvision
from .part import Options
from .peers import installed
from .report import LeftOutError, Report

QUESTION = "How long does it take to cut a model that fits nowhere?"
MINUTES = 2.0
LLAMA = {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
MODELS = {"Llama-3.1-405B": (126, "H100"), "Llama-3.1-405B, a quarter of its layers": (32, "H100")}


def made(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """The model without values, and its arguments."""
    load_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**LLAMA, num_hidden_layers=layers, use_cache=False, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        return model, {"input_ids": torch.zeros(1, 4096, dtype=torch.long)}


def by_fxsplit(layers: int, hardware: str) -> tuple[float, float, float, int, float]:
    """Seconds to compile and prove, seconds to write, GiB at the highest, nodes, and parameters in 1e9."""
    import fxsplit

    model, kwargs = made(layers)
    start = time.perf_counter()
    plan = fxsplit.Plan(stages=16, cost="roofline", hardware=hardware, optimizer_states=None)
    with torch.no_grad():
        pipe = fxsplit.compile(model, plan, example_kwargs=kwargs)
    pipe.verify()
    compiled = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        pipe.save_code(Path(folder) / "split")
    written = time.perf_counter()
    parameters = sum(p.numel() for p in model.parameters()) / 1e9
    return compiled - start, written - compiled, peak(), len(pipe.traced.graph.nodes), parameters


def by_export(layers: int, hardware: str) -> tuple[float, float]:
    """Seconds to export, GiB at the highest."""
    model, kwargs = made(layers)
    start = time.perf_counter()
    with torch.no_grad():
        torch.export.export(model, (), kwargs, strict=False)
    return time.perf_counter() - start, peak()


def peak() -> float:
    """GiB of this process at the highest."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 2**20


def measure(options: Options) -> Report:
    """A row for each model."""
    left_out: list[str] = []
    if not installed("transformers") or not Path("/proc/self/status").exists():
        raise LeftOutError("it needs transformers, and Linux")
    rows = []
    for name, (layers, hardware) in (
        {"16 layers of it": (16, "H100")}.items() if options.quick else MODELS.items()
    ):
        seconds, writing, gib, nodes, parameters = in_child(by_fxsplit, layers, hardware)
        try:
            taken, high = in_child(by_export, layers, hardware)
            theirs = [f"{taken:.1f}", f"{high:.2f}"]
        except ChildError as error:
            left_out.append(f"torch.export of {name}: {error}")
            theirs = ["-", "-"]
        rows.append(
            (
                name,
                f"{parameters:.1f} G",
                layers,
                f"{nodes:,}",
                f"{seconds:.1f}",
                f"{writing:.1f}",
                f"{gib:.2f}",
                *theirs,
            )
        )
    header = (
        *(
            "model",
            "parameters",
            "layers",
            "nodes",
            "**capture, cut and proof, s**",
            "writing, s",
            "peak, GiB",
        ),
        *("torch.export alone, s", "its peak, GiB"),
    )
    return Report(header, rows, [], left_out)
