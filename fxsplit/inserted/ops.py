"""The names of fxsplit that generated code may call: `transfer`, `checkpoint`, `guard` and `call_with`.

The first two record themselves as a node when they meet an fx Proxy, so that a stage can be traced or pickled again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint as _torch_checkpoint

from ..compat import tree_map
from ..errors import GuardError
from .random import Stream
from .recompute import Around, Replay, turn


def transfer(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on `device`; differentiable, strides kept, no copy where nothing crosses."""
    if isinstance(value, fx.Proxy):
        return value.tracer.create_proxy("call_function", transfer, (value, device), {})
    return _transfer(value, device)


def _transfer(value: Any, device: torch.device) -> Any:
    return tree_map(lambda leaf: _moved(leaf, device) if isinstance(leaf, torch.Tensor) else leaf, value)


def hide_from_torch_compile() -> None:
    """Transfers stay Python's, in stages that are compiled: streams, and what this thread is told, are not to be traced."""
    global _transfer
    if not getattr(_transfer, "_torchdynamo_disable", False):  # torch 2.9 to 2.15
        _transfer = torch.compiler.disable(_transfer)  # type: ignore[no-untyped-call]


def guard(holds: Any, line: str) -> None:
    """The model decided by a size when it was captured; it has to decide in the same way in every call.

    Raises:
        GuardError: it does not; `line` is the user's.
    """
    if not holds:
        raise GuardError(
            f"{line} takes another path than when the model was captured",
            remedy="call with sizes like those of the example, or compile again with an example like this one",
        )


def call_with(module: torch.nn.Module, parameters: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """``module(*args, **kwargs)`` with these tensors for some of its parameters, which live on another device.

    The module has them for the time of the call; calls from several workers take turns.
    """
    with turn(module):
        return torch.func.functional_call(module, dict(parameters), args, kwargs, tie_weights=False)


Crossing = tuple[torch.Tensor, torch.Tensor]


Move = Callable[[torch.Tensor, torch.device], torch.Tensor]
Again = Callable[[], Around]


class _Mode(threading.local):
    def __init__(self) -> None:
        self.recompute = True
        self.crossings: list[Crossing] | None = None
        self.move: Move = lambda tensor, device: tensor.to(device)
        self.again: Again = _nothing
        self.own_numbers = True


def _nothing() -> Around:
    return contextlib.nullcontext


_mode = _Mode()


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    moved = _mode.move(tensor, device)
    if _mode.crossings is None:
        return moved
    moved = moved.detach().requires_grad_(tensor.requires_grad)
    _mode.crossings.append((tensor, moved))
    return moved


class Computing(contextlib.AbstractContextManager[list[Crossing]]):
    """While this thread computes a stage: what the operations of this module do.

    `transfer` then ends the autograd graph, and what it gives is a leaf: entering gives the list of the pairs (tensor,
    moved tensor). Whoever plays backward carries the gradient back; gradients from elsewhere then enter behind the
    transfer, where autograd adds the stage's own to them one by one.

    Args:
        move: makes the copy.
        recompute: whether `checkpoint` frees and recomputes activations, or keeps them.
        again: asked where a region begins, for what makes the context that is entered around each later computation.
        own_numbers: whether the default generators are this thread's, outside of a stream, so that their states may
            be put back.
    """

    def __init__(self, move: Move, *, recompute: bool, again: Again | None, own_numbers: bool) -> None:
        now = {"recompute": recompute, "again": again or _nothing, "own_numbers": own_numbers}
        self._now: dict[str, Any] = {**now, "crossings": [], "move": move}
        self._before: dict[str, Any] = {}

    def __enter__(self) -> list[Crossing]:
        self._before = {name: getattr(_mode, name) for name in self._now}
        vars(_mode).update(self._now)
        crossings: list[Crossing] = self._now["crossings"]
        return crossings

    def __exit__(self, *exc: object) -> None:
        vars(_mode).update(self._before)


def checkpoint(region: Any, *values: Any) -> Any:
    """``region(*values)``, of which backward keeps only the inputs and computes the rest again.

    Recomputation sees the random numbers, the autocast state and the buffers that the first computation saw,
    and leaves the buffers as they are. `region.meta` says whether it may draw random numbers (``"random"``)
    and names the buffers that it may write (``"writes"``).

    Args:
        region: a `GraphModule` that is an attribute of the stage.
        values: its inputs.
    """
    proxy = next((v for v in values if isinstance(v, fx.Proxy)), None)
    if proxy is not None:
        return proxy.tracer.create_proxy("call_function", checkpoint, (region, *values), {})
    if not (_mode.recompute and torch.is_grad_enabled()):
        return region(*values)
    stream = Stream.current() if region.meta["random"] else None
    replay = Replay(region, stream, _mode.again())
    return _torch_checkpoint(
        region,
        *values,
        use_reentrant=False,
        preserve_rng_state=region.meta["random"] and stream is None and _mode.own_numbers,
        context_fn=lambda: (replay.first(), _Later(replay)),
    )


class _Later(contextlib.AbstractContextManager[None]):
    """Around each later computation: there may be several."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(self._replay.later())

    def __exit__(self, *exc: Any) -> None:
        self._entered.__exit__(*exc)
