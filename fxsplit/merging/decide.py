"""How each output is merged: by its derivation, which numbers confirm; by numbers alone where nothing can be derived."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..batch.dims import BatchDims
from ..batch.merge import Merge, Total
from ..compat import tree_leaves
from ..errors import BatchError, pass_on_if_full
from ..graph.effects import is_known
from ..graph.ir import TensorSpec, Traced
from ..graph.nodes import output_names, output_values
from ..modules.state import preserved
from ..passes import named
from . import dependence
from .dependence import Agree, Denominator, Dependence, Mean, Mixed, Rows, Same, Sum, Unknown, Weight
from .derive import Derivation
from .evidence import Evidence, are_rows, evidence_of
from .probes import Probe, probes_of
from .record import Recorder, values_of
from .weights import describe, with_hidden_outputs

_REMEDY = (
    "return the rows, such as the logits, and compute the loss outside: pipe.step(x, target=t, loss_fn=...); "
    "or Plan(micro_batches=1)"
)


@dataclass(frozen=True)
class Merging:
    """How the outputs are merged.

    Attributes:
        traced: the program, with the weights of means as further flat outputs.
        merges: of all its flat outputs.
        warnings: which outputs have another value than for the whole batch, because the plan says so, and why.
    """

    traced: Traced
    merges: tuple[Merge, ...]
    warnings: tuple[str, ...] = ()


@named("merge", lambda found: "\n".join(map(str, found.merges)))
def find_merges(
    model: nn.Module, traced: Traced, dims: BatchDims, inputs: Sequence[torch.Tensor], *, check: bool = True
) -> Merging:
    """Decide how the outputs of micro-batches become those of the batch.

    How an output depends on the batch is derived from the operations of the program. The outcome is compared with the
    whole batch, in values and gradients, also on inputs that are made up: other numbers, and integers that cross
    entropy ignores. Where an operation has no rule the numbers alone decide, if all of them agree.

    Args:
        check: whether what is derived is compared, too; where there are values.

    Raises:
        BatchError: an output mixes rows, or nothing reproduces it from parts, or nothing is derived of it and there are no
            values that would tell; or the program does not run on a part of
            the batch. The message names the line.
    """
    if dims.batch_size(inputs) is None:
        raise BatchError(
            "no input has a batch dimension, so there is nothing to split into micro-batches",
            remedy='Plan(micro_batches=1), or Plan(batch_dims={"x": 0})',
        )
    with preserved(model, parameters=any(fact.stateful for fact in traced.facts.values())):
        for module in model.modules():
            module.training = False
        probes = list(probes_of(inputs, dims))
        derivation = _derivation(model, traced, probes, dims)
        names = output_names(traced)
        states = dict(zip(names, derivation.outputs(), strict=True))
        hidden = Hidden.of(states.values(), len(names))
        extended = with_hidden_outputs(model, traced, hidden.weights, hidden.nodes, inputs)
        merges = {name: _merge(name, state, extended, hidden) for name, state in states.items()}
        evidence: list[Evidence] = []
        if check or any(merge is None for merge in merges.values()) or _numbers(extended):
            writes = derivation.writes
            runs = (evidence_of(model, extended, p, dims, writes=writes) for p in probes)
            evidence = [e for e in runs if e is not None]
        found = [_noted(m, derivation) for m in _decided(extended, merges, states, evidence, derivation)]
        decided = (*found, *hidden.merges())
        valued = not any(x.is_meta for x in inputs)
        warnings = _confirm(names, decided, evidence, derivation) if check and valued else ()
    return Merging(extended, decided, warnings)


@dataclass(frozen=True)
class Hidden:
    """The flat outputs after the model's own: the weights of means, sums that these are made of, and terms of totals.

    Attributes:
        first: the number of the first one.
    """

    weights: tuple[Weight, ...]
    sums: tuple[str, ...]
    terms: tuple[tuple[str, Dependence], ...]
    first: int

    @classmethod
    def of(cls, states: Iterable[Dependence], first: int) -> Hidden:
        """What these outputs need."""
        terms = dict.fromkeys(
            (node, s) for state in states if isinstance(state, dependence.Total) for node, s, _ in state.terms
        )
        means = [s for s in (*states, *(s for _, s in terms)) if isinstance(s, Mean)]
        weights = tuple(dict.fromkeys(m.weight for m in means if m.weight is not None))
        kept = (w.kept[0] for w in weights if isinstance(w, Denominator) and w.kept is not None)
        return cls(weights, tuple(dict.fromkeys(kept)), tuple(terms), first)

    @property
    def nodes(self) -> list[str]:
        """Of those that the program computes already."""
        return [*self.sums, *(node for node, _ in self.terms)]

    def merge(self, state: Dependence) -> Merge | None:
        """How a value that depends so on the batch is merged; None where nothing is known."""
        if isinstance(state, Rows):
            return Merge("rows", state.dim)
        if isinstance(state, Mean):
            if state.weight is None:
                return Merge("mean")
            place = self.first + self.weights.index(state.weight)
            note = f"weighted by {describe(state.weight)}"
            return Merge("mean", weight=place, total=self._total(state.weight), note=note)
        if isinstance(state, Sum):
            return Merge("sum")
        if isinstance(state, dependence.Total):
            begin = self.first + len(self.weights) + len(self.sums)
            terms = tuple((begin + self.terms.index((node, s)), n) for node, s, n in state.terms)
            return Merge("total", terms=terms, note=f"of {', '.join(node for node, _, _ in state.terms)}")
        return Merge("same") if isinstance(state, Same | Agree) else None

    def _total(self, weight: Weight) -> Total | None:
        if not isinstance(weight, Denominator) or weight.kept is None:
            return None
        node, how, number = weight.kept
        return Total(
            self.first + len(self.weights) + self.sums.index(node), "add" if how == "add" else "clamp", number
        )

    def merges(self) -> list[Merge]:
        """Of the hidden outputs themselves."""
        found = [self.merge(state) for _, state in self.terms]
        return [Merge("sum")] * (len(self.weights) + len(self.sums)) + [m for m in found if m is not None]


def _derivation(model: nn.Module, traced: Traced, probes: Sequence[Probe], dims: BatchDims) -> Derivation:
    """The derivation from the first probe, with what it assumes confirmed on all of them."""
    probe, records = probes[0], []
    for inputs in (probe.inputs, dims.split(probe.inputs, probe.rows)[0]):
        try:
            with preserved(model):
                records.append(Recorder(traced.module).observe([x.detach().clone() for x in inputs]))
        except Exception as error:
            pass_on_if_full(error)
            raise _does_not_run(error, dims) from error
    # What has run without values does the same with any: then what was recorded of a module that is kept whole says it all.
    without_values = any(x.is_meta for x in probe.inputs)
    opaque = {
        node.name: f"{node.target} is kept whole: {traced.kept_whole[str(node.target)]}"
        for node in traced.graph.nodes
        if not without_values
        and node.op == "call_module"
        and str(node.target) in traced.kept_whole
        and not _only_kernels(model, str(node.target))
    }
    refuted: set[str] = set()
    while True:
        found = Derivation(
            traced, records[0], records[1], (sum(probe.rows), probe.rows[0]), dims.dims, opaque, refuted
        )
        wrong = _refuted(model, traced, found, probes, dims)
        if not wrong:
            return found
        refuted |= wrong


# Layers of torch.nn's that are kept whole because they choose among kernels, all of which compute one function.
_KERNELS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)


def _only_kernels(model: nn.Module, path: str) -> bool:
    """Whether a module that is kept whole does the same with other numbers: what was recorded of it then says it all."""
    module = model.get_submodule(path)
    return isinstance(module, _KERNELS) and all(map(is_known, module.modules()))


def _refuted(
    model: nn.Module, traced: Traced, found: Derivation, probes: Sequence[Probe], dims: BatchDims
) -> set[str]:
    """The first of the assumed rows that are none, by their numbers, and all that this was assumed of after it."""
    if any(x.is_meta for x in probes[0].inputs):
        return set(found.assumed)  # there are no numbers that would confirm it
    if not found.assumed or found.by_micro_batch:
        return set()
    for probe in probes:
        try:
            with preserved(model):
                runs = [
                    values_of(traced.module, found.assumed, [x.detach().clone() for x in inputs])
                    for inputs in (probe.inputs, *dims.split(probe.inputs, probe.rows))
                ]
        except Exception:
            if probe.made_up:
                continue
            raise
        for name, (dim, _) in found.assumed.items():
            whole, *parts = (tree_leaves(run[name]) for run in runs)
            if not all(are_rows(w, p, dim) for w, p in zip(whole, zip(*parts, strict=True), strict=True)):
                return {name}
    return set()


def _does_not_run(error: Exception, dims: BatchDims) -> BatchError:
    names = [n for n, d in zip(dims.names, dims.dims, strict=True) if d is not None]
    return BatchError(
        f"the model does not run on a part of the batch: {(str(error).splitlines() or [type(error).__name__])[0]}",
        where=f"split along the batch: {', '.join(names)}",
        remedy="name what is not split, such as Plan(batch_dims={'mask': None}); "
        "or compile with an example of at least 2 rows",
    )


def _merge(name: str, state: Dependence, traced: Traced, hidden: Hidden) -> Merge | None:
    """What the derivation says; None where it says nothing.

    Raises:
        BatchError: it says that there is no way.
    """
    if isinstance(state, Mixed):
        raise _cannot(name, f"it {state.why}", _line(traced, state.node))
    if isinstance(state, Rows) and (state.outer != 1 or state.divided):
        raise _cannot(
            name,
            f"it {'divides every row by their number' if state.divided else 'has them in another order'}",
            None,
        )
    return hidden.merge(state)


def _line(traced: Traced, node: str) -> str | None:
    fact = traced.facts.get(node)
    if fact is None or fact.source is None:
        return None
    return f"{fact.module_path}, {fact.source.with_text()}" if fact.module_path else fact.source.with_text()


def _cannot(name: str, why: str, where: str | None) -> BatchError:
    return BatchError(f"{name} cannot be put together from micro-batches: {why}", where=where, remedy=_REMEDY)


def _decided(
    traced: Traced,
    merges: dict[str, Merge | None],
    states: dict[str, Dependence],
    evidence: Sequence[Evidence],
    derivation: Derivation,
) -> list[Merge]:
    """The merges of the model's outputs: what is not derived by what fits all the evidence."""
    found, numbers = [], _numbers(traced)
    for i, (name, merge) in enumerate(merges.items()):
        state = states[name]
        if merge is not None and i not in numbers:
            found.append(merge)
            continue
        why = state.why if isinstance(state, Unknown) else ""
        candidates = _candidates(evidence, i)
        whole = evidence[0].whole[i]
        if isinstance(whole, torch.Tensor) and whole.is_meta:
            raise _cannot(
                name,
                f"{why or 'nothing says how it depends on the batch'}, and a model on meta has no values that tell",
                None,
            )
        chosen = next((m for m in candidates if all(e.fits(i, m) for e in evidence)), None)
        if chosen is None and derivation.by_micro_batch and candidates[0].how == "rows":
            chosen = candidates[0]
        if chosen is None:
            raise _cannot(
                name,
                "it is neither rows, nor a mean, nor a sum over the batch",
                evidence[-1].described(i) + (f"; not derived, because {why}" if why else ""),
            )
        found.append(replace(chosen, note=f"by its numbers only, because {why}" if why else ""))
    return found


def _noted(merge: Merge, derivation: Derivation) -> Merge:
    """With what the derivation assumed, and numbers confirmed."""
    names = [*derivation.assumed]
    if not names:
        return merge
    rest = f" and {len(names) - 2} more" if len(names) > 2 else ""
    why = next(iter(derivation.assumed.values()))[1]
    text = f"with {', '.join(names[:2])}{rest} taken for rows by their numbers only, because {why}"
    return replace(merge, note="; ".join(filter(None, (merge.note, text))))


def _numbers(traced: Traced) -> list[int]:
    """Which outputs are computed and no tensors: sizes."""
    values = enumerate(output_values(traced.graph)[: traced.out_spec.num_leaves])
    nodes = [(i, v) for i, v in values if isinstance(v, torch.fx.Node)]
    return [i for i, v in nodes if not isinstance(traced.facts[v.name].value, TensorSpec)]


def _candidates(evidence: Sequence[Evidence], i: int) -> list[Merge]:
    whole, part = evidence[0].whole[i], evidence[0].parts[0][i]
    if isinstance(whole, torch.Tensor):
        alike = whole.dim() == part.dim()
        grown = [d for d in range(whole.dim()) if alike and whole.shape[d] != part.shape[d]]
        if grown:
            return [Merge("rows", grown[0])]
    number = isinstance(whole, torch.Tensor | int | float) and not isinstance(whole, bool)
    return [Merge("same"), *([Merge("mean"), Merge("sum")] if number else [])]


def _confirm(
    names: Sequence[str],
    merges: Sequence[Merge],
    evidence: Sequence[Evidence],
    derivation: Derivation,
) -> tuple[str, ...]:
    """Compare every output with that of the whole batch.

    Raises:
        BatchError: one differs. Not where the program draws random numbers, or computes each micro-batch by itself: then
            another value is what was asked for.
    """
    if any(e.draws for e in evidence):
        return ()
    odd = [(name, e, i) for e in evidence for i, name in enumerate(names) if not e.fits(i, merges[i], merges)]
    if odd and derivation.by_micro_batch:
        return tuple(dict.fromkeys(f"{name} {derivation.by_micro_batch}" for name, _, _ in odd))
    for name, found, i in odd[:1]:
        raise _cannot(name, "micro-batches give another value or other gradients", found.described(i))
    return ()
