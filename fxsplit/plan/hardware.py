"""`Device`: an accelerator in four figures, for plans that are made without running on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..arguments import explained
from ..errors import PlanError, did_you_mean
from .sizes import nbytes_of


@dataclass(frozen=True)
class Device:
    """What a device can do. Any figure may be left out where it is not needed.

    Args:
        flops: floating point operations per second that it reaches.
        bandwidth: bytes per second between its memory and its cores.
        memory: bytes, or a string such as ``"80GB"``.
        link: bytes per second from it to the next device, in one direction; `fxsplit.measure_link` measures it.
        name: for people.

    Raises:
        PlanError: a figure is not a positive number.
    """

    flops: float | None = None
    bandwidth: float | None = None
    memory: int | str | None = None
    link: float | None = None
    name: str = ""

    def __post_init__(self) -> None:
        for field in ("flops", "bandwidth", "link"):
            value = getattr(self, field)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise PlanError(
                    f"Device({field}={value!r}) is not a positive number", remedy=f"{field}=1e12, in a second"
                )
        if self.memory is not None:
            size = nbytes_of(self.memory)
            if not size:
                raise PlanError(f"Device(memory={self.memory!r}) is not a size", remedy='memory="80GB"')
            object.__setattr__(self, "memory", size)

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "")}


Device.__init__ = explained(  # type: ignore[method-assign]
    PlanError, 'fxsplit.Device(flops=1e14, bandwidth=1e12, memory="80GB", link=2e10)'
)(Device.__init__)


# Peak rates of dense half precision and the rated memory and links, from the makers' data sheets; what a model reaches
# is less, by about the same factor for all of its parts. Links: NVLink or Infinity Fabric in one direction, else PCIe.
ACCELERATORS: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device(65e12, 320e9, "16GB", 16e9, "T4"),
        Device(125e12, 900e9, "32GB", 150e9, "V100"),
        Device(121e12, 300e9, "24GB", 32e9, "L4"),
        Device(165e12, 1008e9, "24GB", 32e9, "RTX-4090"),
        Device(312e12, 1555e9, "40GB", 300e9, "A100-40GB"),
        Device(312e12, 2039e9, "80GB", 300e9, "A100-80GB"),
        Device(989e12, 3350e9, "80GB", 450e9, "H100"),
        Device(989e12, 4800e9, "141GB", 450e9, "H200"),
        Device(1307e12, 5300e9, "192GB", 64e9, "MI300X"),
    )
}


def described(where: str, value: object) -> Device:
    """A description as it may stand in a plan: a `Device`, the name of one, or its figures.

    Raises:
        PlanError: it is none of them.
    """
    if isinstance(value, Device):
        return value
    if isinstance(value, str):
        if value not in ACCELERATORS:
            raise PlanError(
                f"{where}={value!r} is not a device that fxsplit knows",
                remedy=did_you_mean(value, list(ACCELERATORS), label="devices"),
            )
        return ACCELERATORS[value]
    if isinstance(value, Mapping):
        known = list(Device.__dataclass_fields__)
        for key in value:
            if key not in known:
                raise PlanError(f"{where}: a Device has no {key!r}", remedy=did_you_mean(str(key), known))
        return Device(**value)
    raise PlanError(
        f"{where}={value!r} does not describe a device",
        remedy='"A100-80GB", or fxsplit.Device(flops=1e14, bandwidth=1e12, memory="80GB", link=2e10)',
    )
