"""How every value of a graph depends on the batch, derived from two runs of it: of a batch, and of some of its rows.

The runs show which operations a program is made of, and which sizes and numbers follow the batch; what the numbers in
its tensors are is not looked at.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from math import prod
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from ..compat import tree_leaves
from ..graph.ir import Traced
from ..graph.nodes import resolve
from ..inserted.ops import guard
from . import shape_rules  # noqa: F401  registers its rules
from .dependence import SAME, Dependence, Mean, Mixed, Position, Rows, Same, Targets, Unknown
from .pair import Pair
from .record import Record, Ref, Step
from .rules import results_of

_READS = ("_local_scalar_dense", "equal", "is_nonzero", "allclose")


class Derivation:
    """The dependence of the values of a run.

    Args:
        whole, part: the two runs of the traced module.
        rows: of the whole batch, and of the part of it.
        dims: of each input the dimension of the batch, or None.
        opaque: traced nodes that may do something else with other numbers: why.
        refuted: nodes whose values are known not to be rows.

    Attributes:
        assumed: nodes of which nothing is known, but which are as long as there are rows: taken for rows, for the
            numbers to say.
        by_micro_batch: what makes the values of a micro-batch others than those of its rows in the whole batch, because
            the plan says that micro-batches are computed one by one: batch normalisation, and state that forward
            writes. Empty if nothing does.
        writes: whether forward writes to parameters or buffers.
    """

    def __init__(
        self,
        traced: Traced,
        whole: Record,
        part: Record,
        rows: tuple[int, int],
        dims: Sequence[int | None],
        opaque: Mapping[str, str],
        refuted: Container[str] = (),
    ) -> None:
        self.module, self.whole, self.part, self.rows = traced.module, whole, part, rows
        self.states: dict[int, Dependence] = {}
        self._aliases: dict[int, dict[int, Ref]] = {}
        self._made_by: dict[tuple[int, Any], str] = {}
        self._doubt = ""
        self._opaque, self._refuted = opaque, refuted
        self.assumed: dict[str, tuple[int, str]] = {}
        self._smooth: Dependence | None = None
        self.writes = whole.writes or part.writes
        self.by_micro_batch = _by_micro_batch(traced, whole, part, opaque)
        self._lasting = {ref.storage for ref in whole.tensors.values()}
        self._tensors = {(ref.storage, ref.place): f"self.{name}" for name, ref in whole.tensors.items()}
        self._run(list(traced.module.graph.nodes), dims)

    def outputs(self) -> list[Dependence]:
        """Of the flat outputs; what is no tensor is the same."""
        values = self.whole.nodes[self.module.graph.output_node().name][0]
        return [self.state_of(v) if isinstance(v, Ref) else SAME for v in values]

    def state_of(self, ref: Ref) -> Dependence:
        """The dependence of a tensor now. One that no operation made is a constant, if it is one in both runs."""
        return self.states.get(ref.value, SAME)

    def _run(self, nodes: Sequence[fx.Node], dims: Sequence[int | None]) -> None:
        done, slots = 0, iter(dims)
        for node in nodes:
            (value, end), (in_part, end_in_part) = self.whole.nodes[node.name], self.part.nodes[node.name]
            if node.op == "placeholder":
                dim = next(slots)
                self._assign(value, SAME if dim is None else Rows(dim), node.name)
            if end != end_in_part and not self._doubt:
                self._doubt = f"{node.name} takes another path for another number of rows"
            for step, other in zip(self.whole.steps[done:end], self.part.steps[done:end], strict=False):
                self._step(step, other, node)
            done = end
            self._made(node, value, in_part)

    def _made(self, node: fx.Node, value: Any, in_part: Any) -> None:
        """The node has its value."""
        for ref, other in zip(tree_leaves(value), tree_leaves(in_part), strict=False):
            if not isinstance(ref, Ref):
                continue
            self._made_by.setdefault((ref.storage, ref.place), node.name)
            self._made_by.setdefault((ref.storage, _elements(ref)), node.name)
            if isinstance(other, Ref) and ref.value not in self.states and ref.shape != other.shape:
                self._assign(ref, Unknown("a tensor that was made past torch's operations"), node.name)
            if node.name in self._opaque and not isinstance(self.state_of(ref), Same):
                self.states[ref.value] = Unknown(self._opaque[node.name])
            state = self.state_of(ref)
            if isinstance(state, Unknown) and isinstance(other, Ref) and node.name not in self._refuted:
                self._assume(node, ref, other, state)

    def _assume(self, node: fx.Node, ref: Ref, other: Ref, state: Unknown) -> None:
        """Take for rows what is as long as there are rows."""
        grown = [d for d, (a, b) in enumerate(zip(ref.shape, other.shape, strict=False)) if a != b]
        if len(ref.shape) != len(other.shape) or len(grown) != 1:
            return
        (dim,) = grown
        inner, rest = divmod(ref.shape[dim], self.rows[0])
        if not rest and other.shape[dim] == inner * self.rows[1]:
            self.states[ref.value] = Rows(dim, 1, inner)
            self.assumed[node.name] = dim, state.why

    def _step(self, step: Step, other: Step, node: fx.Node) -> None:
        if not self._doubt and (step.func is not other.func or len(step.outputs) != len(other.outputs)):
            self._doubt = f"{node.name} takes another path for another number of rows"
        if not step.outputs:
            reads = step.func._schema.name.endswith(_READS) and not self._doubt and not _is_guarded(node)
            if reads and any(self.state_of(r) != SAME for r in tree_leaves(step.args) if isinstance(r, Ref)):
                self._doubt = f"{node.name} reads a value of the batch"
            return
        pair = Pair(step, other, self.rows, self.state_of, self._node_of)
        found = [Unknown(self._doubt)] * len(step.outputs) if self._doubt else self._results(pair, node)
        for ref, derived in zip(step.outputs, found, strict=True):
            state: Dependence = derived
            if step.func._schema.is_mutable and ref.storage in self._lasting:
                state = SAME  # the state of the model, which one micro-batch hands on to the next
            if isinstance(state, Mixed) and not state.node:
                state = Mixed(state.why, node.name)
            self._assign(ref, state, node.name)

    def _results(self, pair: Pair, node: fx.Node) -> Sequence[Dependence]:
        try:
            found = results_of(pair)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # a form that no rule knows
            return [Unknown(f"nothing is known of this form of {pair.name}")] * len(pair.outputs)
        smoothed = self._smoothed(pair, node, found[0])
        if smoothed is not None:
            return [smoothed]
        checked: list[Dependence] = []
        for ref, other, state in zip(pair.outputs, pair.part.outputs, found, strict=True):
            if isinstance(state, Position) and prod(ref.shape) != ref.shape[state.dim]:
                state = Mixed("computes with the numbers of rows")
            checked.append(state if self._fits(state, ref, other) else Unknown(f"the sizes of {pair.name}"))
        return checked

    def _smoothed(self, pair: Pair, node: fx.Node, found: Dependence) -> Dependence | None:
        """Smoothed labels: a mean over the targets, and one over all classes of them, with the same weight."""
        if not _smooths(self.module, node):
            return None
        if pair.name in ("nll_loss_forward", "nll_loss2d_forward"):
            self._smooth = found if isinstance(found, Mean) and isinstance(found.weight, Targets) else None
        return self._smooth if pair.name == "add" else None

    def _fits(self, state: Dependence, ref: Ref, other: Ref) -> bool:
        """Whether the sizes in both runs are what the state says."""
        if not isinstance(state, Rows):
            return (
                isinstance(state, Mixed | Unknown) or ref.shape == other.shape or isinstance(state, Position)
            )
        if len(ref.shape) != len(other.shape) or state.dim >= len(ref.shape):
            return False
        for dim, sizes in enumerate(zip(ref.shape, other.shape, strict=True)):
            expected = (
                sizes if dim != state.dim else tuple(state.outer * n * (state.inner or 0) for n in self.rows)
            )
            ragged = dim == state.dim and state.inner is None
            if not ragged and (sizes != expected or (dim != state.dim and sizes[0] != sizes[1])):
                return False
        return True

    def _assign(self, ref: Ref, state: Dependence, node: str) -> None:
        """A tensor has a new value; what shares its memory and was something else is not known any more."""
        before = self.states.get(ref.value)
        views = self._aliases.setdefault(ref.storage, {})
        if before is not None and before != state:
            for view in views.values():
                if view.value != ref.value and self.states.get(view.value) not in (state, None):
                    whole = _elements(view) == _elements(ref)
                    self.states[view.value] = (
                        state
                        if whole and not isinstance(state, Rows)
                        else Unknown(f"{node} writes to a part of it")
                    )
        views[ref.value] = ref
        self.states[ref.value] = state

    def _node_of(self, ref: Ref) -> str | None:
        """The traced node that has this tensor, or one with the same elements, as its value; or ``self.name``."""
        found = self._made_by.get((ref.storage, ref.place)) or self._made_by.get(
            (ref.storage, _elements(ref))
        )
        return found or self._tensors.get((ref.storage, ref.place))


def _is_guarded(node: fx.Node) -> bool:
    """Whether a number is read for a decision only that is baked in: another outcome is an error, not a number."""
    return bool(node.users) and all(user.target is guard or _is_guarded(user) for user in node.users)


def _by_micro_batch(traced: Traced, whole: Record, part: Record, opaque: Container[str]) -> str:
    """Why a micro-batch may have other values than its rows in the whole batch, although no rows are mixed."""
    if whole.normalises or part.normalises:
        return "is normalised by the statistics of the batch"
    may = any(fact.buffers or fact.stateful for name, fact in traced.facts.items() if name in opaque)
    return "depends on state that forward writes" if may or whole.writes or part.writes else ""


def _elements(ref: Ref) -> tuple[Any, ...]:
    """Equal for two tensors of one storage that have the same elements in the same order: contiguous ones."""
    count, contiguous = 1, len(ref.place) > 2
    if not contiguous:  # sparse
        return ref.place
    offset, *strides = ref.place[:-2]
    for size, stride in zip(reversed(ref.shape), reversed(strides), strict=True):
        contiguous = contiguous and (size == 1 or stride == count)
        count *= size
    return ("contiguous", offset, count, ref.dtype) if contiguous else ref.place


def _smooths(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the node is a cross entropy of smoothed labels."""
    if node.op == "call_module":
        layer = resolve(module, str(node.target))
        return isinstance(layer, nn.CrossEntropyLoss) and layer.label_smoothing > 0
    return node.target is F.cross_entropy and bool(node.kwargs.get("label_smoothing", 0.0))
