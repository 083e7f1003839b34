"""`Checkpoint`: what is not kept for backward but computed again, as a value that answers.

    spelling in a plan              value            recomputed, of micro-batch i
    "never"                         Never            nothing
    "always"                        Always           everything
    "except_last"                   ExceptLast       everything where i > 0: micro-batch 0 goes backward first
    ["h.4", "h.5"]                  Paths            these modules
    lambda path, module: ...        Where            the modules for which it is true
    Budget("2GiB")                  Budget           what it takes to keep that much on each device

A new policy is a class here, and a row in `Checkpoint.of` where it has a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

from ..arguments import explained
from ..errors import PartitionError, PlanError, did_you_mean
from .choice import Choice
from .sizes import nbytes_of


class Checkpoint(Choice):
    """A policy.

    Attributes:
        everything: whether whole stages are recomputed, and not modules that are chosen.
        limit: the bytes that a device may keep, where that decides what is recomputed.
    """

    everything: ClassVar[bool] = False

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"cannot assign to field {name!r}")

    @staticmethod
    def of(value: object) -> Checkpoint:
        """The policy that a plan's ``checkpoint=`` spells.

        Raises:
            PlanError: it spells none.
        """
        if isinstance(value, Checkpoint):
            return value
        if isinstance(value, str) and value in WORDS:
            return WORDS[value]()
        if isinstance(value, list | tuple) and value and all(isinstance(path, str) for path in value):
            return Paths(tuple(value))
        if isinstance(value, str):
            remedy = did_you_mean(value, tuple(WORDS), label="choices")
            if re.match(r"\s*[0-9]", value):
                remedy = f"checkpoint=fxsplit.Budget({value!r})"
            raise PlanError(f"checkpoint={value!r} is not known", remedy=remedy)
        if callable(value):
            return Where(value)
        raise PlanError(
            f"checkpoint={value!r} is no policy",
            remedy='"always", "except_last", "never", ["h.4", "h.5"], a function (path, module) -> bool, '
            'or fxsplit.Budget("2GiB")',
        )

    @property
    def plain(self) -> Any:
        """What it is written as in a file.

        Raises:
            PlanError: it is a function.
        """
        return self.spelling

    @property
    def limit(self) -> int | None:
        return None

    def recomputes(self, micro_batch: int) -> bool:
        """Whether anything of a micro-batch is computed again."""
        return True

    @property
    def anything(self) -> bool:
        """Whether anything of any micro-batch is."""
        return self.recomputes(1)

    @property
    def first_whole(self) -> bool:
        """Whether the micro-batch that goes backward first is kept whole."""
        return self.anything and not self.recomputes(0)

    def share(self, micro_batches: int) -> float:
        """The part of all forwards that is computed again, where that is the same for all nodes."""
        return sum(map(self.recomputes, range(micro_batches))) / micro_batches if self.everything else 0.0

    def paths(self, model: nn.Module) -> list[str]:
        """The modules that are recomputed, by their first names, where the policy chooses modules.

        Raises:
            PartitionError: `model` has no such module.
        """
        return []

    def __str__(self) -> str:
        return str(self.spelling)


class Never(Checkpoint):
    """Everything is kept."""

    spelling = "never"

    def recomputes(self, micro_batch: int) -> bool:
        return False


class Always(Checkpoint):
    """Every stage keeps its inputs only."""

    everything = True
    spelling = "always"


class ExceptLast(Checkpoint):
    """The same but for the micro-batch that goes backward first: what it keeps is soon free (torchgpipe)."""

    everything = True
    spelling = "except_last"

    def recomputes(self, micro_batch: int) -> bool:
        return micro_batch > 0


class Paths(Checkpoint):
    """Modules by their paths."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        object.__setattr__(self, "spelling", paths)

    def paths(self, model: nn.Module) -> list[str]:
        modules = dict(model.named_modules(remove_duplicate=False))
        first_name = {id(module): name for name, module in model.named_modules()}
        for path in self.spelling:
            if path not in modules or not path:
                raise PartitionError(
                    f"checkpoint= names {path!r}, which {type(model).__name__} does not have",
                    remedy=did_you_mean(path, [n for n in modules if n]),
                )
        return [first_name[id(modules[path])] for path in self.spelling]

    def __str__(self) -> str:
        return ", ".join(self.spelling)


class Where(Checkpoint):
    """The modules for which a function ``(path, module) -> bool`` is true."""

    def __init__(self, function: Callable[[str, nn.Module], bool]) -> None:
        object.__setattr__(self, "spelling", function)

    @property
    def plain(self) -> Any:
        raise PlanError(
            "checkpoint= is a function, which is not written to a file",
            remedy="name the modules: checkpoint=[path for path, m in model.named_modules() if ...]",
        )

    def paths(self, model: nn.Module) -> list[str]:
        return [path for path, module in model.named_modules() if path and self.spelling(path, module)]

    def __str__(self) -> str:
        return "by a function"


class Budget(Checkpoint):
    """How many bytes of activations each device may keep for backward, recomputation included.

    Args:
        nbytes: a number of bytes, or a string such as ``"2GiB"``, ``"512 MiB"`` or ``"1.5GB"``. It is for one batch
            like the example, with all its micro-batches; parameters, gradients and optimizer state come on top.

    Raises:
        PlanError: it is not a positive size.
    """

    nbytes: int

    @explained(PlanError, 'fxsplit.Budget("2GiB")')
    def __init__(self, nbytes: int | str) -> None:
        size = nbytes_of(nbytes)
        if not size:
            raise PlanError(f"Budget({nbytes!r}) is not a size", remedy='Budget("2GiB") or Budget(2 * 2**30)')
        object.__setattr__(self, "nbytes", size)
        object.__setattr__(self, "spelling", ("budget", size))

    @property
    def plain(self) -> dict[str, int]:
        return {"budget": self.nbytes}

    @property
    def limit(self) -> int:
        return self.nbytes

    def __reduce__(self) -> Any:
        return Budget, (self.nbytes,)

    def __repr__(self) -> str:
        return f"Budget(nbytes={self.nbytes})"

    def __str__(self) -> str:
        return f"within {self.nbytes:_} bytes a device"


WORDS: dict[str, type[Checkpoint]] = {
    policy.spelling: policy for policy in (Always, ExceptLast, Never)
}  # of the command line too
