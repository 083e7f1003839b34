"""`Timeline`: the steps that were recorded, and the files that show them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from torch import nn

from ..compiled import Compiled
from ..errors import ArgumentError
from ..memory.kept import Kept
from ..runtime.events import Played
from .page import page
from .step import Event, Step
from .trace import trace

_REMEDY = 'timeline.save("page.html"), or timeline.save("trace.json") for Perfetto'


class Timeline:
    """What ``with pipe.timeline() as timeline:`` records: when each instruction began and ended, step by step.

    ``print(timeline)`` says how long a step took and how busy the workers were. Times are the host's: of a device with
    queues, such as a GPU, they are those at which it was told what to do. ``len``, indexing and iteration give the steps.

    Args:
        model: the user's, whose modules the page shows.
        measure: what the stages of a program keep for backward; None where nobody knows.
        steps: of a simulation.
    """

    def __init__(
        self, model: nn.Module, measure: Callable[[Compiled], Kept | None], steps: Iterable[Step] = ()
    ) -> None:
        self._model, self._measure, self._given = model, measure, tuple(steps)
        self._began = time.perf_counter()
        self._heard: list[Played] = []

    def hear(self, played: Played) -> None:
        """One instruction more; called by the threads of the workers."""
        self._heard.append(played)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The calls of the pipeline, in order; a ``pipe(x)`` and its backward are one."""
        calls: dict[int, list[Played]] = {}
        for played in list(self._heard):
            calls.setdefault(played.call, []).append(played)
        return self._given + tuple(self._step(calls[number]) for number in sorted(calls))

    def _step(self, row: list[Played]) -> Step:
        tape = row[0].tape
        events = [
            Event(
                x.instruction,
                tape.names[tape.worker_of[x.instruction.number]],
                x.device,
                x.begin - self._began,
                x.end - self._began,
            )
            for x in sorted(row, key=lambda x: x.begin)
        ]
        return Step(row[0].compiled, tape, tuple(events))

    @property
    def events(self) -> list[Event]:
        """Those of all steps."""
        return [event for step in self.steps for event in step.events]

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> Step:
        return self.steps[index]

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def save(self, path: str | os.PathLike[str], step: int = -1) -> None:
        """Write a page (``.html``), or a trace for Perfetto and chrome://tracing (``.json``), by the name of the file.

        The page is one file that asks the network for nothing: one step beside what the plan predicts, what each stage
        keeps for backward over time (as `Pipeline.memory` measures it, by running the model once on the example), the
        stages with their code, and the modules. The trace has all steps, and what the plan predicts for each.

        Args:
            step: which one the page shows; by default the last one.

        Raises:
            ArgumentError: another suffix; nothing was recorded; or there is no such step.
            OSError: the file cannot be written.
        """
        if not isinstance(path, str | os.PathLike):
            raise ArgumentError(f"the file is a {type(path).__name__}", remedy=_REMEDY)
        file, steps = Path(os.fsdecode(path)), self.steps
        if file.suffix not in (".html", ".json"):
            raise ArgumentError(f"{file.name!r} is neither a page nor a trace", remedy=_REMEDY)
        if not steps:
            raise ArgumentError(
                "nothing was recorded",
                remedy="with pipe.timeline() as timeline: pipe.step(x, target=y, loss_fn=f)",
            )
        if file.suffix == ".json":
            text = trace(steps)
        else:
            try:
                shown = steps[step]
            except (IndexError, TypeError):
                raise ArgumentError(
                    f"step={step!r}: {len(steps)} were recorded", remedy=f"0 … {len(steps) - 1}, or -1"
                ) from None
            text = page(self._model, shown, self._measure(shown.compiled) if shown.goes_backward else None)
        file.write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        steps = self.steps
        if not steps:
            return "nothing was recorded"
        before = [step.shown(step.duration) for step in steps[:-1]]
        return (f"after steps of {', '.join(before)}, the last:\n" if before else "") + str(steps[-1])

    def __repr__(self) -> str:
        return f"Timeline({len(self)} steps, {len(self.events)} events)"
