"""Sizes in bytes, written as people write them."""

from __future__ import annotations

import re

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def nbytes_of(size: object) -> int | None:
    """Bytes of ``"2GiB"``, ``"512 MiB"``, ``"1.5GB"`` or a whole number; None where it is no size."""
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*", size)
        if match is None or match.group(2).upper() not in _UNITS:
            return None
        size = int(float(match.group(1)) * _UNITS[match.group(2).upper()])
    return size if isinstance(size, int) and not isinstance(size, bool) and size >= 0 else None


def in_units(count: float) -> str:
    """``1.5 MiB``."""
    if count < 1024:
        return f"{count:.0f} B"
    unit, scale = next((u, 1024**i) for i, u in ((3, "GiB"), (2, "MiB"), (1, "KiB")) if count >= 1024**i)
    return f"{count / scale:.1f} {unit}"
