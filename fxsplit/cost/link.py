"""Measured bandwidth between two devices."""

from __future__ import annotations

import statistics
import time

import torch

from ..arguments import explained
from ..errors import ArgumentError, PlanError
from ..plan.devices import device_name


@explained(ArgumentError, 'fxsplit.measure_link("cpu", "cuda:0")')
def measure_link(
    source: str | torch.device, destination: str | torch.device, *, nbytes: int = 2**26, runs: int = 7
) -> float:
    """Bytes per second that a copy between two devices reaches: the median of `runs` copies after two for warming up.

    Args:
        source, destination: devices that are there.
        nbytes: size of the copy, at least 1.
        runs: how many copies are timed, at least 1.

    Raises:
        ArgumentError: a device is not there, or a number is not positive.
    """
    for name, number in (("nbytes", nbytes), ("runs", runs)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ArgumentError(
                f"measure_link({name}={number!r})",
                remedy=f"a whole number: {name}={7 if name == 'runs' else 2**26}",
            )
    try:
        source, destination = (device_name("measure_link", device) for device in (source, destination))
    except PlanError as error:
        raise ArgumentError(error.what, remedy='fxsplit.measure_link("cpu", "cuda:0")') from None
    try:
        data = torch.zeros(nbytes, dtype=torch.uint8, device=source)
        there = torch.empty(nbytes, dtype=torch.uint8, device=destination)
        samples = []
        for _ in range(runs + 2):
            _wait(data, there)
            start = time.perf_counter()
            there.copy_(data)
            _wait(data, there)
            samples.append(time.perf_counter() - start)
    except (RuntimeError, AssertionError) as error:
        raise ArgumentError(
            f"{source} or {destination} is not there: {str(error).splitlines()[0]}",
            remedy="name devices that this machine has",
        ) from None
    return nbytes / statistics.median(samples[2:])


def _wait(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.device.type != "cpu":
            torch.accelerator.synchronize(tensor.device)
