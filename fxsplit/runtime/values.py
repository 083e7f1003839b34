"""What the stages of a call hand to each other: values, and their gradients back."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..compat import tree_map

Row = list[torch.Tensor | None]  # of a value's leaves, the gradients


class Values:
    """Of one call, for all its micro-batches.

    Args:
        readers: value → how often it is read; those that are not there are read by nobody.

    Attributes:
        same: a value that is the same tensor as another one, in a micro-batch → the first of its names, under which
            its gradient goes.
    """

    def __init__(self, readers: Mapping[str, int]) -> None:
        self._readers = readers
        self._values: dict[tuple[str, int], Any] = {}
        self._unread: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()
        self._gradients: dict[tuple[str, int], Row] = {}
        self._of_parameters: dict[tuple[str, int], torch.Tensor] = {}
        self.same: dict[tuple[str, int], str] = {}

    def give(self, name: str, i: int, value: Any) -> None:
        """Make a value readable: detached, and marked with whether it needs a gradient."""
        if name in self._readers:
            self._values[name, i] = handed_over(value)
            self._unread[name, i] = self._readers[name]

    def take(self, name: str, i: int) -> Any:
        """A leaf of its own for this reader. The last one gets what was given, which is dropped here."""
        key = name, i
        with self._lock:
            value = self._values[key]
            self._unread[key] -= 1
            if not self._unread[key]:
                del self._values[key]
                return value
        return handed_over(value)

    def results(self, names: Sequence[str | tuple[Any, ...]], i: int) -> list[Any]:
        """The outputs of the whole program."""
        return [self._values[v, i] if isinstance(v, str) else v[0] for v in names]

    def forget(self) -> None:
        """Nobody reads any more."""
        self._values.clear()

    def receive(self, name: str, i: int, row: Row) -> None:
        """Gradients of an output of the program, before anybody else's."""
        key = self.same.get((name, i), name), i
        self._gradients[key] = added(self._gradients[key], row) if key in self._gradients else row

    def gradient(self, tensor: str, i: int) -> Row | None:
        """What later readers of it have come to."""
        return self._gradients.get((tensor, i))

    def take_gradient(self, tensor: str, i: int) -> Row | None:
        """The same for the stage that made it: nobody else asks."""
        return self._gradients.pop((tensor, i), None)

    def give_gradient(self, tensor: str, i: int, row: Row) -> None:
        """What it comes to with that of one more reader."""
        self._gradients[tensor, i] = row

    def take_of_parameter(self, fqn: str, i: int) -> torch.Tensor | None:
        """The gradient of a parameter by the stages behind this one that read it too."""
        return self._of_parameters.pop((fqn, i), None)

    def give_of_parameter(self, fqn: str, i: int, gradient: torch.Tensor) -> None:
        """The same for the stage before."""
        self._of_parameters[fqn, i] = gradient

    def forget_gradients(self) -> None:
        """Another backward begins, or everybody has what he wants."""
        self._gradients, self._of_parameters = {}, {}


def added(first: Sequence[torch.Tensor | None], second: Sequence[torch.Tensor | None]) -> Row:
    """The sums of two rows; None adds nothing."""
    return [b if a is None else a if b is None else a + b for a, b in zip(first, second, strict=True)]


def handed_over(value: Any) -> Any:
    """Its tensors as leaves, without the graph that they come from."""
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return tree_map(lambda v: handed_over(v) if isinstance(v, torch.Tensor) else v, value)


def has_grad(leaf: Any) -> bool:
    """Whether it is a tensor that has a gradient."""
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
