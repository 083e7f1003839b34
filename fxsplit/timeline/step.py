"""The events of one call, and what follows from them: who was busy, who waited for whom, what is kept when."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from ..compiled import Compiled
from ..memory.kept import Kept
from ..schedules.simulate import planned, timeline
from ..schedules.tape import Instruction, Kind, Tape


@dataclass(frozen=True)
class Event:
    """One instruction, and when it was played.

    Attributes:
        instruction: what; ``str(event)`` is such as ``2F0``, and ``2L0`` for a loss.
        worker: whose, such as ``"stage 2.0"``.
        device: of the stage.
        begin: seconds since the recording began; of a simulated step without costs, units.
        end: the same.
    """

    instruction: Instruction
    worker: str
    device: torch.device
    begin: float
    end: float

    @property
    def kind(self) -> Kind:
        """``"forward"``, ``"loss"``, ``"backward"``, or one of its halves, ``"inputs"`` and ``"weights"``."""
        return self.instruction.kind

    @property
    def stage(self) -> int:
        """Whose code it runs."""
        return self.instruction.stage

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Several where those that met go backward as one."""
        return self.instruction.micro_batches

    @property
    def duration(self) -> float:
        """In seconds, or units."""
        return self.end - self.begin

    def __str__(self) -> str:
        return str(self.instruction)


@dataclass(frozen=True)
class Wait:
    """A gap of a worker before an instruction that needs what was not done yet.

    Attributes:
        worker: whose.
        before: what is played after it.
        needed: what it waited for.
        begin: seconds, as of an `Event`.
        end: the same.
    """

    worker: str
    before: Event
    needed: tuple[str, ...]
    begin: float
    end: float


@dataclass(frozen=True, eq=False)
class Step:
    """One call: a step, or a ``pipe(x)`` with its backward, if one came.

    Attributes:
        compiled: the program, and what it was made of.
        tape: that of the call.
        events: in the order in which they began.
        unit: ``"ms"`` where times are seconds, or ``"units"``.
        measured: or else simulated.
    """

    compiled: Compiled
    tape: Tape
    events: tuple[Event, ...]
    unit: Literal["ms", "units"] = "ms"
    measured: bool = True

    @property
    def begin(self) -> float:
        """When the first event began."""
        return self.events[0].begin

    @cached_property
    def duration(self) -> float:
        """From the first event to the end of the last one; what a call does before and after is not in it."""
        return max(e.end for e in self.events) - self.begin

    @cached_property
    def workers(self) -> tuple[str, ...]:
        """Those that play anything, in the order of the tape."""
        playing = {e.worker for e in self.events}
        return tuple(name for name in self.tape.names if name in playing)

    def of(self, worker: str) -> list[Event]:
        """What a worker plays."""
        return [e for e in self.events if e.worker == worker]

    @cached_property
    def busy(self) -> dict[str, float]:
        """Worker → the share of the step in which it computes."""
        return {w: sum(e.duration for e in self.of(w)) / (self.duration or 1) for w in self.workers}

    @property
    def bubble(self) -> float:
        """The idle share of the workers."""
        return 1 - statistics.fmean(self.busy.values())

    @property
    def goes_backward(self) -> bool:
        """Whether any of it is of the half that goes backward."""
        return any(e.kind in ("backward", "inputs") for e in self.events)

    @cached_property
    def waits(self) -> tuple[Wait, ...]:
        """The gaps before instructions of which something that they come after was not done yet."""
        done = {e.instruction.number: e for e in self.events}
        found = []
        for worker in self.workers:
            free = self.begin
            for event in self.of(worker):
                needs = [done[n] for n in event.instruction.after if n in done]
                late = tuple(str(e) for e in needs if e.end > free and e.worker != worker)
                if late and event.begin > free:
                    found.append(Wait(worker, event, late, free, event.begin))
                free = event.end
        return tuple(found)

    @cached_property
    def outside(self) -> tuple[float, float] | None:
        """When the caller had it, between the forwards and the backwards, for a loss outside of the schedule."""
        ahead = [e.end for e in self.events if e.instruction.is_forward or e.kind == "loss"]
        behind = [e.begin for e in self.events if not (e.instruction.is_forward or e.kind == "loss")]
        between = (max(ahead), min(behind)) if ahead and behind else (0.0, 0.0)
        return between if between[0] < between[1] else None

    @cached_property
    def predicted(self) -> Step | None:
        """The same step as the plan has it, with the loads of its stages, scaled so that all workers compute as long.

        None of a simulated step, and of the part of a step that one of several ranks plays: it waits for what others do.
        """
        tape = self.tape if self.goes_backward else self.tape.forward
        if not self.measured or any(x.packet is not None for x in tape.order):
            return None
        times = planned(tape, _loads(self.compiled, tape))
        scale = sum(e.duration for e in self.events) / sum(end - begin for begin, end in times)
        times = [(begin * scale, end * scale) for begin, end in times]
        return _simulated(self.compiled, tape, times, self.unit)

    def kept(self, kept: Kept) -> dict[int, list[tuple[float, float]]]:
        """Stage → (time, bytes that it keeps for backward from then on), by the events; empty without a backward."""
        if not self.goes_backward:
            return {}
        changes: dict[int, list[tuple[float, float]]] = {}
        for event in self.events:
            for action in event.instruction.actions:
                row, size = changes.setdefault(action.stage, []), kept.nbytes(action)
                if action.kind == "F":
                    row.append((event.begin, size))
                elif action.kind == "B" or (action.kind == "W") == kept.to_the_end(action):
                    row.append((event.end, -size))
        found: dict[int, list[tuple[float, float]]] = {}
        for stage in sorted(changes):
            now, row = 0.0, found.setdefault(stage, [])
            for when, change in sorted(changes[stage]):
                now += change
                row.append((when, now))
        return found

    def shown(self, time: float) -> str:
        """``3.14 ms``."""
        return f"{time * 1e3:.2f} ms" if self.unit == "ms" else f"{time:.2f} units"

    def __str__(self) -> str:
        plan, width = self.compiled.plan, max(map(len, self.workers))
        waits = {w: sum(x.end - x.begin for x in self.waits if x.worker == w) for w in self.workers}
        predicted = f", predicted {self.predicted.bubble:.1%}" if self.predicted else ""
        count = len({i for e in self.events for i in e.micro_batches})
        return "\n".join(
            [
                f"{self.shown(self.duration)}: {plan.schedule_name}, {len(self.compiled.stages)} stages, "
                f"{count} micro-batch{'es' * (count != 1)}",
                *(
                    f"{w:<{width}}  busy {self.busy[w]:6.1%}, waits {self.shown(waits[w])}"
                    for w in self.workers
                ),
                f"bubble {self.bubble:.1%}{predicted}",
            ]
        )


def simulated(compiled: Compiled, tape: Tape, seconds: Callable[[Instruction], float] | None) -> Step:
    """A step in which every instruction begins as soon as its worker is free and it may.

    Args:
        seconds: of an instruction. Without, the plan's loads: the unit is the forward of one micro-batch through the mean
            stage, and a backward takes twice as long as the forward.
    """
    if seconds is not None:
        return _simulated(compiled, tape, timeline(tape, seconds), "ms")
    return _simulated(compiled, tape, planned(tape, _loads(compiled, tape)), "units")


def _loads(compiled: Compiled, tape: Tape) -> list[float]:
    """Of one micro-batch, by the plan; the mean stage's is 1. A replica's load is of its share of the batch."""
    count = 1 + max(i for x in tape.instructions for i in x.micro_batches)
    assignment = compiled.assignment
    pairs = zip(assignment.loads, assignment.replicas, strict=True)
    each = [load / math.ceil(count / replicas) for load, replicas in pairs]
    mean = statistics.fmean(each)
    return [load / mean for load in each] if mean else [1.0] * len(each)


def _simulated(
    compiled: Compiled, tape: Tape, times: Sequence[tuple[float, float]], unit: Literal["ms", "units"]
) -> Step:
    events = []
    for x in tape.order:
        device = compiled.stages[x.stage].device_of(x.micro_batches[0])
        begin, end = times[x.number]
        events.append(Event(x, tape.names[tape.worker_of[x.number]], device, begin, end))
    return Step(compiled, tape, tuple(sorted(events, key=lambda e: (e.begin, e.end))), unit, measured=False)
