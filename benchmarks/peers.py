"""The peers by name: how each is called, what stands in a table for one that is not installed, and their threads.

torchgpipe and fairscale.nn.Pipe are GPipe in threads, whose backward on the CPU is all in the calling thread. Peers with
processes are in `processes`.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
from typing import Any

from .tasks import Task, loss_of
from .variants import Variant, on_model

THREADED = {"torchgpipe": ("torchgpipe", "GPipe"), "fairscale": ("fairscale.nn", "Pipe")}


def installed(name: str, left_out: list[str] | None = None) -> bool:
    """Whether a library can be imported; a line is added to `left_out` where it cannot."""
    if importlib.util.find_spec(name) is not None:
        return True
    if left_out is not None:
        left_out.append(f"{name} is not installed")
    return False


def versioned(name: str) -> str:
    """A library with its version."""
    return f"{name} {importlib.metadata.version(name)}"


def threaded_peer(
    task: Task, library: str, stages: int = 2, checkpoint: str = "never", chunks: int = 8, **more: Any
) -> Variant:
    """torchgpipe or fairscale.nn.Pipe, all stages on the CPU.

    Raises:
        ImportError: it is not installed.
    """
    module, attribute = THREADED[library]
    wrap = getattr(importlib.import_module(module), attribute)
    model, balance = copy.deepcopy(task.model), task.equal_parts(stages)
    pipe = wrap(model, balance, devices=["cpu"] * stages, chunks=chunks, checkpoint=checkpoint)
    return on_model(versioned(library), model, lambda: loss_of(pipe(task.x), task.target).backward(), **more)


def threaded_peers(task: Task, left_out: list[str], **options: Any) -> list[Variant]:
    """Those that are installed."""
    return [threaded_peer(task, library, **options) for library in THREADED if installed(library, left_out)]
