"""Compare a pipeline with the model that it came from, number by number."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from ..batch.merge import merged, split_gradients
from ..batch.scattered import Scattered
from ..compare import agree, difference, gradient_for
from ..compat import tree_leaves
from ..compiled import Compiled
from ..errors import ArgumentError, VerifyError
from ..graph.nodes import first_difference, structure
from ..modules.state import preserved
from ..pipeline import Pipeline


def graphs_equal(a: fx.Graph, b: fx.Graph) -> tuple[bool, str]:
    """Whether two graphs have the same nodes in the same order with the same operands, and the reason if not."""
    index = first_difference(structure(a), structure(b))
    if index is None:
        return True, ""
    shown = [list(g.nodes)[index].format_node() if index < len(g.nodes) else "nothing" for g in (a, b)]
    return False, f"node {index}: {shown[0]} against {shown[1]}"


def assert_equivalent(
    model: nn.Module, pipe: Pipeline, *args: Any, atol: float = 0.0, rtol: float = 0.0, **kwargs: Any
) -> None:
    """Outputs, gradients and buffers of `pipe` equal those of `model` run on the same micro-batches in order.

    The model's gradients are accumulated in that order. Both run on deep copies, so neither is changed, and
    from the same random state. With several micro-batches a model that draws random numbers is not
    comparable: eager has no masks for micro-batches that run at the same time.

    Args:
        args, kwargs: the model's.
        atol, rtol: by default equality is bit for bit.

    Raises:
        VerifyError: names the first value that differs, and by how much.
    """
    for name, what in differences(model, pipe, *args, atol=atol, rtol=rtol, **kwargs).items():
        raise VerifyError(f"{name} differs: {what}", where=f"{pipe.plan!r}")


def differences(
    model: nn.Module, pipe: Pipeline, *args: Any, atol: float = 0.0, rtol: float = 0.0, **kwargs: Any
) -> dict[str, str]:
    """What `assert_equivalent` compares, as names of the values that differ → how."""
    if not isinstance(model, nn.Module) or not isinstance(pipe, Pipeline):
        raise ArgumentError(
            f"a model and its pipeline are compared, and not {type(model).__name__} and {type(pipe).__name__}",
            remedy="fxsplit.testing.assert_equivalent(model, fxsplit.compile(model, ...), x)",
        )
    eager, split = copy.deepcopy(model), copy.deepcopy(pipe)
    inputs = split.traced.signature.flatten(args, kwargs)
    with torch.random.fork_rng(devices=[]):
        state = torch.get_rng_state()
        found = _run_split(split, inputs)
        torch.set_rng_state(state)
        expected = _run_eager(eager, split, inputs)
    return {
        name: difference(found[name], value)
        for name, value in expected.items()
        if not agree(found[name], value, rtol=rtol, atol=atol)
    }


def _leaves(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]


def _run_split(pipe: Pipeline, inputs: Sequence[torch.Tensor]) -> dict[str, Any]:
    leaves = _leaves(inputs)
    args, kwargs = pipe.traced.signature.unflatten([x.view_as(x) if x.requires_grad else x for x in leaves])
    output = pipe(*args, **kwargs)
    outputs = tree_leaves(output.gather() if isinstance(output, Scattered) else output)
    pairs = [(t, gradient_for(t)) for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
    return _collect(pipe.model, leaves, outputs)


def _run_eager(model: nn.Module, pipe: Pipeline, inputs: Sequence[torch.Tensor]) -> dict[str, Any]:
    leaves = _leaves(inputs)
    views = [x.view_as(x) if x.requires_grad else x for x in leaves]
    made = pipe.active
    chunks, rows = pipe.micro_batches(views)
    results = []
    for chunk in chunks:
        args, kwargs = made.traced.signature.unflatten(chunk)
        weights = _weights(model, made, chunk)
        results.append([*tree_leaves(model(*args, **kwargs)), *weights])
    columns = list(zip(*results, strict=True))
    outputs = merged(made.merges, columns, rows)
    seeds = {
        i: gradient_for(v)
        for i, v in enumerate(outputs)
        if isinstance(v, torch.Tensor) and any(part.requires_grad for part in columns[i])
    }
    pieces = split_gradients(made.merges, seeds, columns, rows)
    for k, row in enumerate(results):
        pairs = [(row[i], given[k]) for i, given in pieces.items() if given[k] is not None]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
    return _collect(model, leaves, outputs)


def _weights(model: nn.Module, made: Compiled, chunk: Sequence[torch.Tensor]) -> list[Any]:
    """What one micro-batch counts in each mean that is weighted: the model does not say it, its graph does."""
    count = made.merges.shown
    if count == len(made.merges):
        return []
    with preserved(model, parameters=True):
        return list(made.traced.module(*chunk))[count:]


def _collect(model: nn.Module, inputs: Sequence[torch.Tensor], outputs: Sequence[Any]) -> dict[str, Any]:
    values = {f"output {i}": v.detach() if isinstance(v, torch.Tensor) else v for i, v in enumerate(outputs)}
    values.update({f"gradient of {name}": p.grad for name, p in model.named_parameters()})
    values.update({f"gradient of input {i}": x.grad for i, x in enumerate(inputs) if x.requires_grad})
    values.update({f"buffer {name}": b for name, b in model.named_buffers()})
    return values
