"""Steps as a trace in the format of Chrome's trace events, which Perfetto reads too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .step import Event, Step

Row = dict[str, Any]


def trace(steps: Sequence[Step]) -> str:
    """JSON: a process of what was measured and one of what the plan predicts, a thread for each worker, times in µs.

    Waits are events of the category ``wait``; arrows lead from what an instruction of another worker needs.
    """
    rows: list[Row] = []
    workers = list(dict.fromkeys(name for step in steps for name in step.workers))
    predicted = [step.predicted for step in steps]
    for pid, title in ((1, "measured" if steps[0].measured else "simulated"), (2, "predicted")):
        if pid == 1 or any(predicted):
            rows.append(_named("process_name", pid, 0, title))
            rows += [_named("thread_name", pid, tid, name) for tid, name in enumerate(workers)]
    for step, plan in zip(steps, predicted, strict=True):
        rows += _rows(1, step, workers, 0.0)
        rows += _rows(2, plan, workers, step.begin) if plan is not None else []
    return json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}) + "\n"


def _named(what: str, pid: int, tid: int, name: str) -> Row:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _rows(pid: int, step: Step, workers: Sequence[str], later: float) -> list[Row]:
    unit = 1.0 if step.unit == "ms" else 1e-3  # one unit is shown as 1 ms

    def at(time: float) -> int:  # ns: whole numbers, so that what ends and begins at once does not overlap
        return round((time + later) * unit * 1e9)

    def complete(name: str, category: str, worker: str, begin: float, end: float, args: Row) -> Row:
        times = {"ts": at(begin) / 1e3, "dur": (at(end) - at(begin)) / 1e3}
        where = {"pid": pid, "tid": workers.index(worker)}
        return {"name": name, "cat": category, "ph": "X", **times, **where, "args": args}

    rows = []
    for e in step.events:
        first, last = step.compiled.stages[e.stage].modules
        args = {"stage": e.stage, "micro_batches": e.micro_batches, "modules": f"{first} … {last}"}
        rows.append(complete(str(e), e.kind, e.worker, e.begin, e.end, {**args, "device": str(e.device)}))
    for w in step.waits:
        rows.append(complete("wait", "wait", w.worker, w.begin, w.end, {"for": ", ".join(w.needed)}))
    done = {e.instruction.number: e for e in step.events}
    for e in step.events:
        for source in (done[n] for n in e.instruction.after if n in done):
            if source.worker != e.worker and source.end <= e.begin:
                rows += _arrow(pid, source, e, at, workers)
    return rows


def _arrow(pid: int, source: Event, target: Event, at: Any, workers: Sequence[str]) -> list[Row]:
    number = f"{pid}.{at(target.begin)}.{source.instruction.number}.{target.instruction.number}"
    both = {"name": "needs", "cat": "needs", "id": number, "pid": pid}
    begin = {"ph": "s", "ts": at(source.end) / 1e3, "tid": workers.index(source.worker)}
    return [
        {**both, **begin},
        {**both, "ph": "f", "bp": "e", "ts": at(target.begin) / 1e3, "tid": workers.index(target.worker)},
    ]
