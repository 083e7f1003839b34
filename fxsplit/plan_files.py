"""The fields of a plan as plain values, and in a JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from .actions import Schedule
from .checkpoint import Budget, Checkpoint
from .costs import Cost
from .errors import PlanError


def plain_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are set, as what JSON can hold.

    Raises:
        PlanError: one is a function.
    """
    plain: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Checkpoint | Cost):
            value = value.plain
        elif isinstance(value, Schedule):
            value = {"name": value.name, "csv": value.to_csv()}
        elif name == "hardware" and value is not None:
            value = [one.to_dict() for one in value] if isinstance(value, tuple) else value.to_dict()
        elif name == "optimizer_states" and value is None:
            value = "inference"
        if value is not None:
            plain[name] = list(value) if isinstance(value, tuple) else value
    return json.loads(json.dumps(plain))  # type: ignore[no-any-return]


def fields_of(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `plain_fields`."""
    fields = dict(plain)
    policy, schedule = fields.get("checkpoint"), fields.get("schedule")
    if isinstance(policy, Mapping) and set(policy) == {"budget"}:
        fields["checkpoint"] = Budget(policy["budget"])
    if isinstance(schedule, Mapping) and set(schedule) == {"name", "csv"}:
        fields["schedule"] = Schedule.from_csv(schedule["csv"], schedule["name"])
    if fields.get("optimizer_states") == "inference":
        fields["optimizer_states"] = None
    return fields


def write_fields(path: str | os.PathLike[str], plain: Mapping[str, Any]) -> None:
    """Write plain fields as a JSON file."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(plain, file, indent=2)
        file.write("\n")


def read_fields(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read them again.

    Raises:
        PlanError: the file holds no plan.
    """
    with open(path, encoding="utf-8") as file:
        try:
            fields = json.load(file)
        except ValueError as error:
            raise PlanError(
                f"{os.fspath(path)} is not JSON: {error}", remedy="write it with plan.save(path)"
            ) from None
    if not isinstance(fields, dict):
        raise PlanError(f"{os.fspath(path)} holds no plan", remedy="write it with plan.save(path)")
    return fields
