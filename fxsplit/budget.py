"""`Budget`: how much a device may keep."""

from __future__ import annotations

from dataclasses import dataclass

from .arguments import explained
from .errors import PlanError
from .sizes import nbytes_of


@dataclass(frozen=True)
class Budget:
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
