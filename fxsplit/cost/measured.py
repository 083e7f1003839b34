"""Measured seconds: forward and backward of every node, alone, on the example."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from ..compat import Interpreter, tree_leaves, tree_map
from ..graph.ir import Traced
from ..graph.nodes import compute_nodes
from ..modules.state import preserved


def measured_seconds(
    model: nn.Module, traced: Traced, inputs: Sequence[torch.Tensor], *, runs: int = 3
) -> dict[str, float]:
    """Median seconds of forward plus backward per node, over `runs` runs after one that is not counted.

    The model's parameters, buffers, gradients, modes and the random number generator are as before afterwards.
    """
    samples: dict[str, list[float]] = {node.name: [] for node in compute_nodes(traced.graph)}
    with preserved(model, parameters=True):
        for run in range(runs + 1):
            timer = _Timer(traced.module)
            with torch.enable_grad():
                timer.run(*(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs))
            if run:
                for name, seconds in timer.seconds.items():
                    samples[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in samples.items()}


class _Timer(Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seconds: dict[str, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        start = _now()
        value = super().run_node(n)
        forward = _now() - start
        self.seconds[n.name] = forward + self._backward(value)
        # The next node starts from values of its own, so that its backward ends at its inputs. In-place
        # operations refuse leaves that require gradients, and views of them: hand out a copy.
        return tree_map(_detached, value)

    def _backward(self, value: Any) -> float:
        roots = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        if not roots:
            return 0.0
        grads = [torch.ones_like(t) for t in roots]
        start = _now()
        # What was written in place keeps its graph: it is gone through again with every node that reads it.
        torch.autograd.backward(roots, grads, retain_graph=True)
        return _now() - start


def _detached(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.is_leaf:
        return leaf
    detached = leaf.detach().requires_grad_()
    return detached.clone()


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
