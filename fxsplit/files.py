"""Reading a file that anybody may have written: regular files of a bounded size only, and JSON that is not too much."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

MOST_BYTES = 256 * 2**20
MOST_VALUES = 10_000_000  # in one file: what Python makes of a byte of JSON may take fifty
MOST_DEEP = 200


def read_text(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> str:
    """What is in a file, as text. A pipe would be waited for, and a device may never end: they are refused.

    Raises:
        OSError, ValueError: it is not there, no regular file, too large, or no text.
    """
    name = Path(path).name
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{name} is no regular file")
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{name} is no regular file")
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"{name} is larger than {most_bytes} bytes")
    return data.decode("utf-8").replace("\r\n", "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """What a JSON file holds; NaN and infinities are no JSON.

    Raises:
        OSError, ValueError: as `read_text`, or it is not JSON, or too many or too deeply nested values.
    """
    return parse_json(read_text(path))


def parse_json(text: str) -> Any:
    """What a text in JSON says.

    Raises:
        ValueError: as `read_json`.
    """
    if sum(map(text.count, "[{,")) > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES} values")
    try:
        found = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("values are nested too deeply") from None
    row, depth = [found], 0
    while row := [v for item in row for v in _inside(item)]:
        depth += 1
        if depth > MOST_DEEP:
            raise ValueError(f"values are nested more than {MOST_DEEP} deep")
    return found


def _inside(value: Any) -> list[Any]:
    return [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")
