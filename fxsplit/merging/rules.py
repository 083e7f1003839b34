"""What an operation makes of the dependence of its operands: a rule for each family of ATen's operations.

Operations that are composed of others never come here, and neither does autograd: what is left are some hundred names.
One without a rule makes its result Unknown. Rules that move rows about are in `shape_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from .dependence import SAME, Agree, Dependence, Kept, Mean, Mixed, Position, Rows, Same, Sum, Total, Unknown
from .pair import Operand, Pair, shapes_that_grow

Rule = Callable[[Pair], Dependence]
RULES: dict[str, Rule] = {}

NUMBER = "depends on the number of rows"
COMPUTED = "computes with what is made of all rows of the batch"
MEET = "lets rows of the batch meet other rows"
SIZED = "meets values that are made for this number of rows"
DIVIDED = "divides some values by the number of rows"


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for these operations."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def results_of(pair: Pair) -> list[Dependence]:
    """The dependence of each output."""
    first = _first(pair)
    found = [first] * len(pair.outputs)
    if pair.name.startswith("nll_loss") and len(found) > 1 and not isinstance(first, Mixed):
        found[1] = Sum()  # how much counts
    elif pair.name in _WITH_STATISTICS:
        found[1:] = [SAME if pair.is_one_size(o) else Unknown("it is a statistic") for o in pair.outputs[1:]]
    return found


def _first(pair: Pair) -> Dependence:
    if pair.name in _FILLED:
        return _filled(pair)
    if all(isinstance(o.state, Same) for o in pair.operands):
        return _of_constants(pair)
    states = [o.state for o in pair.operands]
    for kind in (Mixed, Unknown):
        odd = next((s for s in states if isinstance(s, kind)), None)
        if odd is not None:
            return Unknown("it says where rows are") if _places_numbers(pair) else odd
    if pair.name in RULES:
        return RULES[pair.name](pair)
    if torch.Tag.pointwise in pair.func.tags:
        return pointwise(pair)
    return Unknown(f"nothing is known of {pair.name}")


def _places_numbers(pair: Pair) -> bool:
    """``inverse[permutation] = arange(n)``: whole numbers, to find rows again with."""
    return pair.name in ("index_put", "index_put_") and not pair.outputs[0].dtype.is_floating_point


# -- constants ---------------------------------------------------------------------------------------------------

# Filled with one number or drawn: alike for all rows.
_FILLED = frozenset(
    f"{prefix}{kind}{suffix}"
    for kind in ("zeros", "ones", "full", "empty", "rand", "randn", "randint")
    for prefix in ("", "new_")
    for suffix in ("", "_like", "_strided", "_permuted")
)


def _of_constants(pair: Pair) -> Dependence:
    """Of operands that are the same for all: so is the result, unless its size follows the batch."""
    if not shapes_that_grow(pair):
        counted = pair.counts_rows and pair.name in ("mul", "scalar_tensor", "lift_fresh", "lift_fresh_copy")
        begins_alike = pair.name == "slice" and pair.is_one_argument("start") and pair.is_one_argument("step")
        if pair.same_scalars or pair.name in _RESHAPES or begins_alike:
            return SAME
        return Sum() if counted else Mixed(NUMBER)
    if pair.name == "arange":
        (n,), (k,) = pair.shapes
        plain = (n, k) == pair.rows and not pair.argument("start") and pair.argument("step") in (None, 1)
        return Position() if plain else Mixed("numbers the rows of the batch")
    return grown(pair) if pair.name in ("expand", "repeat") else Mixed(NUMBER)


_RESHAPES = ("view", "_unsafe_view", "reshape", "_reshape_alias", "expand")


def _filled(pair: Pair) -> Dependence:
    if not shapes_that_grow(pair):
        if pair.same_scalars or not pair.name.startswith("full"):
            return SAME
        return Sum() if pair.counts_rows else Mixed(NUMBER)
    like = pair.operands[0] if pair.operands else None
    if like is not None and isinstance(like.state, Rows) and like.shape == pair.shapes[0]:
        return Rows(like.state.dim, like.state.outer, like.state.inner)
    return grown(pair)


def grown(pair: Pair) -> Dependence:
    """Alike for all rows, and as long as there are rows along one dimension."""
    dims = shapes_that_grow(pair)
    if len(dims) != 1:
        return Mixed("is made for pairs of rows")
    inner, rest = divmod(pair.shapes[0][dims[0]], pair.rows[0])
    return Mixed(NUMBER) if rest else Rows(dims[0], 1, inner)


# -- element by element ------------------------------------------------------------------------------------------


def varying(pair: Pair) -> list[Operand]:
    """The operands that depend on the batch."""
    return [o for o in pair.operands if not isinstance(o.state, Same)]


@rule("_to_copy", "clone", "detach", "alias", "lift_fresh", "lift_fresh_copy", "neg", "positive")
def _converted(pair: Pair) -> Dependence:
    given = pair.operands[0]
    rounds = given.dtype.is_floating_point and not pair.outputs[0].dtype.is_floating_point
    if isinstance(given.state, Sum | Mean | Total) and rounds:
        return Mixed("rounds what is made of all rows of the batch")
    if isinstance(given.state, Total) and pair.name == "neg":
        return given.state.times(-1.0)
    if isinstance(given.state, Position) and pair.name == "neg":
        return Mixed("computes with the numbers of rows")
    return given.state


def pointwise(pair: Pair) -> Dependence:
    """Each element of the result is made of the elements at its place."""
    operands = varying(pair)
    if any(isinstance(o.state, Position) for o in operands):
        return Mixed("computes with the numbers of rows")
    if not all(isinstance(o.state, Rows) for o in operands):
        return _of_numbers(pair, operands)
    if pair.same_scalars:
        return aligned(pair)
    found = aligned(pair)
    by_count = pair.counts_rows and pair.name in ("mul", "div") and len(operands) == 1
    if by_count and isinstance(found, Rows) and found.divided == (pair.name == "mul"):
        return Rows(found.dim, found.outer, found.inner, not found.divided)
    return Mixed(NUMBER)


def aligned(pair: Pair) -> Dependence:
    """Operands with rows, broadcast against each other and against what is the same for all."""
    rank, operands = len(pair.shapes[0]), varying(pair)
    places = {placed(o, rank) for o in operands}
    if len(places) != 1:
        return Mixed(DIVIDED if len({p.divided for p in places}) > 1 else MEET)
    place = places.pop()
    if place.divided:
        alone = len(operands) == len(pair.operands) and pair.name in ("add", "sub")
        if not alone and pair.name not in ("mul", "div", "masked_fill"):
            return Mixed(DIVIDED)
    same = (o for o in pair.operands if isinstance(o.state, Same))
    return Mixed(SIZED) if any(reaches(o, place.dim, rank) for o in same) else place


def reaches(operand: Operand, dim: int, rank: int) -> bool:
    """Whether an operand that is the same for all has more than one element along a dimension of the result."""
    own = dim - rank + len(operand.shape)
    return own >= 0 and operand.shape[own] != 1


def placed(operand: Operand, rank: int) -> Rows:
    """Where its rows are in a result of `rank` dimensions that it is broadcast to."""
    assert isinstance(operand.state, Rows)
    state = operand.state
    return Rows(state.dim + rank - len(operand.shape), state.outer, state.inner, state.divided)


def _of_numbers(pair: Pair, operands: Sequence[Operand]) -> Dependence:
    """Sums and means over rows are among the operands: what is linear in them is one, too."""
    first, every = operands[0].state, len(operands) == len(pair.operands)
    alike = all(o.state == first for o in operands)
    if pair.name in ("add", "sub", "rsub") and alike and pair.same_scalars:
        if isinstance(first, Mean):  # also beside something that is the same for all
            return first
        if isinstance(first, Sum) and every and (len(operands) > 1 or pair.argument("other") == 0):
            return first
    if pair.name in ("add", "sub"):
        total = pair.total()
        if total is not None:
            return total
    alone = len(operands) == 1 and (pair.name == "mul" or pair.operands[0].state == first)
    if pair.name in ("mul", "div") and alone and isinstance(first, Sum | Mean):
        return _scaled(pair, first)
    if pair.name in ("mul", "div") and isinstance(first, Total) and pair.same_scalars:
        number = pair.argument("other")
        if isinstance(number, int | float) and pair.argument("rounding_mode") is None:
            return first.times(number if pair.name == "mul" else 1 / number)
    if pair.name == "div" and [type(o.state) for o in pair.operands] in ([Sum, Sum], [Sum, Kept]):
        return pair.ratio()
    kept = pair.kept() if isinstance(first, Sum) else None
    if kept is not None:
        return kept
    if pair.name == "logical_not" and isinstance(first, Agree):
        return first
    return Mixed(COMPUTED)


def _scaled(pair: Pair, state: Sum | Mean) -> Dependence:
    """A sum or a mean, times or by what is the same for all, or the number of rows."""
    if pair.same_scalars and pair.argument("rounding_mode") is None:
        return state
    if pair.counts_rows and pair.name == "div" and isinstance(state, Sum):
        return Mean()
    return Sum() if pair.counts_rows and pair.name == "mul" and state == Mean() else Mixed(NUMBER)


@rule("copy")
def _copied(pair: Pair) -> Dependence:
    """Of all of a tensor, or of a view of it, the contents are replaced."""
    target, source = pair.operands
    if target.shape == source.shape and not isinstance(source.state, Same):
        return source.state
    if isinstance(source.state, Same) and not isinstance(target.state, Rows):
        return SAME
    return pointwise(pair)


@rule("fill", "zero")
def _set(pair: Pair) -> Dependence:
    target = pair.operands[0].state
    if len(varying(pair)) > isinstance(target, Rows) or not pair.same_scalars:
        return Mixed(COMPUTED)
    return target if isinstance(target, Rows) else SAME


@rule("native_dropout", "bernoulli", "normal", "uniform", "exponential", "random")
def _drawn(pair: Pair) -> Dependence:
    return pair.operands[0].state


# -- over dimensions ---------------------------------------------------------------------------------------------


def dimensions(asked: int | Sequence[int] | None, rank: int) -> set[int]:
    """The dimensions that an argument names; none, or an empty list, is all of them."""
    if asked is None or asked == []:
        return set(range(rank))
    return {d % max(rank, 1) for d in ([asked] if isinstance(asked, int) else asked)}


@rule(
    *(
        "sum",
        "mean",
        "amax",
        "amin",
        "max",
        "min",
        "argmax",
        "argmin",
        "var",
        "std",
        "var_mean",
        "std_mean",
        "prod",
    ),
    *(
        "logsumexp",
        "linalg_vector_norm",
        "norm",
        "all",
        "any",
        "count_nonzero",
        "median",
        "nansum",
        "nanmedian",
    ),
)
def _reduced(pair: Pair) -> Dependence:
    given, rank = pair.operands[0], len(pair.operands[0].shape)
    if len(pair.operands) > 1:  # of two tensors
        return pointwise(pair)
    state, dims = given.state, dimensions(pair.argument("dim"), rank)
    if not isinstance(state, Rows):
        linear = pair.name in ("sum", "mean") and isinstance(state, Sum | Mean)
        return state if linear else Mixed(COMPUTED)
    if state.dim not in dims:
        if state.divided and pair.name not in ("sum", "mean"):
            return Mixed(DIVIDED)
        gone = sum(d < state.dim for d in dims) if len(pair.shapes[0]) < rank else 0
        return Rows(state.dim - gone, state.outer, state.inner, state.divided)
    if pair.name in ("sum", "nansum", "count_nonzero"):
        return Mean() if state.divided else Sum()
    if pair.name == "mean" and not state.divided:
        return Mean() if state.inner is not None else pair.mean_of_elements()
    discrete = pair.name in ("amax", "amin", "max", "min") and not given.dtype.is_floating_point
    if pair.name in ("all", "any") or discrete:
        return Agree()
    return Mixed(f"computes the {pair.name.replace('linalg_vector_', '')} of the rows of the batch")


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def _normalised(pair: Pair) -> Dependence:
    given = pair.operands[0]
    if not isinstance(given.state, Rows) or len(varying(pair)) > 1:
        return Mixed(COMPUTED)
    inside = given.state.dim < len(given.shape) - len(pair.argument("normalized_shape"))
    return given.state if inside and not given.state.divided else Mixed(MEET)


# -- products ----------------------------------------------------------------------------------------------------


@rule("mm", "bmm", "mv", "dot", "vdot", "linear")
def _product(pair: Pair) -> Dependence:
    return _multiplied(pair, *pair.operands[:2])


@rule("addmm", "baddbmm", "addmv")
def _product_and_sum(pair: Pair) -> Dependence:
    added, a, b = pair.operands
    found, rank = _multiplied(pair, a, b), len(pair.shapes[0])
    if isinstance(found, Same):
        return added.state
    if isinstance(added.state, Same):
        if isinstance(found, Rows):
            return (
                Mixed(SIZED if not found.divided else DIVIDED) if reaches(added, found.dim, rank) else found
            )
        return found if isinstance(found, Mean | Mixed) else Mixed(COMPUTED)
    if isinstance(found, Rows):
        return found if isinstance(added.state, Rows) and placed(added, rank) == found else Mixed(MEET)
    return found if added.state == found else Mixed(COMPUTED)


def _multiplied(pair: Pair, a: Operand, b: Operand) -> Dependence:
    """``a @ b`` of batches of matrices, matrices or vectors."""
    states = [o.state for o in (a, b) if not isinstance(o.state, Same)]
    if not states:
        return SAME
    if not all(isinstance(s, Rows) for s in states):
        linear = len(states) == 1 and isinstance(states[0], Sum | Mean)
        return states[0] if linear else Mixed(COMPUTED)
    rank = len(pair.shapes[0])
    contracted: list[Rows] = []
    free: list[Rows] = []
    for operand, dim in ((a, len(a.shape) - 1), (b, max(len(b.shape) - 2, 0))):
        state = operand.state
        if not isinstance(state, Rows):
            continue
        if state.dim == dim:
            contracted.append(Rows(0, state.outer, state.inner, state.divided))
            continue
        is_batch = len(operand.shape) == 3 and state.dim == 0
        where = 0 if is_batch else rank - 1 if operand is b else len(a.shape) - 2
        free.append(Rows(where, state.outer, state.inner, state.divided))
    if contracted:
        alike = len(contracted) == 2 and replace(contracted[0], divided=False) == replace(
            contracted[1], divided=False
        )
        if free or not alike or contracted[0].inner is None:
            return Mixed("multiplies rows of the batch by other rows")
        times = contracted[0].divided + contracted[1].divided
        return Sum() if times == 0 else Mean() if times == 1 else Mixed(NUMBER)
    other = b if a.state in states else a
    if len(free) == 1:
        per_row = len(other.shape) == 3 and free[0].dim == 0 and rank == 3 and isinstance(other.state, Same)
        return Mixed(SIZED) if per_row and other.shape[0] != 1 else free[0]
    batches = rank == 3 and free[0] == free[1] and free[0].dim == 0 and not free[0].divided
    return free[0] if batches else Mixed("multiplies rows of the batch by other rows")


# -- one row at a time -------------------------------------------------------------------------------------------

_ATTENTION = (
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_attention_math"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable"),
)
_BATCH_NORMS = (
    *(
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_no_training",
        "cudnn_batch_norm",
    ),
    *(
        "_native_batch_norm_legit_functional",
        "_batch_norm_with_update",
        "_batch_norm_no_update",
        "miopen_batch_norm",
    ),
)
_WITH_STATISTICS = frozenset(
    (*_BATCH_NORMS, *_ATTENTION, "native_layer_norm", "native_group_norm", "_fused_rms_norm"),
)


@rule(*_BATCH_NORMS)
def _batch_normalised(pair: Pair) -> Dependence:
    """Input (rows, channels, …), by micro-batch, as the plan says; or (1, rows · channels, …) of instance normalisation."""
    state, others = pair.operands[0].state, [o.state for o in varying(pair)[1:]]
    if not isinstance(state, Rows) or state.divided or state.dim > 1:
        return Unknown(f"{pair.name} along another dimension than the first")
    by_channel = Rows(0, state.outer, state.inner)
    fits = not others if state.dim == 0 else all(s == by_channel for s in others)
    return state if fits else Mixed(MEET)


@rule(
    *_ATTENTION,
    *(
        "native_group_norm",
        "convolution",
        "_convolution",
        "mkldnn_convolution",
        "convolution_overrideable",
        "instance_norm",
    ),
    *(
        "max_pool2d_with_indices",
        "max_pool3d_with_indices",
        "avg_pool2d",
        "avg_pool3d",
        "max_pool1d",
        "avg_pool1d",
    ),
    *("mkldnn_max_pool2d", "mkldnn_max_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d", "max_unpool2d"),
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "upsample_nearest1d", "upsample_nearest2d"),
    *(
        "upsample_nearest3d",
        "upsample_linear1d",
        "upsample_bilinear2d",
        "upsample_trilinear3d",
        "upsample_bicubic2d",
    ),
    *(
        "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d",
        "_upsample_nearest_exact3d",
        "grid_sampler_3d",
    ),
    *(
        "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa",
        "grid_sampler_2d",
        "pixel_shuffle",
        "pixel_unshuffle",
    ),
    *("native_channel_shuffle", "im2col", "col2im", "_transformer_encoder_layer_fwd", "_cdist_forward"),
)
def _each_row(pair: Pair) -> Dependence:
    """Dimension 0 is that of independent rows."""
    states = {o.state for o in varying(pair)}
    for operand in varying(pair):
        state, last = operand.state, 3 if pair.name in _ATTENTION else 1
        if not isinstance(state, Rows):
            return Mixed(COMPUTED)
        if state.dim > 0 and state.dim > len(operand.shape) - last:
            return Unknown(f"{pair.name} along another dimension than the first")
        if state.divided or state.inner is None or (state.dim and pair.name not in _ATTENTION):
            return Unknown(f"{pair.name} of rows that are not dimension 0")
    return states.pop() if len(states) == 1 else Mixed(MEET)


@rule("mkldnn_rnn_layer")
def _recurrent(pair: Pair) -> Dependence:
    """Input (time, batch, features), states (1, batch, features) or the same for all."""
    return Rows(1) if {o.state for o in varying(pair)} == {Rows(1)} else Unknown("a recurrent layer by rows")


# -- losses ------------------------------------------------------------------------------------------------------


@rule(
    *("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
    *("multi_margin_loss", "multilabel_margin_loss_forward", "soft_margin_loss", "l1_loss", "kl_div"),
    *(
        "nll_loss_forward",
        "nll_loss2d_forward",
        "nll_loss_nd",
        "nll_loss",
        "nll_loss2d",
        "cross_entropy_loss",
    ),
)
def _loss(pair: Pair) -> Dependence:
    counts = pair.name.startswith(("nll_loss", "cross_entropy"))
    found = _by_rows(pair) if counts else aligned(pair) if _only_rows(pair) else Mixed(COMPUTED)
    how = pair.argument("reduction")
    if not isinstance(found, Rows) or how == 0:
        return found
    if found.divided:
        return Mixed(DIVIDED)
    if how == 2:
        return Sum()
    if counts and not pair.operands[1].dtype.is_floating_point:
        return pair.mean_of_targets()
    return Mean() if found.inner is not None else pair.mean_of_elements()


def _only_rows(pair: Pair) -> bool:
    return all(isinstance(o.state, Rows) for o in varying(pair))


def _by_rows(pair: Pair) -> Dependence:
    """Scores (rows, classes, …) and their targets (rows, …)."""
    scores, target = pair.operands[:2]
    if not _only_rows(pair) or len(varying(pair)) > 2:
        return Mixed(COMPUTED)
    if not isinstance(scores.state, Rows) or not isinstance(target.state, Rows):
        return Mixed(SIZED)
    if scores.state.dim != 0:
        return Unknown(f"{pair.name} of rows that are not dimension 0")
    return scores.state if scores.state == target.state else Mixed(MEET)
