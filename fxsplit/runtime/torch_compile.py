"""Stages under `torch.compile`: it compiles their code, and looks at none of fxsplit's own.

pipe.compile_stages(...)     each stage is a compiled module, whoever calls it: calls, steps, in place of the model
torch.compile(pipe)(x)       what compiles in the caller's thread is put aside at the door of the pipeline,
                             and is in force again where a worker calls a stage
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from ..compat import set_frame_compiler
from ..compiled import Compiled
from ..errors import PlanError
from ..graph.nodes import region_modules
from ..inserted.ops import hide_from_torch_compile, transfer
from ..schedules.tape import Tape

# What compiles frames in the thread that called the pipeline; its workers inherit it.
_COMPILER: contextvars.ContextVar[Any] = contextvars.ContextVar("_COMPILER", default=None)
_NAME = "_compiled_call_impl"  # torch 2.9 to 2.15


@contextlib.contextmanager
def put_aside(compiler: Any) -> Iterator[None]:
    """Until the end, `compiler` compiles stages, and nothing else."""
    token = _COMPILER.set(compiler)
    try:
        yield
    finally:
        _COMPILER.reset(token)


def is_put_aside() -> bool:
    """Whether there is something that compiles stages."""
    return _COMPILER.get() is not None


def called(stage: nn.Module, inputs: Iterable[Any]) -> Any:
    """``stage(*inputs)``, compiled where that was asked for."""
    compiler = _COMPILER.get()
    if compiler is None:
        return stage(*inputs)
    before = set_frame_compiler(compiler)
    try:
        return stage(*inputs)
    finally:
        set_frame_compiler(before)


@contextlib.contextmanager
def as_written(stages: Iterable[nn.Module]) -> Iterator[None]:
    """The stages compute what their code says, operation by operation: compiled kernels round in another way."""
    before = [(stage, vars(stage).pop(_NAME, None)) for stage in stages]
    token = _COMPILER.set(None)
    try:
        yield
    finally:
        _COMPILER.reset(token)
        for stage, compiled in before:
            if compiled is not None:
                vars(stage)[_NAME] = compiled


def compile_modules(stages: Iterable[nn.Module], options: Mapping[str, Any]) -> None:
    """What a call of each of them runs from now on."""
    hide_from_torch_compile()
    for stage in stages:
        stage.compile(**options)


def check_can_be_compiled(
    compiled: Compiled, tapes: Iterable[Tape], options: Mapping[str, Any] | None = None
) -> None:
    """Refuse what a compiled stage cannot do: it is one operation to autograd, and is traced for one set of modules.

    Raises:
        PlanError: names what the plan asks for.
    """
    plan, stages = compiled.plan, compiled.stages
    regions = any(True for s in stages for _ in region_modules(s.module))
    crosses = any(n.target is transfer for s in stages for n in s.module.graph.nodes)
    for excluded, what, remedy in (
        (
            any(tape.halves for tape in tapes),
            f"schedule={plan.schedule_name!r} goes backward in two halves",
            "schedule='1f1b'",
        ),
        (regions, "a checkpoint is computed again, operation by operation", "checkpoint='never'"),
        (
            any(len(s.row) > 1 for s in stages),
            "a stage has replicas",
            "replicas=1, and devices= with one a stage",
        ),
        (any(s.offloaded for s in stages), "weights are fetched for each call", "offload=False"),
        (plan.sync_batch_norm, "sync_batch_norm lets layers wait for each other", "sync_batch_norm=False"),
        (plan.deferred_batch_norm, "deferred_batch_norm puts layers off", "deferred_batch_norm=False"),
        (plan.detect_anomaly, "detect_anomaly looks at each operation", "detect_anomaly=None"),
        (
            bool(options and options.get("fullgraph")) and crosses,
            "fullgraph=True wants one graph, and stages begin with a transfer, which Python makes",
            "compile_stages() without fullgraph",
        ),
    ):
        if excluded:
            raise PlanError(f"stages cannot be compiled by torch.compile: {what}", remedy=remedy)
