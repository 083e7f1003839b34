"""Which line of the user's code made this?"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
import types

import torch

from ..ir import Source

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_ENTRY = os.path.join(_HERE, "trace", "by_value.py")  # what called that is not the model
_DEMO = os.path.join(_HERE, "demo") + os.sep  # a model like any user's


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
    """Whether the user's line is in an assert, a raise, or a call whose result nobody takes, such as a warning.

    A size that is written into such a text decides nothing.
    """
    line = user_line()
    return line is not None and line.line in _message_lines(line.path)


@functools.lru_cache(maxsize=256)
def _message_lines(path: str) -> frozenset[int]:
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return frozenset()
    found: set[int] = set()
    for node in ast.walk(tree):
        call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if call or isinstance(node, ast.Raise | ast.Assert):
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))  # type: ignore[attr-defined]
    return frozenset(found)


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
    return not path.startswith((_TORCH, "<")) and (not path.startswith(_HERE) or path.startswith(_DEMO))
