"""What people see: a line of progress while something is done, and results as text or JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Says what is being done, for how long, and after which pass, from a second on; nothing if nobody looks."""
    if not sys.stderr.isatty():
        yield
        return
    begin, ended, latest, log = time.monotonic(), threading.Event(), _Latest(), logging.getLogger("fxsplit")

    def tell() -> None:
        while not ended.wait(1.0):
            after = f", after {latest.text}" if latest.text else ""
            print(
                f"\r\x1b[K{what}: {time.monotonic() - begin:.0f} s{after}",
                end="",
                file=sys.stderr,
                flush=True,
            )

    level = log.level
    if not log.isEnabledFor(logging.INFO):
        log.setLevel(logging.INFO)
    log.addHandler(latest)
    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        log.removeHandler(latest)
        log.setLevel(level)
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class _Latest(logging.Handler):
    """The latest line of the log."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:
            self.text = record.getMessage()


def print_json(value: Any) -> None:
    """Print `value` as JSON; what has no form there as its text."""
    print(json.dumps(value, indent=2, default=str))
