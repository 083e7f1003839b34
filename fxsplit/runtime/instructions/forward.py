"""A stage goes forward with a micro-batch.

Every stage has a small autograd graph of its own for each micro-batch, from leaves to what it gives, detached from
those of the others; the runtime carries gradients from one to the next::

      stage 0             handed over           stage 1
    x ─▶ · · · ─▶ y    ──── y.detach() ────▶  y' ─▶ · · · ─▶ z
                  dy   ◀─────── dy ─────────  dy' ◀─ · · · ◀─ dz
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...compat import tree_leaves
from ...graph.ir import Stage
from ...inserted.ops import Computing
from ...inserted.random import Stream, seeded
from ...replicas.replicas import Replica
from ...schedules.tape import Instruction
from ..anomaly import run_watched
from ..call import Call, Record
from ..torch_compile import called
from ..unsaid import as_said
from ..wiring import Role


def forward(call: Call, instruction: Instruction) -> None:
    """Compute what the stage gives, and hand it over."""
    role, (i,) = call.wiring.roles[instruction.stage], instruction.micro_batches
    stage = role.stage
    if instruction.beside:
        call.meetings.enter(instruction.beside)
    inputs = _inputs(call, stage, i)
    with contextlib.ExitStack() as around:
        if call.seed is not None and stage.index in call.how.drawing:
            around.enter_context(random_numbers(call, stage, i))
        around.enter_context(torch.set_grad_enabled(call.how.grad))
        result, crossings = _computed(call, role, i, inputs)
        if call.fetching is not None:
            result = call.fetching.own(stage.index, result)
        outputs = dict(zip(stage.outputs, (result,) if len(stage.outputs) == 1 else result, strict=True))
        if call.how.grad:
            _keep(call, stage, i, (inputs, outputs), crossings)
        for name, value in outputs.items():
            call.values.give(name, i, value)


def random_numbers(call: Call, stage: Stage, i: int) -> contextlib.AbstractContextManager[object]:
    """Those of one micro-batch, in a call that draws."""
    assert call.seed is not None
    # A checkpoint of the user's saves and restores the default generator's own state; compiled code draws from it.
    if stage.rng_state or call.how.compiled:
        call.seed.use()
        return seeded(call.seed.of(i, stage.index), stage.device)
    return Stream(functools.partial(call.seed.of, i, stage.index), drawn=call.seed.use)


def _inputs(call: Call, stage: Stage, i: int) -> dict[str, Any]:
    """The inputs of a stage; several names of one tensor are one leaf."""
    taken: dict[str, Any] = {}
    inputs = {}
    for name in stage.inputs:
        value = call.values.take(name, i)
        if call.lanes.has_queues:
            call.lanes.uses(stage.index, i, tree_leaves(value))
        inputs[name] = taken.setdefault(call.values.same.get((name, i), name), value)
    return inputs


def _computed(
    call: Call, role: Role, i: int, inputs: Mapping[str, Any]
) -> tuple[Any, Sequence[tuple[torch.Tensor, torch.Tensor]]]:
    """What its code gives, and the tensors that have changed device on the way."""
    stage, how = role.stage, call.how
    replica: Replica = call.replica(stage.index, i)
    meets = stage.index in call.tape.meets
    norming = None if call.norms is None else call.norms.around(stage, i, meets=meets)
    with contextlib.ExitStack() as around:
        crossings: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
        if role.asks:
            crossings = around.enter_context(
                Computing(
                    call.lanes.move,
                    recompute=call.how.checkpoint.recomputes(i),
                    again=None if norming is None else norming.again,
                    own_numbers=(len(call.chunks) == 1 and call.seed is None)
                    or stage.rng_state
                    or call.how.compiled,
                )
            )
        if norming is not None:
            around.enter_context(norming)
        if not meets:  # copies that meet see to it themselves
            if stage.index in how.watched:
                around.enter_context(as_said(stage, replica.module))
            if replica.buffers:
                around.enter_context(call.written.carried(stage, i))
        if how.anomaly is None and not how.asked:
            if how.compiled:
                return called(replica.module, inputs.values()), crossings
            return replica.module(*inputs.values()), crossings
        return run_watched(replica.module, inputs.values(), how.anomaly, asked=how.asked), crossings


def _keep(
    call: Call,
    stage: Stage,
    i: int,
    values: tuple[Mapping[str, Any], Mapping[str, Any]],
    crossings: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Leave a record for the backward."""
    moved, record = {}, Record({}, {}, {})
    for tensor, arrived in crossings:
        moved[id(tensor)] = arrived
        record.homes[id(arrived)] = tensor.device
    for name, value in values[0].items():
        leaves = tree_leaves(value)
        record.inputs[name] = [moved.get(id(leaf), leaf) for leaf in leaves] if moved else leaves
    for name, value in values[1].items():
        record.outputs[name] = leaves = tree_leaves(value)
        for leaf in leaves:  # of a view that was written in place, autograd makes it when it is asked
            _ = leaf.grad_fn if isinstance(leaf, torch.Tensor) else None
    call.records[stage.index, i] = record
    if call.wiring.program.aliases:
        _note_aliases(call, record, i)


def _note_aliases(call: Call, record: Record, i: int) -> None:
    """Which of the values that a stage gives are one tensor, in this micro-batch."""
    known: dict[int, str] = {}
    for name, leaves in (*record.inputs.items(), *record.outputs.items()):
        if len(leaves) == 1 and isinstance(leaves[0], torch.Tensor):
            first = known.setdefault(id(leaves[0]), call.values.same.get((name, i), name))
            if first != name and name in call.wiring.program.aliases:
                call.values.same[name, i] = first
