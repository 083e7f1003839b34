"""Does the graph compute what the model computes? In both modes, and at another batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from ..batch.dims import BatchDims
from ..compat import Interpreter
from ..errors import ModelError, TraceError, VerifyError, pass_on_if_full
from ..graph.ir import Traced
from ..modules.state import preserved
from ..passes import named
from ..proof.numerics import ModelFailsError, verify_numerics


class BakedInError(TraceError):
    """The graph does not run at another batch size.

    Attributes:
        path: the module in whose forward it stops; ``""`` is the model.
    """

    def __init__(self, what: str, path: str) -> None:
        super().__init__(what)
        self.path = path


@named("compare the graph")
def accept(model: nn.Module, traced: Traced, inputs: Sequence[torch.Tensor], dims: BatchDims) -> None:
    """Compare outputs, gradients, buffers and random state of `traced` with the model's; the model is left as it was.

    Raises:
        VerifyError: names the first value that differs.
        BakedInError: the graph is right for the batch size of the example, and does not run at another one.
    """
    own = model.training
    for training in traced.all_modes():
        graph = traced.for_mode(training)
        with preserved(model):
            if training != own:
                model.train(training)
            if (
                training != own and graph is traced and not traced.assumptions.asks_for_grad
            ):  # the same operations: their gradients are known to be right
                try:
                    with torch.no_grad():
                        _compare(model, graph, inputs, training)
                except ModelFailsError:  # it registers hooks on values, say
                    _compare(model, graph, inputs, training)
                continue
            _compare(model, graph, inputs, training)
            other = dims.another_batch(inputs)
            if other is not None:
                _compare_other_batch(model, graph, other, dims)


def holds_for_other_rows(
    model: nn.Module, traced: Traced, inputs: Sequence[torch.Tensor], dims: BatchDims
) -> bool:
    """Whether a graph that is written for one batch size is right for other values of that size."""
    other = [x if d is None else x.flip(d) for x, d in zip(inputs, dims.dims, strict=True)]
    try:
        verify_numerics(model, traced, lambda values: list(traced.module(*values)), other)
    except Exception as error:
        pass_on_if_full(error)
        return False
    return True


def _compare(model: nn.Module, traced: Traced, inputs: Sequence[torch.Tensor], training: bool) -> None:
    try:
        verify_numerics(model, traced, lambda values: list(traced.module(*values)), inputs)
    except ModelFailsError as error:
        if not torch.is_grad_enabled():
            raise
        raise ModelError(
            f"{type(model).__name__} runs on the example, but its backward does not: {(str(error).splitlines() or [''])[0]}",
            remedy="run model(...) and backward by hand to see it; torch.utils.checkpoint needs use_reentrant=False",
        ) from error
    except VerifyError as error:
        raise VerifyError(
            f"in {'train' if training else 'eval'} mode, {error.what}", where=error.where, remedy=error.remedy
        ) from None


def _compare_other_batch(
    model: nn.Module, traced: Traced, inputs: Sequence[torch.Tensor], dims: BatchDims
) -> None:
    rows = dims.batch_size(inputs)
    try:
        verify_numerics(model, traced, lambda values: list(traced.module(*values)), inputs)
    except ModelFailsError:
        return  # batch normalisation may want more rows
    except VerifyError as error:
        raise VerifyError(f"with {rows} rows, {error.what}", where=error.where, remedy=error.remedy) from None
    except Exception as error:
        pass_on_if_full(error)
        node = _stops_at(model, traced, inputs)
        fact = None if node is None else traced.facts.get(node.name)
        raise BakedInError(
            f"the graph does not run with {rows} rows: {(str(error).splitlines() or [type(error).__name__])[0]}",
            fact.module_path if fact else "",
        ) from error


def _stops_at(model: nn.Module, traced: Traced, inputs: Sequence[torch.Tensor]) -> fx.Node | None:
    runner = _LastNode(traced.module)
    with preserved(model, parameters=True):
        try:
            runner.run(*(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs))
        except Exception:
            return runner.last
    return None


class _LastNode(Interpreter):
    """Remembers the node that was run last."""

    last: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.last = n
        return super().run_node(n)
