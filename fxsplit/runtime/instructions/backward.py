"""A stage goes backward: with one micro-batch, or with several that met.

What it starts from, and what it finds, for a stage that reads x and gives y, where a later stage reads x too::

    y, dy     ─┐                                           ┌─▶  dx, with what later readers have come to
    x, dx     ─┤   autograd.grad(roots, wanted, seeds)   ──┤    for the stage before that reads x, or made it
    w, dw     ─┘                                           └─▶  dw of this micro-batch, added in their order

In two halves (`I` and `W`, see halves.py) dx is found first, and dw is put off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import AnomalyError
from ...graph.ir import Stage
from ...schedules.tape import Instruction
from ..anomaly import is_bad
from ..call import Call, Owned, Record
from ..halves import input_half
from ..values import added, has_grad
from .forward import random_numbers

Found = dict[int, torch.Tensor | None]  # id of a leaf → its gradient
Late = Callable[[], list[torch.Tensor | None]]


@dataclass
class _Part:
    """The backward of one micro-batch: where it starts, with which gradients, and what it is to find."""

    stage: Stage
    micro_batch: int
    record: Record
    owned: Owned
    roots: list[torch.Tensor] = field(default_factory=list)
    seeds: list[torch.Tensor] = field(default_factory=list)
    leaves: dict[int, torch.Tensor] = field(default_factory=dict)


def backward(call: Call, instruction: Instruction) -> None:
    """Find the gradients of inputs and weights, those of several micro-batches together, and hand them back."""
    parts = [_prepared(call, instruction.stage, i) for i in instruction.micro_batches]
    stage, i = parts[0].stage, parts[0].micro_batch
    roots, seeds, wanted, weights = list[torch.Tensor](), list[torch.Tensor](), Leaves(), Leaves()
    for part in parts:
        roots += part.roots
        seeds += part.seeds
        wanted.update(part.leaves)
    for part in parts:
        wanted.add(part.owned.shared.values())
        weights.add(part.owned.alone.values())
    every = [*wanted.values(), *weights.values()]
    found: Sequence[torch.Tensor | None] = [None] * len(every)
    late: Late | None = None
    if roots and instruction.kind == "inputs" and call.is_halved(stage.index, i):
        first, early, late = input_half(roots, seeds, list(wanted.values()), list(weights.values()))
        found = [*first, *early]
    elif roots and not call.how.hub.everything and call.how.hub.accumulates(call, stage.index, i):
        found = _accumulated(call, roots, seeds, every)
    elif roots and every:
        draws = (
            (stage.rng_state or call.how.compiled)
            and call.seed is not None
            and stage.index in call.how.drawing
        )
        with random_numbers(call, stage, i) if draws else contextlib.nullcontext():
            found = torch.autograd.grad(roots, every, seeds, retain_graph=call.keep_graph, allow_unused=True)
    by_leaf: Found = dict(zip((*wanted, *weights), found, strict=True))
    for part in parts:
        if call.how.anomaly is not None:
            _check_gradients(call.how.anomaly, part, by_leaf)
        _hand_back(call, part, by_leaf)
        _give_weights(call, part, by_leaf, list(weights), late)


def _accumulated(
    call: Call, roots: Sequence[torch.Tensor], seeds: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Into ``.grad``: hooks of parameters that are sharded sit there. Leaves of the call have none before and after."""
    torch.autograd.backward(roots, seeds, retain_graph=call.keep_graph)
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


class Leaves(dict[int, torch.Tensor]):
    """Tensors by their ids, each once."""

    def add(self, parameters: Any) -> None:
        """Parameters, but for those that were frozen since the forward: they get no gradient, as in autograd."""
        for p in parameters:
            if p.requires_grad:
                self[id(p)] = p


def _prepared(call: Call, stage_index: int, i: int) -> _Part:
    """What the backward of a micro-batch starts from, and what it is to find."""
    key, values = (stage_index, i), call.values
    record = call.records[key] if call.keep_graph else call.records.pop(key)
    part = _Part(call.wiring.roles[stage_index].stage, i, record, call.owned(stage_index, i))
    for name, leaves in record.outputs.items():
        if (name, i) not in values.same:
            _seed(call, part, leaves, values.take_gradient(name, i))
    # Gradients from later readers enter here, so that autograd adds this stage's to them, in the order
    # of the unsplit model.
    tensors: set[str] = set()
    for name, leaves in record.inputs.items():
        tensor = values.same.get((name, i), name)
        if tensor not in tensors:
            _seed(call, part, leaves, values.gradient(tensor, i))
        tensors.add(tensor)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                part.leaves[id(leaf)] = leaf
    for fqn, parameter in part.owned.shared.items():
        _seed(call, part, (parameter,), (values.take_of_parameter(fqn, i),))
    return part


def _seed(
    call: Call, part: _Part, tensors: Sequence[Any], gradients: Sequence[torch.Tensor | None] | None
) -> None:
    for tensor, gradient in zip(tensors, gradients, strict=True) if gradients is not None else ():
        if gradient is not None and tensor.requires_grad:
            part.roots.append(tensor)
            home = tensor.device
            part.seeds.append(gradient if gradient.device == home else call.lanes.move(gradient, home))
            if call.lanes.has_queues:
                call.lanes.uses(part.stage.index, part.micro_batch, (gradient,))


def _hand_back(call: Call, part: _Part, found: Found) -> None:
    """Give the gradients of inputs to those who wait for them."""
    i, record, values = part.micro_batch, part.record, call.values
    handed: set[int] = set()
    new: set[str] = set()
    for name, leaves in record.inputs.items():
        ids = set(map(id, leaves))
        if leaves and ids <= handed:
            continue  # another name of the same leaf
        handed |= ids
        row = list[torch.Tensor | None]()
        for leaf in leaves:
            gradient = found[id(leaf)] if isinstance(leaf, torch.Tensor) and leaf.requires_grad else None
            if gradient is not None and id(leaf) in record.homes:
                gradient = call.lanes.move(gradient, record.homes[id(leaf)])
            row.append(gradient)
        tensor = values.same.get((name, i), name)
        before = values.gradient(tensor, i) if tensor in new else None
        values.give_gradient(tensor, i, row if before is None else added(before, row))
        new.add(tensor)


def _give_weights(call: Call, part: _Part, found: Found, weights: Sequence[int], late: Late | None) -> None:
    """Add up the gradients of parameters, or put that off. One that met others is taken by the first micro-batch."""
    stage, i, owned = part.stage.index, part.micro_batch, part.owned
    if owned.shared:
        shared = {fqn: found.pop(id(leaf), None) for fqn, leaf in owned.shared.items()}
        for fqn in shared.keys() - owned.owns:
            gradient = shared.pop(fqn)
            if gradient is not None:
                call.values.give_of_parameter(fqn, i, gradient)
        call.add_shared(i, shared)
    own = [found.pop(id(leaf), None) for leaf in owned.alone.values()]
    if late is None:
        call.add(stage, i, own)
        return
    ids = list(map(id, owned.alone.values()))

    def rest(late: Late = late) -> list[torch.Tensor | None]:
        behind = dict(zip(weights, late(), strict=True))
        return [behind.get(k) if early is None else early for k, early in zip(ids, own, strict=True)]

    call.put_off[stage, i] = rest


def _check_gradients(kind: str, part: _Part, found: Found) -> None:
    """Look for anomalies in what a backward has found: of the inputs first, then of the parameters."""
    if not is_bad(list(found.values()), kind):
        return
    named = [(name, leaf) for name, row in part.record.inputs.items() for leaf in row if has_grad(leaf)]
    named += [*part.owned.shared.items(), *part.owned.alone.items()]
    bad = [name for name, leaf in named if is_bad(found.get(id(leaf)), kind)]
    if bad:
        raise AnomalyError(
            f"the gradient of {', '.join(bad[:3])} has {'a NaN' if kind == 'nan' else 'a NaN or infinity'}",
            remedy="look at the operations of this stage; torch.autograd.detect_anomaly() on pipe.unsplit() names one",
        )
