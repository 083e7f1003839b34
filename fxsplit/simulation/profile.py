"""`profile`: what the instructions of a pipeline take on this machine, and what a step should take by that.

Instructions are timed in steps of the pipeline itself, in which its workers compute side by side as they do in any step:
on a machine with few cores or little bandwidth each takes longer then than alone. Steps with a hook that times them and
steps without, which are predicted, take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tabulate import tabulate

from ..arguments import explained
from ..errors import ArgumentError
from ..modules.state import preserved
from ..pipeline import Pipeline
from ..report.tables import in_seconds
from ..runtime.events import ActionEvent
from ..schedules.schedule import Action
from ..schedules.simulate import timeline
from ..schedules.tape import Instruction, Tape
from .costs import StageCosts, with_bytes

_EXAMPLE = "fxsplit.profile(pipe, x, target=y, loss_fn=nn.functional.mse_loss)"
Times = Mapping[Action, tuple[float, float]]  # begin and end


@dataclass(frozen=True)
class Profile:
    """What was measured, and predicted by it. All times are in seconds, and medians.

    Attributes:
        instructions: (kind, stage) → one instruction, the mean over the micro-batches of a step; kinds are F, B, I and W, as
            of an `Action`.
        own: from the end of an instruction to the beginning of the next one of its worker.
        wake: from the end of an instruction to the beginning of one of another worker that waits for it.
        loss: of a micro-batch, where the schedule has it inside.
        head: before the first instruction of a step.
        middle: between forward and backward, with the loss of the merged output, where it is outside.
        tail: after the last instruction.
        predictions: of each step whose instructions were timed, by their means in it: `head`, the simulated schedule,
            `middle` and `tail`.
        steps: what the steps took that came right after those.
        costs: for `simulate`; without `head`, `middle` and `tail`.
    """

    instructions: Mapping[tuple[str, int], float]
    own: float
    wake: float
    loss: float
    head: float
    middle: float
    tail: float
    predictions: tuple[float, ...]
    steps: tuple[float, ...]
    costs: StageCosts = field(repr=False)

    @property
    def predicted(self) -> float:
        """The median of `predictions`."""
        return statistics.median(self.predictions)

    @property
    def measured(self) -> float:
        """The median of `steps`."""
        return statistics.median(self.steps)

    @property
    def ratio(self) -> float:
        """What was predicted as a part of what was measured right after, the median."""
        return statistics.median(self._ratios())

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles of that ratio."""
        low, _, high = statistics.quantiles(self._ratios(), n=4, method="inclusive")
        return low, high

    def _ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.predictions, self.steps, strict=True)]

    def predict(self, pipe: Pipeline) -> float:
        """Seconds of a step of another pipeline of the same stages and micro-batches, by the figures of this one.

        A backward in two is taken to be two equal halves of a whole one, where only that was measured. Where only one of
        the two pipelines has its loss inside, the loss of all micro-batches is taken for what is between forward and
        backward, or the other way round.
        """
        phases, count = _phases(pipe), pipe.plan.micro_batches
        middle, loss = self.middle, self.loss
        if len(phases) == 1 and self.middle:
            middle, loss = 0.0, self.middle / count
        elif len(phases) == 2 and not self.middle:
            middle, loss = self.loss * count, 0.0

        def cost(instruction: Instruction) -> float:
            if instruction.kind == "loss":
                return loss
            kind, stage, _ = instruction.actions[0]
            known = self.instructions
            if (kind, stage) in known:
                return known[kind, stage] + self.own
            if kind == "B":
                return known["I", stage] + known["W", stage] + self.own
            return known["B", stage] / 2 + self.own

        return self.head + middle + self.tail + sum(self._makespan(tape, cost) for tape in phases)

    def _makespan(self, tape: Tape, cost: Callable[[Instruction], float]) -> float:
        worker = tape.worker_of

        def travel(made: Instruction, read: Instruction) -> float:
            apart = made.number in worker and worker[made.number] != worker[read.number]
            return self.wake - self.own if apart else 0.0

        return max((end for _, end in timeline(tape, cost, travel)), default=0.0)

    def __str__(self) -> str:
        rows = [(f"{kind} of stage {s}", in_seconds(t)) for (kind, s), t in sorted(self.instructions.items())]
        rows += [(name, in_seconds(getattr(self, name))) for name in ("own", "wake", "loss")]
        rows += [(name, in_seconds(getattr(self, name))) for name in ("head", "middle", "tail")]
        low, high = self.spread
        return "\n".join(
            [
                tabulate(rows, ("instruction", "median"), disable_numparse=True),
                f"step: predicted {in_seconds(self.predicted)}, measured {in_seconds(self.measured)}, "
                f"ratio {self.ratio:.3f} (quartiles {low:.3f} to {high:.3f} over {len(self.steps)} steps)",
            ]
        )


@explained(ArgumentError, _EXAMPLE)
def profile(
    pipe: Pipeline,
    *args: Any,
    loss_fn: Callable[..., torch.Tensor],
    target: Any = None,
    reduction: str | None = None,
    rounds: int = 10,
    **kwargs: Any,
) -> Profile:
    """Time the instructions of a pipeline's steps, and predict by them what a step takes.

    The model's parameters, buffers, gradients, modes and the random number generators are as before afterwards.

    Args:
        args, loss_fn, target, reduction, kwargs: as of `Pipeline.step`.
        rounds: how many steps are timed instruction by instruction, and how many as a whole; they take turns, after three
            that are not counted.

    Raises:
        ArgumentError: it is no pipeline, or no number of rounds.
        FxsplitError: as of `Pipeline.step`.
    """
    if not isinstance(pipe, Pipeline):
        raise ArgumentError(f"profile takes a pipeline, not {type(pipe).__name__}", remedy=_EXAMPLE)
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 2:
        raise ArgumentError(f"profile(rounds={rounds!r}) is no number from 2 on", remedy="rounds=10")
    timed: list[tuple[float, Times, float]] = []
    whole: list[float] = []

    def step() -> tuple[float, float]:
        pipe.model.zero_grad(set_to_none=True)
        begin = time.perf_counter()
        pipe.step(*args, loss_fn=loss_fn, target=target, reduction=reduction, **kwargs)
        return begin, time.perf_counter()

    with preserved(
        pipe.model
    ):  # not the parameters, for which a mode would watch: workers take turns within one
        for _ in range(3):
            step()
        for _ in range(rounds):
            found: dict[Action, tuple[float, float]] = {}

            def note(event: ActionEvent, into: dict[Action, tuple[float, float]] = found) -> None:
                into[event.action] = event.begin, event.end

            handle = pipe.register_action_hook(note)
            try:
                begin, end = step()
            finally:
                handle.remove()
            timed.append((begin, found, end))
            begin, end = step()
            whole.append(end - begin)
    return _profile(pipe, timed, whole)


def _phases(pipe: Pipeline) -> list[Tape]:
    """What is played in a step, one after the other."""
    tape = pipe.tape
    return [tape] if any(x.kind == "loss" for x in tape.order) else [tape.forward, tape.backward]


def _profile(pipe: Pipeline, timed: Sequence[tuple[float, Times, float]], whole: Sequence[float]) -> Profile:
    rows: list[dict[tuple[str, int], float]] = []
    own, wake, losses, heads, middles, tails = (list[float]() for _ in range(6))
    phases = _phases(pipe)
    for begin, times, end in timed:
        seconds: dict[tuple[str, int], list[float]] = {}
        for (kind, stage, _), (a, b) in times.items():
            seconds.setdefault((kind, stage), []).append(b - a)
        rows.append({key: statistics.fmean(values) for key, values in seconds.items()})
        for phase in phases:
            for gap, waits, loss in _gaps(phase, times):
                (losses if loss else wake if waits else own).append(gap)
        heads.append(min(a for a, _ in times.values()) - begin)
        tails.append(end - max(b for _, b in times.values()))
        if len(phases) == 2:
            last = max(b for action, (_, b) in times.items() if action.kind == "F")
            middles.append(min(a for action, (a, _) in times.items() if action.kind != "F") - last)
    each = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    gap = _median(own)
    count, stages = max(a.micro_batch for a in timed[0][1]) + 1, range(len(pipe.stages))
    back = [each.get(("B", s), 0.0) + each.get(("I", s), 0.0) + each.get(("W", s), 0.0) for s in stages]
    costs = StageCosts(
        [count * each.get(("F", s), 0.0) for s in stages],
        [count * b for b in back],
        weights=[count * each.get(("W", s), back[s] / 2) for s in stages],
        overhead=gap,
    )
    found = Profile(
        each,
        gap,
        max(gap, _median(wake)),
        max(0.0, _median(losses) - gap),
        _median(heads),
        _median(middles),
        _median(tails),
        (),
        tuple(whole),
        with_bytes(costs, pipe),
    )
    return replace(found, predictions=tuple(replace(found, instructions=row).predict(pipe) for row in rows))


def _gaps(tape: Tape, times: Times) -> Iterable[tuple[float, bool, bool]]:
    """Of each instruction that has one before it: seconds between, whether that is another worker's, whether there is a loss."""
    for row in tape.workers:
        before: tuple[float, bool] | None = None  # when its worker was free, and whether a loss came then
        for x in row:
            if x.kind == "loss":
                before = (before[0], True) if before is not None else None
                continue
            begin, end = times[x.actions[0]]
            others = [
                times[tape.instructions[n].actions[0]][1]
                for n in x.after
                if n in tape.worker_of and tape.instructions[n].actions and tape.instructions[n] not in row
            ]
            if before is not None:
                latest = max(others, default=0.0)
                yield begin - max(before[0], latest), latest > before[0], before[1]
            before = end, False


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
