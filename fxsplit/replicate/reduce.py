"""Add the gradients of micro-batches in micro-batch order, whichever replica finishes first."""

from __future__ import annotations

import threading

import torch

from ..compat import plain_tensors


class OrderedSum:
    """A sum whose terms arrive in any order, from any thread, and are added in the order of their index.

    The rounding is that of gradient accumulation over the micro-batches one after the other. A term that
    is None (the parameter was not used) adds nothing.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._next = 0
        self._early: dict[int, torch.Tensor | None] = {}
        self._sum: torch.Tensor | None = None
        self._owned = False  # whether the sum's memory is ours to write to
        self._lock = threading.Lock()

    def add(self, index: int, term: torch.Tensor | None) -> None:
        """Add the term with this index (each index once)."""
        with self._lock:
            self._early[index] = term
            while self._next in self._early:
                self._accumulate(self._early.pop(self._next))
                self._next += 1

    def _accumulate(self, term: torch.Tensor | None) -> None:
        if term is None:
            return
        if self._sum is None:
            self._sum = term
        elif self._owned and not self._sum.is_sparse:
            with plain_tensors():
                self._sum += term
        else:
            with plain_tensors():  # as autograd adds them, whatever class they have
                self._sum, self._owned = self._sum + term, True

    def total(self) -> torch.Tensor | None:
        """The sum of all terms; None where there was none.

        Raises:
            RuntimeError: a term is missing.
        """
        if self._next != self._count:
            raise RuntimeError(f"gradient of micro-batch {self._next} is missing")
        return self._sum
