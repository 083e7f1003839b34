"""`StageCosts`: what the stages of a model take, keep and send, for a whole batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from ..arguments import explained
from ..compiler import Preview
from ..cost.model import parameter_copies
from ..cost.saved import live_bytes, measured_saved
from ..errors import ArgumentError
from ..graph.ir import Assignment, Traced
from ..graph.nodes import compute_nodes
from ..graph.place import has_no_values
from ..pipeline import Pipeline
from ..plan.costs import BACKWARD
from ..plan.plan import Plan
from ..schedules.catalog import kept_shares

_MOST = 1e18  # sums of so many seconds or bytes are still numbers
_REMEDY = "fxsplit.StageCosts(forward=[2e-3, 3e-3], backward=[4e-3, 6e-3])"


@dataclass(frozen=True)
class StageCosts:
    """What each of n stages comes to, for a whole batch in one piece.

    Args:
        forward: n numbers of seconds; at least one.
        backward: n numbers of seconds; twice those of `forward` by default.
        kept: n numbers of bytes that are kept for backward; nothing by default.
        parameters: n numbers of bytes of parameters, of which the gradients have as many; nothing by default.
        state: n numbers of bytes of parameters, gradients and what the optimizer keeps; four times `parameters` by
            default, as with Adam.
        sent: n - 1 numbers of bytes that go over each cut; their gradients have as many. Nothing by default.
        inputs: bytes of the batch that the first stage reads.
        weights: n numbers of seconds, that part of `backward` which gives the gradients of the weights; half of it by
            default. Schedules that go backward in two do it by itself.
        link: bytes per second between two workers, in one direction, as `fxsplit.Device.link`; by default what is sent
            takes no time. A transfer goes on beside what both workers compute, and transfers do not disturb each other.
        overhead: seconds that each instruction takes on top, whatever its size.

    Raises:
        ArgumentError: a list is empty or of another length, or a figure is negative or no number.
    """

    forward: Sequence[float]
    backward: Sequence[float] = ()
    kept: Sequence[float] = ()
    parameters: Sequence[float] = ()
    state: Sequence[float] = ()
    sent: Sequence[float] = ()
    inputs: float = 0.0
    weights: Sequence[float] = ()
    link: float | None = None
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.forward, list | tuple) or not self.forward:
            raise ArgumentError(f"StageCosts(forward={self.forward!r}) is no list of seconds", remedy=_REMEDY)
        self._settle("forward", self.forward)
        none = [0.0] * len(self)
        self._settle("backward", [BACKWARD * f for f in self.forward])
        self._settle("kept", none)
        self._settle("parameters", none)
        self._settle("state", [parameter_copies(Plan.optimizer_states) * p for p in self.parameters])
        self._settle("sent", none[1:])
        self._settle("weights", [b / 2 for b in self.backward])
        for s, (part, whole) in enumerate(zip(self.weights, self.backward, strict=True)):
            if part > whole:
                raise ArgumentError(
                    f"StageCosts(weights[{s}]={part!r}) is more than backward[{s}]={whole!r}, of which it is a part",
                    remedy=f"weights[{s}]={whole / 2!r}",
                )
        for name in ("inputs", "overhead"):
            _check(name, getattr(self, name))
        if self.link is not None and not (_is_number(self.link) and 0 < self.link < math.inf):
            raise ArgumentError(
                f"StageCosts(link={self.link!r}) is not a positive number",
                remedy="link=2e10, bytes in a second",
            )

    def _settle(self, name: str, usual: Sequence[float]) -> None:
        """A tuple of what was given, or of what is usual."""
        values = getattr(self, name)
        if not isinstance(values, list | tuple):
            raise ArgumentError(f"StageCosts({name}={values!r}) is no list of numbers", remedy=_REMEDY)
        values = values or usual
        if len(values) != len(usual):
            raise ArgumentError(
                f"StageCosts({name}=) lists {len(values)} numbers, not {len(usual)}",
                remedy="a number for each cut, one fewer than stages"
                if name == "sent"
                else "one for each stage",
            )
        for i, value in enumerate(values):
            _check(f"{name}[{i}]", value)
        object.__setattr__(self, name, tuple(map(float, values)))

    def __len__(self) -> int:
        return len(self.forward)

    @classmethod
    def of(cls, value: StageCosts | Pipeline | Preview) -> StageCosts:
        """The costs of a pipeline's stages or of a preview's, by the seconds that its plan weighed.

        Raises:
            ArgumentError: it is neither, or its plan knows no seconds or counted with recomputation.
        """
        if isinstance(value, StageCosts):
            return value
        if isinstance(value, Preview):
            return _of(value.plan, value.traced, value.assignment)
        if isinstance(value, Pipeline):
            found = _of(value.plan, value.traced, value.assignment)
            return with_bytes(found, value)
        raise ArgumentError(f"costs are a {type(value).__name__}", remedy=_REMEDY)

    def grouped(self, stages: int) -> Self:
        """The costs of fewer stages, each of several neighbours; the heaviest is as light as can be.

        Raises:
            ArgumentError: there are not so many.
        """
        if not 1 <= stages <= len(self):
            raise ArgumentError(
                f"stages={stages}, but there are costs of {len(self)}", remedy=f"stages={len(self)} or fewer"
            )
        if stages == len(self):
            return self
        loads = [f + b for f, b in zip(self.forward, self.backward, strict=True)]
        ends = _lightest(loads, stages)
        begins = [0, *ends[:-1]]

        def sums(values: Sequence[float]) -> list[float]:
            return [math.fsum(values[a:b]) for a, b in zip(begins, ends, strict=True)]

        return replace(
            self,
            forward=sums(self.forward),
            backward=sums(self.backward),
            kept=sums(self.kept),
            parameters=sums(self.parameters),
            state=sums(self.state),
            weights=sums(self.weights),
            sent=[self.sent[begin - 1] for begin in begins[1:]],
        )


StageCosts.__init__ = explained(ArgumentError, _REMEDY)(StageCosts.__init__)  # type: ignore[method-assign]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check(where: str, value: object) -> None:
    if not (isinstance(value, int | float) and _is_number(value) and 0 <= value < _MOST):
        raise ArgumentError(
            f"StageCosts({where}={value!r}) is not zero or a positive number", remedy=f"{where}=0.001"
        )


def _lightest(loads: Sequence[float], groups: int) -> list[int]:
    """Where each of so many groups of neighbours ends, with the heaviest as light as can be, by bisection."""

    def ends(limit: float) -> list[int]:
        found, total = [], 0.0
        for i, load in enumerate(loads):
            if total and total + load > limit:
                found.append(i)
                total = 0.0
            total += load
        return [*found, len(loads)]

    low, high = max(loads), sum(loads)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if len(ends(middle)) <= groups else (middle, high)
    found = ends(high)
    while len(found) < groups:  # a group in two is no heavier
        begins = [0, *found[:-1]]
        wide = max(
            range(len(found)), key=lambda k: (found[k] - begins[k] > 1, sum(loads[begins[k] : found[k]]))
        )
        found.insert(wide, (begins[wide] + found[wide] + 1) // 2)
    return found


def _of(plan: Plan, traced: Traced, assignment: Assignment) -> StageCosts:
    forecast = assignment.forecast
    if forecast.unit != "s":
        raise ArgumentError(
            f"the plan weighed {forecast.unit}, and seconds are wanted",
            remedy='Plan(cost="time"), or Plan(cost="roofline", hardware="A100-80GB"), or the costs of '
            "fxsplit.profile(pipe, x, target=y, loss_fn=loss)",
        )
    if plan.recomputation.anything:
        raise ArgumentError(
            f"the plan counted with checkpoint={str(plan.checkpoint)!r}",
            remedy='Plan(checkpoint="never"), and simulate(checkpoint=...)',
        )
    passes = 1 + BACKWARD if plan.optimizer_states is not None else 1
    forward = [load / passes for load in assignment.loads]
    shares = kept_shares(
        plan.schedule_for(len(forward), plan.micro_batches, assignment.replicas),
        len(forward),
        plan.micro_batches,
    )
    state = [s.state or 0 for s in forecast.stages]
    kept = [
        max(0.0, (s.memory or 0) - (s.state or 0)) / (share or 1)
        for s, share in zip(forecast.stages, shares, strict=True)
    ]
    links = [d.link for d in plan.described() if d.link is not None]
    return StageCosts(
        forward,
        kept=kept,
        parameters=[s / parameter_copies(plan.optimizer_states) for s in state],
        state=state,
        sent=crossing(assignment, traced),
        link=min(links, default=None),
    )


def crossing(assignment: Assignment, traced: Traced) -> list[int]:
    """Per cut the bytes of the values that are made before it and read after it."""
    stage_of = assignment.stage_of()
    found = [0] * (len(assignment.stages) - 1)
    for node in traced.graph.nodes:
        if node.name in stage_of:
            last = max((stage_of[user.name] for user in node.users if user.name in stage_of), default=0)
            for cut in range(stage_of[node.name], last):
                found[cut] += traced.facts[node.name].nbytes
    return found


def with_bytes(costs: StageCosts, pipe: Pipeline) -> StageCosts:
    """The costs with the bytes of a pipeline's stages; what they keep for backward is measured, where there are values."""
    model, traced = pipe.model, pipe.traced
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    owned = [sum(sizes.get(name, 0) for name in stage.parameters) for stage in pipe.stages]
    copies = parameter_copies(pipe.plan.optimizer_states)
    found = replace(
        costs,
        parameters=owned,
        state=[copies * size for size in owned],
        sent=crossing(pipe.assignment, traced),
        inputs=sum(x.numel() * x.element_size() for x in pipe.example),
    )
    homes = {t.device for t in (*model.parameters(), *pipe.example)}
    if has_no_values(model) or len(homes) > 1:
        return found
    saved = measured_saved(model, traced, pipe.example)
    nodes = {node.name: node for node in compute_nodes(traced.graph)}
    kept = [live_bytes(saved, [[nodes[n] for n in s.nodes]], [[]], 1).kept for s in pipe.stages]
    return replace(found, kept=kept)
