"""Which runs of a stage's nodes may be computed twice.

::

    stage          a   b   add_   c   d        add_ writes to what b gave, in place; c reads it
    one group     [a   b   add_   c   d]       one run: computed again, it writes to its own b
    two groups    [a   b]  add_  [c   d]       add_ would write to another run's b once more: it stays out
    kept           what enters a run, the state of generators there, the buffers that it writes, as they were
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx, nn

from ..cost.saved import Live, Saved, live_bytes, measured_saved
from ..errors import PartitionError
from ..graph.ir import Assignment, Traced
from ..graph.nodes import compute_nodes, enters, is_context, is_within, leaves
from ..modules.callbacks import callbacks_of
from ..plan.checkpoint import Paths
from ..plan.plan import Plan

Runs = list[tuple[int, int]]


def chosen_runs(
    model: nn.Module, traced: Traced, assignment: Assignment, plan: Plan, inputs: Sequence[torch.Tensor]
) -> list[Runs]:
    """Per stage the runs of its nodes that become checkpoint regions, by the plan's policy.

    Raises:
        PartitionError: a path names nothing that may be recomputed, or the budget cannot be kept.
    """
    nodes = {node.name: node for node in compute_nodes(traced.graph)}
    stages = [[nodes[name] for name in names] for names in assignment.stages]
    policy = plan.recomputation
    if not policy.anything:
        return [[] for _ in stages]
    if policy.everything:
        return [checkpoint_runs(traced, stage, [0] * len(stage)) for stage in stages]
    if policy.limit is not None:
        return _within_budget(model, traced, assignment, plan, stages, inputs, policy.limit)
    paths = policy.paths(model)
    outermost = [p for p in paths if not any(o != p and is_within(p, o) for o in paths)]
    found = []
    for stage in stages:
        inside = [next((p for p in outermost if is_within(_path(traced, n), p)), None) for n in stage]
        found.append(
            checkpoint_runs(traced, stage, [None if p is None else outermost.index(p) for p in inside])
        )
    for path in paths if isinstance(policy, Paths) else ():
        runs = [
            stage[i] for stage, rows in zip(stages, found, strict=True) for a, b in rows for i in range(a, b)
        ]
        if not any(is_within(_path(traced, n), path) for n in runs):
            raise PartitionError(
                f"checkpoint= names {path!r}, of which nothing can be recomputed: it is not called, or changes state",
                remedy="name modules that run in forward and write to nothing but their own values and buffers",
            )
    return found


def _path(traced: Traced, node: fx.Node) -> str:
    return traced.facts[node.name].module_path


def _within_budget(
    model: nn.Module,
    traced: Traced,
    assignment: Assignment,
    plan: Plan,
    stages: Sequence[Sequence[fx.Node]],
    inputs: Sequence[torch.Tensor],
    limit: int,
) -> list[Runs]:
    """Greedy knapsack: the region that frees most bytes for the work of computing it again, until the budget is kept.

    Each pick is judged by the liveness simulation of all picks so far, so that what two regions share is counted
    once. Large regions free more and need more room while they are computed again: if the budget cannot be kept
    with them, they are left out, the largest first. (Choosing regions under a memory limit is a knapsack:
    Chen et al., 2016; Beaumont et al., 2019.)
    """
    saved = measured_saved(model, traced, inputs)
    chosen: list[Runs] = [[] for _ in stages]
    for device in dict.fromkeys(assignment.devices):
        here = [i for i, d in enumerate(assignment.devices) if d == device]

        def live(picks: list[Runs], here: list[int] = here) -> Live:
            return live_bytes(saved, [stages[i] for i in here], [picks[i] for i in here], plan.micro_batches)

        candidates = [(i, run) for i in here for run in _candidates(traced, stages[i])]
        least: int | None = None
        while True:
            picks, peak = _greedy(chosen, stages, candidates, saved, live, limit)
            least = peak if least is None else min(least, peak)
            if peak <= limit:
                chosen = picks
                break
            if not candidates:
                raise PartitionError(
                    f"checkpoint=Budget({limit:_} bytes) cannot be kept on {device}: {least:_} bytes are needed however "
                    "much is recomputed",
                    remedy="more stages on other devices, more micro-batches, a smaller batch, or a larger budget",
                )
            largest = max(_work([run], stages[i], saved) for i, run in candidates)
            candidates = [c for c in candidates if _work([c[1]], stages[c[0]], saved) < 0.9 * largest]
    return chosen


def _greedy(
    chosen: list[Runs],
    stages: Sequence[Sequence[fx.Node]],
    candidates: Sequence[tuple[int, tuple[int, int]]],
    saved: Saved,
    live: Callable[[list[Runs]], Live],
    limit: int,
) -> tuple[list[Runs], int]:
    now = live(chosen)
    while now.peak > limit:
        best: tuple[float, list[Runs], Live] | None = None
        for i, run in candidates:
            picks = _with(chosen, i, run)
            if picks is None:
                continue
            after = live(picks)
            price = _work(picks[i], stages[i], saved) - _work(chosen[i], stages[i], saved)
            rate = (now.kept - after.kept) / max(price, 1)
            if after.kept < now.kept and (best is None or rate > best[0]):
                best = rate, picks, after
        if best is None:
            break
        _, chosen, now = best
    return chosen, now.peak


def _candidates(traced: Traced, stage: Sequence[fx.Node]) -> Runs:
    """What may be recomputed of each module in this stage, and of the stage as a whole; each run once."""
    paths = {path for node in stage for path in _around(_path(traced, node)) if path}
    found = dict.fromkeys(checkpoint_runs(traced, stage, [0] * len(stage)))
    for path in sorted(paths):
        inside = [0 if is_within(_path(traced, node), path) else None for node in stage]
        found.update(dict.fromkeys(checkpoint_runs(traced, stage, inside)))
    return list(found)


def _around(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts) + 1)]


def _with(chosen: Sequence[Runs], stage: int, run: tuple[int, int]) -> list[Runs] | None:
    """The picks with this run, which takes the place of those inside of it; None where it overlaps otherwise."""
    start, end = run
    rest = [r for r in chosen[stage] if not (start <= r[0] and r[1] <= end)]
    if any(a < end and start < b for a, b in rest) or run in chosen[stage]:
        return None
    return [sorted([*rest, run]) if i == stage else list(runs) for i, runs in enumerate(chosen)]


def _work(runs: Runs, stage: Sequence[fx.Node], saved: Saved) -> int:
    return sum(saved.again(stage[i].name) for start, end in runs for i in range(start, end))


def checkpoint_runs(traced: Traced, nodes: Sequence[fx.Node], groups: Sequence[int | None]) -> Runs:
    """Maximal runs ``[start, end)`` of `nodes` that recomputation may repeat, in order.

    A run may write to values that it made itself, and to buffers (their contents are put back). It may not
    touch any other storage that somebody writes to: the second computation would see other contents than
    the first.

    Args:
        groups: for each node the group that it may be recomputed with, or None. A run lies in one group.
    """
    facts = traced.facts
    buffer_storages = {s for n in traced.graph.nodes if facts[n.name].buffers for s in facts[n.name].lasting}
    writers: dict[int, list[int]] = {}
    touching: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        for storage in facts[node.name].storages:
            touching.setdefault(storage, []).append(i)
        for storage in facts[node.name].writes:
            writers.setdefault(storage, []).append(i)
    arguments = {s for n in traced.graph.nodes if n.op == "placeholder" for s in facts[n.name].storages}
    apart = {i for i, node in enumerate(nodes) if facts[node.name].stateful or _is_heard(traced, node)}
    apart |= _cut_contexts(nodes) | {i for i, group in enumerate(groups) if group is None}
    spans = _context_marks(nodes)
    while True:
        run_of = _number_runs(groups, apart)
        before = len(apart)
        for storage, writing in writers.items():
            touched = touching[storage]
            one_run = len({run_of[i] for i in touched}) == 1
            if storage in arguments:
                apart.update(touched)
            elif storage in buffer_storages:
                apart.update(() if one_run else touched)
            else:
                apart.update(i for i in touched if i <= writing[-1] and run_of[i] != run_of[touched[0]])
        for span in spans:  # a context is made, entered and left in one run, or around the runs inside of it
            if len({run_of[i] for i in span}) > 1:
                apart.update(span)
        if len(apart) == before:
            break
    runs: Runs = []
    for i, number in enumerate(run_of):
        if number < 0:
            continue
        if runs and run_of[i - 1] == number:
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((i, i + 1))
    return [run for run in runs if any(nodes[i].op != "get_attr" for i in range(*run))]


def _context_marks(nodes: Sequence[fx.Node]) -> list[set[int]]:
    """For each context among `nodes` the positions where it is made, entered and left."""
    marks: dict[fx.Node, set[int]] = {}
    for i, node in enumerate(nodes):
        for context in (node if is_context(node) else None, enters(node), leaves(node)):
            if context is not None:
                marks.setdefault(context, set()).add(i)
    return list(marks.values())


def _is_heard(traced: Traced, node: fx.Node) -> bool:
    """Whether it calls a module that is told of its copies, or has hooks: what is said to others is not said again."""
    if node.op != "call_module":
        return False
    module = getattr(traced.module, traced.names[str(node.target)])
    return any(callbacks_of(m) or m._forward_hooks or m._forward_pre_hooks for m in module.modules())


def _cut_contexts(nodes: Sequence[fx.Node]) -> set[int]:
    """Positions that enter or leave a context whose other end is in another stage."""
    here = set(nodes)
    left = {leaves(node) for node in nodes}
    found = set()
    for i, node in enumerate(nodes):
        context = leaves(node)
        if context is not None and context not in here:
            found.add(i)
        made = enters(node) if enters(node) is not None else node if is_context(node) else None
        if made is not None and made not in left:
            found.add(i)
    return found


def _number_runs(groups: Sequence[int | None], apart: set[int]) -> list[int]:
    """A number for each run of neighbours of one group that are not apart; those that are have negative ones."""
    numbers, current = [], 0
    for i, group in enumerate(groups):
        if i in apart:
            current += 1
            numbers.append(-i - 1)
            continue
        if i and group != groups[i - 1]:
            current += 1
        numbers.append(current)
    return numbers
