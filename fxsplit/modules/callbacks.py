"""Who wants to be told of the copies of a module that its replicas are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import ArgumentError

HOOK = "__data_parallel_replicate__"  # the name that jactorch gave it
_OWN = "_fxsplit_on_replicate"  # an attribute: a copy of the module has it too

Callback = Callable[[nn.Module, "ReplicationContext", int], Any]


class ReplicationContext(SimpleNamespace):
    """What the copies of one module share: attributes are theirs to set. It lives as long as the replicas do."""


def on_replicate(module: nn.Module, callback: Callback) -> RemovableHandle:
    """Call ``callback(copy, context, copy_id)`` for every copy of a module, when replicas are made of a pipeline's stages.

    What a module with a method ``__data_parallel_replicate__(self, context, copy_id)`` is told by itself (jactorch's
    replication callback), for modules that have none. The module with the callback is kept whole, so register before
    `fxsplit.compile`.

    Args:
        callback: gets the copy, the `ReplicationContext` that all copies of this module share, and the number of the
            copy: 0, the master, comes first.

    Returns:
        A handle; ``handle.remove()`` takes the callback away.

    Raises:
        ArgumentError: `module` is no module, or `callback` cannot be called.
    """
    if not isinstance(module, nn.Module) or not callable(callback):
        raise ArgumentError(
            f"on_replicate({type(module).__name__}, {type(callback).__name__}) is not a module and a function",
            remedy="fxsplit.on_replicate(model.norm, lambda copy, context, copy_id: ...)",
        )
    own: OrderedDict[int, Callback] = module.__dict__.setdefault(_OWN, OrderedDict())
    handle = RemovableHandle(own)
    own[handle.id] = callback
    _registered[0] += 1
    return handle


_registered = [0]


def registered() -> int:
    """How often `on_replicate` was called: a module may have callbacks that it had not."""
    return _registered[0]


def on_replicate_of(module: nn.Module) -> Sequence[Callback]:
    """The callbacks that `on_replicate` has registered."""
    return tuple(module.__dict__.get(_OWN, {}).values())


def callbacks_of(module: nn.Module) -> Sequence[Callback]:
    """All that wants to be told of the copies of this module."""
    found: list[Callback] = []
    if (
        hasattr(type(module), HOOK) or HOOK in module.__dict__
    ):  # not what __getattr__ finds in a module inside
        found.append(lambda copy, context, copy_id: getattr(copy, HOOK)(context, copy_id))
    return [*found, *on_replicate_of(module)]
