"""Give a model, run micro-batch by micro-batch, the random numbers that its pipeline draws.

With several micro-batches every stage of a pipeline draws from a stream of its own for each of them (see
`inserted.random`), and the model knows no stages. But it draws in the same order as its graph. So the graph is run once
to see which stage each draw belongs to, and then each draw of the model is made from the stream of that stage.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..compat import Interpreter, OpOverload, TorchDispatchMode
from ..compiled import Compiled
from ..inserted.random import Stream, device_of, draws, stage_seed


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what draws from a default generator.

    Attributes:
        stage: where the next draws are.
        found: per draw, in order, where it was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stage, self.found = 0, list[int]()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if draws(func, args, kwargs or {}):
            self.found.append(self.stage)
        return func(*args, **(kwargs or {}))


class _StageByStage(Interpreter):
    def __init__(self, made: Compiled, counting: Draws) -> None:
        super().__init__(made.traced.module)
        self.stages, self.counting = made.assignment.stage_of(), counting

    def run_node(self, n: fx.Node) -> Any:
        self.counting.stage = self.stages.get(n.name, self.counting.stage)
        return super().run_node(n)


def drawn_in(made: Compiled, inputs: Sequence[torch.Tensor]) -> tuple[list[int], list[Any]]:
    """Run the program: per draw, in order, the stage that it is in; and the flat outputs."""
    counting = Draws()
    with counting:
        values = _StageByStage(made, counting).run(*inputs)
    return counting.found, list(values)


class Masks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In this thread each draw is made from the stream of the stage that it belongs to.

    Args:
        order: of each draw, its stage; see `drawn_in`.
        base: the number that the call of the pipeline drew.
        micro_batch: whose.
    """

    def __init__(self, order: Sequence[int], base: int, micro_batch: int) -> None:
        super().__init__()
        self.left: Iterator[int] = iter(order)
        self.streams: Mapping[int, Stream] = {
            stage: Stream(functools.partial(stage_seed, base, micro_batch, stage)) for stage in set(order)
        }

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        stage = next(self.left, None) if draws(func, args, kwargs) else None
        if stage is None:
            return func(*args, **kwargs)
        with self.streams[stage].lent(device_of(args, kwargs)):
            return func(*args, **kwargs)
