"""The passes of a compile: a line of log for each, and what it made.

Logs go to the standard library's logger ``fxsplit``: ``logging.getLogger("fxsplit").setLevel("INFO")``, or without a change
of the program ``TORCH_LOGS="fxsplit"``, says how long each pass took; DEBUG, or ``TORCH_LOGS="+fxsplit"``, shows the program
after it too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

_LOG = logging.getLogger("fxsplit")
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass that was run.

    Attributes:
        name: what it does.
        seconds: that it took, with the passes within it.
        made: what it returned; None of a pass that only proves.
    """

    name: str
    seconds: float
    made: Any = field(repr=False)

    def __str__(self) -> str:
        return f"{self.name}: {self.seconds:.3f} s"


_RECORD: ContextVar[list[Pass] | None] = ContextVar("fxsplit_passes", default=None)


@contextlib.contextmanager
def recorded() -> Iterator[list[Pass]]:
    """The passes that are run within, in the order in which they end."""
    found: list[Pass] = []
    token = _RECORD.set(found)
    try:
        yield found
    finally:
        _RECORD.reset(token)


def named(name: str, text: Callable[[Any], str] | None = None) -> Callable[[_F], _F]:
    """Make a function a pass of this name.

    Args:
        text: what it made, as text, for the log; by default nothing is shown.
    """

    def decorated(function: _F) -> _F:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                made = function(*args, **kwargs)
            except Exception as error:
                _LOG.info("%s: %s after %.3f s", name, type(error).__name__, time.perf_counter() - begin)
                raise
            done = Pass(name, time.perf_counter() - begin, made)
            record = _RECORD.get()
            if record is not None:
                record.append(done)
            _LOG.info("%s", done)
            if text is not None and _LOG.isEnabledFor(logging.DEBUG):
                _LOG.debug("after %s:\n%s", name, text(made))
            return made

        return run  # type: ignore[return-value]

    return decorated
