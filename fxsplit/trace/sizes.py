"""Sizes of all values of a graph, as polynomials in the sizes of its inputs: what holds for every call, not for the example.

Where an operation is not known here, the sizes of what it gives are numbers of their own, of which nothing is claimed. So
nothing is assumed, whatever the model does::

    x: (x.0, x.1)   h = wte(x): (x.0, x.1, 32)   h.view(-1, 32): (x.0 * x.1, 32)   u = somebodys(h): (u.0, u.1)
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..graph.effects import is_known
from ..graph.ir import NodeFacts, TensorSpec
from .operations import OPERATORS


@dataclass(frozen=True)
class Size:
    """A polynomial: names of sizes, multiplied, each with an integer before it."""

    terms: tuple[tuple[tuple[str, ...], int], ...]

    def __repr__(self) -> str:
        return " + ".join("*".join([str(n), *names]) for names, n in self.terms) or "0"


Number = int | Size


@dataclass(frozen=True)
class Shape:
    """Of a tensor."""

    sizes: tuple[Number, ...]


@dataclass(frozen=True)
class Unknown:
    """A tensor of which not even the rank is known: it may depend on sizes, too."""

    name: str


class _NotKnownError(Exception):
    pass


def _made(terms: Mapping[tuple[str, ...], int]) -> Number:
    left = tuple(sorted((names, n) for names, n in terms.items() if n))
    if not left:
        return 0
    return left[0][1] if len(left) == 1 and not left[0][0] else Size(left)


def _terms(a: Number) -> dict[tuple[str, ...], int]:
    return dict(a.terms) if isinstance(a, Size) else {(): a}


def named(name: str) -> Size:
    """A size of which nothing is known."""
    return Size((((name,), 1),))


def plus(a: Number, b: Number, sign: int = 1) -> Number:
    """a + b, or a - b."""
    found = _terms(a)
    for names, n in _terms(b).items():
        found[names] = found.get(names, 0) + sign * n
    return _made(found)


def times(a: Number, b: Number) -> Number:
    """a * b."""
    found: dict[tuple[str, ...], int] = {}
    for left, n in _terms(a).items():
        for right, m in _terms(b).items():
            names = tuple(sorted((*left, *right)))
            found[names] = found.get(names, 0) + n * m
    return _made(found)


def divided(a: Number, b: Number) -> Number | None:
    """a / b, where that is a polynomial whatever the sizes are; `b` is one term."""
    if b == 0 or (isinstance(b, Size) and len(b.terms) != 1):
        return None
    ((below, m),) = _terms(b).items()
    found: dict[tuple[str, ...], int] = {}
    for names, n in _terms(a).items():
        rest = list(names)
        for name in below:
            if name not in rest:
                return None
            rest.remove(name)
        if n % m:
            return None
        found[tuple(rest)] = n // m
    return _made(found)


def least(a: Number) -> int | None:
    """The least that it can be, since no size is below zero; None where that is not said by its signs."""
    found = _terms(a)
    return None if any(n < 0 for names, n in found.items() if names) else found.get((), 0)


def compared(kind: Any, a: Number, b: Number) -> bool | None:
    """``kind(a, b)``, where it is the same for all sizes."""
    difference, other = plus(a, b, -1), plus(b, a, -1)
    if isinstance(difference, int):
        return bool(kind(difference, 0))
    low, high = least(difference), least(other)  # a - b is at least `low`, and at most -high
    if low is not None and low > 0:
        return bool(kind(1, 0))
    if high is not None and high > 0:
        return bool(kind(0, 1))
    if low == 0 and kind in (operator.ge, operator.lt):
        return kind is operator.ge
    if high == 0 and kind in (operator.le, operator.gt):
        return kind is operator.le
    return None


Value = Any  # a Shape, a number, a tuple or list of values; None for what is not known


def sizes_of(
    graph: fx.Graph, facts: Mapping[str, NodeFacts], objects: Mapping[str, Any]
) -> dict[fx.Node, Value]:
    """Node → its `Shape`, number, or tuple or list of them; what is not there is not known.

    Args:
        objects: target of a ``call_module`` or ``get_attr`` → what it is.
    """
    found: dict[fx.Node, Value] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        example = facts[node.name].value
        try:
            value = _Rules(node, found, example, objects).value()
        except (_NotKnownError, TypeError, ValueError, IndexError, KeyError, AttributeError):
            value = None
        if not _fits(value, example, facts):
            value = None
        found[node] = _nameless(node, example) if value is None else value
    return found


def _fits(value: Value, example: Any, facts: Mapping[str, NodeFacts]) -> bool:
    """What is said of a value may not be wrong of the example."""
    if isinstance(value, Shape):
        return isinstance(example, TensorSpec) and _fits(value.sizes, example.shape, facts)
    if isinstance(value, bool) or isinstance(example, bool):
        return value is example
    if isinstance(value, int | Size):
        return isinstance(example, int) and _of_example(value, facts) == example
    if isinstance(value, tuple | list):
        return (
            isinstance(example, tuple | list)
            and len(value) == len(example)
            and all(v is None or _fits(v, e, facts) for v, e in zip(value, example, strict=True))
        )
    return value is None


def _of_example(number: Number, facts: Mapping[str, NodeFacts]) -> int:
    """Names are those of nodes, and which of their dimensions it is."""
    whole = 0
    for names, n in _terms(number).items():
        for name in names:
            node, _, dim = name.rpartition(".")
            n *= facts[node].value.shape[int(dim)]
        whole += n
    return whole


def _nameless(node: fx.Node, example: Any) -> Value:
    if not isinstance(example, TensorSpec):
        return None
    if node.op != "placeholder":
        return Unknown(node.name)
    return Shape(
        tuple(named(f"{node.name}.{k}") for k in range(len(example.shape)))
    )  # a call has the same rank


# fmt: off
_EACH = frozenset((  # element by element, over all operands that are tensors
    "add", "sub", "mul", "truediv", "true_divide", "div", "pow", "neg", "pos", "invert", "and_", "or_", "xor", "lt", "le", "gt", "ge", "eq", "ne",
    "tanh", "relu", "gelu", "silu", "sigmoid", "exp", "log", "sqrt", "rsqrt", "square", "abs", "sin", "cos", "erf", "softplus",
    "clamp", "where", "masked_fill", "logical_not", "logical_and", "logical_or", "maximum", "minimum", "reciprocal",
))
_FIRST = frozenset((  # of the size of the first operand
    "leaky_relu", "elu", "mish", "hardtanh", "hardswish", "relu6", "dropout", "dropout1d", "dropout2d", "softmax", "log_softmax",
    "contiguous", "clone", "detach", "float", "half", "bfloat16", "to", "type_as", "bool", "int", "long", "double", "layer_norm",
    "rms_norm", "group_norm", "batch_norm", "normalize", "cumsum", "tril", "triu", "zeros_like", "ones_like", "empty_like",
    "full_like", "roll", "flip",
))
_SAME = (  # layers that give what they get, in size
    nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd, nn.Identity, nn.ReLU, nn.GELU,
    nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softmax, nn.LeakyReLU, nn.ELU, nn.Hardswish, nn.ReLU6, nn.Hardsigmoid, nn.Softplus, nn.Mish,
    *((nn.RMSNorm,) if hasattr(nn, "RMSNorm") else ()),
)
# fmt: on
_POOLS = (nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd)
_COMPARES = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
_FILLS = frozenset(("zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full"))


def name_of(node: fx.Node) -> str:
    """Of a function of torch's or of an operator, or of a tensor's method; "" of anybody else's."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    target: Any = node.target
    home = getattr(target, "__module__", None) or ""
    known = target in (len, getattr) or home in ("_operator", "torch", "torch.nn.functional", "torch._C._nn")
    builtin = home == "" and getattr(torch, getattr(target, "__name__", "?"), None) is target
    builtin = builtin or getattr(F, getattr(target, "__name__", "?"), None) is target
    return str(target.__name__) if known or builtin else ""


class _Rules:
    """What one operation gives."""

    def __init__(
        self,
        node: fx.Node,
        found: Mapping[fx.Node, Value],
        example: Any,
        objects: Mapping[str, Any],
    ) -> None:
        self.node, self.found, self.example, self.objects = node, found, example, objects

    def value(self) -> Value:
        node = self.node
        if node.op == "call_module":
            return self._layer(self.objects[str(node.target)])
        if node.op == "get_attr":
            tensor = self.objects[str(node.target)]
            return Shape(tuple(tensor.shape)) if isinstance(tensor, nn.Parameter) else None
        if node.op not in ("call_function", "call_method"):
            return None
        name = name_of(node)
        args = tuple(map(self._resolved, node.args))
        kwargs = {k: self._resolved(v) for k, v in node.kwargs.items()}
        if all(not isinstance(a, Shape | Unknown) for a in (*args, *kwargs.values())):
            numbers = self._numbers(node.target, name, args)
            if numbers is not None:
                return numbers
        if not isinstance(self.example, TensorSpec | int | tuple | list):
            return None
        if name in _EACH:
            if "out" in kwargs or any(isinstance(a, Unknown) for a in (*args, *kwargs.values())):
                return None
            return Shape(_broadcast([s.sizes for s in (*args, *kwargs.values()) if isinstance(s, Shape)]))
        in_place = node.op == "call_method" and name.endswith("_") and name[:-1] in _EACH | _FIRST
        if name in _FIRST or in_place:
            return args[0] if isinstance(args[0], Shape) else None
        rule = getattr(self, f"_{name}", None)
        return None if not name or rule is None or name.startswith("_") else rule(*args, **kwargs)

    def _resolved(self, value: Any) -> Any:
        """An argument, with what is known in place of nodes."""
        if isinstance(value, fx.Node):
            return self.found.get(value)
        if isinstance(value, tuple | list):
            return tuple(map(self._resolved, value))
        if isinstance(value, slice):
            return slice(*(self._resolved(v) for v in (value.start, value.stop, value.step)))
        return value

    # -- numbers ---------------------------------------------------------------------------------------------------

    def _numbers(self, target: Any, name: str, args: Sequence[Any]) -> Value:
        if name in _FILLS:
            return self._filled(args[0] if isinstance(args[0], tuple) else args)
        if name == "arange" and len(args) == 1 and isinstance(args[0], int | Size):
            return Shape((args[0],))
        if target is operator.getitem:
            return (
                args[0][args[1]] if isinstance(args[0], tuple | list) and isinstance(args[1], int) else None
            )
        if target is len:
            return len(args[0]) if isinstance(args[0], tuple | list) else None
        if not args or not all(_is_number(a) for a in args):
            return None
        a, *rest = args
        if target is operator.neg:
            return plus(0, a, -1)
        if not rest:
            return None
        (b,) = rest
        if target in (operator.add, operator.sub):
            return plus(a, b, 1 if target is operator.add else -1)
        if target is operator.mul:
            return times(a, b)
        if target is operator.floordiv:
            return a // b if isinstance(a, int) and isinstance(b, int) else divided(a, b)
        return compared(target, a, b) if target in _COMPARES else None

    def _size(self, x: Shape | Unknown, dim: int | None = None) -> Value:
        if isinstance(x, Unknown):
            return None if dim is None else named(f"{x.name}.{dim}")
        return x.sizes if dim is None else x.sizes[dim]

    def _getattr(self, x: Shape, what: str) -> Value:
        if what == "shape":
            return x.sizes
        if what in ("T", "mT"):
            return self._transpose(x, -1, -2) if len(x.sizes) == 2 or what == "mT" else None
        return None

    def _len(self, x: Shape) -> Value:
        return x.sizes[0]

    def _numel(self, x: Shape) -> Value:
        return _product(x.sizes)

    _nelement = _numel

    def _dim(self, x: Shape) -> Value:
        return len(x.sizes)

    # -- the same numbers, arranged otherwise ----------------------------------------------------------------------

    def _view(self, x: Shape | Unknown, *sizes: Any) -> Value:
        wanted = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple) else sizes
        if not all(_is_number(s) for s in wanted):
            return None
        if wanted.count(-1) != 1:
            return Shape(tuple(wanted)) if -1 not in wanted else None
        rest = _product([s for s in wanted if s != -1])
        whole = divided(_product(x.sizes), rest) if isinstance(x, Shape) else None
        place = wanted.index(-1)
        free = named(f"{self.node.name}.{place}") if whole is None else whole
        return Shape((*wanted[:place], free, *wanted[place + 1 :]))

    _reshape = _view

    def _transpose(self, x: Shape, a: int, b: int) -> Value:
        sizes = list(x.sizes)
        sizes[a], sizes[b] = sizes[b], sizes[a]
        return Shape(tuple(sizes))

    _swapaxes = _transpose

    def _t(self, x: Shape) -> Value:
        return Shape(x.sizes[::-1])

    def _permute(self, x: Shape, *dims: Any) -> Value:
        order = dims[0] if len(dims) == 1 and isinstance(dims[0], tuple) else dims
        return Shape(tuple(x.sizes[d] for d in order))

    def _unsqueeze(self, x: Shape, dim: int) -> Value:
        sizes = list(x.sizes)
        sizes.insert(dim if dim >= 0 else dim + len(sizes) + 1, 1)
        return Shape(tuple(sizes))

    def _flatten(self, x: Shape, start_dim: int = 0, end_dim: int = -1) -> Value:
        start, end = start_dim % len(x.sizes), end_dim % len(x.sizes)
        return Shape((*x.sizes[:start], _product(x.sizes[start : end + 1]), *x.sizes[end + 1 :]))

    def _expand(self, x: Shape | Unknown, *sizes: Any) -> Value:
        wanted = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple) else sizes
        if isinstance(x, Unknown):
            place = self.node.name
            return Shape(tuple(named(f"{place}.{k}") if s == -1 else s for k, s in enumerate(wanted)))
        new = len(wanted) - len(x.sizes)
        return Shape(tuple(x.sizes[k - new] if s == -1 else s for k, s in enumerate(wanted)))

    def _split(self, x: Shape, size: Any, dim: int = 0) -> Value:
        if isinstance(size, tuple):
            return tuple(Shape(_with(x.sizes, dim, s)) for s in size)
        whole = x.sizes[dim]
        if isinstance(size, int) and isinstance(whole, int):
            parts = [min(size, whole - at) for at in range(0, whole, size)]
            return tuple(Shape(_with(x.sizes, dim, s)) for s in parts)
        return None

    def _chunk(self, x: Shape, chunks: int, dim: int = 0) -> Value:
        whole = x.sizes[dim]
        each = divided(whole, chunks)
        known = isinstance(each, int) and each > 0
        return (Shape(_with(x.sizes, dim, each)),) * chunks if known else None

    def _unbind(self, x: Shape, dim: int = 0) -> Value:
        count = x.sizes[dim]
        rest = Shape((*x.sizes[:dim], *x.sizes[dim + 1 :])) if dim >= 0 else None
        return (rest,) * count if isinstance(count, int) else None

    def _getitem(self, x: Value, key: Any) -> Value:
        if not isinstance(x, Shape):
            return x[key] if isinstance(x, tuple | list) and isinstance(key, int) else None
        keys = key if isinstance(key, tuple) else (key,)
        if not all(k is None or k is Ellipsis or isinstance(k, slice) or _is_number(k) for k in keys):
            return None
        used = sum(k is not None and k is not Ellipsis for k in keys)
        if Ellipsis not in keys:
            keys = (*keys, Ellipsis)
        place = keys.index(Ellipsis)
        full = (slice(None),) * (len(x.sizes) - used)
        sizes, at = list[Number](), 0
        for k in (*keys[:place], *full, *keys[place + 1 :]):
            if k is None:
                sizes.append(1)
                continue
            if isinstance(k, slice):
                sizes.append(self._sliced(x.sizes[at], k, len(sizes)))
            at += 1
        return Shape(tuple(sizes))

    def _sliced(self, size: Number, part: slice, place: int) -> Number:
        if part == slice(None):
            return size
        ends = (part.start, part.stop, part.step)
        if isinstance(size, int) and all(e is None or isinstance(e, int) for e in ends):
            return len(range(*part.indices(size)))
        return named(f"{self.node.name}.{place}")

    def _cat(self, tensors: Sequence[Shape], dim: int = 0) -> Value:
        whole: Number = 0
        for x in tensors:
            whole = plus(whole, x.sizes[dim])
        alike = [[s for d, s in enumerate(x.sizes) if d != dim % len(x.sizes)] for x in tensors]
        rank = len(tensors[0].sizes)
        if any(len(x.sizes) != rank for x in tensors):
            return None
        rest = [next((s for s in row if isinstance(s, int)), row[0]) for row in zip(*alike, strict=True)]
        rest.insert(dim % rank, whole)
        return Shape(tuple(rest))

    def _stack(self, tensors: Sequence[Shape], dim: int = 0) -> Value:
        return self._unsqueeze(tensors[0], dim) and Shape(
            _with(self._unsqueeze(tensors[0], dim).sizes, dim, len(tensors))
        )

    def _min(self, a: Shape, b: Shape) -> Value:
        return Shape(_broadcast([a.sizes, b.sizes]))

    _max = _min

    # -- products and sums -------------------------------------------------------------------------------------------

    def _matmul(self, a: Shape, b: Shape) -> Value:
        if len(a.sizes) < 2 or len(b.sizes) < 2:
            return None
        return Shape((*_broadcast([a.sizes[:-2], b.sizes[:-2]]), a.sizes[-2], b.sizes[-1]))

    _bmm = _mm = _matmul

    def _addmm(self, _: Any, a: Shape, b: Shape) -> Value:
        return Shape((a.sizes[0], b.sizes[1]))

    def _linear(self, x: Shape, weight: Shape, bias: Any = None) -> Value:
        return Shape((*x.sizes[:-1], weight.sizes[0]))

    def _embedding(self, x: Shape, weight: Shape, *_: Any, **__: Any) -> Value:
        return Shape((*x.sizes, weight.sizes[1])) if self.node.target is F.embedding else None

    def _scaled_dot_product_attention(
        self, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any
    ) -> Value:
        return Shape((*_broadcast([query.sizes[:-2], value.sizes[:-2]]), query.sizes[-2], value.sizes[-1]))

    def _filled(self, sizes: Sequence[Any]) -> Value:
        return Shape(tuple(sizes)) if all(_is_number(s) for s in sizes) else None

    def _new_ones(self, _: Shape, *sizes: Any, **__: Any) -> Value:
        return self._filled(sizes[0] if isinstance(sizes[0], tuple) else sizes)

    _new_zeros = _new_empty = _new_ones

    def _new_full(self, _: Shape, sizes: Any, *__: Any, **___: Any) -> Value:
        return self._filled(sizes)

    def _sum(self, x: Shape, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
        dims = {d % len(x.sizes) for d in (dim if isinstance(dim, tuple) else (dim,))}
        kept = ((1,) if k in dims else (s,) for k, s in enumerate(x.sizes) if keepdim or k not in dims)
        return Shape(tuple(s for row in kept for s in row))

    _mean = _amax = _amin = _sum

    # -- layers ----------------------------------------------------------------------------------------------------

    def _layer(self, layer: Any) -> Value:
        if not self.node.args or self.node.kwargs:
            return None
        x = self._resolved(self.node.args[0])
        if not isinstance(x, Shape) or not is_known(layer):
            return None
        if isinstance(layer, _SAME):
            return x
        if isinstance(layer, nn.Linear):
            return Shape((*x.sizes[:-1], layer.weight.shape[0]))
        if isinstance(layer, nn.Embedding):
            return Shape((*x.sizes, layer.weight.shape[1]))
        if isinstance(layer, nn.modules.conv._ConvNd) and len(x.sizes) == layer.weight.dim():
            return Shape((x.sizes[0], layer.out_channels, *self._free(len(x.sizes))))
        if isinstance(layer, _POOLS) and len(x.sizes) == int(type(layer).__name__[-2]) + 2:
            return Shape((*x.sizes[:2], *self._free(len(x.sizes))))
        return None

    def _free(self, rank: int) -> list[Number]:
        """Sizes of all but the batch and the channels, of which nothing is claimed."""
        return [named(f"{self.node.name}.{k}") for k in range(2, rank)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | Size) and not isinstance(value, bool)


def _product(sizes: Sequence[Number]) -> Number:
    whole: Number = 1
    for size in sizes:
        whole = times(whole, size)
    return whole


def _with(sizes: Sequence[Number], dim: int, size: Any) -> tuple[Number, ...]:
    found = list(sizes)
    found[dim] = size
    return tuple(found)


def _broadcast(rows: Sequence[Sequence[Number]]) -> tuple[Number, ...]:
    """The size of what operands of these sizes give, element by element.

    Raises:
        _NotKnownError: two sizes that are not known to be the same, of which one may be 1.
    """
    rank, found = max(map(len, rows)), list[Number]()
    for k in range(1, rank + 1):
        here = {row[-k] for row in rows if len(row) >= k} - {1}
        fixed = [s for s in here if isinstance(s, int)]
        if len(fixed) == 1:
            found.append(fixed[0])
        elif len(here) <= 1:
            found.append(next(iter(here), 1))
        else:
            raise _NotKnownError
    return tuple(reversed(found))


def known_operation(node: fx.Node) -> bool:
    """Whether an operation is one of those above: it computes a value, and does nothing else."""
    name = name_of(node)
    known = (
        hasattr(_Rules, f"_{name}") or name in _EACH or name in _FIRST or name in _FILLS or name == "arange"
    )
    return bool(name) and not name.startswith("_") and (known or node.target in _ARITHMETIC)


_ARITHMETIC = {*OPERATORS.values(), len, operator.getitem, operator.floordiv, operator.neg} - {
    operator.setitem
}
