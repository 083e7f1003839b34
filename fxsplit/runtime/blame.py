"""Which line of the user's an error in a stage comes from."""

from __future__ import annotations

import linecache
import traceback


def users_line(error: BaseException) -> str:
    """``", at model.py:41: y = self.fc(x)"``: what the traceback passed last in generated code; empty if nothing.

    Generated code says in a comment above a line which line of the user's it was. Backward runs none of it, unless
    something is recomputed.
    """
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        if path.startswith("<fxsplit "):
            text = linecache.getlines(path)[:line]
            comment = next((t.strip()[2:] for t in reversed(text) if t.strip().startswith("# ")), "")
            found = f", at {comment}: {text[-1].strip()}" if comment else ""
    return found
