"""The rules of operations that move rows about: shapes, pieces, order and indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .dependence import Dependence, Mean, Mixed, Position, Rows, Same, Sum, Unknown, reshaped
from .pair import Operand, Pair, shapes_that_grow
from .rules import (
    COMPUTED,
    MEET,
    NUMBER,
    SIZED,
    aligned,
    dimensions,
    placed,
    pointwise,
    reaches,
    rule,
    varying,
)

_SOME = "takes some of the rows of the batch"
_BESIDE = "puts other rows beside those of the batch"
_NUMBERS = "computes with the numbers of rows"


@rule("view", "_unsafe_view", "reshape", "_reshape_alias")
def _viewed(pair: Pair) -> Dependence:
    given = pair.operands[0]
    if isinstance(given.state, Rows):
        return reshaped(given.state, given.shape, pair.shapes[0], pair.rows[0])
    return given.state


@rule("squeeze", "unsqueeze")
def _by_one(pair: Pair) -> Dependence:
    """A dimension of size one comes or goes."""
    given, asked = pair.operands[0], pair.argument("dim")
    if not isinstance(given.state, Rows | Position):
        return given.state
    state, rank = given.state, len(given.shape)
    if pair.name == "unsqueeze":
        return replace(state, dim=state.dim + (asked % (rank + 1) <= state.dim))
    gone = sum(d < state.dim and given.shape[d] == 1 for d in dimensions(asked, rank))
    return replace(state, dim=state.dim - gone)


@rule("permute", "transpose", "t")
def _permuted(pair: Pair) -> Dependence:
    state, rank = pair.operands[0].state, len(pair.shapes[0])
    if not isinstance(state, Rows):
        return state
    order = list(range(rank))
    if pair.name == "permute":
        order = [d % rank for d in pair.argument("dims")]
    elif rank > 1:
        a, b = (0, 1) if pair.name == "t" else (pair.argument("dim0"), pair.argument("dim1"))
        order[a], order[b] = order[b], order[a]
    return replace(state, dim=order.index(state.dim))


@rule("expand", "repeat")
def _expanded(pair: Pair) -> Dependence:
    given, dims = pair.operands[0], shapes_that_grow(pair)
    if isinstance(given.state, Sum | Mean):
        return given.state if not dims else Mixed(COMPUTED)
    if not isinstance(given.state, Rows):
        return Mixed(_NUMBERS)
    dim = given.state.dim + len(pair.shapes[0]) - len(given.shape)
    if list(dims) != [dim] or given.state.inner is None:
        return Mixed("is made for pairs of rows")
    times = pair.shapes[0][dim] // max(given.shape[given.state.dim], 1)
    return replace(given.state, dim=dim, outer=given.state.outer * times)


@rule("slice", "select")
def _sliced(pair: Pair) -> Dependence:
    given = pair.operands[0]
    state, rank = given.state, len(given.shape)
    if isinstance(state, Position):
        return state if pair.shapes[0] == given.shape and pair.name == "slice" else Mixed(_NUMBERS)
    if not isinstance(state, Rows):
        return state if pair.same_scalars else Mixed(NUMBER)
    dim = int(pair.argument("dim")) % rank
    if dim != state.dim:
        return replace(state, dim=state.dim - (pair.name == "select" and dim < state.dim))
    if pair.name == "slice" and pair.argument("step") == 1:
        size = pair.shapes[0][dim]
        if size == given.shape[dim]:
            return state
        block = pair.rows[0] * (state.inner or 0)
        if state.outer > 1 and size == block and (pair.argument("start") or 0) % block == 0:
            return replace(state, outer=1)
    return Mixed(_SOME)


@rule("split", "split_with_sizes", "unbind", "unsafe_split", "chunk")
def _split(pair: Pair) -> Dependence:
    given = pair.operands[0]
    state = given.state
    if not isinstance(state, Rows):
        return Mixed(_NUMBERS) if isinstance(state, Position) else state
    dim = int(pair.argument("dim", 0)) % len(given.shape)
    if dim != state.dim:
        return replace(state, dim=state.dim - (pair.name == "unbind" and dim < state.dim))
    if pair.name == "unbind":
        return Mixed(_SOME)
    sizes = {o.shape[dim] for o in pair.outputs}
    if sizes == {given.shape[dim]}:
        return state
    whole = state.inner is not None and state.outer > 1 and sizes == {pair.rows[0] * state.inner}
    return replace(state, outer=1) if whole else Mixed(_SOME)


@rule("cat", "stack")
def _joined(pair: Pair) -> Dependence:
    rank = len(pair.shapes[0])
    dim = int(pair.argument("dim")) % rank
    present = [o for o in pair.operands if o.shape != (0,) or rank == 1]
    having = [o for o in present if not isinstance(o.state, Same)]
    states = {o.state for o in having}
    if not all(isinstance(s, Rows) for s in states):
        alike = len(states) == 1 and (len(having) == len(present) or isinstance(having[0].state, Mean))
        return having[0].state if alike and isinstance(having[0].state, Sum | Mean) else Mixed(COMPUTED)
    if len(states) > 1:
        return Mixed(MEET)
    (state,) = states
    assert isinstance(state, Rows)
    if pair.name == "stack":
        shifted = replace(state, dim=state.dim + (dim <= state.dim))
        return shifted if len(having) == len(present) else Mixed(SIZED)
    if dim != state.dim:
        return state if len(having) == len(present) else Mixed(SIZED)
    if len(having) < len(present):
        return Mixed(_BESIDE)
    return Mixed(MEET) if state.inner is None else replace(state, outer=state.outer * len(having))


@rule("constant_pad_nd", *(f"{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)))
def _padded(pair: Pair) -> Dependence:
    given = pair.operands[0]
    if not isinstance(given.state, Rows) or given.state.divided:
        return Mixed(COMPUTED)
    pads = list(pair.whole.args[1])
    last = len(given.shape) - 1 - given.state.dim
    return Mixed(_BESIDE) if any(pads[2 * last : 2 * last + 2]) else given.state


@rule(
    *(
        "flip",
        "roll",
        "cumsum",
        "cumprod",
        "sort",
        "argsort",
        "topk",
        "kthvalue",
        "cummax",
        "cummin",
        "unfold",
        "glu",
    ),
    *(
        "_softmax",
        "_log_softmax",
        "_safe_softmax",
        "logcumsumexp",
        "_fft_r2c",
        "_fft_c2r",
        "_fft_c2c",
    ),
)
def _along(pair: Pair) -> Dependence:
    """Along one dimension or several, for every place in the others by itself."""
    given = pair.operands[0]
    if not isinstance(given.state, Rows):
        return given.state if pair.name == "flip" else Mixed(COMPUTED)
    asked = pair.argument("dims", pair.argument("dim", pair.argument("dimension")))
    if given.state.dim in dimensions(asked, len(given.shape)):
        return Unknown("rows change their order") if pair.name in _ORDERS else Mixed(MEET)
    return given.state if not given.state.divided or pair.name in ("flip", "roll") else Mixed(COMPUTED)


@rule("renorm")
def _renorm(pair: Pair) -> Dependence:
    """For every place along one dimension by itself, over all the others."""
    given = pair.operands[0].state
    alone = isinstance(given, Rows) and dimensions(pair.argument("dim"), len(pair.operands[0].shape)) == {
        given.dim
    }
    return given if alone else Mixed(MEET)


_ORDERS = ("flip", "roll", "sort", "argsort", "topk")  # which another operation may put right again


@rule("tril", "triu")
def _triangle(pair: Pair) -> Dependence:
    given = pair.operands[0]
    inside = isinstance(given.state, Rows) and given.state.dim < len(given.shape) - 2
    return given.state if inside else Mixed(MEET)


# -- by index ----------------------------------------------------------------------------------------------------


@rule("embedding")
def _embedded(pair: Pair) -> Dependence:
    table, index = pair.operands
    return index.state if isinstance(table.state, Same) and isinstance(index.state, Rows) else Mixed(COMPUTED)


@rule("index_select")
def _index_selected(pair: Pair) -> Dependence:
    given, index = pair.operands
    dim = int(pair.argument("dim")) % max(len(given.shape), 1)
    if isinstance(given.state, Same) and isinstance(index.state, Rows):
        return replace(index.state, dim=dim)
    if isinstance(given.state, Rows):
        if isinstance(index.state, Same) and dim != given.state.dim:
            return given.state
        if isinstance(index.state, Position) and given.state == Rows(dim):
            return given.state
    return Unknown("rows are taken by index")


@rule("gather", "scatter", "scatter_add", "scatter_reduce")
def _gathered(pair: Pair) -> Dependence:
    states = {o.state for o in pair.operands if o.shape}
    (state, *others), dim = states, int(pair.argument("dim"))
    plain = not others and isinstance(state, Rows) and not state.divided
    if plain and isinstance(state, Rows) and dim % len(pair.operands[0].shape) != state.dim:
        return state
    return Unknown("values are taken by index")


@rule("index", "_unsafe_index")
def _indexed(pair: Pair) -> Dependence:
    given, indices = pair.operands[0], _indices(pair)
    (dim, first), others = indices[0], [o for _, o in indices[1:]]
    state = given.state
    if isinstance(state, Rows) and all(isinstance(o.state, Same) for _, o in indices):
        if len(indices) == 1 and dim != state.dim:
            gone = len(first.shape) if first.dtype is torch.bool else 1
            made = 1 if first.dtype is torch.bool else len(first.shape)
            return replace(state, dim=state.dim + (made - gone if dim < state.dim else 0))
    elif first.dtype is torch.bool:
        if not others and dim == 0 and state == first.state == Rows(0):
            return Rows(0, inner=None)
        if not others and dim == 0 and isinstance(state, Rows) and state == first.state and state.dim == 0:
            return replace(state, inner=None) if state.outer == 1 and not state.divided else Mixed(MEET)
    elif isinstance(state, Same) and not others and isinstance(first.state, Rows):
        return replace(first.state, dim=first.state.dim + dim)
    elif state == Rows(0) and isinstance(first.state, Position) and dim == 0:
        rank = max(len(o.shape) for _, o in indices)
        place = Rows(first.state.dim + rank - len(first.shape))
        alike = all(placed(o, rank) == place for o in others if isinstance(o.state, Rows))
        constant = all(not reaches(o, place.dim, rank) for o in others if isinstance(o.state, Same))
        known = all(isinstance(o.state, Rows | Same) for o in others)
        if alike and constant and known and [d for d, _ in indices] == list(range(len(indices))):
            return place
    return Unknown("rows are taken by index")


@rule("index_put", "_unsafe_index_put")
def _put(pair: Pair) -> Dependence:
    given, value, indices = pair.operands[0], pair.operands[-1], _indices(pair)
    if isinstance(given.state, Rows) and isinstance(value.state, Same) and not given.state.divided:
        (dim, first), *others = indices
        masked = first.dtype is torch.bool and first.state == given.state and dim == given.state.dim == 0
        elsewhere = all(isinstance(o.state, Same) and d != given.state.dim for d, o in indices)
        if elsewhere or (masked and not others):
            return given.state
    return Unknown("values are written by index")


def _indices(pair: Pair) -> Sequence[tuple[int, Operand]]:
    """The dimensions that are indexed, and what by."""
    found = [(d, pair.operand(index)) for d, index in enumerate(pair.argument("indices"))]
    return [(d, operand) for d, operand in found if operand is not None]


@rule("masked_select")
def _masked(pair: Pair) -> Dependence:
    found = aligned(pair) if all(isinstance(o.state, Rows) for o in varying(pair)) else None
    one_shape = len({o.shape for o in pair.operands}) == 1
    return Rows(0, inner=None) if found == Rows(0) and one_shape else Unknown("values are taken by a mask")


@rule("where", "masked_fill")
def _chosen(pair: Pair) -> Dependence:
    """``where(mask)`` alone gives the places, whose numbers count the rows."""
    return (
        Unknown("rows are found by a mask")
        if len(pair.operands) < 2 and pair.name == "where"
        else pointwise(pair)
    )
