"""What users' logging sees of a call: an event for each action."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..actions import Action


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
    act: Callable[[Action], None], device_of: Callable[[Action], torch.device], hooks: Sequence[ActionHook]
) -> Callable[[Action], None]:
    """`act`, after which every hook is called, in the worker's thread. An error of a hook is one of the action."""

    def watched(action: Action) -> None:
        begin = time.perf_counter()
        act(action)
        name = threading.current_thread().name
        event = ActionEvent(action, device_of(action), name, begin, time.perf_counter())
        for hook in hooks:
            hook(event)

    return watched if hooks else act
