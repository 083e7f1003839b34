"""Random numbers of micro-batches that run at the same time.

The rule: with one micro-batch the stages run one after the other on the caller's own generator, so masks and
the state afterwards are eager's. With more, a call draws one number from the caller's default CPU generator,
and micro-batch i of stage s starts from a seed that is a function of that number, i and s alone. Masks then do
not depend on the schedule, on thread timing or on the checkpoint mode.

The default generator is one for all threads, so stages that draw random numbers take turns at it.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator

import torch

_GENERATOR = threading.Lock()


def draw_base_seed() -> int:
    """One number from the caller's default CPU generator."""
    return int(torch.randint(0, 2**62, (), dtype=torch.int64, device="cpu").item())


def stage_seed(base: int, micro_batch: int, stage: int) -> int:
    """The seed of one micro-batch of one stage: 63 bits of a hash of the three numbers."""
    digest = hashlib.blake2b(f"{base}/{micro_batch}/{stage}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """The default generators start from `seed` inside and are as before afterwards; one thread at a time."""
    devices = [device.index or 0] if device.type == "cuda" else []
    with _GENERATOR, torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
