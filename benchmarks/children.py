"""Functions in fresh interpreters: an allocator's settings, a peak of memory and a crash are theirs alone."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch


class ChildError(Exception):
    """The other interpreter failed; the text is the last line of its error."""


def in_child(
    function: Callable[..., Any],
    *args: Any,
    environment: Mapping[str, str] | None = None,
    limit: float = 600,
    fresh: bool = True,
) -> Any:
    """What a function of a module returns in an interpreter of its own, with one intra-op thread.

    Args:
        environment: variables that it has besides this process's.
        limit: seconds; then it is killed.
        fresh: False calls it in this process, where only whether it runs is of interest.

    Raises:
        ChildError: it raised, died or took too long.
    """
    if not fresh:
        return function(*args)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(there, function, args), daemon=False)
    with _variables(environment or {}):
        child.start()
    there.close()
    try:
        if not here.poll(limit):
            raise ChildError(f"took longer than {limit:.0f} s")
        done, result = here.recv()
    except EOFError:
        raise ChildError("crashed") from None
    finally:
        child.join(5)
        if child.is_alive():
            child.kill()
        child.join()
    if not done:
        raise ChildError(result)
    return result


@contextlib.contextmanager
def _variables(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _answer(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    try:
        answer = (True, function(*args))
    except Exception as error:
        answer = (False, f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}")
    pipe.send(answer)
    gc.collect()  # fairscale's pipe waits for its threads in __del__: forever, if the interpreter is ending
