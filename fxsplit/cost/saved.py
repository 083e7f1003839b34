"""Which memory backward needs, node by node: measured on the example, and added up for a set of recomputed regions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ..compat import Interpreter, storage_key, tree_leaves
from ..graph.ir import Traced
from ..modules.state import preserved, state_tensors
from .attention import FusedAttention
from .flops import flop_counter

Storages = Mapping[int, int]  # identity of a storage → its bytes


@dataclass(frozen=True)
class Saved:
    """What one forward of the whole example batch leaves behind.

    Attributes:
        by_node: node name → the storages that autograd keeps for the node's backward.
        values: node name → the storages of the node's value.
        flops: node name → floating point operations of its forward, by torch's own registry.

    Parameters, buffers and the caller's arguments are not counted: they are there in any case.
    """

    by_node: Mapping[str, Storages]
    values: Mapping[str, Storages]
    flops: Mapping[str, int]

    def again(self, name: str) -> int:
        """What computing a node again costs: floating point operations and bytes written."""
        return self.flops[name] + sum(self.values[name].values())


@dataclass(frozen=True)
class Live:
    """Bytes of activations on one device, for a batch like the example.

    Attributes:
        kept: after forward, until backward.
        peak: the same and the largest region while it is computed again.
    """

    kept: int
    peak: int

    def except_last(self, plain: int, micro_batches: int) -> Live:
        """The same if one of the micro-batches is not recomputed, the one that goes backward first.

        Args:
            plain: bytes that are kept if none is.
        """
        kept = self.kept * (micro_batches - 1) // micro_batches + plain // micro_batches
        return Live(kept, max(kept, self.peak))


def measured_saved(model: nn.Module, traced: Traced, inputs: Sequence[torch.Tensor]) -> Saved:
    """Run the graph once on the example and watch what autograd keeps; the model is left as it was."""
    with preserved(model, parameters=True), torch.enable_grad():
        watcher = _Watcher(model, traced.module)
        watcher.run(*(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs))
    return Saved(watcher.by_node, watcher.values, watcher.flops)


class _Watcher(Interpreter):
    def __init__(self, model: nn.Module, module: fx.GraphModule) -> None:
        super().__init__(
            module, garbage_collect_values=False
        )  # a reused address would look like the same storage
        self.by_node: dict[str, dict[int, int]] = {}
        self.values: dict[str, dict[int, int]] = {}
        owned = [*model.parameters(), *state_tensors(model).values()]
        self.ignored = {storage_key(t) for t in owned if t.layout is torch.strided}
        self.flops: dict[str, int] = {}
        self.kept: list[Any] = []

    def run_node(self, n: fx.Node) -> Any:
        found = self.by_node.setdefault(n.name, {})

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self._add(found, [tensor])
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            flop_counter() as flops,
            FusedAttention() as fused,
        ):
            value = super().run_node(n)
        if n.op == "placeholder":
            self.ignored |= {storage_key(t) for t in tree_leaves(value) if _strided(t)}
        self.values[n.name] = {}
        self._add(self.values[n.name], tree_leaves(value))
        self.flops[n.name] = flops.get_total_flops() + fused.flops
        self.kept.append(value)
        return value

    def _add(self, found: dict[int, int], leaves: Iterable[Any]) -> None:
        for leaf in leaves:
            if _strided(leaf) and storage_key(leaf) not in self.ignored:
                found[storage_key(leaf)] = leaf.untyped_storage().nbytes()


def _strided(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided


def live_bytes(
    saved: Saved,
    stages: Sequence[Sequence[fx.Node]],
    regions: Sequence[Sequence[tuple[int, int]]],
    micro_batches: int,
) -> Live:
    """Simulate what is alive after the forward of all micro-batches, and while a region is computed again.

    Args:
        stages: the nodes of each stage on one device.
        regions: for each of them the runs ``[start, end)`` that are recomputed.
    """
    kept: dict[int, int] = {}
    work = 0
    for nodes, runs in zip(stages, regions, strict=True):
        inside = {i for start, end in runs for i in range(start, end)}
        here = set(nodes)
        for i, node in enumerate(nodes):
            if i not in inside:
                kept.update(saved.by_node[node.name])
            crosses = any(user not in here for user in node.users) or any(
                o not in here for o in node.all_input_nodes
            )
            if crosses:  # what a stage reads and gives is held for its backward
                for other in (node, *node.all_input_nodes):
                    leaves_here = other is node and any(user not in here for user in node.users)
                    if leaves_here or other not in here:
                        kept.update(saved.values[other.name])
        for start, end in runs:
            run = set(nodes[start:end])
            for node in nodes[start:end]:
                for operand in node.all_input_nodes:
                    if operand not in run:
                        kept.update(saved.values[operand.name])
    for nodes, runs in zip(stages, regions, strict=True):
        for start, end in runs:
            again: dict[int, int] = {}
            for node in nodes[start:end]:
                again.update(saved.by_node[node.name])
            work = max(work, sum(size for key, size in again.items() if key not in kept))
    total = sum(kept.values())
    return Live(total, total + -(-work // micro_batches))
