"""The one module that touches names which torch does not promise to keep.

Each name says in which version of torch it was seen. Everything else in fxsplit uses documented torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree  # torch 2.13: the pytree that transformers and torch.export register with

TreeSpec = _pytree.TreeSpec


def tree_flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of `tree` in order, and the structure that holds them."""
    return _pytree.tree_flatten(tree)


def tree_flatten_with_paths(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of `tree` with their access paths, such as ``['image'][0]``."""
    leaves, _ = _pytree.tree_flatten_with_path(tree)
    return [(_pytree.keystr(path), leaf) for path, leaf in leaves]


def tree_unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """The inverse of `tree_flatten`."""
    return _pytree.tree_unflatten(list(leaves), spec)


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of `tree` in order."""
    return _pytree.tree_leaves(tree)


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with `fn` applied to each leaf."""
    return _pytree.tree_map(fn, tree)


def backward_keeps_graph() -> bool:
    """Whether the backward pass that is running was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())  # torch 2.13


@contextlib.contextmanager
def parameter_hooks_silenced(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Tensor hooks of `parameters` do not fire inside.

    The pipeline's inner backward passes compute per-micro-batch gradients of the user's own parameters; the
    user's hooks must see the sum, once, when autograd receives it.
    """
    silenced = [(p, p._backward_hooks) for p in parameters if p._backward_hooks]  # torch 2.13
    for p, _ in silenced:
        p._backward_hooks = None
    try:
        yield
    finally:
        for p, hooks in silenced:
            p._backward_hooks = hooks


def storage_key(tensor: torch.Tensor) -> int:
    """An identity for the memory of `tensor`: equal for views of one storage. Valid while it lives."""
    return int(tensor.untyped_storage()._cdata)  # torch 2.13


def sdpa_switches() -> list[str]:
    """Names in ``torch._C`` that switch kernels of scaled_dot_product_attention."""
    return [
        name for name in dir(torch._C) if name.startswith(("_set_sdp_use_", "_set_sdp_priority"))
    ]  # torch 2.13
