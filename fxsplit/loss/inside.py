"""The loss in the middle of a step: the loss of each micro-batch, and the gradients of what it depends on."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..batch.merge import Merges, merged
from ..compat import TreeSpec, tree_leaves, tree_map, tree_unflatten
from ..graph.assumptions import global_hooks
from ..inserted.random import BaseSeed, Stream
from .check import leaves_of
from .losses import STEP, LossInParts
from .said import compare, gradients_of, loss_of_the_whole, what_counts

Around = Callable[[], contextlib.AbstractContextManager[None]]


class LossInside:
    """The losses of one step.

    Args:
        loss: of a micro-batch.
        outputs: of the program, in order: the name of a value, or a constant in a 1-tuple.
        out_spec: their structure.
        around: entered while `loss` runs.
        seed: of the call's random numbers; None if the model draws none: it is drawn if the loss does.

    Attributes:
        losses: micro-batch → its weighted loss, detached.
        values: micro-batch → flat outputs, detached.
        of_outputs: micro-batch → its flat outputs that have gradients → these, where `keeps` asks for them.
        differentiable: whether any of the losses depends on something that requires a gradient.
    """

    def __init__(
        self,
        loss: LossInParts,
        outputs: Sequence[str | tuple[Any, ...]],
        out_spec: TreeSpec,
        around: Around,
        seed: BaseSeed | None,
    ) -> None:
        self.loss, self.outputs, self.out_spec, self.around = loss, outputs, out_spec, around
        self.losses: dict[int, torch.Tensor] = {}
        self.values: dict[int, list[Any]] = {}
        self.of_outputs: dict[int, dict[int, torch.Tensor | None]] = {}
        self.keeps = False
        self.differentiable = False
        self._others: dict[int, tuple[torch.Tensor, dict[int, torch.Tensor | None]]] = {}
        self._turns = threading.Lock()
        self._seed = seed
        # Those of PyTorch that are known neither draw random numbers nor come back to the pipeline.
        self._calls_nobody = loss.reduction.over != "said" and not global_hooks()

    def gradients(
        self, i: int, stages: int, taken: Mapping[str, Any]
    ) -> dict[str, list[torch.Tensor | None]]:
        """The gradients of the leaves of each output, for one micro-batch.

        What else the loss depends on (its own parameters, weights that it penalises) gets its gradient at the end of
        the step, in one sum: `sums`.

        Args:
            taken: output → its value, leaves of a graph of their own.
        """
        with self._turns, torch.enable_grad():
            flat = [taken[v] if isinstance(v, str) else v[0] for v in self.outputs]
            part = self._part(i, stages, tree_unflatten(flat[: self.out_spec.num_leaves], self.out_spec))
            leaves = {v: tree_leaves(value) for v, value in taken.items()}
            wanted: dict[int, torch.Tensor] = {}
            for leaf in itertools.chain.from_iterable(leaves.values()):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    wanted[id(leaf)] = leaf
            found: dict[int, torch.Tensor | None] = {}
            if part.requires_grad:
                every = {**wanted, **leaves_of(part)}
                # The graph behind a target that came with one is there for the next micro-batch.
                gradients = torch.autograd.grad(part, [*every.values()], retain_graph=True, allow_unused=True)
                found = dict(zip(every, gradients, strict=True))
                for key, tensor in itertools.islice(every.items(), len(wanted), None):
                    self._others.setdefault(key, (tensor, {}))[1][i] = found[key]
            self.losses[i] = part.detach()
            self.values[i] = [v.detach() if isinstance(v, torch.Tensor) else v for v in flat]
            self.differentiable = self.differentiable or part.requires_grad
            if self.keeps:
                self.of_outputs[i] = {k: found.get(id(v)) for k, v in enumerate(flat) if _has_grad(v)}
        return {v: list(map(found.get, map(id, row))) for v, row in leaves.items()}

    def _part(self, i: int, stages: int, output: Any) -> torch.Tensor:
        """The loss of a micro-batch."""
        if self._calls_nobody:
            return self.loss(i, output)
        with self.around(), Stream(lambda: self._seed_of(i, stages)):
            return self.loss(i, output)

    def _seed_of(self, i: int, stages: int) -> int:
        if self._seed is None:
            self._seed = BaseSeed()
        return self._seed.of(i, stages)

    def check_said(self, merges: Merges, target: Any) -> None:
        """Compare a loss whose reduction the user says with the loss of the whole batch.

        Raises:
            ArgumentError: it is another one, in value or gradients.
        """
        order = range(len(self.losses))
        with torch.enable_grad():
            rows = [self._leaves(i) for i in order]
            flat = merged(merges, list(zip(*rows, strict=True)), self.loss.rows)
            output = tree_unflatten(flat, self.out_spec)
            home = next((v.device for v in flat if isinstance(v, torch.Tensor)), torch.device("cpu"))
            moved = tree_map(lambda t: t.to(home) if isinstance(t, torch.Tensor) else t, target)
            with self.around():
                expected = loss_of_the_whole(self.loss.loss_fn, output, moved, [home])
            if expected is None:
                return
            first = [self.outputs.index(v) for v in self.outputs]  # an output that is there twice is one leaf
            places = [(i, k) for i in order for k in self.of_outputs[i] if first[k] == k]
            wanted = gradients_of(expected, [rows[i][k] for i, k in places])
        found = [self.of_outputs[i][k] for i, k in places]
        half = [None if g is None else g * 0.5 for g in found]  # as `gradient_for` begins
        losses = [self.losses[i] for i in order]
        compare(self.loss.reduction, losses, self.total(), expected, (half, wanted), "in a step", STEP.whole)

    def _leaves(self, i: int) -> list[Any]:
        """The flat outputs of a micro-batch as leaves of a graph of their own."""
        made = [_leaf(v) for v in self.values[i]]
        return [
            made[self.outputs.index(v)] if isinstance(v, str) else m
            for v, m in zip(self.outputs, made, strict=True)
        ]

    def rows(self) -> list[list[Any]]:
        """The flat outputs of each micro-batch."""
        return [self.values[i] for i in range(len(self.values))]

    def total(self) -> torch.Tensor:
        """The loss of the whole batch."""
        losses = [self.losses[i] for i in range(len(self.losses))]
        return sum(losses[1:], losses[0])

    def sums(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What the loss depends on beside the outputs, and its gradient: added up in the order of micro-batches."""
        sums = []
        for tensor, parts in self._others.values():
            terms = [g for _, g in sorted(parts.items()) if g is not None]
            if terms:
                sums.append((tensor, sum(terms[1:], terms[0])))
        return sums


class Said:
    """What was compared last of losses whose reduction the user says."""

    def __init__(self) -> None:
        self._key: Any = None

    def check_of(self, loss: LossInside, merges: Merges, target: Any) -> Callable[[], None]:
        """What compares the loss of a step, if it has not been compared for such targets yet."""
        parts = loss.loss
        if parts.reduction.over != "said":
            return _nothing_to_compare
        code = getattr(parts.loss_fn, "__code__", parts.loss_fn)
        key = (code, parts.reduction.how, what_counts(parts.targets, parts.rows))
        if key == self._key:
            return _nothing_to_compare
        loss.keeps = True

        def check() -> None:
            loss.check_said(merges, target)
            self._key = key

        return check


def _nothing_to_compare() -> None:
    return None


def _leaf(value: Any) -> Any:
    """A flat output as a leaf of a graph of its own."""
    floats = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return value.detach().requires_grad_() if floats else value


def _has_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
