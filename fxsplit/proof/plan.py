"""Does the program compute what the model computes, on the micro-batches that the plan will make of a batch?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..batch.dims import BatchDims
from ..batch.merge import Merges, merged, sizes
from ..errors import BatchError, GuardError, VerifyError, pass_on_if_full
from ..graph.ir import Traced
from ..modules.state import preserved
from .numerics import ModelFailsError, Run, verify_numerics


def verify_sizes(
    model: nn.Module, traced: Traced, dims: BatchDims, rows: Sequence[int], inputs: Sequence[torch.Tensor]
) -> None:
    """Compare the graph with the model on a micro-batch of each size that the example gives, and on a single row.

    Args:
        rows: of each micro-batch of the example.

    Raises:
        BatchError: the graph or the model does not take a size that occurs; names size and line.
        VerifyError: the graph computes other numbers there, or for a single row.
    """
    chunks = dims.split(inputs, rows)
    first = dict(zip(rows, chunks, strict=True))
    for size, chunk in first.items():
        if size != sum(rows):
            _verify_size(model, traced, size, chunk, rows)
    if 1 not in first:
        one = [x if d is None else x.narrow(d, 0, 1) for x, d in zip(inputs, dims.dims, strict=True)]
        _verify_size(model, traced, 1, one, ())


def _verify_size(
    model: nn.Module, traced: Traced, size: int, chunk: Sequence[torch.Tensor], rows: Sequence[int]
) -> None:
    """One size; where it does not occur in the example (`rows` is empty), an error in a call is what is to be expected."""
    what = f"micro-batches of {size} row{'s' * (size != 1)}"
    fits = next((m for m in range(len(rows), 1, -1) if size not in sizes(sum(rows), m)), 1)
    remedy = f"Plan(micro_batches={fits}), or a larger batch in the example"
    try:
        verify_numerics(model, traced, lambda values: list(traced.module(*values))[: _count(traced)], chunk)
    except VerifyError as error:
        raise VerifyError(f"in {what}, {error.what}", where=error.where, remedy=error.remedy) from None
    except ModelFailsError as error:
        if rows:
            raise BatchError(
                f"{type(model).__name__} does not take {what}, which the plan makes of the example's {sum(rows)} rows: "
                f"{(str(error).splitlines() or ['it raises an error'])[0]}",
                remedy=remedy,
            ) from error
    except GuardError as error:
        if rows:
            raise BatchError(
                f"the plan makes {what} of the example's {sum(rows)} rows, and for those {error.what}",
                remedy=f"{remedy}; or compile with an example of {size} row{'s' * (size != 1)}",
            ) from error
    except Exception as error:
        pass_on_if_full(error)
        if rows:
            raise BatchError(
                f"the graph of {type(model).__name__} does not take {what}, which the plan makes of the example's "
                f"{sum(rows)} rows: {(str(error).splitlines() or [type(error).__name__])[0]}",
                remedy=remedy,
            ) from error


def _count(traced: Traced) -> int:
    """How many flat outputs are the model's."""
    return traced.out_spec.num_leaves


def in_micro_batches(
    model: nn.Module, traced: Traced, dims: BatchDims, merges: Merges, rows: Sequence[int]
) -> Callable[[Run], Run]:
    """Makes a run of a batch of a run of the model: micro-batch by micro-batch, in order, with merged outputs."""

    def whole(run: Run) -> Run:
        def batch(inputs: Sequence[torch.Tensor]) -> list[object]:
            results = []
            for chunk in dims.split(inputs, rows):
                hidden = []
                if merges.shown < len(merges):  # the model does not say how much counts: its graph does
                    with preserved(model, parameters=True):
                        hidden = list(traced.module(*chunk))[merges.shown :]
                results.append([*run(chunk), *hidden])
            return merged(merges, list(zip(*results, strict=True)), rows)

        return batch

    return whole
