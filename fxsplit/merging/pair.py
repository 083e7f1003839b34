"""One operation in two runs: of a batch, and of some of its rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..compat import OpOverload, tree_leaves
from .dependence import Denominator, Dependence, Elements, Kept, Mean, Same, Sum, Targets, Total, Unknown
from .record import Ref, Step, argument_of


@dataclass(frozen=True)
class Operand:
    """A tensor operand of the whole run, and how it depends on the batch."""

    ref: Ref
    state: Dependence

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ref.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.ref.dtype


@dataclass(frozen=True)
class Pair:
    """The same step of the two runs.

    Attributes:
        rows: of the batch, and of the part of it.
        state_of: the dependence of a tensor of the whole run.
        node_of: the traced node that has this value; None if none has.
    """

    whole: Step
    part: Step
    rows: tuple[int, int]
    state_of: Callable[[Ref], Dependence]
    node_of: Callable[[Ref], str | None]

    @property
    def func(self) -> OpOverload:
        return self.whole.func

    @functools.cached_property
    def name(self) -> str:
        """Without namespace, overload, and the mark of what works in place."""
        name = str(self.func._schema.name).partition("::")[2]
        return name[:-1] if name.endswith("_") and not name.endswith("__") else name

    @functools.cached_property
    def operands(self) -> list[Operand]:
        """The tensors among the arguments, in order."""
        leaves = tree_leaves((self.whole.args, self.whole.kwargs))
        return [Operand(leaf, self.state_of(leaf)) for leaf in leaves if isinstance(leaf, Ref)]

    @property
    def outputs(self) -> tuple[Ref, ...]:
        return self.whole.outputs

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the first output, in both runs."""
        return self.whole.outputs[0].shape, self.part.outputs[0].shape

    def is_one_size(self, output: Ref) -> bool:
        """Whether this output is as large in both runs."""
        return output.shape == self.part.outputs[self.whole.outputs.index(output)].shape

    @functools.cached_property
    def _scalars(self) -> list[tuple[Any, Any]]:
        columns = [
            [leaf for leaf in tree_leaves((step.args, step.kwargs)) if not isinstance(leaf, Ref)]
            for step in (self.whole, self.part)
        ]
        return list(zip(*columns, strict=False))

    @property
    def same_scalars(self) -> bool:
        """Whether all arguments that are no tensors are the same in both runs."""
        return all(a is b or a == b or (a != a and b != b) for a, b in self._scalars)

    @property
    def counts_rows(self) -> bool:
        """Whether those that differ are multiples of the number of rows."""
        odd = [(a, b) for a, b in self._scalars if not (a is b or a == b)]
        numbers = all(isinstance(v, int | float) for pair in odd for v in pair)
        return bool(odd) and numbers and all(a * self.rows[1] == b * self.rows[0] for a, b in odd)

    def argument(self, name: str, default: Any = None) -> Any:
        """The argument of this name, as given or by the schema's default."""
        return argument_of(self.whole, name, default)

    def is_one_argument(self, name: str) -> bool:
        """Whether the argument of this name is the same in both runs."""
        return bool(argument_of(self.whole, name) == argument_of(self.part, name))

    def operand(self, argument: Any) -> Operand | None:
        """An argument that is a tensor."""
        return Operand(argument, self.state_of(argument)) if isinstance(argument, Ref) else None

    def mean_of_elements(self) -> Dependence:
        """A mean over as many values as the data says."""
        node = self.node_of(self.operands[0].ref)
        return (
            Unknown("a mean over as many values as the data says") if node is None else Mean(Elements(node))
        )

    def total(self) -> Dependence | None:
        """The sum, or the difference, of values that are put together in different ways."""
        sign = -1.0 if self.name == "sub" else 1.0
        alpha = self.argument("alpha", 1)
        if len(self.operands) != 2 or self.name == "rsub" or not self.same_scalars or alpha is None:
            return None
        terms: list[tuple[str, Any, float]] = []
        for operand, factor in zip(self.operands, (1.0, sign * float(alpha)), strict=True):
            if isinstance(operand.state, Total):
                terms += operand.state.times(factor).terms
                continue
            node = self.node_of(operand.ref)
            if node is None or "." in node or not isinstance(operand.state, Same | Sum | Mean):
                return None
            terms.append((node, operand.state, factor))
        return Total(tuple(terms))

    def ratio(self) -> Dependence:
        """A sum over rows divided by another one."""
        node = self.node_of(self.operands[1].ref)
        if node is None:
            return Unknown("a sum is divided by another one inside of a module that is kept whole")
        below = self.operands[1].state
        return Mean(
            Denominator(node, (below.node, below.how, below.number) if isinstance(below, Kept) else None)
        )

    def kept(self) -> Dependence | None:
        """A sum over rows that is kept from being zero."""
        node = self.node_of(self.operands[0].ref)
        if node is None or not self.same_scalars or len(self.operands) != 1:
            return None
        if self.name in ("clamp", "clamp_min") and self.argument("max") is None:
            number = self.argument("min")
            return Kept(node, "clamp", float(number)) if isinstance(number, int | float) else None
        if self.name == "add" and self.argument("alpha") == 1:
            number = self.argument("other")
            return Kept(node, "add", float(number)) if isinstance(number, int | float) else None
        return None

    def mean_of_targets(self) -> Dependence:
        """The mean of cross entropy over the targets that count."""
        target, weight = self.argument("target"), self.argument("weight")
        node = self.node_of(target)
        of_classes = None if weight is None else self.node_of(weight)
        if node is None or (weight is not None and of_classes is None):
            return Unknown("a mean over the targets that count inside of a module that is kept whole")
        return Mean(Targets(node, of_classes, int(self.argument("ignore_index", -100))))


def shapes_that_grow(pair: Pair) -> Sequence[int]:
    """The dimensions of the first output that are longer in the whole run."""
    whole, part = pair.shapes
    if len(whole) != len(part):
        return range(len(whole))
    return [d for d, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
