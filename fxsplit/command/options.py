"""The fields of a plan as options of a command: one row each."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any

from ..errors import PlanError
from ..plan.checkpoint import WORDS as CHECKPOINTS
from ..plan.costs import CATALOG as COSTS
from ..plan.plan import EFFORTS, Plan
from ..schedules.catalog import NAMES as SCHEDULES
from ..schedules.schedule import Schedule


def words(text: str) -> list[str]:
    """Separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def _one_or_words(text: str) -> str | list[str]:
    found = words(text)
    return found[0] if len(found) == 1 else found


def numbers(text: str) -> list[int]:
    """Separated by commas."""
    return [int(word) for word in words(text)]


def _replicas(text: str) -> str | int | list[int]:
    if text == "auto":
        return text
    counts = numbers(text)
    return counts[0] if len(counts) == 1 else counts


def _word_or_json(text: str) -> Any:
    return json.loads(text) if text.lstrip().startswith("{") else text


def _schedule(text: str) -> str | Schedule:
    if text in SCHEDULES or not os.path.exists(text):
        return text
    with open(text, encoding="utf-8") as file:
        return Schedule.from_csv(file.read())


def _checkpoint(text: str) -> str | list[str]:
    return text if text in CHECKPOINTS else words(text)


def _states(text: str) -> int | None:
    return None if text == "inference" else int(text)


@dataclasses.dataclass(frozen=True)
class Option:
    """How a field is written on the command line.

    Attributes:
        read: from text; None for a switch.
        help: what it is, with an example.
        sets: what a switch sets the field to.
    """

    read: Callable[[str], Any] | None
    help: str
    sets: bool = True

    def value(self, flag: str, text: Any) -> Any:
        """What was written after `flag`.

        Raises:
            PlanError: it cannot be read.
        """
        if self.read is None:
            return text
        try:
            return self.read(text)
        except ValueError as error:
            raise PlanError(f"{flag} {text!r}: {error}", remedy=f"{flag}: {self.help}") from None


OPTIONS = {
    "stages": Option(int, "number of stages, cut automatically"),
    "balance": Option(numbers, "units of each stage, such as 2,2"),
    "cut": Option(words, "modules that each begin a stage, such as h.4,h.8"),
    "device_map": Option(_word_or_json, "a word of Accelerate's, or {module: device} as JSON"),
    "cost": Option(str, f"what a stage weighs: {', '.join(COSTS)}"),
    "hardware": Option(_one_or_words, "known devices, one or one for each stage, such as A100-80GB"),
    "optimizer_states": Option(_states, "values for each parameter, 2 for Adam; or inference"),
    "effort": Option(str, f"of the search for a cut: {', '.join(EFFORTS)}"),
    "devices": Option(_one_or_words, "one, or one for each stage: cuda:0,cuda:1"),
    "max_memory": Option(_word_or_json, '{device: bytes} as JSON, such as {"cuda:0": "10GiB"}'),
    "offload": Option(None, "weights stay on the CPU, and are fetched"),
    "no_split_module_classes": Option(words, "classes that a word as device map keeps together"),
    "micro_batches": Option(int, "how many a batch is split into, at most"),
    "schedule": Option(_schedule, f"{', '.join(SCHEDULES)}; or a CSV file with a schedule of your own"),
    "workers": Option(int, "that share the stages, for schedules with several on each"),
    "checkpoint": Option(
        _checkpoint, f"{', '.join(CHECKPOINTS)}; or modules that are computed again: h.0,h.1"
    ),
    "replicas": Option(_replicas, "workers of each stage: 2, or 2,1, or auto"),
    "gather": Option(None, "leave outputs where they are made", sets=False),
    "threads": Option(int, "inside of an operation, of each worker"),
    "deferred_batch_norm": Option(None, "running statistics once for a batch"),
    "sync_batch_norm": Option(None, "statistics of the whole batch"),
    "detect_anomaly": Option(str, "nan, or inf: end at the first"),
    "batch_dims": Option(_word_or_json, '{argument: dimension or null} as JSON, such as {"mask": null}'),
}


def add_to(parser: argparse.ArgumentParser) -> None:
    """All of them, and ``--plan``."""
    group = parser.add_argument_group("plan")
    group.add_argument("--plan", metavar="PLAN.json", help="begin with a saved plan")
    for name, option in OPTIONS.items():
        flag = name.replace("_", "-")
        if option.read is None:
            flag = flag if option.sets else f"no-{flag}"
            group.add_argument(
                f"--{flag}", dest=name, action="store_const", const=option.sets, help=option.help
            )
        else:
            group.add_argument(f"--{flag}", dest=name, metavar="…", help=option.help)


def plan_of(given: argparse.Namespace, **usual: Any) -> Plan:
    """The plan that the options say; with `usual` fields where they say nothing.

    Raises:
        PlanError: one cannot be read, or they do not go together.
    """
    fields = dict(usual)
    for name, option in OPTIONS.items():
        text = getattr(given, name)
        if text is not None:
            fields[name] = option.value(f"--{name.replace('_', '-')}", text)
    begin = Plan.load(given.plan) if given.plan else Plan()
    return begin.replace(**fields)
