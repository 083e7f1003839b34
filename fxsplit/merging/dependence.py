"""How a value depends on the batch.

Let a batch have n rows, and its micro-batches n₁ + … + n_m = n of them. Of a value v of the batch, and of the values
v₁ … v_m that the same program computes for the micro-batches, is said:

    Same        v = v_i
    Rows        v is v₁ … v_m one after the other, along a dimension
    Position    the numbers 0 … n - 1 along a dimension: right as an index of rows, and as nothing else
    Sum         v = v₁ + … + v_m
    Mean        v = (w₁ v₁ + … + w_m v_m) / (w₁ + … + w_m), where w is a Sum that the program computes, or the rows
    Kept        v is f(v₁ + … + v_m), where f keeps what is to be divided by from being zero
    Total       v is a sum of values of the program each of which is Same, Sum or Mean
    Agree       v is that of all v_i, where those are equal, as of "are all of them finite"
    Mixed       none of these: rows meet other rows
    Unknown     nobody knows: an operation without a rule

The size of the dimension of `Rows` is ``outer · n · inner``: a batch of images taken apart into 4 patches has inner = 4,
two batches one behind the other outer = 2, which is no value that can be put together from micro-batches any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Same:
    """It does not depend on the batch."""


@dataclass(frozen=True)
class Rows:
    """It has something for each row.

    Attributes:
        dim: the dimension along which rows lie.
        outer, inner: see above; `inner` is None where the data says how much there is of each row.
        divided: every element is divided by the number of rows.
    """

    dim: int
    outer: int = 1
    inner: int | None = 1
    divided: bool = False


@dataclass(frozen=True)
class Position:
    """It numbers the rows, along a dimension; all others have one element.

    Attributes:
        dim: that dimension.
    """

    dim: int = 0


@dataclass(frozen=True)
class Sum:
    """It is a sum over rows."""


@dataclass(frozen=True)
class Kept:
    """It is a sum over rows that a number keeps from being zero: ``clamp(s, min=number)`` or ``s + number``.

    Attributes:
        node: the node that is s.
    """

    node: str
    how: str
    number: float


@dataclass(frozen=True)
class Denominator:
    """What a sum over rows is divided by: the value of this node.

    Attributes:
        kept: the node of the sum that it is made of, and what keeps it from being zero; None if it is a sum itself.
    """

    node: str
    kept: tuple[str, str, float] | None = None


@dataclass(frozen=True)
class Elements:
    """How many elements the value of this node has."""

    node: str


@dataclass(frozen=True)
class Targets:
    """The targets that count in a cross entropy, each with the weight of its class.

    Attributes:
        node: of the targets.
        weight: the node of the weights of classes, or ``self.name`` for a tensor of the traced module; or None.
    """

    node: str
    weight: str | None
    ignore_index: int


Weight = Denominator | Elements | Targets


@dataclass(frozen=True)
class Mean:
    """It is a mean over rows.

    Attributes:
        weight: how much counts; None where every row counts as much.
    """

    weight: Weight | None = None


@dataclass(frozen=True)
class Total:
    """It is a sum of terms that are put together in different ways.

    Attributes:
        terms: node, its dependence, and how often it counts.
    """

    terms: tuple[tuple[str, Same | Sum | Mean, float], ...]

    def times(self, factor: float) -> Total:
        """A multiple of it."""
        return Total(tuple((node, state, n * factor) for node, state, n in self.terms))


@dataclass(frozen=True)
class Agree:
    """It is that of all parts if they agree."""


@dataclass(frozen=True)
class Mixed:
    """Rows meet other rows.

    Attributes:
        why: in words, to follow "it".
        node: name of the traced node where that happens.
    """

    why: str
    node: str = ""


@dataclass(frozen=True)
class Unknown:
    """Nobody knows.

    Attributes:
        why: in words.
    """

    why: str


Dependence = Same | Rows | Position | Sum | Kept | Mean | Total | Agree | Mixed | Unknown
SAME = Same()


def reshaped(rows: Rows, old: Sequence[int], new: Sequence[int], batch: int) -> Dependence:
    """Where the rows are after elements of shape `old` are read, in order, as of shape `new`."""
    if rows.inner is None:  # ragged: as long as nothing is taken apart or put together
        keeps = len(old) == len(new) or prod(new[: rows.dim]) == prod(old[: rows.dim])
        return rows if keeps and rows.dim < len(new) and new[rows.dim] == old[rows.dim] else Unknown(_RAGGED)
    right = rows.inner * prod(old[rows.dim + 1 :])  # elements between a row and the next
    span = right * batch
    after = prod(new)
    for dim, size in enumerate(new):
        after //= max(size, 1)
        if size == 1 and batch > 1:
            continue
        if right % after == 0 and (after * size) % span == 0 and after * size >= span:
            inner = right // after
            return Rows(dim, size // (batch * inner), inner, rows.divided)
    return Mixed("takes the rows of the batch apart in another order")


_RAGGED = "as many values as the data says are read in another shape"
