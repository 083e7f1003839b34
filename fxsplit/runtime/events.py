"""What others see of a call: a `Played` for each instruction, and of these an event for each action."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..compiled import Compiled
from ..schedules.schedule import Action
from ..schedules.tape import Instruction, Tape

if TYPE_CHECKING:
    from .call import Call


@dataclass(frozen=True)
class ActionEvent:
    """One action that is done.

    Attributes:
        action: what; ``str(event.action)`` is such as ``2F0``.
        device: of the stage.
        worker: name of the thread.
        begin: seconds of `time.perf_counter`.
        end: the same.
    """

    action: Action
    device: torch.device
    worker: str
    begin: float
    end: float


ActionHook = Callable[[ActionEvent], object]


@dataclass(frozen=True)
class Played:
    """One instruction that is done. It keeps no tensor of the call.

    Attributes:
        call: number of the call that it is of; the forward and the backward of a ``pipe(x)`` are one call.
        compiled: what is played.
        tape: that of the whole call.
        device: of the stage.
        thread: name of it.
        begin: seconds of `time.perf_counter`.
        end: the same.
    """

    call: int
    compiled: Compiled
    tape: Tape
    instruction: Instruction
    device: torch.device
    thread: str
    begin: float
    end: float


Listener = Callable[[Played], object]


def for_each_action(hook: ActionHook) -> Listener:
    """Calls `hook` for each action of an instruction; the loss and packets are none."""

    def listener(played: Played) -> None:
        for action in played.instruction.actions:
            hook(ActionEvent(action, played.device, played.thread, played.begin, played.end))

    return listener


def announced(call: Call, act: Callable[[Instruction], None]) -> Callable[[Instruction], None]:
    """`act`, after which every listener is called, in the worker's thread. An error of one is that of the instruction."""
    listeners = call.how.listeners

    def watched(instruction: Instruction) -> None:
        begin = time.perf_counter()
        act(instruction)
        end = time.perf_counter()
        device, thread = call.device_of(instruction), threading.current_thread().name
        played = Played(call.number, call.how.compiled_as, call.tape, instruction, device, thread, begin, end)
        for listener in listeners:
            listener(played)

    return watched if listeners else act
