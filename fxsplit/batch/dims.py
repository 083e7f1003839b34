"""Which dimension of each input holds the batch, and its rows as views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import BatchError, PlanError, did_you_mean
from ..graph.signature import Signature


@dataclass(frozen=True)
class BatchDims:
    """For each tensor input the dimension that holds the batch, or None for an input that is not split."""

    dims: tuple[int | None, ...]
    names: tuple[str, ...]

    @classmethod
    def of_example(
        cls, signature: Signature, inputs: Sequence[torch.Tensor], chosen: Mapping[str, int | None] | None
    ) -> BatchDims:
        """Dimension 0 of every tensor whose dimension 0 is as long as that of the first one; `chosen` overrides.

        Raises:
            PlanError: `chosen` names an unknown argument, or a dimension that it does not have.
            BatchError: two chosen dimensions differ in length.
        """
        chosen = dict(chosen or {})
        known = {a.name for a in signature.arguments} | {a.argument for a in signature.arguments}
        for name in chosen:
            if name not in known:
                raise PlanError(
                    f"batch_dims names {name!r}, which is no tensor argument",
                    remedy=did_you_mean(name, known),
                )
        asked = [chosen.get(a.name, chosen.get(a.argument, -1)) for a in signature.arguments]
        for argument, dim in zip(signature.arguments, asked, strict=True):
            if dim is not None and dim >= argument.dim:
                raise PlanError(
                    f"batch_dims[{argument.name!r}] is {dim}, but the argument has {argument.dim} dimensions"
                )
        first = [(x.shape[d], d) for x, d in zip(inputs, asked, strict=True) if d is not None and d >= 0]
        guess = [x.shape[0] for x, d in zip(inputs, asked, strict=True) if d == -1 and x.dim()]
        batch = first[0][0] if first else guess[0] if guess else None
        dims = tuple(
            (0 if x.dim() and x.shape[0] == batch else None) if d == -1 else d
            for x, d in zip(inputs, asked, strict=True)
        )
        found = cls(dims, tuple(a.name for a in signature.arguments))
        found.batch_size(inputs)
        return found

    def batch_size(self, inputs: Sequence[torch.Tensor]) -> int | None:
        """Rows of this batch; None where no input is split.

        Raises:
            BatchError: two inputs disagree; names both.
        """
        batch: tuple[str, int] | None = None
        for name, x, dim in zip(self.names, inputs, self.dims, strict=True):
            if dim is None:
                continue
            if batch is not None and x.shape[dim] != batch[1]:
                raise BatchError(
                    f"{batch[0]!r} has a batch of {batch[1]} rows, {name!r} of {x.shape[dim]} (dimension {dim})",
                    remedy=f"give both the same batch; or, where {name!r} is not split, Plan(batch_dims={{{name!r}: None}})",
                )
            batch = batch or (name, x.shape[dim])
        return batch[1] if batch else None

    def another_batch(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """The example's rows in reverse without its last one, or its one row twice; None where no input is split."""
        batch = self.batch_size(inputs)
        if not batch:
            return None
        return [
            x if d is None else x.narrow(d, 0, batch - 1).flip(d) if batch > 1 else torch.cat([x, x], d)
            for x, d in zip(inputs, self.dims, strict=True)
        ]

    def split(self, inputs: Sequence[torch.Tensor], rows: Sequence[int]) -> list[list[torch.Tensor]]:
        """Per micro-batch the inputs: views of rows, in order; an input that is not split is given whole."""
        if len(rows) == 1:
            return [list(inputs)]
        pieces = [
            torch.split(x, list(rows), dim) if dim is not None else [x] * len(rows)
            for x, dim in zip(inputs, self.dims, strict=True)
        ]
        return [list(piece) for piece in zip(*pieces, strict=True)]
