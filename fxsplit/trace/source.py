"""Which line of the user's code made this?"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
import types

import torch

from ..graph.ir import Source
from ..modules.reach import MODELS

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_ENTRY = os.path.join(_HERE, "trace", "by_value.py")  # what called that is not the model
_MODELS = tuple(os.path.join(os.path.dirname(_HERE[:-1]), *name.split(".")) for name in MODELS)


def user_line() -> Source | None:
    """The innermost line on the stack that is neither torch's nor fxsplit's."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if is_the_users(path):
            return Source(path, frame.f_lineno, _positions(frame.f_code)[frame.f_lasti // 2])
        if path == _ENTRY:
            return None
        frame = frame.f_back
    return None


def in_a_message() -> bool:
    """Whether the user's line is in an assert, a raise, or a a call that prints or warns.

    A size that is written into such a text decides nothing. A call counts by the name of what is called: a method that
    adds the text to a list does something with it.
    """
    line = user_line()
    if line is None or line.span is None or line.span[0] is None or line.span[2] is None:
        return False
    here = (line.span[0], line.span[2])
    return any(begin <= here < end for begin, end in _messages(line.path))


@functools.lru_cache(maxsize=256)
def _messages(path: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where texts stand that are only read by people: from (line, column) to (line, column)."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return []
    found: list[ast.expr | ast.stmt] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and _tells(node.value)):
            found.append(node)
        elif isinstance(node, ast.Assert) and node.msg is not None:
            found.append(node.msg)
    return [((n.lineno, n.col_offset), (n.end_lineno or 0, n.end_col_offset or 0)) for n in found]


_TELL = frozenset(
    (
        "print",
        "log",
        "debug",
        "info",
        "info_once",
        "warn",
        "warning",
        "warning_once",
        "error",
        "exception",
        "critical",
    )
) | {"_assert", "_check"}


def _tells(value: ast.expr) -> bool:
    """Whether this is a call of what prints, warns or checks."""
    function = getattr(value, "func", None)
    return getattr(function, "attr", getattr(function, "id", "")) in _TELL


@functools.lru_cache(maxsize=4096)
def _positions(code: types.CodeType) -> list[tuple[int | None, ...]]:
    """Where in the text each instruction comes from."""
    return list(code.co_positions())


def error_line(error: BaseException) -> Source | None:
    """The innermost line of the traceback that is neither torch's nor fxsplit's."""
    found, step = None, error.__traceback__
    while step is not None:
        path = step.tb_frame.f_code.co_filename
        if is_the_users(path):
            found = Source(path, step.tb_lineno)
        step = step.tb_next
    return found


def is_the_users(path: str) -> bool:
    """Whether a file is neither torch's nor fxsplit's."""
    return not path.startswith((_TORCH, "<")) and not is_ours(path)


def is_ours(path: str) -> bool:
    """Whether a file is fxsplit's, without the models in it."""
    return path.startswith(_HERE) and not path.startswith(_MODELS)
