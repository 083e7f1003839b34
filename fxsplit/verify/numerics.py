"""Run the model and the program on the same example and compare every number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..compat import tree_leaves
from ..errors import VerifyError
from ..ir import Traced
from ..state import preserved

Outcome = dict[str, torch.Tensor | None]


def verify_numerics(
    model: nn.Module, traced: Traced, split: nn.Module, inputs: Sequence[torch.Tensor]
) -> None:
    """Outputs, gradients, buffers and the state of the generator after one forward and backward.

    Args:
        split: what has to compute the same as `model` from flat inputs: a program's root, or the traced graph.

    The model is left as it was.

    Raises:
        VerifyError: names the first value that differs, and by how much.
    """

    def call_model(values: Sequence[torch.Tensor]) -> list[Any]:
        args, kwargs = traced.signature.unflatten(values)
        return tree_leaves(model(*args, **kwargs))

    for last in (False, False, True):
        # The default generator is one for all threads: a thread that draws meanwhile makes two runs differ.
        expected = _outcome(model, inputs, call_model)
        found = _outcome(model, inputs, lambda values: list(split(*values)))
        name = next((n for n, value in expected.items() if not _equal(value, found[n])), None)
        if name is None:
            return
        if last:
            value, other = expected[name], found[name]
            raise VerifyError(
                f"the split computes another {name} than the model: {_difference(value, other)}",
                remedy="keep the module that computes it out of the graph: give it a forward hook, or report the model",
            )


def _outcome(
    model: nn.Module, inputs: Sequence[torch.Tensor], run: Callable[[Sequence[torch.Tensor]], Sequence[Any]]
) -> Outcome:
    with preserved(model), torch.enable_grad():
        for parameter in model.parameters():
            parameter.grad = None
        leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        # A leaf that requires gradients refuses in-place writes: hand out a view of it, as a model in a
        # larger model would get.
        values = run([x.view_as(x) if x.requires_grad else x for x in leaves])
        outcome: Outcome = {}
        roots, grads = [], []
        for i, value in enumerate(values):
            if not isinstance(value, torch.Tensor):
                continue
            outcome[f"output {i}"] = value.detach().clone()
            if value.requires_grad:
                roots.append(value)
                grads.append(_weights(value))
        if roots:
            torch.autograd.backward(roots, grads)
        outcome.update({f"gradient of input {i}": x.grad for i, x in enumerate(leaves) if x.requires_grad})
        outcome.update({f"gradient of {name}": p.grad for name, p in model.named_parameters()})
        outcome.update({f"buffer {name}": b.detach().clone() for name, b in model.named_buffers()})
        outcome["state of the random number generator"] = torch.get_rng_state()
    return outcome


def _weights(value: torch.Tensor) -> torch.Tensor:
    """Gradients that differ from element to element, and from run to run not at all."""
    ramp = torch.linspace(0.5, 1.5, max(value.numel(), 1), device=value.device)[: value.numel()]
    return ramp.reshape(value.shape).to(value.dtype)


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    a, b = a.detach().cpu(), b.detach().cpu()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b) or not (a.dtype.is_floating_point or a.dtype.is_complex):
        return bool(torch.equal(a, b))
    # Libraries take another kernel for the same numbers when they are captured (a causal flag, a mask).
    scale = a.nan_to_num().abs().max().item() if a.numel() else 0.0
    return bool(torch.allclose(a, b, rtol=0.0, atol=1e-4 * scale + 1e-7, equal_nan=True))


def _difference(a: torch.Tensor | None, b: torch.Tensor | None) -> str:
    if a is None or b is None:
        return "none in the split" if b is None else "none in the model"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{b.dtype}{tuple(b.shape)} instead of {a.dtype}{tuple(a.shape)}"
    return f"off by {(a.detach().cpu().double() - b.detach().cpu().double()).abs().max().item():.3g}"
