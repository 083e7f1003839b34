"""The hooks of the model itself, around the pipeline's forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from ..graph.effects import has_hooks


def call_with_hooks(
    model: nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """``model(*args, **kwargs)`` with another forward: its hooks run as they would, and get `model` itself.

    Hooks of inner modules are not the matter here: such modules stay whole and run their own.
    """
    if not has_hooks(model):
        return forward(*args, **kwargs)
    stand_in = nn.Module()
    stand_in.__dict__["forward"] = forward

    def bound(hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda _, *rest: hook(model, *rest)

    for key, hook in model._forward_pre_hooks.items():
        stand_in.register_forward_pre_hook(
            bound(hook), with_kwargs=key in model._forward_pre_hooks_with_kwargs
        )
    for key, hook in model._forward_hooks.items():
        stand_in.register_forward_hook(
            bound(hook),
            with_kwargs=key in model._forward_hooks_with_kwargs,
            always_call=key in model._forward_hooks_always_called,
        )
    for hook in model._backward_pre_hooks.values():
        stand_in.register_full_backward_pre_hook(bound(hook))
    for hook in model._backward_hooks.values():
        stand_in.register_full_backward_hook(bound(hook))
    return stand_in(*args, **kwargs)
