"""What a loss depends on: whether on anything with a gradient, and on which leaves."""

from __future__ import annotations

import torch

from ..errors import GradientError


def check_differentiable(depends: bool) -> None:
    """Refuse a step that has nothing to go backward with.

    Raises:
        GradientError: the loss depends on nothing that requires a gradient.
    """
    if not depends:
        raise GradientError(
            "the loss depends on nothing that requires a gradient",
            remedy="pipe(x) computes without gradients",
        )


def leaves_of(loss: torch.Tensor) -> dict[int, torch.Tensor]:
    """The leaves of the loss's graph that require a gradient, by their ids."""
    found: dict[int, torch.Tensor] = {}
    seen, waiting = set(), [loss.grad_fn] if loss.grad_fn is not None else []
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            found[id(leaf)] = leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found
