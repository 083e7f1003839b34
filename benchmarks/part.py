"""One claim, measured in this process: python -m benchmarks.part NAME [--quick]. Its block of the page goes to stdout."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
import time
import warnings
from dataclasses import dataclass

UNABLE = 3  # the exit status of a part that cannot be run here


@dataclass(frozen=True)
class Options:
    """What a part may be told.

    Attributes:
        quick: seconds in place of minutes: sizes at which figures mean nothing.
        registry: of `capture`: ``package.module:NAME`` of the models that it tries.
        devices: of `gpu`: the devices that it uses, the first one twice where there is one.
    """

    quick: bool = False
    registry: str | None = None
    devices: tuple[str, ...] = ()

    def __str__(self) -> str:
        """As on the command line."""
        words = [
            "--quick" * self.quick,
            f"--registry {self.registry}" * bool(self.registry),
            f"--devices {','.join(self.devices)}" * bool(self.devices),
        ]
        return "".join(f" {word}" for word in words if word)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of `Options`."""
    parser.add_argument("--quick", action="store_true", help="see that everything runs; figures mean nothing")
    parser.add_argument("--registry", help="capture: package.module:NAME of its models")
    parser.add_argument("--devices", default="", help="gpu: cuda:0,cuda:1, say; cuda:0 if nothing is said")


def options_of(given: argparse.Namespace) -> Options:
    """What was said."""
    return Options(given.quick, given.registry, tuple(filter(None, given.devices.split(","))))


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    add_options(parser)
    given = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no part of the page
    import torch

    from .machine import describe
    from .report import LeftOutError

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    options, machine, begin = options_of(given), describe(), time.monotonic()
    part = importlib.import_module(f".{given.name}", __package__)
    try:
        report = part.measure(options)
    except LeftOutError as reason:
        print(reason, file=answers, flush=True)
        return UNABLE
    print(report.markdown(f"python -m benchmarks {given.name}{options}", machine), file=answers, flush=True)
    seconds = time.monotonic() - begin
    print(f"{given.name}: {seconds:.0f} s of {part.MINUTES * 60:.0f} s planned", file=sys.stderr, flush=True)
    gc.collect()  # fairscale's pipe waits for its threads in __del__: forever, if the interpreter is ending
    return 0


if __name__ == "__main__":
    sys.exit(main())
