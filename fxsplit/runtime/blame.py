"""Which line of the user's an error in a stage comes from, and what helps where there is no memory."""

from __future__ import annotations

import linecache
import re
import traceback

from ..errors import is_out_of_memory

_BESIDE = re.compile(r"  # (?P<line>\S+:\d+)$")  # or, where that is too long, above
_HEADING = re.compile(r"\s*# (?P<path>[^\s:]+)$")  # blocks.1, above


def users_line(error: BaseException) -> str:
    """``", at model.py:41 (blocks.1): y = self.fc(x)"``: what the traceback passed last in generated code; empty if nothing.

    Generated code says beside a statement which line of the user's it was, unless that is the line of the statement
    above, and where a module of a list begins. Backward runs none of it, unless something is recomputed.
    """
    found = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        if path.startswith("<fxsplit "):
            text = [line.rstrip() for line in linecache.getlines(path)[:number]]
            line = next((m["line"] for m in map(_BESIDE.search, reversed(text)) if m), "")
            module = next((f" ({m['path']})" for m in map(_HEADING.match, reversed(text)) if m), "")
            found = f", at {line}{module}: {_BESIDE.sub('', text[-1]).strip()}" if line else ""
    return found


def what_takes_less(error: BaseException) -> str:
    """What to type where an error says that a device, or the host, has no memory left; empty if it says something else."""
    if not is_out_of_memory(error):
        return ""
    return (
        '; pipe.memory() says what is held. Less of it: more micro_batches=, checkpoint="always", '
        'schedule="1f1b" with pipe.step, more stages, offload=True'
    )
