"""`Scattered`: the outputs of the micro-batches of a call, each where it was made, and how to put them together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from ..compat import TreeSpec, register_pytree, tree_unflatten
from .merge import Merge, Merges, merged


# DistributedDataParallel looks for the tensors in an output by dataclass (find_unused_parameters), and hands them on by
# pytree (static_graph): what it does not find, it takes for unused, or does not reduce.
@dataclass(init=False, eq=False, repr=False)
class Scattered:
    """What ``pipe(x)`` gives with ``Plan(gather=False)``: the model's output for each micro-batch, in order.

    ``len(out)``, ``out[i]`` and iteration give the parts. Autograd sees ordinary tensors: a gradient of the parts is
    that of the gathered output, bit for bit. They are one node of the graph: go backward once, with the sum of what
    is made of the parts, or say ``retain_graph=True``. A part is not to be changed in place where it is a list or a dict: what
    `gather` puts together are the tensors that were in it.

    It is the same type for any number of micro-batches and replicas, also for one. (torch.nn.DataParallel and
    encoding.parallel leave outputs on the devices of the replicas as a list, and as the bare output where there is one.)

    Attributes:
        parts: the output of each micro-batch, in the model's structure, on the device where its last stage ran. A
            tensor of shape (rows, ...) in the whole output is (sizes[i], ...) in part i.
        sizes: rows of each part; ``(1,)`` where no argument of the model has a batch.
        devices: of each part.
    """

    parts: tuple[Any, ...]
    sizes: tuple[int, ...]
    devices: tuple[torch.device, ...]

    def __init__(
        self,
        leaves: Sequence[Sequence[Any]],
        spec: TreeSpec,
        sizes: Sequence[int] | None,
        devices: Sequence[torch.device],
        merges: Sequence[Merge],
    ) -> None:
        """From flat outputs of each micro-batch.

        Args:
            sizes: None for a single part without a batch.
            merges: how each flat output is merged; those after the model's own are the weights of means.
        """
        self._merges = merges if isinstance(merges, Merges) else Merges(merges)
        self.parts = tuple(tree_unflatten(list(row)[: self._merges.shown], spec) for row in leaves)
        self.sizes, self.devices = tuple(sizes or (1,)), tuple(devices)
        self.has_batch = sizes is not None
        self._leaves, self._spec = [list(row) for row in leaves], spec

    def gather(self) -> Any:
        """The output for the whole batch, as a pipeline with ``gather=True`` gives it; differentiable.

        Parts on other devices are moved to that of the first.

        Raises:
            BatchError: rows of the parts do not fit together, or an output that was the same for all micro-batches of
                the example is not so now.
        """
        if len(self.parts) == 1:
            return self.parts[0]
        columns = list(zip(*self._leaves, strict=True))
        return tree_unflatten(merged(self._merges, columns, self.sizes), self._spec)

    def detach(self) -> Scattered:
        """The same parts without their graph."""
        leaves = [[v.detach() if isinstance(v, torch.Tensor) else v for v in row] for row in self._leaves]
        sizes = self.sizes if self.has_batch else None
        return Scattered(leaves, self._spec, sizes, self.devices, self._merges)

    @property
    def merges(self) -> tuple[Merge, ...]:
        """How each tensor in the output is merged, and whatever else differs from part to part."""
        pairs = zip(self._merges[: self._merges.shown], self._leaves[0], strict=False)
        return tuple(m for m, v in pairs if isinstance(v, torch.Tensor) or m.how != "same")

    def __len__(self) -> int:
        return len(self.parts)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self.parts[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts)

    def __repr__(self) -> str:
        shown = [f"{n} row{'s' * (n != 1)} on {d}" for n, d in zip(self.sizes, self.devices, strict=True)]
        count = "1 part" if len(self) == 1 else f"{len(self)} parts"
        return f"Scattered({count}: {', '.join(shown if self.has_batch else map(str, self.devices))})"


def _flatten(value: Scattered) -> tuple[list[Any], Any]:
    sizes = value.sizes if value.has_batch else None
    return value._leaves, (value._spec, sizes, value.devices, value._merges)


def _unflatten(rows: Iterable[Any], kept: Any) -> Scattered:
    return Scattered(list(rows), *kept)


register_pytree(Scattered, _flatten, _unflatten)
