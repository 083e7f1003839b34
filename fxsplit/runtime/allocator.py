"""What workers free stays theirs: glibc would give it to the kernel, and each step would fault it in again.

A thread takes its memory from heaps of 64 MiB. glibc unmaps a heap when the last block in it is freed, which is what
the end of a backward does, and the next forward takes its activations page by page:

    step 1   forward  [####][####][##..]  backward  frees all: three heaps unmapped
    step 2   forward  80,000 page faults, each zeroes 4 KiB in the kernel

The main thread's heap is given back from its end only, and processes have a main thread each: most of what threads lose
to them is this (docs/benchmarks.md). The remedy is glibc's own, in two parts, while there are pipelines that play
in several threads:

- One block of nearly 32 MiB is freed, untouched. From it glibc learns that blocks up to that size come from heaps and are
  not mapped one by one: it learns that of every block that is freed, up to 32 MiB.
- Its "top pad" is 256 MiB: what remains free at the end of heaps before any is given back.

When the last of these pipelines is gone, the pad is glibc's default again, and what is free is given back. Somebody who
has set glibc's allocator by environment variables is left alone. Other allocators are not concerned.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

# mallopt(3): these are of glibc's interface.
_M_TOP_PAD = -2
_DEFAULT, _PAD = 128 * 1024, 256 * 2**20
_LEARNED = 32 * 2**20 - 8192  # the largest that it learns from, with room for its header


def _glibc() -> dict[str, Callable[..., Any]]:
    """Functions of glibc, where that is the C library."""
    if platform.libc_ver()[0] != "glibc":
        return {}
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    return {name: getattr(library, name) for name in ("malloc", "free", "mallopt", "malloc_trim")}


_GLIBC = _glibc()
_lock = threading.RLock()  # the collector may end an owner in the middle of `keep_pages`
_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def keep_pages(owner: object) -> None:
    """While `owner` lives, what threads free is kept for what they take next.

    Args:
        owner: can be referenced weakly.
    """
    if not _GLIBC or not _is_chosen_by_nobody(os.environ):
        return
    with _lock:
        _owners.add(owner)
        _GLIBC["free"](_GLIBC["malloc"](_LEARNED))
        _GLIBC["mallopt"](_M_TOP_PAD, _PAD)
    weakref.finalize(owner, _give_back).atexit = False


def _give_back() -> None:
    with _lock:
        if not any(True for _ in _owners):  # their number may still count one that is gone
            _GLIBC["mallopt"](_M_TOP_PAD, _DEFAULT)
            _GLIBC["malloc_trim"](0)


def _is_chosen_by_nobody(environment: Mapping[str, str]) -> bool:
    """Whether the allocator is glibc's, as it is by default."""
    chosen = any(name.startswith("MALLOC_") for name in environment)
    chosen = chosen or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
    return not chosen and "LD_PRELOAD" not in environment
