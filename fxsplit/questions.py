"""What people ask of a pipeline: whether it is right, what it keeps, how its stages look."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from html import escape

import torch
from torch import nn

from .compiled import Compiled
from .cost.saved import Live, measured_saved
from .graph.ir import Traced
from .graph.moved import Example
from .graph.nodes import output_names
from .graph.place import has_no_values
from .memory.kept import Kept
from .proof.numerics import verify_numerics
from .proof.plan import in_micro_batches, verify_sizes
from .proof.structure import verify_structure
from .report.tables import html_table, sizes_of, stage_rows, stage_table
from .runtime.engine import Engine, over
from .runtime.torch_compile import as_written
from .trace.spread import Together, is_spread
from .trace.without_values import all_on_meta, without_values


def verify(every: Iterable[Engine], now: Engine, example: Example) -> str:
    """Prove that each program is its traced graph; and, where there are weights, compare the numbers of one with the model's.

    Returns:
        What was shown, a line for each rule.

    Raises:
        VerifyError: names the rule or the first number that differs.
    """
    every, empty = list(every), has_no_values(now.model)
    model, compiled, inputs = now.model, now.compiled, example.for_model(now.model)
    for engine in every:
        if not empty:
            engine.watch.use_current_modules()
        lines = verify_structure(model, engine.compiled.traced, engine.compiled.program)
    if empty:
        return "\n".join([*lines, "numbers: not compared, since the model has no weights yet"])
    # Backward in this thread, which has the lock: autograd's own for a device would wait for it.
    with (
        as_written([stage.module for engine in every for stage in engine.compiled.stages]),
        torch.autograd.set_multithreading_enabled(False),
        torch.set_grad_enabled(compiled.traced.assumptions.grad),
        _runnable(now, example) as (beside, traced),
    ):
        verify_numerics(beside, traced, now.run_whole, inputs, of=model)
        lines.append("numbers: outputs, gradients, buffers and random state equal the model's on the example")
        if compiled.dims.batch_size(inputs) and compiled.plan.micro_batches > 1:
            verify_sizes(beside, traced, compiled.dims, now.micro_batches(inputs)[1], inputs)
            if verify_micro_batches(now, example, inputs):
                lines.append("micro-batches: the same, for the model on one micro-batch after the other")
    return "\n".join(lines)


def verify_micro_batches(now: Engine, example: Example, inputs: Sequence[torch.Tensor]) -> bool:
    """Compare outputs and buffers with the model's on the same micro-batches, one after the other.

    Returns:
        False if they are not comparable: random numbers, or statistics of the whole batch.

    Raises:
        VerifyError: names the first value that differs.
    """
    compiled, (_, rows) = now.compiled, now.micro_batches(inputs)
    plan = compiled.plan
    if now.crew.drawing() or plan.deferred_batch_norm or plan.sync_batch_norm or now.crew.meets(len(rows)):
        return False
    # Without gradients: a loop goes backward with each micro-batch before the next one writes to buffers.
    with _runnable(now, example) as (beside, traced), torch.no_grad():
        whole = in_micro_batches(beside, traced, compiled.dims, compiled.merges, rows)
        verify_numerics(beside, traced, lambda values: now.run_in(rows, values), inputs, whole, of=now.model)
    return True


def memory(now: Engine, example: Example) -> dict[torch.device, Live]:
    """Per device the bytes of activations that a batch like the example keeps for backward, by simulation."""
    crew, count = now.crew, len(now.micro_batches(example.inputs)[1])
    return kept(now, example).by_device(crew.schedule_for(count, crew.meets(count)))


def kept(now: Engine, example: Example) -> Kept:
    """What each stage keeps of each micro-batch of a batch like the example. Runs the model once on it."""
    compiled, inputs = now.compiled, example.for_model(now.model)
    with now.common.lock:
        if has_no_values(now.model):
            with all_on_meta(now.model):
                saved = measured_saved(now.model, _over(now, now.model), without_values(inputs))
        else:
            saved = measured_saved(*_beside(now, example), inputs)
    count = len(now.micro_batches(example.inputs)[1])
    return Kept(saved, compiled.traced, compiled.stages, count, compiled.plan.recomputation)


def report(model: nn.Module, compiled: Compiled) -> str:
    """The stage table, and what there is to say of how outputs merge."""
    table = stage_table(compiled.plan, compiled.traced, compiled.assignment, sizes_of(model))
    named = zip(output_names(compiled.traced), compiled.merges, strict=False)
    merges = [f"{name}: {m.how} over micro-batches, {m.note}" for name, m in named if m.note]
    return "\n".join([table, *merges])


def as_html(model: nn.Module, compiled: Compiled, headline: str) -> str:
    """What a notebook shows: a table of the stages, and the code of each, folded."""
    rows = stage_rows(compiled.traced, compiled.assignment, sizes_of(model))
    return f"<p>{escape(headline)}</p>{html_table(rows)}" + "".join(s._repr_html_() for s in compiled.stages)


def _beside(engine: Engine, example: Example) -> tuple[nn.Module, Traced]:
    """The model and its graph where the example is: a copy, where the model has been moved."""
    model = example.beside(engine.model)
    if model is engine.model:
        return model, engine.compiled.traced
    return model, _over(engine, model)


@contextlib.contextmanager
def _runnable(engine: Engine, example: Example) -> Iterator[tuple[nn.Module, Traced]]:
    """The model and its graph, which can be run within: where they are if they are spread, else where the example is."""
    if not is_spread(engine.model):
        yield _beside(engine, example)
        return
    with Together(engine.model):
        yield engine.model, engine.compiled.traced


def _over(engine: Engine, model: nn.Module) -> Traced:
    """The graph over another model, or over what the model has now."""
    return over({True: engine.compiled}, model)[True].traced
