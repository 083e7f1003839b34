"""Hypothesis strategies: small models, plans over all fields, batches like an example, schedules. They shrink to the plain.

Needs ``pip install "fxsplit[testing]"``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from torch import nn

from ..batch.dims import BatchDims
from ..compat import tree_map
from ..graph.signature import Signature
from ..plan.plan import Plan
from ..schedules.schedule import Action, Kind, Schedule
from .plans import random_fields
from .programs import Program, random_recipe

_T = TypeVar("_T")
Batch = tuple[tuple[Any, ...], dict[str, Any]]


class _Choices:
    """Hypothesis chooses; the first option and the lowest number are the plainest."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw

    def choice(self, options: Sequence[_T], /) -> _T:
        found: _T = self._draw(st.sampled_from(options))
        return found

    def randint(self, low: int, high: int, /) -> int:
        return int(self._draw(st.integers(low, high)))


@st.composite
def modules(draw: st.DrawFn, most: int = 8, inputs: int | None = None) -> Program:
    """Small random models with 1 to 3 inputs of (rows, 4): see `fxsplit.testing.programs`."""
    return Program(random_recipe(_Choices(draw), most=most, inputs=inputs))


@st.composite
def fields_of_plans(draw: st.DrawFn, /, model: nn.Module | None = None, **fixed: Any) -> dict[str, Any]:
    """Fields of a plan: see `plans`."""
    return random_fields(_Choices(draw), model if model is not None else nn.Module(), fixed=fixed)


def plans(model: nn.Module | None = None, **fixed: Any) -> st.SearchStrategy[Plan]:
    """Plans over all fields, on the CPU.

    Args:
        model: whose modules are named in cuts, maps and checkpoints; without it none are.
        fixed: fields that every plan has.
    """
    return fields_of_plans(model, **fixed).map(lambda fields: Plan(**fields))


@st.composite
def batches(
    draw: st.DrawFn,
    model: nn.Module,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    rows: tuple[int, int] = (1, 9),
    batch_dims: Mapping[str, int | None] | None = None,
) -> Batch:
    """Arguments like an example, with another number of rows and other values.

    Floating point tensors are normal with the example's mean and deviation, integers are between its smallest and largest, and
    what has no batch dimension is as it is.

    Args:
        model: whose forward they are arguments of.
        rows: the fewest and the most.
        batch_dims: as of the plan.
    """
    signature = Signature.of_example(model.forward, example_args, dict(example_kwargs or {}))
    inputs = signature.flatten(example_args, dict(example_kwargs or {}))
    dims = BatchDims.of_example(signature, inputs, batch_dims)
    count = draw(st.integers(*rows))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    made = [
        x.clone() if dim is None else _like(x, dim, count, generator)
        for x, dim in zip(inputs, dims.dims, strict=True)
    ]
    args, kwargs = signature.unflatten(made)
    return tuple(args), dict(kwargs)


def _like(x: torch.Tensor, dim: int, rows: int, generator: torch.Generator) -> torch.Tensor:
    sizes = [rows if d == dim else size for d, size in enumerate(x.shape)]
    if x.is_floating_point() or x.is_complex():
        spread = x.detach().std() if x.numel() > 1 else torch.ones(())
        made = torch.randn(sizes, generator=generator, dtype=x.dtype) * spread + x.detach().mean()
        return made.to(x.dtype).requires_grad_(x.requires_grad)
    low, high = (int(x.min()), int(x.max())) if x.numel() else (0, 0)
    return torch.randint(low, high + 1, sizes, generator=generator).to(x.dtype)


@st.composite
def schedules(
    draw: Callable[..., Any], stages: int, micro_batches: int, *, halves: bool | None = None
) -> Schedule:
    """Schedules with a worker for each stage, in any order that can be played.

    Args:
        halves: whether stages go backward in two; by default some do.
    """
    in_two = draw(st.booleans()) if halves is None else halves
    done: list[list[Action]] = [[] for _ in range(stages)]
    finished: set[Action] = set()

    def ready(kind: Kind, stage: int, i: int) -> bool:
        if kind == "F":
            return stage == 0 or Action("F", stage - 1, i) in finished
        if kind == "W":
            return Action("I", stage, i) in finished
        after = stage == stages - 1 or Action(kind, stage + 1, i) in finished
        return after and Action("F", stage, i) in finished

    kinds: tuple[Kind, ...] = ("F", "I", "W") if in_two else ("F", "B")
    todo = [Action(k, s, i) for k in kinds for s in range(stages) for i in range(micro_batches)]
    while todo:
        action = draw(st.sampled_from([a for a in todo if ready(*a)]))
        todo.remove(action)
        finished.add(action)
        done[action.stage].append(action)
    return Schedule("drawn", tuple(map(tuple, done)), tuple((stage, 0) for stage in range(stages)))


def copied(batch: Batch) -> Batch:
    """The same values, without a history."""
    args, kwargs = tree_map(
        lambda x: x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x,
        batch,
    )
    return tuple(args), dict(kwargs)
