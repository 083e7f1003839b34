"""A step as one HTML file that asks the network for nothing; `page.html` has its layout, `page.css` and `page.js` the rest."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from torch import nn

from ..graph.ir import Stage, Traced
from ..graph.nodes import is_within
from ..memory.kept import Kept
from ..plan.sizes import in_units
from ..report.tables import sizes_of, stage_rows
from .chart import AREA, GAP, ROW, areas, chart, least_width, ticks
from .step import Step

_LEGEND = {
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "inputs": "backward of the inputs",
    "weights": "backward of the weights",
    "send": "send",
    "receive": "receive",
}


@dataclass(frozen=True)
class Line:
    """A line of generated code, and the modules whose forward it is of, as far as that is known."""

    text: str
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Module:
    """A module of the model, the stages that compute any of it, and its children."""

    path: str
    name: str
    kind: str
    parameters: str
    stages: tuple[int, ...]
    children: tuple[Module, ...]


def page(model: nn.Module, step: Step, kept: Kept | None) -> str:
    """The page of a step.

    Args:
        kept: what its stages keep for backward; None where nothing is kept, or nobody knows.
    """
    compiled, predicted = step.compiled, step.predicted
    span = max(step.duration, predicted.duration if predicted is not None else 0.0)
    least = least_width(step)
    queued = step.measured and any(e.device.type != "cpu" for e in step.events)
    note = "times of the host: when it told the devices what to do" if queued else ""
    charts = [chart(step, "Measured" if step.measured else "Simulated", note, span, least)]
    if predicted is not None:
        note = (
            f"from the loads of the plan ({compiled.assignment.cost}), a backward twice as long as a forward, "
            "scaled so that all workers together compute as long as measured; nothing but the schedule waits"
        )
        charts.append(chart(predicted, "Predicted", note, span, least))
    rows = stage_rows(compiled.traced, compiled.assignment, sizes_of(model))
    for index, row in enumerate(rows):
        own = sum(e.duration for e in step.events if e.stage == index)
        row["time"] = step.shown(own)
        row["busy"] = f"{own / (step.duration or 1) / max(1, len(compiled.stages[index].row)):.0%}"
    over_time = step.kept(kept) if kept is not None else {}
    kinds = {box.kind for line in charts[0].boxes for box in line}
    text = _template().render(
        name=type(model).__name__,
        compiled=compiled,
        step=step,
        predicted=predicted,
        micro_batches=len({i for e in step.events for i in e.micro_batches}),
        charts=charts,
        ticks=ticks(step, span, least),
        least=least,
        names=max(map(len, step.workers)),
        row=ROW,
        gap=GAP,
        area=AREA,
        areas=areas(over_time, compiled.stages, step, span),
        legend={kind: said for kind, said in _LEGEND.items() if kind in kinds},
        rows=rows,
        stages_share=any(b.below for line in charts[0].boxes for b in line),
        codes=[_lines(stage, compiled.traced) for stage in compiled.stages],
        tree=_tree(model, step),
        css=_file("page.css"),
        js=_file("page.js"),
        js_hash=base64.b64encode(hashlib.sha256(_file("page.js").encode()).digest()).decode(),
    )
    return str(text)


@cache
def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> Any:
    import jinja2  # here, for it takes a while

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_file("page.html"))


def _lines(stage: Stage, traced: Traced) -> list[Line]:
    """The code of a stage. A comment belongs to the line below it."""
    found: list[Line] = []
    modules: tuple[str, ...] = ()
    for text, nodes in reversed(stage.lines()):
        if not text.lstrip().startswith("#"):
            facts = [traced.facts[node] for node in nodes if node in traced.facts]
            modules = tuple(dict.fromkeys(one.module_path for one in facts))
        found.append(Line(text, modules if text.startswith(" ") else ()))
    return found[::-1]


def _tree(model: nn.Module, step: Step) -> Module:
    facts = step.compiled.traced.facts
    used = [(facts[name].module_path, stage.index) for stage in step.compiled.stages for name in stage.nodes]
    pairs = list(dict.fromkeys(used))

    def made(path: str, module: nn.Module) -> Module:
        children = tuple(
            made(f"{path}.{name}" if path else name, child) for name, child in module.named_children()
        )
        stages = sorted({stage for inner, stage in pairs if is_within(inner, path)})
        size = in_units(sum(p.numel() * p.element_size() for p in module.parameters()))
        name = path.rpartition(".")[2] or "(model)"
        return Module(path, name, type(module).__name__, size, tuple(stages), children)

    return made("", model)
