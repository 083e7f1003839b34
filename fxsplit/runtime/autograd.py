"""The whole pipeline as one node of the caller's autograd graph."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from ..batch.merge import check_rows, merged, split_gradients
from ..compat import backward_keeps_graph, storage_key
from ..compiled import Compiled
from ..errors import GradientError
from ..loss.inside import LossInside
from . import play
from .call import Call

_IS_GIVEN = functools.partial(operator.is_not, None)


class PipelineFunction(torch.autograd.Function):
    """Forward plays the forward half of the schedule, backward the backward half.

    Its inputs are the tensor arguments *and the parameters*: autograd decides what is needed, and
    `torch.autograd.grad`, ``backward(inputs=…)``, hooks on parameters and DDP see ordinary gradients.
    """

    @staticmethod
    def forward(ctx: Any, runner: Runner, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Play the forward half."""
        ctx.runner = runner
        ctx.set_materialize_grads(False)
        outputs, differentiable = runner.forward()
        ctx.mark_non_differentiable(*(o for o, d in zip(outputs, differentiable, strict=True) if not d))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Play the backward half.

        Raises:
            GradientError: with ``create_graph=True``: gradients of gradients would silently miss a part.
        """
        if torch.is_grad_enabled():
            raise GradientError(
                "a pipeline has no second derivative, but backward was called with create_graph=True",
                remedy="compute such a loss (a gradient penalty, say) with the model itself: pipe.unsplit()",
            )
        return (None, *ctx.runner.backward(gradients, keep_graph=backward_keeps_graph()))


class Runner:
    """Merges what a `Call` computes for each micro-batch, and splits the gradients that come back.

    Args:
        rows: rows of each micro-batch.
        gather: whether the outputs are merged; otherwise those of each micro-batch are given.
    """

    def __init__(
        self,
        call: Call,
        compiled: Compiled,
        rows: Sequence[int],
        gather: bool = True,
    ) -> None:
        self.call, self.rows, self.gather = call, rows, gather
        self.dims, self.merges = compiled.dims, compiled.merges
        self.given: list[
            list[Any]
        ] = []  # per output what the caller gets: the merged value, or one for each part
        self.positions: list[int] = []
        self.per_output: list[list[Any]] = []
        self.spent = False
        # What is gathered later needs the weights of means, too.
        self.outputs = call.program.outputs[: self.merges.shown] if gather else call.program.outputs

    def forward(self) -> tuple[list[torch.Tensor], list[bool]]:
        """The tensor outputs, each value once, all parts of it in a row; and whether each is differentiable."""
        by_micro_batch = play.forward(self.call)
        self.per_output = [list(values) for values in zip(*by_micro_batch, strict=True)]
        self.given = [[v] for v in self.merged(by_micro_batch)] if self.gather else self.per_output
        first: dict[str, int] = {}
        for i, name in enumerate(self.outputs):
            if isinstance(name, str) and isinstance(self.given[i][0], torch.Tensor):
                first.setdefault(name, i)
        self.positions = list(first.values())
        tensors = [v for i in self.positions for v in self.given[i]]
        if self.gather:
            differentiable = [any(v.requires_grad for v in self.per_output[i]) for i in self.positions]
        else:
            differentiable = [v.requires_grad for v in tensors]
        return self._apart([t.detach() for t in tensors]), differentiable

    def results(
        self, tensors: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]]
    ) -> list[list[Any]]:
        """The flat outputs of the batch, or of each part, with the tensors of `forward` as autograd knows them.

        Args:
            inputs: of the batch, or of each part: an argument handed back is itself.
        """
        program, rows = self.call.program, []
        for k, given in enumerate(inputs):
            by_name = {
                self.outputs[i]: t for i, t in zip(self.positions, tensors[k :: len(inputs)], strict=True)
            }
            by_name.update(zip(program.inputs, given, strict=True))
            pairs = zip(self.outputs, self.given, strict=True)
            rows.append([by_name.get(v, seen[k]) if isinstance(v, str) else v[0] for v, seen in pairs])
        return rows

    def devices(self) -> list[torch.device]:
        """Where the last stage of each micro-batch ran: the devices of what it gives."""
        made_by = self.call.wiring.made_by
        last = max(self.positions, key=lambda i: made_by.get(str(self.outputs[i]), -1), default=None)
        if last is None:
            return [torch.empty(0, device=self.call.program.stages[-1].device).device] * len(self.rows)
        return [v.device for v in self.per_output[last]]

    def _apart(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """No memory is shared with another output or an argument: autograd would not see a write to it."""
        if self.gather and len(self.rows) > 1:
            return tensors  # merged: new memory
        taken = {_memory(x) for chunk in self.call.chunks for x in chunk} - {None}
        handed_back = set(self.call.program.inputs)
        names = [self.outputs[i] for i in self.positions for _ in self.given[i]]
        apart = []
        for name, tensor in zip(names, tensors, strict=True):
            if name not in handed_back and (memory := _memory(tensor)) is not None:
                tensor = tensor.clone() if memory in taken else tensor
                taken.add(memory)
            apart.append(tensor)
        return apart

    def backward(
        self, gradients: Sequence[torch.Tensor | None], *, keep_graph: bool
    ) -> list[torch.Tensor | None]:
        """The gradients of the tensor inputs and of the parameters.

        Raises:
            GradientError: the values were freed by an earlier backward.
        """
        if self.spent:
            raise GradientError(
                "backward through the pipeline a second time: its values were freed by the first backward",
                remedy="loss.backward(retain_graph=True) in the first one",
            )
        found: dict[int, list[torch.Tensor | None]] = {}
        following = iter(gradients)
        for position in self.positions:
            found[position] = list(itertools.islice(following, len(self.given[position])))
        if self.gather:
            merged_ones = {i: g for i, (g,) in found.items() if g is not None}
            found = split_gradients(self.merges, merged_ones, self.per_output, self.rows)
        rows: list[dict[str, Any]] = [{} for _ in self.rows]
        for position, pieces in found.items():
            name = str(self.call.program.outputs[position])
            for row, piece in zip(rows, pieces, strict=True):
                if piece is not None:
                    row[name] = row[name] + piece if name in row else piece
        self.spent = not keep_graph
        play.backward(self.call, rows, keep_graph=keep_graph)
        return self._gradients()

    def step(self, loss: LossInside) -> list[torch.Tensor | None]:
        """Play the whole schedule: the gradients of inputs and parameters. `loss` has the losses."""
        play.step(self.call, loss)
        return self._gradients()

    def merged(self, rows: Sequence[Sequence[Any]]) -> list[Any]:
        """The flat outputs of the whole batch, from those of each micro-batch."""
        return merged(self.merges, list(zip(*rows, strict=True)), self.rows)

    def check_rows(self, rows: Sequence[Sequence[Any]]) -> None:
        """Refuse outputs that `merged` would refuse because their rows do not fit together."""
        check_rows(self.merges, list(zip(*rows, strict=True)))

    def _gradients(self) -> list[torch.Tensor | None]:
        call, program = self.call, self.call.program
        inputs = [self._input_gradient(i, name) for i, name in enumerate(program.inputs)]
        gradients = [*inputs, *call.parameter_gradients()]
        call.release()
        return gradients

    def _input_gradient(self, position: int, name: str) -> torch.Tensor | None:
        pieces = [self.call.input_gradient(name, i) for i in range(len(self.rows))]
        if not any(map(_IS_GIVEN, pieces)):
            return None
        chunks = [chunk[position] for chunk in self.call.chunks]
        filled = [torch.zeros_like(c) if p is None else p for p, c in zip(pieces, chunks, strict=True)]
        dim = self.dims.dims[position]
        if len(filled) == 1:
            return filled[0]
        if dim is not None:
            return torch.cat(filled, dim)
        return sum(filled[1:], filled[0])


def _memory(tensor: torch.Tensor) -> int | None:
    """Which memory a tensor has; None where it has none that can be named: sparse, or wrapped by torch.func."""
    try:
        return storage_key(tensor)
    except (NotImplementedError, RuntimeError):
        return None
