"""What a thread has that PyTorch keeps for each thread: the caller's, to be in force in the workers.

Autograd does the same for its own threads: a backward sees the state of the thread that calls it, at that moment.
Some of PyTorch's settings are the whole process's, and in force anyway: the default dtype, deterministic algorithms,
anomaly mode, matmul precision, the kernels that attention may use. Flushing of denormal numbers is inherited by new
threads from the one that starts them. Gradient mode is set for each action.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from ..compat import (
    autocast_kinds,
    backward_uses_threads,
    default_device,
    saved_tensors_hooks_in_force,
    saved_tensors_hooks_refused,
)

Context = Callable[[], contextlib.AbstractContextManager[None]]


def settle_autocast() -> None:
    """What the workers have cast is forgotten, unless the caller is inside of autocast, whose end does that."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    if not depth:
        torch.clear_autocast_cache()


def thread_state() -> Context:
    """The calling thread's state, to be entered in new threads.

    Autocast of every kind of device, inference mode, the default device, hooks for saved tensors (the innermost pair,
    the only one that autograd calls) or that they are refused, and whether backward may use threads.
    """
    autocast = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in autocast_kinds()
    ]
    caches = torch.is_autocast_cache_enabled()
    inference, device = torch.is_inference_mode_enabled(), default_device()
    hooks, refused = saved_tensors_hooks_in_force(), saved_tensors_hooks_refused()
    if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint":
        hooks = None  # a checkpoint around the pipeline would call it again in the middle of its own backward
    threads = backward_uses_threads()

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.autograd.set_multithreading_enabled(threads))
            if device.type != "cpu":
                stack.enter_context(device)
            if hooks is not None:
                stack.enter_context(saved_tensors_hooks(*hooks))
            if refused is not None:
                stack.enter_context(disable_saved_tensors_hooks(refused))
            # Set, and not entered as a context: to leave one empties a cache of cast weights that all threads share.
            for kind, enabled, dtype in autocast:
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_cache_enabled(caches)
            # Nested, so that no `with autocast` inside is the outermost, which empties that cache (`settle_autocast`).
            torch.autocast_increment_nesting()
            stack.callback(torch.autocast_decrement_nesting)
            yield

    return entered
