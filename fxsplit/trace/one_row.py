"""Decisions that a model takes otherwise for a single row, although it computes the same: ``if rows != 1: expand``."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from ..batch.dims import BatchDims
from ..compat import Interpreter
from ..errors import GuardError, pass_on_if_full
from ..graph.ir import Traced
from ..inserted.ops import guard
from .capture import Capture


def one_row(inputs: Sequence[torch.Tensor], dims: BatchDims) -> list[torch.Tensor]:
    """The first row of the example."""
    return [x if d is None else x.narrow(d, 0, 1) for x, d in zip(inputs, dims.dims, strict=True)]


def refused_for_one_row(traced: Traced, row: Sequence[torch.Tensor]) -> list[int]:
    """Which of the guards of a graph do not hold for a single row, by their order."""
    guards = [node for node in traced.module.graph.nodes if node.target is guard]
    if not guards:
        return []
    runner = _Guards(traced.module)
    with torch.no_grad():
        try:
            runner.run(*(x.detach().clone() for x in row))
        except Exception as error:  # more than a guard stands against it
            pass_on_if_full(error)
            return []
    return [i for i, node in enumerate(guards) if node in runner.refused]


def but_for_one_row(capture: Capture, refused: Sequence[int], dims: BatchDims) -> Capture:
    """The capture with guards that let a single row pass: whoever asks for it compares its numbers with the model's."""
    if not refused:
        return capture
    graph = fx.Graph()
    graph.output(graph.graph_copy(capture.graph, {}, return_output_node=False))
    for copied, node in zip(graph.nodes, capture.graph.nodes, strict=True):
        copied.meta = dict(node.meta)
    slots = [n for n in graph.nodes if n.op == "placeholder"]
    source, dim = next((n, d) for n, d in zip(slots, dims.dims, strict=True) if d is not None)
    guards = [node for node in graph.nodes if node.target is guard]
    for node in (guards[i] for i in refused):
        with graph.inserting_before(node):
            rows = graph.call_method("size", (source, dim))
            single = graph.call_function(operator.eq, (rows, 1))
            either = graph.call_function(operator.or_, (node.args[0], single))
        for made in (rows, single, either):
            made.meta = dict(node.meta)
        node.args = (either, *node.args[1:])
    return replace(capture, graph=graph)


class _Guards(Interpreter):
    """Runs a graph past its guards, and remembers those that do not hold."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.refused: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> object:
        try:
            return super().run_node(n)
        except GuardError:
            self.refused.add(n)
            return None
