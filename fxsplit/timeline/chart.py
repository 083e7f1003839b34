"""Where the boxes, waits and areas of a page are: in percent of the width of the time axis, and pixels of height."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..graph.ir import Stage
from ..plan.sizes import in_units
from .step import Event, Step

ROW = 34  # pixels of a worker's row, and of the gap below it
GAP = 8
WRITTEN = 7.5  # of a letter in a box
AREA = 46  # of a stage's area
_KINDS = {"inputs": "backward of the inputs", "weights": "backward of the weights"}


@dataclass(frozen=True)
class Box:
    """An event: where it is, what is written in it, and what is said of it; `tight` where the text may not fit."""

    kind: str
    left: float
    width: float
    top: int
    text: str
    below: str
    tip: str
    tight: bool = False


@dataclass(frozen=True)
class Chart:
    """One row of boxes for each worker.

    Attributes:
        rows: name of a worker, and what is said beside it.
        boxes: per row.
        waits: as boxes.
        outside: left and width of what the caller does in the middle of the step.
        ticks: of the axis: where, and what is written there.
    """

    title: str
    note: str
    rows: list[tuple[str, str]]
    boxes: list[list[Box]]
    waits: list[Box]
    outside: tuple[float, float] | None
    height: int


@dataclass(frozen=True)
class Area:
    """What one stage keeps over time, as the points of a path in a field of 1000 by 100."""

    name: str
    most: str
    path: str
    tip: str


def chart(step: Step, title: str, note: str, span: float, least: float) -> Chart:
    """The rows of a step.

    Args:
        span: time of the whole width.
        least: pixels that the width has at least.
    """
    several = {w: len({e.stage for e in step.of(w)}) > 1 for w in step.workers}
    boxes = []
    for row, worker in enumerate(step.workers):
        top = row * (ROW + GAP)
        shown = [
            e for e in step.of(worker) if step.measured or e.duration > 0
        ]  # a simulated loss takes no time
        boxes.append([_box(step, e, span, least, top, several=several[worker]) for e in shown])
    waits = [
        Box(
            "wait",
            _percent(w.begin - step.begin, span),
            _percent(w.end - w.begin, span),
            step.workers.index(w.worker) * (ROW + GAP),
            "",
            "",
            f"{w.worker} waits for {', '.join(w.needed)}\n{step.shown(w.end - w.begin)}",
        )
        for w in step.waits
    ]
    outside = step.outside
    return Chart(
        title,
        note,
        [(w, f"{step.busy[w]:.0%} busy") for w in step.workers],
        boxes,
        waits,
        outside and (_percent(outside[0] - step.begin, span), _percent(outside[1] - outside[0], span)),
        len(step.workers) * (ROW + GAP),
    )


def _box(step: Step, e: Event, span: float, least: float, top: int, *, several: bool) -> Box:
    width = _percent(e.duration, span)
    number, below = "+".join(map(str, e.micro_batches)), f"s{e.stage}" if several else ""
    tight = width / 100 * least < max(WRITTEN * len(number), WRITTEN * len(below)) + 3

    batch = f"micro-batch{'es' * (len(e.micro_batches) > 1)} {', '.join(map(str, e.micro_batches))}"
    tip = "\n".join(
        (
            f"{e}: {_KINDS.get(e.kind, e.kind)} of stage {e.stage}, {batch}",
            f"{span_of(step.compiled.stages[e.stage])} on {e.device}",
            f"{step.shown(e.duration)}, from {step.shown(e.begin - step.begin)}",
        )
    )
    left = _percent(e.begin - step.begin, span)
    return Box(e.kind, left, width, top, number, below, tip, tight)


def span_of(stage: Stage) -> str:
    """First and last of its modules."""
    first, last = (path or "(model)" for path in stage.modules)
    return first if first == last else f"{first} … {last}"


def least_width(step: Step) -> float:
    """Pixels at which a usual box can be read, within reason."""
    usual = statistics.median([e.duration for e in step.events if e.duration] or [step.duration])
    return round(min(max(620.0, 17 * step.duration / (usual or 1)), 6000.0))


def ticks(step: Step, span: float, least: float) -> list[tuple[float, str, bool]]:
    """Where the time axis has a number, in percent, which, and whether it is left out where the width is a screen's."""
    whole = span * (1e3 if step.unit == "ms" else 1)
    if whole <= 0:
        return [(0.0, "0", False)]
    few, many = _round(whole / 8), _round(whole / max(8, least / 100))
    found = []
    for k in range(int(whole / many * 1.000001) + 1):
        among_few = abs(k * many / few - round(k * many / few)) < 1e-6
        found.append((_percent(k * many, whole), f"{k * many:g}", not among_few))
    return found


def _round(length: float) -> float:
    """The next of 1, 2, 5, 10, 20, …"""
    power = 10.0 ** math.floor(math.log10(length))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= length)


def areas(
    kept: dict[int, list[tuple[float, float]]], stages: Sequence[Stage], step: Step, span: float
) -> list[Area]:
    """What each stage keeps over time; all on one scale."""
    highest = max((size for row in kept.values() for _, size in row), default=0.0)
    found = []
    for index, row in kept.items():
        x, y, points = 0.0, 100.0, ["M0 100"]
        for when, size in row:
            x = 10 * _percent(when - step.begin, span)
            points.append(f"L{x:.2f} {y:.2f}")
            y = 100 - 96 * max(size, 0.0) / (highest or 1)
            points.append(f"L{x:.2f} {y:.2f}")
        points.append(f"L{x:.2f} 100Z")
        most = in_units(max(size for _, size in row))
        tip = f"stage {index} ({span_of(stages[index])}) keeps at most {most} for backward"
        found.append(Area(f"stage {index}", most, "".join(points), tip))
    return found


def _percent(time: float, span: float) -> float:
    return round(100 * time / span, 4) if span else 0.0
