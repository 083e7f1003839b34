"""The fields of a plan as plain values, and in a JSON file."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import IO, Any

from ..errors import PlanError
from ..schedules.schedule import Schedule
from .checkpoint import Budget, Checkpoint
from .costs import Cost


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
    """Write plain fields as a JSON file.

    Raises:
        PlanError: there can be no such file.
    """
    with _opened(path, "w", "plan.save") as file:
        json.dump(plain, file, indent=2)
        file.write("\n")


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str], mode: str, call: str) -> Iterator[IO[str]]:
    if not isinstance(path, str | os.PathLike):
        raise PlanError(f"{call}({path!r}): not a path", remedy=f'{call}("plan.json")')
    try:
        file = open(path, mode, encoding="utf-8")  # noqa: SIM115
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise PlanError(
            f"{call}({os.fspath(path)!r}): {why}",
            remedy=f"{call}(path) of a file that can be "
            + ("written" if mode == "w" else "read, such as plan.save(path) writes"),
        ) from None
    with file:
        yield file


def read_fields(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read them again.

    Raises:
        PlanError: the file holds no plan.
    """
    with _opened(path, "r", "fxsplit.Plan.load") as file:
        try:
            fields = json.load(file)
        except ValueError as error:
            raise PlanError(
                f"{os.fspath(path)} is not JSON: {error}", remedy="write it with plan.save(path)"
            ) from None
    if not isinstance(fields, dict):
        raise PlanError(f"{os.fspath(path)} holds no plan", remedy="write it with plan.save(path)")
    return fields
