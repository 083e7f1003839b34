"""What a worker does for each kind of instruction."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...schedules.tape import Instruction, Kind
from ..call import Call
from .backward import backward
from .forward import forward
from .loss import loss
from .message import message
from .weights import weights

PLAYS: Mapping[Kind, Callable[[Call, Instruction], None]] = {
    "forward": forward,
    "loss": loss,
    "backward": backward,
    "inputs": backward,
    "weights": weights,
    "send": message,
    "receive": message,
}
