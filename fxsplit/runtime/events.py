"""What users' logging sees of a call: an event for each action."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..schedules.schedule import Action
from ..schedules.tape import Instruction


@dataclass(frozen=True)
class ActionEvent:
    """One action that is done.

    Attributes:
        action: what; ``str(event.action)`` is such as ``2F0``.
        device: of the stage.
        worker: name of the thread.
        begin, end: seconds of `time.perf_counter`.
    """

    action: Action
    device: torch.device
    worker: str
    begin: float
    end: float


ActionHook = Callable[[ActionEvent], object]


def announced(
    act: Callable[[Instruction], None],
    device_of: Callable[[Instruction], torch.device],
    hooks: Sequence[ActionHook],
) -> Callable[[Instruction], None]:
    """`act`, after which every hook is called, in the worker's thread. An error of a hook is one of the action."""

    def watched(instruction: Instruction) -> None:
        begin = time.perf_counter()
        act(instruction)
        end = time.perf_counter()
        for action in instruction.actions:
            name = threading.current_thread().name
            event = ActionEvent(action, device_of(instruction), name, begin, end)
            for hook in hooks:
                hook(event)

    return watched if hooks else act
