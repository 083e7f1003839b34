"""Parameters that stay in the CPU's memory, and are on the device of their stage only while it computes.

    parameter, on the CPU   ──▶  its counterpart on the device: one tensor object for good, which autograd knows;
                                 memory is taken and filled when a stage comes to need it, and given back after

Autograd saves counterparts, not their memory, so a backward finds them filled again. (FSDP of PyTorch frees what it
has gathered in this way; Accelerate's hooks put other tensors into the modules, and only go forward.)
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..compat import storage_key
from ..errors import GradientError
from .copies import Tree, steps_of


class Offload(Tree):
    """The modules of a model again, over counterparts of its parameters on a device."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter, int]] = {}  # by id of the parameter
        self._users: Counter[int] = Counter()
        self._turn = threading.Lock()
        super().__init__(model, device)

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for a parameter here: its counterpart."""
        known = self._made.get(id(tensor))
        return super().copy_of(tensor) if known is None else known[1]

    def refresh(self, always: Sequence[torch.Tensor] = ()) -> None:
        """Follow the model; what parameters hold is looked at when they are fetched."""
        current = {id(p) for module, _ in self._pairs for p in module._parameters.values()}
        self._made = {key: row for key, row in self._made.items() if key in current}
        super().refresh(always)

    def stands_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """The counterpart of a parameter, without memory until it is fetched."""
        assert isinstance(tensor, nn.Parameter)
        known = self._made.get(id(tensor))
        if known is None or known[0] is not tensor or not _alike(tensor, known[1]):
            made = nn.Parameter(torch.empty_like(tensor, device=self.device), tensor.requires_grad)
            known = tensor, made, made.untyped_storage().nbytes()
            made.untyped_storage().resize_(0)
            self._made[id(tensor)] = known
        known[1].requires_grad_(tensor.requires_grad)
        return known[1]

    def fetch(self, parameters: Sequence[nn.Parameter]) -> None:
        """Somebody needs these on the device until `leave`; after an error nobody does."""
        for done, parameter in enumerate(parameters):
            try:
                self._fetch(parameter)
            except BaseException:
                self.leave(parameters[: done + 1])
                raise

    def _fetch(self, parameter: nn.Parameter) -> None:
        original, made, size = self._made[id(parameter)]
        with self._turn, torch.inference_mode(False), torch.no_grad():
            self._users[id(parameter)] += 1
            if self._users[id(parameter)] == 1:
                made.untyped_storage().resize_(size)
                made.data.copy_(original.data)

    def leave(self, parameters: Sequence[nn.Parameter]) -> None:
        """Whoever fetched these needs them no more."""
        with self._turn:
            for parameter in parameters:
                self._users[id(parameter)] -= 1
                if not self._users[id(parameter)]:
                    self._made[id(parameter)][1].untyped_storage().resize_(0)


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()


class Offloaded:
    """The parameters of one stage: on the CPU, and their counterparts on its device."""

    def __init__(self, tree: Offload, named: dict[str, nn.Parameter]) -> None:
        self._tree, self._named = tree, named
        self._parameters = list({id(p): p for p in named.values()}.values())

    def fetch(self) -> None:
        """They are on the device until `leave`."""
        self._tree.fetch(self._parameters)

    def leave(self) -> None:
        """Their memory on the device is given back, if no other stage needs it."""
        self._tree.leave(self._parameters)

    def tensors(self) -> Iterator[torch.Tensor]:
        """The counterparts."""
        return map(self._tree.copy_of, self._parameters)

    def memory(self) -> frozenset[int]:
        """What tells the memory of the counterparts, while they have any."""
        return frozenset(map(storage_key, self.tensors()))

    def versions(self) -> list[tuple[int, int]]:
        """What changes when a parameter is changed in place, or stepped by an optimizer."""
        return [(p._version, steps_of(p)) for p in self._parameters]

    def check(self, versions: list[tuple[int, int]]) -> None:
        """Refuse to go backward with other values than those of the forward.

        Raises:
            GradientError: names the first parameter that was changed.
        """
        for parameter, before, now in zip(self._parameters, versions, self.versions(), strict=True):
            if before != now:
                name: Any = next(n for n, p in self._named.items() if p is parameter)
                raise GradientError(
                    f"{name} was changed in place between forward and backward",
                    remedy="call backward before optimizer.step()",
                )
