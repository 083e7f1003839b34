"""Compare a pipeline with the model that it came from, number by number."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from ..batch.merge import merged, split_gradients
from ..batch.scattered import Scattered
from ..compare import agree, difference, gradient_for
from ..compat import tree_leaves
from ..errors import ArgumentError, NotEquivalentError
from ..graph.nodes import first_difference, structure
from ..graph.place import has_no_values
from ..inserted.random import draw_base_seed
from ..pipeline import Pipeline
from ..runtime.worker import using
from .locate import located
from .masks import Draws, Masks, drawn_in


def graphs_equal(a: fx.Graph, b: fx.Graph) -> tuple[bool, str]:
    """Whether two graphs have the same nodes in the same order with the same operands, and the reason if not."""
    index = first_difference(structure(a), structure(b))
    if index is None:
        return True, ""
    shown = [list(g.nodes)[index].format_node() if index < len(g.nodes) else "nothing" for g in (a, b)]
    return False, f"node {index}: {shown[0]} against {shown[1]}"


@dataclass(frozen=True)
class Comparison:
    """What was compared of a pipeline and its model, and what came out. ``print`` says it.

    Attributes:
        compared: names of the values: outputs, gradients of inputs and parameters, buffers.
        differences: name of a value that differs → how.
        left_out: what was not compared → why.
        micro_batches: on how many the model was run, one after the other.
        bound: what counts as equal.
        first: where the first difference is, if there is one: node, stage, micro-batch and the user's line.
    """

    compared: tuple[str, ...]
    differences: Mapping[str, str]
    left_out: Mapping[str, str] = field(default_factory=dict)
    micro_batches: int = 1
    bound: str = "bit for bit"
    first: str = ""

    def __str__(self) -> str:
        kinds = {
            "outputs": "output ",
            "gradients of inputs": "gradient of input ",
            "gradients of parameters": "gradient of ",
            "buffers": "buffer ",
        }
        rest, shown = list(self.compared), []
        for kind, prefix in kinds.items():
            found = [name for name in rest if name.startswith(prefix)]
            rest = [name for name in rest if not name.startswith(prefix)]
            shown += (
                [f"{len(found)} {kind if len(found) != 1 else kind.replace('s', '', 1)}"] if found else []
            )
        count = f"{self.micro_batches} micro-batches" if self.micro_batches > 1 else "the batch as a whole"
        lines = [f"compared on {count}, {self.bound}: {', '.join(shown)}"]
        lines += [f"not compared: {what}: {why}" for what, why in self.left_out.items()]
        lines += [f"{name} differs: {how}" for name, how in self.differences.items()]
        lines += [self.first] if self.first else []
        return "\n".join(lines)


def assert_equivalent(
    model: nn.Module, pipe: Pipeline, *args: Any, atol: float = 0.0, rtol: float = 0.0, **kwargs: Any
) -> Comparison:
    """Outputs, gradients and buffers of `pipe` equal those of `model` run on the same micro-batches in order.

    The model's gradients are accumulated in that order. Both run on deep copies, so neither is changed, and from the same
    random state. With several micro-batches the model is given the random numbers that the pipeline's stages draw, draw by
    draw, so that masks of dropout are the same, too. Both use the plan's `threads` inside of an operation, or one: with
    another number kernels round in another way.

    Args:
        args, kwargs: the model's.
        atol, rtol: by default equality is bit for bit.

    Returns:
        What was compared, and what was not, and why. ``print`` shows it.

    Raises:
        NotEquivalentError: an `AssertionError` that names the first value that differs, by how much, and the first node,
            its stage, micro-batch and line of the model where the two part.
        ArgumentError: these are no model and pipeline with values.
        FxsplitError: as a call of the pipeline.
    """
    found = compare(model, pipe, *args, atol=atol, rtol=rtol, **kwargs)
    for name, how in found.differences.items():
        others = f", and {len(found.differences) - 1} others" if len(found.differences) > 1 else ""
        raise NotEquivalentError(
            f"{name} differs: {how}{others}",
            where=f"{found.first or 'nowhere in forward'}; {pipe.plan!r}",
            remedy="print(fxsplit.testing.compare(model, pipe, ...)) shows all that differs; atol= and rtol= allow for rounding",
        )
    return found


def compare(
    model: nn.Module, pipe: Pipeline, *args: Any, atol: float = 0.0, rtol: float = 0.0, **kwargs: Any
) -> Comparison:
    """As `assert_equivalent`, and returns what differs instead of raising it."""
    if not isinstance(model, nn.Module) or not isinstance(pipe, Pipeline):
        raise ArgumentError(
            f"a model and its pipeline are compared, and not {type(model).__name__} and {type(pipe).__name__}",
            remedy="fxsplit.testing.assert_equivalent(model, fxsplit.compile(model, ...), x)",
        )
    if has_no_values(pipe.model) or has_no_values(model):
        raise ArgumentError("there are no values to compare on the meta device", remedy="pipe.verify()")
    bound = "bit for bit" if not atol and not rtol else f"within atol={atol:g}, rtol={rtol:g}"
    eager, split = copy.deepcopy(model), copy.deepcopy(pipe)
    inputs = split.traced.signature.flatten(args, kwargs)
    reference = _Reference(eager, split)
    if reference.whole and bound == "bit for bit":
        # A type that is less precise rounds a whole batch in another way than its parts.
        near = 8 * split.traced.eps
        atol, rtol = (max(least, near) for least in _OF_SUMS)
        bound = f"within atol={atol:g}, rtol={rtol:g}, as sync_batch_norm=True sums in another order"
    # With another number of threads kernels add up in another order: so many for the model and for each worker.
    with using(pipe.plan.threads or 1), torch.random.fork_rng(devices=_accelerators(pipe)):
        state = torch.get_rng_state()
        found = _run_split(split, inputs)
        torch.set_rng_state(state)
        expected = reference.run(inputs)
        differences = {
            name: difference(found[name], value)
            for name, value in expected.items()
            if not agree(found[name], value, rtol=rtol, atol=atol)
        }
        first = ""
        if differences:
            torch.set_rng_state(state)
            first = located(
                copy.deepcopy(model), pipe, reference.chunks(inputs)[0], reference.around, (rtol, atol)
            )
    return Comparison(
        tuple(expected),
        differences,
        reference.left_out,
        len(reference.chunks(inputs)[0]),
        bound,
        first,
    )


def _accelerators(pipe: Pipeline) -> list[int]:
    return sorted({device.index or 0 for device in pipe.devices if device.type == "cuda"})


def _leaves(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]


def _run_split(pipe: Pipeline, inputs: Sequence[torch.Tensor]) -> dict[str, Any]:
    leaves = _leaves(inputs)
    args, kwargs = pipe.traced.signature.unflatten([x.view_as(x) if x.requires_grad else x for x in leaves])
    output = pipe(*args, **kwargs)
    outputs = tree_leaves(output.gather() if isinstance(output, Scattered) else output)
    pairs = [(t, gradient_for(t)) for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
    return _collect(pipe.model, leaves, outputs)


_OF_SUMS = (1e-5, 1e-4)
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class _Reference:
    """The model on the micro-batches of a pipeline, one after the other.

    Attributes:
        left_out: what it cannot say → why.
        whole: all micro-batches are normalised together, so the model has to see them as one.
        order: per micro-batch the stages of the draws; empty where random numbers are the caller's own.
        base: the number that the call drew.
    """

    def __init__(self, model: nn.Module, pipe: Pipeline) -> None:
        self.model, self.pipe, self.made = model, pipe, pipe.active
        self.crew = next(e for e in pipe.engines() if e.compiled is self.made).crew
        self.whole = pipe.plan.sync_batch_norm and bool(self.crew.meets(pipe.plan.micro_batches))
        self.left_out: dict[str, str] = {}
        self.order: list[list[int]] = []
        self.base = 0

    def chunks(self, inputs: Sequence[torch.Tensor]) -> tuple[list[list[torch.Tensor]], list[int]]:
        """The micro-batches: one, where batch normalisation is over the whole batch."""
        if self.whole:
            rows = self.made.dims.batch_size(inputs)
            return [list(inputs)], [rows or 0]
        return self.pipe.micro_batches(inputs)

    def run(self, inputs: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Outputs, gradients and buffers."""
        leaves = _leaves(inputs)
        views = [x.view_as(x) if x.requires_grad else x for x in leaves]
        chunks, rows = self.chunks(views)
        hidden = self._of_the_graph(chunks)
        results = []
        for i, chunk in enumerate(chunks):
            args, kwargs = self.made.traced.signature.unflatten(chunk)
            with self.around(i):
                results.append([*tree_leaves(self.model(*args, **kwargs)), *hidden[i]])
        columns = list(zip(*results, strict=True))
        merges = self.made.merges
        outputs = merged(merges, columns, rows) if len(chunks) > 1 else [column[0] for column in columns]
        outputs = outputs[: merges.shown]
        seeds = {
            i: gradient_for(v)
            for i, v in enumerate(outputs)
            if isinstance(v, torch.Tensor) and any(part.requires_grad for part in columns[i])
        }
        pieces: Mapping[int, Sequence[torch.Tensor | None]]
        pieces = (
            split_gradients(merges, seeds, columns, rows)
            if len(chunks) > 1
            else {i: [g] for i, g in seeds.items()}
        )
        with Draws() as draws, torch.autograd.set_multithreading_enabled(False):
            for k, row in enumerate(results):
                pairs = [(row[i], given[k]) for i, given in pieces.items() if given[k] is not None]
                if pairs:
                    torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        return self._comparable(_collect(self.model, leaves, outputs), draws)

    def around(self, i: int) -> contextlib.AbstractContextManager[object]:
        """The random numbers of micro-batch i."""
        return Masks(self.order[i], self.base, i) if self.order else contextlib.nullcontext()

    def _of_the_graph(self, chunks: Sequence[Sequence[torch.Tensor]]) -> list[list[Any]]:
        """What only the graph says of each micro-batch: what counts in each mean that is weighted, and the order of draws."""
        draws = bool(self.crew.drawing())
        if self.whole:
            self._check_whole(draws=draws)
        draws = draws and len(chunks) > 1
        shown = self.made.merges.shown
        if draws and any(stage.rng_state for stage in self.made.stages):
            self.left_out["masks"] = (
                "a checkpoint of the model's own puts the generator back: they may differ"
            )
            draws = False
        if not draws and shown == len(self.made.merges):
            return [[] for _ in chunks]
        if draws:
            self.base = draw_base_seed()
        twin = copy.deepcopy(
            self.pipe
        ).active  # whose buffers follow from micro-batch to micro-batch, as the model's do
        found = []
        for chunk in chunks:
            order, values = drawn_in(twin, [x.detach() for x in chunk])
            found.append(values[shown:])
            self.order += [order] if draws else []
        return found

    def _check_whole(self, *, draws: bool) -> None:
        """With statistics of the whole batch there is one reference, if nothing else goes by micro-batches."""
        written = {name for stage in self.made.stages for name in stage.writes} - self._statistics()
        if draws or written:
            raise ArgumentError(
                "sync_batch_norm=True normalises by the whole batch, and "
                + ("masks are drawn for" if draws else f"{sorted(written)[0]!r} is written by")
                + " each micro-batch: nothing else computes the same",
                remedy="compare under a plan without sync_batch_norm=",
            )

    def _statistics(self) -> set[str]:
        norms = [n for n, m in self.model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        return {f"{path}.{name}" for path in norms for name in _STATISTICS}

    def _comparable(self, found: dict[str, Any], backward: Draws) -> dict[str, Any]:
        """Without what the model says in another way than the pipeline."""
        if self.order and backward.found:
            self.left_out["gradients"] = (
                "the model draws again in backward, in a checkpoint of its own, from the generator that it knows"
            )
            found = {name: value for name, value in found.items() if not name.startswith("gradient")}
        if self.pipe.plan.deferred_batch_norm and self.pipe.plan.micro_batches > 1:
            self.left_out["running statistics"] = (
                "deferred_batch_norm=True updates them once, by the whole batch"
            )
            own = {f"buffer {name}" for name in self._statistics()}
            found = {name: value for name, value in found.items() if name not in own}
        return found


def _collect(model: nn.Module, inputs: Sequence[torch.Tensor], outputs: Sequence[Any]) -> dict[str, Any]:
    values = {f"output {i}": v.detach() if isinstance(v, torch.Tensor) else v for i, v in enumerate(outputs)}
    values.update({f"gradient of input {i}": x.grad for i, x in enumerate(inputs) if x.requires_grad})
    values.update({f"gradient of {name}": p.grad for name, p in model.named_parameters()})
    values.update({f"buffer {name}": b for name, b in model.named_buffers()})
    return values
