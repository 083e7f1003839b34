"""What is asked of the arguments of a call before anything runs, and how they become those of the micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..compat import has_tangent, in_forward_mode
from ..compiled import Compiled
from ..errors import ArgumentError, GradientError
from ..graph.ir import Traced


class Inputs:
    """The arguments of a program's calls.

    Attributes:
        written: which of them the program may write to in place, by position, and in which line.
    """

    def __init__(self, model: nn.Module, compiled: Compiled) -> None:
        self._model, self._program, self._dims = model, compiled.program, compiled.dims
        self._signature = compiled.traced.signature
        self.written = _written_arguments(compiled.traced)
        rows, stages = compiled.assignment.rows, compiled.stages
        read_on = [
            {torch.device(d) for s in stages if name in s.inputs for d in rows[s.index]}
            for name in compiled.program.inputs
        ]
        self._places = [
            (a.device, on) for a, on in zip(self._signature.arguments, read_on, strict=True)
        ]  # the example's device, and those of the readers
        self._devices = [a.device for a in self._signature.arguments]

    def flat(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The flat inputs of a call, where the program reads them.

        What is moved here is moved in the caller's autograd graph: its gradient goes back to the caller's device.

        Raises:
            ArgumentError: an argument is missing, unknown, or not like the example's.
            GradientError: one of them, or a parameter, has a tangent.
        """
        inputs = self._signature.flatten(args, kwargs)
        if [x.device for x in inputs] != self._devices:
            self._refuse_meta(inputs)
            self._check_homes()
            inputs = [
                x if x.device == home or read <= {x.device} else x.to(home)
                for x, (home, read) in zip(inputs, self._places, strict=True)
            ]
        if in_forward_mode():
            self._refuse_tangents(inputs)
        return inputs

    def split(self, inputs: Sequence[torch.Tensor], rows: Sequence[int]) -> list[list[torch.Tensor]]:
        """Those of each micro-batch: what one of them writes is no change of what another has saved."""
        chunks = self._dims.split(inputs, rows)
        for i in self.written if len(rows) > 1 else ():
            if not inputs[i].is_inference():
                torch.autograd.graph.increment_version(inputs[i])
            for chunk in chunks:
                chunk[i] = chunk[i].data
        return chunks

    def check_flat(self, inputs: Sequence[torch.Tensor]) -> None:
        """Refuse what are no flat inputs.

        Raises:
            ArgumentError: they are none.
        """
        names = self._program.inputs
        flat = isinstance(inputs, list | tuple) and all(isinstance(x, torch.Tensor) for x in inputs)
        if not flat or len(inputs) != len(names):
            raise ArgumentError(
                f"the flat inputs are {len(names)} tensor{'s' * (len(names) != 1)}: {', '.join(names)}",
                remedy="pipe.traced.signature.flatten(args, kwargs) makes them of the arguments of a call",
            )

    def refuse_writes(self, inputs: Sequence[torch.Tensor]) -> None:
        """Refuse an argument that forward writes to in place where autograd records it.

        Eagerly the caller's tensor would get another history. Here its history is the caller's, and stages have leaves.
        """
        for i, where in self.written.items():
            if inputs[i].requires_grad and torch.is_grad_enabled():
                name = self._signature.arguments[i].name
                raise ArgumentError(
                    f"forward writes in place to argument {name!r}, which requires gradients",
                    where=where,
                    remedy=f"{name} = {name}.clone() at the beginning of forward, then compile again; or pass {name}.detach(), "
                    "if nobody needs the gradient",
                )

    def _refuse_meta(self, inputs: Sequence[torch.Tensor]) -> None:
        for argument, x in zip(self._signature.arguments, inputs, strict=True):
            if x.is_meta:
                raise ArgumentError(
                    f"argument {argument.name!r} is on the meta device, where nothing has a value",
                    remedy="pass a tensor with values",
                )

    def _refuse_tangents(self, inputs: Sequence[torch.Tensor]) -> None:
        model = self._model
        if any(map(has_tangent, (*inputs, *model.parameters(), *model.buffers()))):
            raise GradientError(
                "forward-mode differentiation does not go through a pipeline, and an argument or parameter has a tangent",
                remedy="compute it with the model itself: pipe.unsplit()",
            )

    def _check_homes(self) -> None:
        """Refuse a model that was moved after it was compiled: its arguments have been moved, too.

        Raises:
            ArgumentError: a parameter is not on the device of its stage.
        """
        for stage in self._program.stages:
            places = (stage.home,) if stage.offloaded else stage.row or (stage.device,)
            homes = {torch.empty(0, device=d).device for d in places}
            for fqn, parameter in stage.named_parameters():
                if parameter.device not in homes:
                    raise ArgumentError(
                        f"{fqn} is on device {parameter.device}, and its stage's are on {stage.home}: the model was moved after "
                        "it was compiled",
                        remedy="pipe.recompile(), which compiles it where it is now",
                    )


def _written_arguments(traced: Traced) -> dict[int, str | None]:
    inputs = [n.name for n in traced.graph.nodes if n.op == "placeholder"]
    own = {s: i for i, name in enumerate(inputs) for s in traced.facts[name].storages}
    found: dict[int, str | None] = {}
    for name in (n.name for n in traced.graph.nodes if n.name not in inputs):
        fact = traced.facts[name]
        for i in sorted(own[s] for s in fact.writes & own.keys()):
            found.setdefault(i, fact.source.with_text() if fact.source else None)
    return found
