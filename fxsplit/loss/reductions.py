"""How a loss makes a number of a batch: known for PyTorch's own, and said for any other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import ArgumentError

LossFn = Callable[..., torch.Tensor]
Over = Literal["elements", "rows", "targets", "said"]

_KINDS: dict[Any, Over] = {
    # A mean over elements, each of which has its own target.
    **dict.fromkeys((nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss), "elements"),
    **dict.fromkeys((nn.BCEWithLogitsLoss, nn.KLDivLoss, nn.PoissonNLLLoss, nn.SoftMarginLoss), "elements"),
    **dict.fromkeys((nn.HingeEmbeddingLoss, F.hinge_embedding_loss, F.gaussian_nll_loss), "elements"),
    **dict.fromkeys(
        (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy), "elements"
    ),
    **dict.fromkeys((F.binary_cross_entropy_with_logits, F.kl_div, F.poisson_nll_loss), "elements"),
    F.soft_margin_loss: "elements",
    # A mean over rows, each of which has several classes.
    **dict.fromkeys((nn.MultiMarginLoss, nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss), "rows"),
    **dict.fromkeys((F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss), "rows"),
    # A mean over the targets that count, each with the weight of its class.
    **dict.fromkeys((nn.CrossEntropyLoss, nn.NLLLoss, F.cross_entropy, F.nll_loss), "targets"),
}
_WORDS = ("mean", "batchmean", "sum", "none")
# Arguments that are the reduction by another name, or what is given to the loss itself.
_NOT_SETTINGS = ("size_average", "reduce", "input", "target")


@dataclass(frozen=True)
class Reduction:
    """How one loss function reduces.

    Attributes:
        name: of the loss function, for messages.
        how: ``"mean"``, ``"sum"`` or ``"none"``; empty if not known.
        over: what a mean is over; ``"said"``: rows, as the user says.
        settings: the arguments of a loss of PyTorch.
        doubt: why it is not known; empty if it is.
    """

    name: str
    how: str = ""
    over: Over = "said"
    settings: Mapping[str, Any] = field(default_factory=dict)
    doubt: str = ""


def reduction_of(loss_fn: LossFn, said: str | None, words: tuple[str, ...]) -> Reduction:
    """The reduction of a loss function.

    Args:
        said: by the user; None to know it from `loss_fn`.
        words: what may be said.

    Raises:
        ArgumentError: `said` is none of `words`, or contradicts a loss of PyTorch.
    """
    name = str(getattr(loss_fn, "__name__", type(loss_fn).__name__))
    if said is not None and said not in words:
        *most, last = [f'"{word}"' for word in words]
        raise ArgumentError(
            f"reduction={said!r} is not known", remedy=f"reduction={', '.join(most)} or {last}"
        )
    over, settings, doubt = _known(loss_fn)
    if over is None:
        return Reduction(name, said or "", doubt="" if said else doubt)
    own = settings.get("reduction", "mean")
    if own not in _WORDS:
        return Reduction(name, doubt=f"reduction={own!r}")
    how = own.replace("batchmean", "mean")
    if said not in (None, how):
        raise ArgumentError(
            f"reduction={said!r}, but that of {name} is {own!r}", remedy="leave out reduction="
        )
    return Reduction(
        name, how, over, settings, _doubtful(settings) if (over, how) == ("targets", "mean") else ""
    )


def _known(loss_fn: LossFn) -> tuple[Over | None, Mapping[str, Any], str]:
    """What the mean of a loss of PyTorch is over, and its settings; or None, and why."""
    if isinstance(loss_fn, functools.partial):
        over, settings, doubt = _known(loss_fn.func)
        given = [n for n in _NOT_SETTINGS if n in loss_fn.keywords]
        if loss_fn.args or given:
            return None, {}, f"{given[0]}= is given to it" if given else "its first argument is given to it"
        return over, {**settings, **loss_fn.keywords}, doubt
    if not isinstance(loss_fn, nn.Module):
        return _KINDS.get(loss_fn) if isinstance(loss_fn, Hashable) else None, {}, ""
    if loss_fn._forward_hooks or loss_fn._forward_pre_hooks or "forward" in vars(loss_fn):
        return None, {}, "it has hooks, or a forward of its own"
    tensors = {**dict(loss_fn.named_buffers()), **dict(loss_fn.named_parameters())}
    return _KINDS.get(type(loss_fn)), {**vars(loss_fn), **tensors}, ""


def _doubtful(settings: Mapping[str, Any]) -> str:
    """Why a mean over targets is not the sum of its parts, each with the weight of its classes."""
    weight = settings.get("weight")
    if weight is None:
        return ""
    if weight.requires_grad:
        return "its weight requires a gradient"
    if (weight < 0).any():
        return "its weight is negative somewhere"
    # Label smoothing spreads over all classes: also where those of a part weigh nothing.
    smooths = settings.get("label_smoothing") and bool((weight == 0).any())
    return "it smooths labels, and a class weighs nothing" if smooths else ""
