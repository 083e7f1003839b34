"""Devices as people write them in a plan → strings that PyTorch knows."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from ..errors import PlanError, did_you_mean
from .sizes import nbytes_of

DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")

DeviceLike = str | int | torch.device


def device_map_of(value: object) -> str | dict[str, str | tuple[str, str]]:
    """One of `DEVICE_MAPS`, or module path → device or (device, output device).

    Raises:
        PlanError: it is neither.
    """
    if isinstance(value, str):
        if value in DEVICE_MAPS:
            return value
        raise _unknown_word(value)
    if not isinstance(value, Mapping) or not value:
        raise PlanError(
            f"device_map={value!r} is not a mapping of module paths to devices",
            remedy='device_map={"": "cuda:0", "head": "cuda:1"}, or a word such as "auto"',
        )
    resolved: dict[str, str | tuple[str, str]] = {}
    for path, device in value.items():
        if not isinstance(path, str):
            raise PlanError(
                f"device_map key {path!r} is not a module path", remedy='use a string such as "h.4"'
            )
        where = f"device_map[{path!r}]"
        if isinstance(device, list | tuple):
            if len(device) != 2:
                raise PlanError(
                    f"{where} has {len(device)} devices",
                    remedy="one device, or a pair (device, output device)",
                )
            resolved[path] = (device_name(where, device[0]), device_name(where, device[1]))
        else:
            resolved[path] = device_name(where, device)
    return resolved


def _unknown_word(word: str) -> PlanError:
    try:
        remedy = f'device_map={{"": "{device_name("device_map", word)}"}} for the whole model'
    except PlanError as error:
        if word == "disk":
            raise error from None
        remedy = did_you_mean(word, DEVICE_MAPS, label="words")
    return PlanError(f"device_map={word!r} is not known", remedy=remedy)


def memory_limits_of(value: object) -> dict[str, int]:
    """Device → bytes, of what a user wrote as ``max_memory=``.

    Raises:
        PlanError: it is not a mapping of devices to sizes, or names one device twice.
    """
    if not isinstance(value, Mapping) or not value:
        raise PlanError(
            f"max_memory={value!r} is not a mapping of devices to sizes",
            remedy='max_memory={0: "10GiB", "cpu": "30GiB"}',
        )
    limits: dict[str, int] = {}
    spelled: dict[str, object] = {}
    for key, size in value.items():
        # "0": what JSON makes of the key 0
        index = int(key) if isinstance(key, str) and re.fullmatch("[0-9]+", key) else key
        device, limit = device_name(f"max_memory key {key!r}", index), nbytes_of(size)
        if limit is None:
            raise PlanError(
                f"max_memory[{key!r}]={size!r} is not a size",
                remedy='a size such as "10GiB" or 10 * 2**30',
            )
        if device in limits:
            raise PlanError(
                f"max_memory keys {spelled[device]!r} and {key!r} are both {device}", remedy="keep one"
            )
        limits[device], spelled[device] = limit, key
    return limits


def device_name(where: str, device: object) -> str:
    """The device as PyTorch writes it; a number is an accelerator's, as in Accelerate.

    Raises:
        PlanError: it is no device.
    """
    if isinstance(device, bool) or not isinstance(device, str | int | torch.device):
        raise PlanError(
            f"{where} is {device!r}, not a device", remedy='a device such as "cpu", "cuda:0" or 0'
        )
    if device == "disk":
        raise PlanError(
            f"{where}: fxsplit does not offload to disk",
            remedy='"cpu", which holds what the accelerators cannot',
        )
    if isinstance(device, int) and device < 0:
        raise PlanError(f"{where} is {device}, not a device", remedy='a device such as "cpu", "cuda:0" or 0')
    if isinstance(device, int):  # Accelerate's way to name an accelerator; known also where there is none
        kind = torch.accelerator.current_accelerator()
        return f"{kind.type if kind is not None else 'cuda'}:{device}"
    number = re.fullmatch(r".*:([0-9]+)", device) if isinstance(device, str) else None
    if number is not None and int(number.group(1)) > 127:
        raise PlanError(
            f"{where} is {device!r}, and PyTorch numbers devices from 0 to 127", remedy='"cuda:0"'
        )
    try:
        return str(torch.device(device))
    except RuntimeError as error:
        raise PlanError(
            f"{where}: {str(error).splitlines()[0]}", remedy='a device such as "cpu", "cuda:0" or 0'
        ) from None
