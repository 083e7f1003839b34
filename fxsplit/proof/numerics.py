"""Run the model and the program on the same example and compare every number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..compare import agree_each, difference, gradient_for, largest_of
from ..compat import tree_leaves
from ..errors import VerifyError, pass_on_if_full
from ..graph.ir import Traced
from ..modules.state import others_draw, preserved, python_random_digest, state_tensors
from .locate import first_other_module

Outcome = dict[str, Any]
_FOREIGN = "leaves that are no parameters"
_GENERATOR = "state of the random number generator"
Run = Callable[[Sequence[torch.Tensor]], Sequence[Any]]


class ModelFailsError(Exception):
    """The model itself does not run on these inputs."""


def verify_numerics(
    model: nn.Module,
    traced: Traced,
    split: Run,
    inputs: Sequence[torch.Tensor],
    whole: Callable[[Run], Run] = lambda run: run,
    of: nn.Module | None = None,
) -> None:
    """Outputs, gradients, buffers and the state of the generators after one forward and backward.

    Under `torch.no_grad` there is no backward, and no gradients are compared.

    Args:
        split: what has to compute the same as `model` from flat inputs: the pipeline, or the traced graph.
        whole: makes a run of the batch of a run of the model, where that is in micro-batches.
        of: the model whose parameters `split` reads, where that is not `model` itself but spread over devices.

    The model is left as it was.

    Raises:
        VerifyError: names the first value that differs, and by how much.
        ModelFailsError: the model cannot be run on `inputs`.
    """
    # what writes to parameters is known; where nothing does, they are not copied
    parameters = any(fact.stateful for fact in traced.facts.values())

    def call_model(values: Sequence[torch.Tensor]) -> list[Any]:
        args, kwargs = traced.signature.unflatten(values)
        return tree_leaves(model.forward(*args, **kwargs))  # hooks of the model itself run around either

    run = whole(call_model)
    for last in (False, False, True):
        # The default generator is one for all threads: a thread that draws meanwhile makes two runs differ.
        try:
            expected = _outcome(model, inputs, run, parameters)
        except Exception as error:
            pass_on_if_full(error)
            raise ModelFailsError(str(error)) from error
        found = _outcome(model if of is None else of, inputs, split, parameters)
        foreign = expected.pop(_FOREIGN)
        found.pop(_FOREIGN)
        if foreign:
            _refuse_lasting(foreign, _outcome(model, inputs, run, parameters)[_FOREIGN])
        names = [*expected, *(n for n in found if n not in expected)]
        # Libraries take another kernel for the same numbers when they are captured (a causal flag, a mask).
        largest = largest_of(v for n, v in expected.items() if n.startswith("gradient"))
        scales = {n: largest if n.startswith("gradient") else _beside(n, expected) for n in names}
        odd = [n for n in names if not agree_each(found.get(n), expected.get(n), largest=scales[n])]
        name = odd[0] if odd else None
        if name is None:
            return
        if last:
            if others_draw():
                if odd == [_GENERATOR]:
                    return
                raise VerifyError(
                    f"another thread draws from torch's default generator of random numbers, so {name} cannot be compared",
                    remedy="let that thread wait until the model is compiled, or draw from a torch.Generator of its own",
                )
            what = difference(found.get(name), expected.get(name))
            raise VerifyError(
                f"the split computes another {name} than the model: {what}",
                where=first_other_module(model, traced, inputs),
                remedy="if the model computes other values from call to call, make it repeatable; otherwise keep the "
                "module that computes this whole, by a forward hook on it",
            )


def _beside(name: str, outcome: Outcome) -> float:
    """For a buffer the largest number in those of its module: a mean may be nothing but rounding beside its variance."""
    module = name.rpartition(".")[0]
    found = [v for n, v in outcome.items() if n.rpartition(".")[0] == module]
    return largest_of(found) if name.startswith("buffer ") and module else 0.0


def _outcome(model: nn.Module, inputs: Sequence[torch.Tensor], run: Run, parameters: bool) -> Outcome:
    with preserved(model, parameters=parameters):
        leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        values = list(run(leaves))
        outcome: Outcome = {f"output {i}": v.detach() if _is_tensor(v) else v for i, v in enumerate(values)}
        roots = [v for v in values if _is_tensor(v) and v.requires_grad]
        wanted = {f"gradient of input {i}": x for i, x in enumerate(leaves) if x.requires_grad}
        wanted.update((f"gradient of {n}", p) for n, p in model.named_parameters() if p.requires_grad)
        outcome[_FOREIGN] = _foreign_leaves(roots, {id(t) for t in (*wanted.values(), *model.parameters())})
        found: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if roots and wanted:
            found = torch.autograd.grad(
                roots, list(wanted.values()), [gradient_for(r) for r in roots], allow_unused=True
            )
        outcome.update(zip(wanted, found, strict=True))
        outcome.update({f"buffer {name}": t.detach().clone() for name, t in state_tensors(model).items()})
        outcome[_GENERATOR] = torch.get_rng_state()
        outcome["state of Python's random numbers"] = python_random_digest()
    return outcome


def _foreign_leaves(roots: Sequence[torch.Tensor], known: set[int]) -> list[torch.Tensor]:
    """Leaves of the autograd graph that are neither parameters nor inputs: a pipeline gives them no gradient."""
    todo, seen = [r.grad_fn for r in roots if r.grad_fn is not None], set()
    found = []
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor) and leaf.is_leaf and leaf.requires_grad and id(leaf) not in known:
            found.append(leaf)
        todo += [parent for parent, _ in node.next_functions if parent is not None]
    return found


def _refuse_lasting(leaves: Sequence[torch.Tensor], again: Sequence[torch.Tensor]) -> None:
    """A leaf made in forward is gone afterwards; one that two runs read is somebody's."""
    for leaf in leaves:
        if any(leaf is other for other in again):
            raise VerifyError(
                f"the model reads a tensor of shape {tuple(leaf.shape)} that requires gradients and is no parameter of it",
                remedy="make it an nn.Parameter of a module (in an nn.ModuleList, not a list), or detach it",
            )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
