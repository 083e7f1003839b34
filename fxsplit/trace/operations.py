"""What the tracer knows of torch's functions, by their names."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

import torch

# `a + b` arrives as Tensor.add: written back as it reads best
OPERATORS: dict[str, Callable[..., Any]] = {
    **{
        n: getattr(operator, n)
        for n in ("add", "sub", "mul", "matmul", "neg", "gt", "lt", "ge", "le", "eq", "ne", "mod")
    },
    "div": operator.truediv,
    "true_divide": operator.truediv,
    "remainder": operator.mod,
    "pow": operator.pow,
    "__pow__": operator.pow,
    "floor_divide": operator.floordiv,
    "__floordiv__": operator.floordiv,
    "__eq__": operator.eq,
    "__ne__": operator.ne,
    "__and__": operator.and_,
    "__or__": operator.or_,
    "__xor__": operator.xor,
    "__invert__": operator.invert,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__matmul__": operator.matmul,
    "__lshift__": operator.lshift,
    "__rshift__": operator.rshift,
}
REFLECTED: dict[str, Callable[..., Any]] = {
    "__rsub__": operator.sub,
    "__rdiv__": operator.truediv,
    "__rtruediv__": operator.truediv,
    "__rfloordiv__": operator.floordiv,
    "__rpow__": operator.pow,
    "__rmatmul__": operator.matmul,
    "__rmod__": operator.mod,
    "__radd__": operator.add,
    "__rmul__": operator.mul,
    "__rlshift__": operator.lshift,
    "__rrshift__": operator.rshift,
    "__rand__": operator.and_,
    "__ror__": operator.or_,
    "__rxor__": operator.xor,
}
SIZES = frozenset(("size", "numel", "nelement", "stride", "storage_offset", "__len__", "sym_size"))
# fmt: off
# What a tensor is, not what it holds: the same for every input of its kind.
PLAIN = frozenset(
    [
        "dim", "ndimension", "element_size", "get_device", "result_type", "can_cast", "promote_types",
        "__hash__", "__repr__", "__format__", "data_ptr", "type",
        "has_names", "__dir__", "is_floating_point", "is_complex", "is_contiguous",
        "is_signed", "is_inference", "is_conj", "is_neg", "is_pinned", "is_shared", "is_set_to",
        "is_coalesced", "untyped_storage", "storage", "_is_view", "__reduce_ex__", "is_tensor", "_nnz",
        "dense_dim", "sparse_dim", "__deepcopy__", "broadcast_shapes",
    ]
)
# Property or method of a tensor → what it is decided by (a key of `assumptions.ASKED`). The kind of a dtype and the
# device are not asked: a call has to have the example's, and what is written as a device follows the stage.
ASKS = {
    **dict.fromkeys(("dtype", "itemsize", "element_size", "type", "is_signed", "result_type", "can_cast"), "dtype"),
    **dict.fromkeys(("requires_grad", "grad_fn"), "requires_grad"),
    **dict.fromkeys(("layout", "is_sparse", "is_sparse_csr", "is_mkldnn", "is_nested"), "layout"),
    "is_leaf": "is_leaf",
}
MEMORY_FORMAT = frozenset(("is_contiguous", "is_inference", "is_conj", "is_neg", "is_pinned", "is_coalesced"))
GRAD_CONTEXTS = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled)
TENSOR_PROPERTIES = frozenset(("T", "mT", "H", "mH", "real", "imag", "data"))
CHANGES_AUTOGRAD = frozenset(
    ["register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_"]
)
SIZE_DEPENDS_ON_DATA = frozenset(
    [
        "nonzero", "unique", "unique_consecutive", "masked_select", "argwhere", "bincount", "_unique2",
        "repeat_interleave",
    ]
)
SIZED_LIKE_SELF = frozenset(
    [
        "index_add", "index_copy", "index_fill", "index_put", "masked_fill", "masked_scatter",
        "scatter", "scatter_add", "scatter_reduce", "index_reduce", "zeros_like", "ones_like",
        "full_like", "empty_like", "rand_like", "randn_like",
    ]
)
# fmt: on
RANK_DEPENDS_ON_SIZE = frozenset(("squeeze", "squeeze_"))
COUNT_DEPENDS_ON_SIZE = frozenset(("unbind", "chunk", "split", "tensor_split"))
TO_NUMBER: dict[str, Callable[..., Any]] = {
    "__bool__": bool,
    "__int__": int,
    "__float__": float,
    "__index__": int,
}
OPPOSITE = {
    operator.eq: operator.ne,
    operator.ne: operator.eq,
    operator.lt: operator.ge,
    operator.ge: operator.lt,
    operator.gt: operator.le,
    operator.le: operator.gt,
}


class FunctionCall:
    """``Function.apply`` of a custom `torch.autograd.Function`, as the target of a node.

    It is equal to every other one of its class, and prints under the name of the class.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.__module__, self.__name__ = function.__module__, f"{function.__name__}_apply"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the user's line does."""
        return self.function.apply(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionCall) and other.function is self.function

    def __hash__(self) -> int:
        return hash(self.function)

    def __repr__(self) -> str:
        return f"{self.function.__name__}.apply"


def is_tensor_method(func: Any, name: str) -> bool:
    """Whether `func`, as a mode sees it, is a method of Tensor."""
    if getattr(func, "__objclass__", None) is not None:
        return True
    return isinstance(func, types.FunctionType) and getattr(torch.Tensor, name, None) is func


def is_masked(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call is ``x[mask]``: the size of its result depends on the mask."""
    if name != "__getitem__":
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in index)
