"""The heaviest load of the chosen cut, beside what other methods choose among the same units of the same graph.

Seven models at real sizes on the meta device, those whose library is installed; work is the roofline's on an A100, for
forward and backward of one training batch, in 2, 4 and 8 stages with links of 200 and 20 GB/s. A load is work and the
distinct bytes in and out by the link, added up from the graph (`cuts.captured`). Each is a ratio to the best that anything
found: any method, then a search that keeps neither to an order nor to a time that anyone would wait, and HiGHS, which looks
for a better assignment of single units to stages; "certified" says that it has proven that there is none that is 0.01 %
better.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from fxsplit.partition.explain import simulator
from fxsplit.partition.planner import plan_stages

from .children import ChildError, in_child
from .cuts.captured import LINKS, STAGES, Captured
from .cuts.certify import certify
from .cuts.orders import Orders, spread
from .cuts.search import long_search
from .models import LARGE, available, load_torchvision
from .part import Options
from .partitioners import by_torchgpipe
from .peers import installed
from .report import Report

QUESTION = "How good is the cut?"
MINUTES = 4.0
METHODS = {
    "fxsplit": "**fxsplit**",
    "search": '**fxsplit, `effort="search"`**',
    "in order": "lightest cut in program order",
    "torchgpipe": "torchgpipe's block partition of the times",
    "time": "time alone, exact",
    "units": "as many units in each stage",
    "parameters": "parameters, exact (what DeepSpeed balances)",
}


@dataclass(frozen=True)
class Effort:
    """Seconds of search and of HiGHS in each case, and which cases."""

    search: float = 1.5
    certify: float = 3.0
    stages: tuple[int, ...] = STAGES
    links: tuple[float, ...] = LINKS


@dataclass(frozen=True)
class Case:
    """One model in so many stages with one link.

    Attributes:
        ratios: method → heaviest load to the best.
        certified: nothing is better than the best.
        seconds: of planning, without and with ``effort="search"``.
    """

    model: str
    stages: int
    link: float
    units: int
    ratios: dict[str, float]
    certified: bool
    seconds: tuple[float, float]


def cases_of(name: str, effort: Effort) -> list[Case]:
    """All cases of one model."""
    load_torchvision()
    return list(_cases(name, effort))


def _cases(name: str, effort: Effort) -> Iterator[Case]:
    captured = Captured(LARGE[name][1])
    count, plain = len(captured.units), np.arange(len(captured.units))
    for link in effort.links:
        orders = Orders(captured.work, captured.values, link)
        timed, weighed = Orders(captured.work, [], link), Orders(captured.parameters(), [], link)
        for stages in effort.stages:
            problem, simulate = captured.problem(stages, link), simulator(captured.plan(stages, link))
            took = []
            for _ in range(3):
                start = time.perf_counter()
                planned = plan_stages(problem, simulate)
                took.append(time.perf_counter() - start)
            start = time.perf_counter()
            searched = plan_stages(problem, simulate, search=True)
            long = time.perf_counter() - start
            cuts = {
                "fxsplit": np.array(planned.cut.stage_of()),
                "search": np.array(searched.cut.stage_of()),
                "in order": orders.lightest(plain, stages)[1],
                "time": timed.lightest(plain, stages)[1],
                "units": spread(plain, [count * s // stages for s in range(stages)]),
                "parameters": weighed.lightest(plain, stages)[1],
            }
            if installed("torchgpipe") and 0 not in (counts := by_torchgpipe(captured.work, stages)):
                cuts["torchgpipe"] = spread(plain, np.cumsum([0, *counts[:-1]]))
            loads = {method: max(captured.loads(cut, stages, link)) for method, cut in cuts.items()}
            if not math.isclose(loads["fxsplit"], planned.bottleneck, rel_tol=1e-9):
                raise ValueError(
                    f"{name}: the planner says {planned.bottleneck}, the graph {loads['fxsplit']}"
                )
            starts = [(loads[method], cuts[method]) for method in loads]
            _, cut = long_search(captured, orders, problem, stages, link, starts, effort.search)
            best, certified = max(captured.loads(cut, stages, link)), False
            until = time.perf_counter() + effort.certify
            while (left := until - time.perf_counter()) > 1:  # again where it finds a better one
                word, _, better = certify(captured, problem, stages, link, best, left)
                certified = word == "certified"
                if better is None:
                    break
                best = min(best, max(captured.loads(better, stages, link)))
            ratios = {method: load / best for method, load in loads.items()}
            yield Case(name, stages, link, count, ratios, certified, (statistics.median(took), long))


def measure(options: Options) -> Report:
    """A row for each method; which cases are the worst of fxsplit's."""
    left_out: list[str] = []
    names = ["unet"] if options.quick else list(available(LARGE, left_out))
    effort = Effort(0.1, 0.0, (2,), LINKS[:1]) if options.quick else Effort()
    for library, use in (("torchgpipe", "compare with it"), ("scipy", "certify")):
        if not installed(library):
            left_out.append(f"{library} is not installed, so as to {use}")

    def one(name):
        try:
            return in_child(cases_of, name, effort, limit=900, fresh=not options.quick)
        except ChildError as error:
            left_out.append(f"{name}: {error}")
            return []

    with ThreadPoolExecutor(1 if options.quick else 2) as pool:
        cases = [case for found in pool.map(one, names) for case in found]
    rows = []
    for method, words in METHODS.items():
        ratios = [case.ratios[method] for case in cases if method in case.ratios]
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            best = sum(ratio <= 1.0001 for ratio in ratios)
            rows.append((words, f"{mean:.4f}", f"{max(ratios):.4f}", f"{best} of {len(ratios)}"))
    header = ("heaviest load, to the best that anything found", "geometric mean", "worst", "within 0.01 %")
    return Report(header, rows, [_said(cases)], left_out)


def _said(cases: list[Case]) -> str:
    """What is proven, where fxsplit is furthest off, and what planning took."""
    worst = sorted(cases, key=lambda case: -case.ratios["fxsplit"])[:2]
    where = ", ".join(
        f"{case.model} in {case.stages} stages at {case.link / 1e9:.0f} GB/s ({case.ratios['fxsplit']:.4f})"
        for case in worst
    )
    longest, longer = (max(case.seconds[i] for case in cases) for i in range(2))
    return (
        f"Certified: {sum(case.certified for case in cases)} of {len(cases)}. fxsplit is furthest off for {where}. "
        f'The longest plan took {longest:.2f} s, with `effort="search"` {longer:.2f} s, two at a time on the cores.'
    )
