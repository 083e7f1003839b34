"""Which runs of a stage's nodes may be computed twice."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ..graph import context_spans, enters, is_context, leaves
from ..ir import Traced


def checkpoint_runs(traced: Traced, nodes: Sequence[fx.Node]) -> list[tuple[int, int]]:
    """Maximal runs ``[start, end)`` of `nodes` that recomputation may repeat, in order.

    A run may write to values that it made itself, and to buffers (their contents are put back). It may not
    touch any other storage that somebody writes to: the second computation would see other contents than
    the first.
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
    apart = {i for i, node in enumerate(nodes) if facts[node.name].stateful}
    apart |= _cut_contexts(nodes)
    spans = context_spans(nodes)
    while True:
        run_of = _number_runs(len(nodes), apart)
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
        for first, last in spans:  # a context is entered and left in one run
            if not apart.isdisjoint(range(first, last + 1)):
                apart.update(range(first, last + 1))
        if len(apart) == before:
            break
    runs, start = [], None
    for i in range(len(nodes) + 1):
        inside = i < len(nodes) and i not in apart
        if inside and start is None:
            start = i
        elif not inside and start is not None:
            runs.append((start, i))
            start = None
    return [run for run in runs if any(nodes[i].op != "get_attr" for i in range(*run))]


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


def _number_runs(count: int, apart: set[int]) -> list[int]:
    numbers, current = [], 0
    for i in range(count):
        if i in apart:
            current += 1
            numbers.append(-i - 1)
        else:
            numbers.append(current)
    return numbers
