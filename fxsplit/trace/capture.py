"""What a front end is asked, and what it gives: one capture of the model in the mode that it is in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from ..compat import TreeSpec
from ..errors import ArgumentError, pass_on_if_full
from ..graph.nodes import is_within
from ..graph.place import has_no_values
from ..graph.signature import Signature
from ..modules.seen import Seen
from ..modules.state import preserved
from .source import error_line


@dataclass(frozen=True, eq=False)
class Request:
    """A model and one call of it.

    Attributes:
        kept: module path → why the module has to stay whole; a front end adds what it finds.
        grad: whether the caller wants gradients.
    """

    model: nn.Module
    signature: Signature
    inputs: Sequence[torch.Tensor]
    kept: dict[str, str] = field(default_factory=dict)
    grad: bool = True

    def leaves(self) -> list[torch.Tensor]:
        """The inputs as leaves of their own."""
        return [x.detach().clone().requires_grad_(x.requires_grad) for x in self.inputs]

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`args` and `kwargs` of the call."""
        return self.signature.unflatten(self.leaves())


@dataclass(frozen=True, eq=False)
class Capture:
    """A graph with flat tensor inputs and flat outputs whose targets are FQNs of the model.

    Each node's ``meta`` has ``module_path``, ``source`` and ``child_call`` (see `NodeFacts`), and, for
    ``call_module``, ``caller``: the module whose forward makes the call.

    Attributes:
        constants: what the graph reads that is no attribute of the model, by target.
        called: paths of the modules whose forward was run, also of those that did nothing.
        flags: path of a module → the modules whose ``training`` its forward has read.
        taken: what forward has read and asked; of nodes it is in their ``meta["asked"]``.
    """

    graph: fx.Graph
    out_spec: TreeSpec
    constants: Mapping[str, Any]
    called: tuple[str, ...] = ()
    flags: Mapping[str, frozenset[str]] = field(default_factory=dict)
    taken: Taken = field(default_factory=lambda: Taken())


@dataclass(frozen=True)
class Taken:
    """What a forward has taken for granted.

    Attributes:
        reads: path of a module, or of an object that is an attribute of one → the attributes that were read.
        objects: paths of these objects, in the order in which they were met.
        asked: path of a tensor of the model, or ``""`` for the caller; what was asked; the answer.
    """

    reads: Mapping[str, Mapping[str, None]] = field(default_factory=dict)
    objects: Mapping[str, None] = field(default_factory=dict)
    asked: tuple[tuple[str, str, Seen], ...] = ()

    def outside(self, whole: Sequence[str]) -> Taken:
        """Without what modules that stay whole have read, which they read anew in every call."""

        def is_outside(path: str) -> bool:
            return not any(is_within(path, w) for w in whole)

        reads = {path: names for path, names in self.reads.items() if is_outside(path)}
        return replace(self, reads=reads, objects={o: None for o in self.objects if is_outside(o)})

    def __or__(self, other: Taken) -> Taken:
        reads = dict(self.reads)
        for path, names in other.reads.items():
            mine = reads.setdefault(path, names)
            if mine != names:
                reads[path] = {**mine, **names}
        first = {(where, what) for where, what, _ in self.asked}
        more = tuple(row for row in other.asked if row[:2] not in first)
        return Taken(reads, {**self.objects, **other.objects}, (*self.asked, *more))


FrontEnd = Callable[[Request], Capture]


def refuse_bad_example(request: Request) -> None:
    """Where the model itself fails on the example, that is what is wrong.

    Raises:
        ArgumentError: names the user's line.
    """
    args, kwargs = request.arguments()
    with preserved(request.model):
        try:
            request.model.forward(*args, **kwargs)
        except Exception as error:
            pass_on_if_full(error)
            line = error_line(error)
            text = (str(error).splitlines() or [""])[0]
            if has_no_values(request.model) and ("meta" in text.lower() or "data-independent" in text):
                return  # it asks for values, which it may not do as if compiled
            if "leaf Variable that requires grad" in text:
                raise ArgumentError(
                    f"{type(request.model).__name__} writes in place to an argument, and that of the example requires gradients",
                    where=str(line) if line else None,
                    remedy="x = x.clone() at the beginning of forward; or an example that does not require gradients",
                ) from error
            raise ArgumentError(
                f"{type(request.model).__name__} itself fails on the example: {type(error).__name__}: {text}",
                where=str(line) if line else None,
                remedy="give example_args that the model can be called with",
            ) from error
