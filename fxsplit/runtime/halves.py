"""Backward in two: first the gradients of a stage's inputs, later those of its weights.

After Qi et al., Zero Bubble Pipeline Parallelism (2023), and torch.distributed.pipelining. A weight is reached from
one operation on the way from the outputs to the inputs, a matrix product say. The gradient that arrives there is kept
when the inputs get theirs; from there the weight gets its own later, and nothing is computed twice. A weight that is
reached from several such operations gets its gradient together with the inputs: from the first of them, those below
would be counted twice. For y = f(x) W::

    I    x ◀── f' ◀── dy W'      dx at once; dy is kept where it arrived
    W              W ◀── x' dy   dW later, from there
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = list[torch.Tensor | None]

# Whose operations have no hooks and no backward of the user's, which would run once for each half.
_KNOWN = ("torch", "_operator", "builtins", "math", "fxsplit")


@dataclass
class _Group:
    """Weights that are reached from one operation, or from the roots themselves."""

    start: Node | None
    weights: list[int] = field(default_factory=list)  # positions
    arrived: Sequence[torch.Tensor | None] = ()


def input_half(
    roots: Sequence[torch.Tensor],
    seeds: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
) -> tuple[Gradients, Gradients, Callable[[], Gradients]]:
    """The gradients of the inputs, and those of the weights that are had at the same price.

    Args:
        roots: tensors with a graph; `seeds` are their gradients.
        inputs, weights: leaves.

    Returns:
        The gradients of the inputs; those of the weights, where they have been computed; and what computes the other
        weights' (None for those that have been). The graph is kept until that is dropped.
    """
    nodes = [get_gradient_edge(root).node for root in roots]
    targets = {get_gradient_edge(x).node for x in inputs}
    position = {get_gradient_edge(w).node: i for i, w in enumerate(weights)}
    groups, at_once = _groups(nodes, targets, position)
    handles = []
    for group in groups:
        if group.start is not None:
            handles.append(group.start.register_prehook(_keeper(group)))
    found: Gradients = [None] * (len(inputs) + len(at_once))
    try:
        wanted = [*inputs, *(weights[i] for i in at_once)]
        if wanted:
            found = list(
                torch.autograd.grad(list(roots), wanted, list(seeds), retain_graph=True, allow_unused=True)
            )
    finally:
        for handle in handles:
            handle.remove()
    early: Gradients = [None] * len(weights)
    for i, gradient in zip(at_once, found[len(inputs) :], strict=True):
        early[i] = gradient

    def weight_half() -> Gradients:
        late: Gradients = [None] * len(weights)
        for group in groups:
            starts: list[tuple[Any, torch.Tensor]]
            if group.start is None:
                starts = list(zip(roots, seeds, strict=True))
            else:
                edges = [GradientEdge(group.start, k) for k in range(len(group.arrived))]
                starts = [(e, g) for e, g in zip(edges, group.arrived, strict=True) if g is not None]
            if not starts:
                continue
            gradients = torch.autograd.grad(
                [start for start, _ in starts],
                [weights[i] for i in group.weights],
                [gradient for _, gradient in starts],
                retain_graph=True,
                allow_unused=True,
            )
            for i, gradient in zip(group.weights, gradients, strict=True):
                late[i] = gradient
        return late

    return found[: len(inputs)], early, weight_half


def _keeper(group: _Group) -> Callable[[tuple[torch.Tensor, ...]], None]:
    def keep(arrived: tuple[torch.Tensor | None, ...]) -> None:
        group.arrived = arrived

    return keep


def _groups(
    roots: Sequence[Node], inputs: set[Node], weights: dict[Node, int]
) -> tuple[list[_Group], list[int]]:
    """Which weights can wait, and from where; and the positions of those that cannot."""
    on_path: dict[Node, bool] = {}  # whether it is on a way to an input
    beside: dict[Node, set[int]] = {}  # weights that are reached without going on along such a way
    for node in _inputs_first(roots):
        following = [n for n, _ in node.next_functions if n is not None]
        on_path[node] = node in inputs or any(on_path[n] for n in following)
        reached = {weights[node]} if node in weights else set()
        beside[node] = reached.union(*(beside[n] for n in following if not on_path[n]))
    owners: dict[int, set[Node | None]] = {}
    starts: list[tuple[Node | None, set[int]]] = [(n, beside[n]) for n in on_path if on_path[n] and beside[n]]
    starts.append((None, set().union(*(beside[n] for n in roots if not on_path[n]))))
    for start, reached in starts:
        for i in reached:
            owners.setdefault(i, set()).add(start)
    groups = []
    for start, reached in starts:
        mine = sorted(i for i in reached if len(owners[i]) == 1)
        if mine:
            groups.append(_Group(start, mine))
    return groups, sorted(i for i, owned in owners.items() if len(owned) > 1)


def _inputs_first(roots: Sequence[Node]) -> Iterator[Node]:
    """Every node once, after all that its gradients go to."""
    seen: set[Node] = set()
    for root in roots:
        stack: list[tuple[Node, bool]] = [(root, False)]
        while stack:
            node, done = stack.pop()
            if done:
                yield node
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack += [(n, False) for n, _ in node.next_functions if n is not None]


def can_be_halved(module: fx.GraphModule) -> bool:
    """Whether all that a stage computes is torch's own: a hook or a backward of the user's would run twice."""
    for node in module.graph.nodes:
        if node.op == "call_module":
            for part in module.get_submodule(str(node.target)).modules():
                own = not isinstance(part, fx.GraphModule) and not type(part).__module__.startswith(
                    "torch.nn."
                )
                hooks = (part._forward_hooks, part._forward_pre_hooks)
                hooks += (part._backward_hooks, part._backward_pre_hooks)  # type: ignore[assignment]
                if own or any(hooks):
                    return False
        elif (node.op == "call_method" and node.target in ("register_hook", "backward", "retain_grad")) or (
            node.op == "call_function" and not _is_known(node.target)
        ):
            return False
    return all(can_be_halved(region) for region in _regions(module))


def _regions(module: nn.Module) -> list[fx.GraphModule]:
    return [child for child in module.children() if isinstance(child, fx.GraphModule)]


def _is_known(target: Any) -> bool:
    return str(getattr(target, "__module__", None) or "torch").partition(".")[0] in _KNOWN
