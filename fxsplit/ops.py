"""The names of fxsplit that generated code may call: `transfer`, `checkpoint`, `guard` and `call_with`.

The first two record themselves as a node when they meet an fx Proxy, so that a stage can be traced or pickled again.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint as _torch_checkpoint

from .compat import tree_map
from .errors import GradientError, GuardError
from .rng import Stream


def transfer(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on `device`; differentiable, strides kept, no copy where nothing crosses."""
    if isinstance(value, fx.Proxy):
        return value.tracer.create_proxy("call_function", transfer, (value, device), {})
    return tree_map(lambda leaf: _moved(leaf, device) if isinstance(leaf, torch.Tensor) else leaf, value)


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


_CALLED: weakref.WeakKeyDictionary[torch.nn.Module, threading.Lock] = weakref.WeakKeyDictionary()
_MAKING = threading.Lock()


def call_with(module: torch.nn.Module, parameters: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """``module(*args, **kwargs)`` with these tensors for some of its parameters, which live on another device.

    The module has them for the time of the call; calls from several workers take turns.
    """
    with _turn(module):
        return torch.func.functional_call(module, dict(parameters), args, kwargs, tie_weights=False)


def _turn(module: torch.nn.Module) -> threading.Lock:
    with _MAKING:
        return _CALLED.setdefault(module, threading.Lock())


def _versions(region: torch.nn.Module) -> list[int]:
    """Of the parameters that are the region's, and not of what another worker's `call_with` has put there."""
    with contextlib.ExitStack() as turns:
        for module in region.modules():
            turns.enter_context(_turn(module))
        return [p._version for p in region.parameters()]


Crossing = tuple[torch.Tensor, torch.Tensor]


Move = Callable[[torch.Tensor, torch.device], torch.Tensor]
Around = Callable[[], contextlib.AbstractContextManager[Any]]
Again = Callable[[], Around]


class _Mode(threading.local):
    def __init__(self) -> None:
        self.recompute = True
        self.crossings: list[Crossing] | None = None
        self.move: Move = lambda tensor, device: tensor.to(device)
        self.again: Again = _nothing


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


@contextlib.contextmanager
def transfers_cut(move: Move) -> Iterator[list[Crossing]]:
    """In this thread, `transfer` ends the autograd graph: what it gives is a leaf.

    Args:
        move: makes the copy.

    Yields the pairs (tensor, moved tensor). Whoever plays backward carries the gradient back; gradients from
    elsewhere then enter behind the transfer, where autograd adds the stage's own to them one by one.
    """
    before = _mode.crossings, _mode.move
    _mode.crossings, _mode.move = [], move
    try:
        yield _mode.crossings
    finally:
        _mode.crossings, _mode.move = before


@contextlib.contextmanager
def recomputation(enabled: bool, again: Again = _nothing) -> Iterator[None]:
    """Whether `checkpoint` frees and recomputes activations (True) or keeps them, in this thread.

    Args:
        again: asked where a region begins, for what makes the context that is entered around each later computation.
    """
    before = _mode.recompute, _mode.again
    _mode.recompute, _mode.again = enabled, again
    try:
        yield
    finally:
        _mode.recompute, _mode.again = before


def checkpoint(region: Any, *values: Any) -> Any:
    """``region(*values)``, of which backward keeps only the inputs and computes the rest again.

    Recomputation sees the random numbers, the autocast state and the buffers that the first computation saw,
    and leaves the buffers as they were. `region.meta` says whether it draws random numbers (``"random"``)
    and names the buffers that it writes (``"writes"``).

    Args:
        region: a `GraphModule` that is an attribute of the stage.
        values: its inputs.
    """
    proxy = next((v for v in values if isinstance(v, fx.Proxy)), None)
    if proxy is not None:
        return proxy.tracer.create_proxy("call_function", checkpoint, (region, *values), {})
    if not (_mode.recompute and torch.is_grad_enabled()):
        return region(*values)
    buffers = [_attribute(region, name) for name in region.meta["writes"]]
    stream, around = Stream.current() if region.meta["random"] else None, _mode.again()
    return _torch_checkpoint(
        region,
        *values,
        use_reentrant=False,
        preserve_rng_state=region.meta["random"] and stream is None,
        context_fn=lambda: (contextlib.nullcontext(), _Replayed(region, buffers, stream, around)),
    )


def _attribute(region: torch.nn.Module, path: str) -> torch.Tensor:
    owner: Any = region
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner  # type: ignore[no-any-return]


class _Replayed:
    """The context of a region's first computation, and the one of each later one: buffers as they were first.

    The writes go through ``.data``: a restored buffer is the one that autograd saved, so its version counter
    must not move. As autograd does for what it saves, a later computation refuses to start when the
    parameters have been written to since, or the mode is another one.
    """

    def __init__(
        self, region: torch.nn.Module, buffers: list[torch.Tensor], stream: Stream | None, around: Around
    ) -> None:
        self.region, self.buffers = region, buffers
        self.stream = None if stream is None else stream.copy()
        self.around, self.entered = around, contextlib.ExitStack()
        self.seen = [buffer.detach().clone() for buffer in buffers]
        self.now: list[torch.Tensor] = []
        self.versions = _versions(region)
        self.modes = [m.training for m in region.modules()]

    def __enter__(self) -> None:
        if self.versions != _versions(self.region):
            raise GradientError(
                "a parameter was changed between forward and backward, so a checkpointed region would be recomputed "
                "with other values",
                remedy="call backward before optimizer.step(), or Plan(checkpoint='never')",
            )
        if self.modes != [m.training for m in self.region.modules()]:
            raise GradientError(
                "train() or eval() was called between forward and backward, so a checkpointed region would be "
                "recomputed in another mode",
                remedy="call backward before changing the mode, or Plan(checkpoint='never')",
            )
        self.now = [buffer.detach().clone() for buffer in self.buffers]
        self._write(self.seen)
        self.entered.enter_context(self.around())
        if self.stream is not None:
            self.entered.enter_context(self.stream.copy())  # it may be computed again once more

    def __exit__(self, *exc: object) -> None:
        self.entered.close()
        self._write(self.now)

    def _write(self, values: list[torch.Tensor]) -> None:
        for buffer, value in zip(self.buffers, values, strict=True):
            buffer.data.copy_(value)
