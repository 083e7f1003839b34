"""Every exception that a user of fxsplit can meet.

Each message has three parts: what is wrong, where (module path and the user's ``file:line``), and what to
type instead. Its last line names the command that prints the section of ``errors.md`` on its class. Each class also
inherits the builtin that a caller would naturally catch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

import torch


class FxsplitError(Exception):
    """Base of all errors raised by fxsplit.

    Args:
        what: what is wrong, in one sentence.
        where: the module path, value or ``file:line`` that is concerned.
        remedy: what to type instead.
    """

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        self.what, self.where, self.remedy = what, where, remedy
        parts = [what]
        if where:
            parts.append(f"  where: {where}")
        if remedy:
            parts.append(f"  instead: {remedy}")
        documented = next(c.__name__ for c in type(self).__mro__ if c.__module__ == __name__)
        parts.append(f"  more: fxsplit explain {documented}")
        super().__init__("\n".join(parts))


class PlanError(FxsplitError, ValueError):
    """A `Plan` field is wrong, or contradicts another field."""


class ModelError(FxsplitError, TypeError):
    """What was given as the model is not a module that can be compiled."""


class TraceError(FxsplitError, RuntimeError):
    """The model could not be captured as a graph."""


class PartitionError(FxsplitError, ValueError):
    """The graph cannot be cut or placed as the plan asks."""


class VerifyError(FxsplitError, RuntimeError):
    """The generated program is not the traced graph, or computes other numbers than the model."""


class NotEquivalentError(VerifyError, AssertionError):
    """A pipeline and its model computed different numbers; what `fxsplit.testing.assert_equivalent` raises."""


class ArgumentError(FxsplitError, TypeError):
    """A call has an argument that is missing, unknown, or not of the kind the pipeline was compiled for."""


class StageIndexError(ArgumentError, IndexError):
    """A pipeline has no such stage."""


class AssumptionError(ArgumentError):
    """The model, or the state of its caller, is not what it was when the pipeline was compiled."""


class BatchError(FxsplitError, ValueError):
    """The arguments of a call do not agree on the batch, or an output cannot be merged."""


class GradientError(FxsplitError, RuntimeError):
    """A gradient that a pipeline cannot compute: a second derivative, or one whose values have been freed."""


class EffectError(FxsplitError, RuntimeError):
    """The model changed something that it was not known to change, where the numbers would depend on it."""


class MoveError(FxsplitError, TypeError):
    """A pipeline was asked to move to another device: the plan owns placement."""


class NoAttributeError(FxsplitError, AttributeError):
    """A pipeline was asked for an attribute that neither it nor the model has, or that it does not hand on."""


class ScheduleError(FxsplitError, ValueError):
    """A schedule repeats an action, lacks one, or can never finish."""


class WorkerError(FxsplitError, RuntimeError):
    """A worker thread ended without finishing its part of the schedule."""


class GuardError(FxsplitError, ValueError, AssertionError):
    """The model would decide by a size in another way than it did when it was captured."""


class AnomalyError(FxsplitError, RuntimeError):
    """A value or gradient has a NaN or an infinity; raised where the plan asks to look for them."""


class SerializeError(FxsplitError, TypeError):
    """A pipeline was pickled; it is saved by plan and state_dict instead."""


class WeightsError(FxsplitError, ValueError):
    """Weights cannot be read, or do not fit the model; nothing has been loaded then."""


class RankError(FxsplitError, RuntimeError):
    """A rank of a pipeline over several processes has failed, does not answer, or was given something else."""


def did_you_mean(word: str, known: Iterable[str], *, label: str = "known") -> str:
    """A remedy that names the entries of `known` nearest to `word`, or the first few of them."""
    names = sorted(set(known))
    close = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(name) for name in close) + "?"
    shown = ", ".join(repr(name) for name in names[:8])
    return f"{label}: {shown}{', …' if len(names) > 8 else ''}" if names else f"there are no {label} names"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or the host, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def pass_on_if_full(error: Exception) -> None:
    """Raise `error` as it is, where it says that there is no memory left: that is no fault of the model's."""
    if is_out_of_memory(error):
        raise error


def sections() -> dict[str, str]:
    """name of a class of this module → what the documentation says of it."""
    text = Path(__file__).with_name("errors.md").read_text(encoding="utf-8")
    parts = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0].strip(): part.partition("\n")[2].strip() for part in parts}
