"""Where figures are from: date, processor, cores, memory, versions, allocator and load, without any name of a host."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

# glibc gives large blocks back to the kernel as soon as they are free, and each step then faults its activations in
# again, page by page: eager's whole batch more than micro-batches. With these settings all variants alike keep what they
# had. By default they have what users have, and a process with pipelines what fxsplit sets (fxsplit/runtime/allocator.py).
KEPT = {
    "MALLOC_TRIM_THRESHOLD_": "-1",
    "MALLOC_TOP_PAD_": "268435456",
    "MALLOC_MMAP_MAX_": "0",
}


@dataclass(frozen=True)
class Machine:
    """The machine, as it is when this is made: before anything is measured."""

    date: str
    hardware: str
    software: str
    load: float

    def __str__(self) -> str:
        return f"{self.date}; {self.hardware}; {self.software}; load average {self.load:.1f} at the start"


def describe() -> Machine:
    """This machine now."""
    return Machine(
        datetime.date.today().isoformat(),
        ", ".join([f"{len(os.sched_getaffinity(0))} cores of {_processor()}", f"{_gib():.0f} GiB", *_gpus()]),
        f"Python {platform.python_version()}, torch {torch.__version__}, {_allocator()}",
        os.getloadavg()[0],
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gib() -> float:
    """Of memory, the limit of a container if it has one."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdigit():
        found.append(int(limit.read_text()))
    return min(found) / 2**30


def _gpus() -> list[str]:
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _allocator() -> str:
    library = " ".join(platform.libc_ver()) or "an unknown C library"
    chosen = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD")
    ]
    return f"{library} with {' '.join(chosen) or 'the defaults of its allocator'}"
