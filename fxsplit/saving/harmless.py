"""What of torch and Python a file may name: what computes with tensors and numbers, and nothing else. A list of what may."""

from __future__ import annotations

import builtins
import functools
import math
import operator
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import get_overridable_functions

from ..compat import OpOverload
from ..inserted import ops
from ..modules.callables import name_of, public_names

# fmt: off
_BUILTINS = (
    "abs", "all", "any", "bool", "complex", "dict", "divmod", "float", "getattr", "int", "len", "list", "max", "min",
    "pow", "range", "round", "set", "slice", "sorted", "str", "sum", "tuple",
)
_OPERATORS_THAT_CALL = frozenset(("attrgetter", "call", "itemgetter", "methodcaller"))
# Makers of tensors, contexts and questions, which torch's list of functions of tensors does not have.
_TORCH = (
    "Size", "arange", "as_strided", "as_tensor", "asarray", "autocast", "bartlett_window", "blackman_window",
    "broadcast_shapes", "can_cast", "complex", "device", "empty", "empty_permuted", "empty_strided", "enable_grad", "eye",
    "fill", "finfo", "full", "get_autocast_dtype", "get_default_dtype", "hamming_window", "hann_window", "iinfo",
    "inference_mode", "is_autocast_enabled", "is_floating_point", "is_grad_enabled", "is_tensor", "kaiser_window",
    "linspace", "logspace", "no_grad", "normal", "ones", "polar", "promote_types", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "randperm", "range", "result_type", "scalar_tensor", "set_grad_enabled",
    "sparse_bsc_tensor", "sparse_bsr_tensor", "sparse_compressed_tensor", "sparse_coo_tensor", "sparse_csc_tensor",
    "sparse_csr_tensor", "sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "tensor", "tril_indices",
    "triu_indices", "vander", "zeros",
)
_SPACES: dict[Any, tuple[str, ...]] = {
    torch.sparse: ("addmm", "log_softmax", "mm", "sampled_addmm", "softmax", "spdiags", "spsolve", "sum"),
    torch.nested: ("as_nested_tensor", "narrow", "nested_tensor", "nested_tensor_from_jagged", "to_padded_tensor"),
}
# Methods that call, keep or hand out something other than tensors: memory, files, hooks, arrays of another library.
_NOT_METHODS = frozenset((
    "apply_", "backward", "const_data_ptr", "data_ptr", "map2_", "map_", "module_load", "numpy", "pin_memory",
    "record_stream", "register_hook", "register_post_accumulate_grad_hook", "share_memory_", "storage", "storage_type",
    "untyped_storage", "set_",
))
_OTHER_METHODS = frozenset((
    "__enter__", "__exit__", "__getitem__", "__len__", "__contains__", "dim", "expand", "full_like", "get", "index", "is_sparse",
    "items", "keys", "mH", "mT", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros", "numel",
    "requires_grad_", "rename", "reshape_as", "sparse_mask", "stride", "to_padded_tensor", "to_sparse_bsc", "to_sparse_bsr",
    "to_sparse_coo", "to_sparse_csc", "to_sparse_csr", "type_as", "unflatten", "values", "view_as", "count",
))
# fmt: on
_OPERATIONS = ("aten", "prims")  # the namespaces of torch.ops that are torch's own
_OURS = (ops.guard, ops.call_with, ops.transfer, ops.checkpoint)


@functools.cache
def harmless() -> dict[str, Any]:
    """Name, as `name_of` gives it → function or class."""
    found = {name_of(value): value for value in _functions()}
    return {name: value for name, value in found.items() if name is not None}


def _functions() -> Iterator[Any]:
    yield from _OURS
    yield from (getattr(builtins, name) for name in _BUILTINS)
    yield from (v for name, v in vars(math).items() if callable(v) and not name.startswith("_"))
    yield from (
        v
        for name, v in vars(operator).items()
        if callable(v) and not name.startswith("_") and name not in _OPERATORS_THAT_CALL
    )
    yield from (getattr(torch, name) for name in _TORCH if hasattr(torch, name))
    for space, names in _SPACES.items():
        yield from (getattr(space, name) for name in names if hasattr(space, name))
    public = public_names()
    for space, functions in get_overridable_functions().items():
        for value in functions:
            word = public.get(id(value), "")
            if space is torch.Tensor or word.startswith("torch.Tensor."):
                if getattr(value, "__name__", "") in methods() and word:
                    yield value
            elif word:
                yield value
    yield from (
        v for name, v in vars(F).items() if word_of(v, public).startswith("F.") and not name.startswith("_")
    )
    yield from (v for name, v in vars(nn.init).items() if name.endswith("_") and not name.startswith("_"))
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.nn.modules."):
            yield from (v for v in vars(module).values() if _is_layer(v, name))


def word_of(value: Any, public: dict[int, str]) -> str:
    """How a user writes a function of torch.nn.functional that is defined there or in torch; empty for what it imports."""
    space = str(getattr(value, "__module__", None) or "torch")
    if (
        not callable(value)
        or isinstance(value, type)
        or space not in ("torch", "torch.nn.functional", "torch._C._nn")
    ):
        return ""
    return public.get(id(value), "")


def _is_layer(value: Any, module: str) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module


@functools.cache
def methods() -> frozenset[str]:
    """The names of methods that a node may call, on whatever value."""
    known = {str(getattr(f, "__name__", "")) for f in get_overridable_functions().get(torch.Tensor, ())}
    public = {name for name in known if not name.startswith("_")}
    return frozenset((public | _OTHER_METHODS) - _NOT_METHODS)


def operation(name: str) -> OpOverload | None:
    """An operation ``torch:ops.aten.add.Tensor`` of torch's own; None if the name is none."""
    space, *rest = name.removeprefix("torch:ops.").split(".")
    if not name.startswith("torch:ops.") or space not in _OPERATIONS or len(rest) not in (1, 2):
        return None
    found: Any = getattr(getattr(torch.ops, space), rest[0], None)
    found = getattr(found, rest[1] if len(rest) == 2 else "default", None)
    if not isinstance(found, OpOverload) or str(found) != name.removeprefix("torch:ops."):
        return None
    return None if any(a.name == "filename" for a in found._schema.arguments) else found


def is_attribute(name: object) -> bool:
    """Whether ``getattr`` with this name is that of a user: nothing that leads to code or globals."""
    return isinstance(name, str) and name.isidentifier() and not name.startswith("_")
