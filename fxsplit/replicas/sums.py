"""Add the gradients of micro-batches in micro-batch order, whichever replica finishes first."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ..compat import add_each, plain_tensors


class OrderedSum:
    """Sums whose terms arrive in any order, from any thread, and are added in the order of their index.

    The rounding is that of gradient accumulation over the micro-batches one after the other. A term that
    is None (the parameter was not used) adds nothing.

    Args:
        count: how many terms each sum has.
        width: how many sums there are: their terms with one index arrive together.
    """

    def __init__(self, count: int, width: int) -> None:
        self._count = count
        self._next = 0
        self._early: dict[int, Sequence[torch.Tensor | None]] = {}
        self._sums: list[torch.Tensor | None] = [None] * width
        self._owned = [False] * width  # whether the memory of a sum is ours to write to
        self._lock = threading.Lock()

    def add(self, index: int, terms: Sequence[torch.Tensor | None]) -> None:
        """Add the terms with this index (each index once)."""
        with self._lock:
            self._early[index] = terms
            while self._next in self._early:
                self._accumulate(self._early.pop(self._next))
                self._next += 1

    def _accumulate(self, terms: Sequence[torch.Tensor | None]) -> None:
        ours, more = list[torch.Tensor](), list[torch.Tensor]()
        with plain_tensors():  # as autograd adds them, whatever class they have
            for k, (so_far, term) in enumerate(zip(self._sums, terms, strict=True)):
                if term is None:
                    continue
                if so_far is None:
                    self._sums[k] = term
                elif not self._owned[k] or so_far.is_sparse:
                    self._sums[k], self._owned[k] = so_far + term, True
                elif type(so_far) is type(term) is torch.Tensor:
                    ours.append(so_far)
                    more.append(term)
                else:
                    so_far += term
            if ours:
                add_each(ours, more)

    def total(self) -> list[torch.Tensor | None]:
        """The sums of all terms; None where there was none.

        Raises:
            RuntimeError: a term is missing.
        """
        if self._next != self._count:
            raise RuntimeError(f"gradient of micro-batch {self._next} is missing")
        return self._sums
