"""Playing the tape of a call: its forwards, its backwards, or all of it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..compat import parameter_hooks_silenced
from ..loss.check import check_differentiable
from ..loss.inside import LossInside
from ..schedules.tape import Instruction, Tape
from .call import Call
from .events import announced
from .instructions import PLAYS
from .unsaid import unchanged
from .worker import play, play_serially, threads_of_each, using


def forward(call: Call) -> list[list[Any]]:
    """Play the forwards. Returns per micro-batch the flat outputs, without graph."""
    with _first(call):
        _play(call, call.tape.forward)
    call.written.arrive()
    return call.results()


def backward(call: Call, gradients: Sequence[dict[str, Any]], *, keep_graph: bool) -> None:
    """Play the backwards. Afterwards the call has the gradients of inputs and parameters.

    Args:
        gradients: per micro-batch the gradient of each output value, by name.
        keep_graph: whether this call may be played backward again.
    """
    call.keep_graph = keep_graph
    call.values.forget_gradients()
    for i, row in enumerate(gradients):
        for name, gradient in row.items():
            call.values.receive(name, i, [gradient])
    call.begin_sums()
    with parameter_hooks_silenced(list(call.parameters.values())):
        _play(call, call.tape.backward)
    if not keep_graph:
        call.records.clear()


def step(call: Call, loss: LossInside) -> None:
    """Play all of it, with the losses in it. Afterwards the call has the gradients of inputs and parameters.

    Raises:
        GradientError: nothing requires a gradient.
    """
    call.loss = loss
    call.begin_sums()
    with _first(call), parameter_hooks_silenced(list(call.parameters.values())):
        _play(call, call.tape)
    call.written.arrive()
    if call.how.hub.everything or call.how.hub.has(len(call.program.stages) - 1):
        check_differentiable(loss.differentiable)


def silently(call: Call) -> None:
    """Play all of it in a process that has not the loss. Afterwards the call has the gradients of its own stages."""
    call.begin_sums()
    with _first(call), parameter_hooks_silenced(list(call.parameters.values())):
        _play(call, call.tape)
    call.written.arrive()


@contextlib.contextmanager
def _first(call: Call) -> Iterator[None]:
    """The part of a call in which stages go forward, and it draws random numbers for the first time, where it does."""
    try:
        with unchanged(call.how.shared) if call.how.shared else contextlib.nullcontext():
            yield
    finally:
        if call.seed is not None:
            call.seed.settle()


def _play(call: Call, tape: Tape) -> None:
    run = call.lanes.queued(announced(call, functools.partial(act, call)))

    if not call.how.hub.everything:
        run = call.how.hub.begins(call, tape, run)

    def play_one(instruction: Instruction) -> None:
        try:
            run(instruction)
        except BaseException as error:
            error.add_note(call.where(instruction, error))
            raise

    # A backward of a stage stays in its worker. Autograd's thread for the device may be the one that waits here.
    fetching = call.fetching.playing(tape) if call.fetching is not None else contextlib.nullcontext()
    with call.lanes.fenced(), fetching, torch.autograd.set_multithreading_enabled(False):
        if call.serial and not tape.meets:
            # What is compiled is compiled for the threads that the workers of later calls will use.
            share = threads_of_each(call.tape, call.how.intra_op)
            with using(share) if call.how.compiled and len(call.chunks) > 1 else contextlib.nullcontext():
                play_serially(tape, play_one)
        else:
            play(tape, play_one, call.how.intra_op, call if tape.meets else None, call.how.inside)


def act(call: Call, instruction: Instruction) -> None:
    """Replicas of a stage that writes to its buffers take turns: one may be computing the other's forward again."""
    if instruction.kind in ("loss", "send", "receive") or not (call.turns or call.fetching):
        PLAYS[instruction.kind](call, instruction)
        return
    turn = call.turns.get(instruction.stage, contextlib.nullcontext())
    fetched = call.fetching.around(instruction) if call.fetching is not None else contextlib.nullcontext()
    with turn, fetched:
        PLAYS[instruction.kind](call, instruction)
