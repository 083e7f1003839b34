"""One call of a pipeline: what a forward and a backward action do with a stage and a micro-batch."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..actions import Action, Needs, Schedule
from ..compat import parameter_hooks_silenced, tree_leaves, tree_map
from ..errors import AnomalyError
from ..graph import region_modules
from ..ir import Program, Stage
from ..ops import Around, recomputation, transfers_cut
from ..replicate.reduce import OrderedSum
from ..rng import Stream, draw_base_seed, seeded, stage_seed
from ..schedules.needs import dependencies, parameter_chains, step_needs, turns_of
from .anomaly import is_bad, run_watched
from .batchnorm import DeferredNorms
from .blame import users_line
from .device import lanes_of
from .events import ActionHook, announced
from .halves import can_be_halved, input_half
from .inside import LossInside
from .loss import check_differentiable
from .worker import play, play_serially


@dataclass
class _Record:
    """What a forward leaves for the backward of the same stage and micro-batch."""

    inputs: dict[str, list[Any]]  # flat leaves of each input on the stage's device, detached
    homes: dict[str, list[torch.device | None]]  # where those leaves came from: their gradients go back there
    outputs: dict[str, list[Any]]  # flat leaves of each output, with their graph


@dataclass
class _WeightHalf:
    """What is left of a backward, and the gradients of weights that are there already."""

    early: dict[str, torch.Tensor | None]
    compute: Callable[[], list[torch.Tensor | None]]


@dataclass(frozen=True)
class Circumstances:
    """How a call is played.

    Attributes:
        grad: whether a backward may follow.
        checkpoint: which micro-batches are recomputed.
        inside: entered by a worker around every action.
        intra_op: threads of each worker inside of an operation; None to share the caller's out.
        serial: play everything in the calling thread (the oracle of the tests).
        hooks: called after every action.
        norms: keeps the statistics of batch normalisation, where its update is put off.
        anomaly: ``"nan"`` or ``"inf"``: what to look for in values and gradients.
    """

    grad: bool
    checkpoint: Any
    inside: Around = contextlib.nullcontext
    intra_op: int | None = None
    serial: bool = False
    hooks: Sequence[ActionHook] = ()
    norms: DeferredNorms | None = None
    anomaly: str | None = None


class Call:
    """The values and gradients of one call, for all its micro-batches.

    Args:
        chunks: per micro-batch the flat tensor inputs.
        parameters: FQN → parameter, those that get gradients.
        how: the circumstances.
    """

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        chunks: Sequence[Sequence[torch.Tensor]],
        parameters: dict[str, nn.Parameter],
        how: Circumstances,
    ) -> None:
        self.program, self.schedule, self.chunks, self.parameters = program, schedule, chunks, parameters
        self.how = how
        # One micro-batch leaves nothing to overlap: the caller's own thread and random numbers.
        self.serial = how.serial or len(chunks) == 1
        self.norms = how.norms if len(chunks) > 1 else None
        self.base_seed = (
            draw_base_seed() if len(chunks) > 1 and any(s.random for s in program.stages) else None
        )
        self.made_by, self.readers = program.producers(), program.readers()
        self.results = {v for v in program.outputs if isinstance(v, str)}
        self.values: dict[tuple[str, int], Any] = {}
        self.unread: dict[tuple[str, int], int] = {}
        self.records: dict[tuple[int, int], _Record] = {}
        halves = any(a.kind == "I" for actions in schedule.workers for a in actions)
        self.halved = {s.index for s in program.stages if halves and can_be_halved(s.module)}
        self.weight_halves: dict[tuple[int, int], _WeightHalf] = {}
        self.gradients: dict[tuple[str, int], list[torch.Tensor | None]] = {}
        self.parameter_gradients: dict[tuple[str, int], torch.Tensor | None] = {}
        self.chains = parameter_chains(program)
        self.sums: dict[str, OrderedSum] = {}
        self.keep_graph = False
        self.loss: LossInside | None = None
        self.lanes = lanes_of([s.device for s in program.stages])
        self.lock = threading.Lock()
        self.turns = {
            s.index: threading.Lock()
            for s in program.stages
            if (s.writes or s.stateful) and how.checkpoint != "never"
        }
        for i, chunk in enumerate(chunks):
            for name, value in zip(program.inputs, chunk, strict=True):
                self._publish(name, i, value)

    # -- the two halves ----------------------------------------------------------------------------------------

    def forward(self) -> list[list[Any]]:
        """Play the forward half. Returns per micro-batch the flat outputs, without graph."""
        in_turn, _ = turns_of(self.program, self.how.checkpoint)
        self._play(self.schedule.half(forward=True), dependencies(self.program, in_turn=in_turn))
        rows = []
        for i in range(len(self.chunks)):
            rows.append([self.values[v, i] if isinstance(v, str) else v[0] for v in self.program.outputs])
        self.values.clear()
        self.lanes.leaves(tree_leaves(rows))
        return rows

    def backward(self, gradients: Sequence[dict[str, Any]], *, keep_graph: bool) -> None:
        """Play the backward half. Afterwards `input_gradient` and `parameter_gradient` have the results.

        Args:
            gradients: per micro-batch the gradient of each output value, by name.
            keep_graph: whether this call may be played backward again.
        """
        self.keep_graph = keep_graph
        self.gradients = {(name, i): [g] for i, row in enumerate(gradients) for name, g in row.items()}
        self.parameter_gradients = {}
        self.sums = {fqn: OrderedSum(len(self.chunks)) for fqn in self.parameters}
        _, again = turns_of(self.program, self.how.checkpoint)
        needs = dependencies(self.program, in_turn=frozenset(), again_in_turn=again)
        with parameter_hooks_silenced(list(self.parameters.values())):
            self._play(self.schedule.half(forward=False), needs)
        if not keep_graph:
            self.records.clear()

    def step(self, loss: LossInside) -> None:
        """Play the whole schedule, the loss of a micro-batch before the backward of its last stage.

        Afterwards `input_gradient`, `parameter_gradient` and `loss` have the results.

        Raises:
            GradientError: nothing requires a gradient.
        """
        self.loss = loss
        self.sums = {fqn: OrderedSum(len(self.chunks)) for fqn in self.parameters}
        with parameter_hooks_silenced(list(self.parameters.values())):
            self._play(self.schedule.workers, step_needs(self.program, self.how.checkpoint))
        check_differentiable(loss.differentiable)

    def input_gradient(self, name: str, micro_batch: int) -> torch.Tensor | None:
        """The gradient of one graph input of one micro-batch."""
        found = self.gradients.get((name, micro_batch))
        self.lanes.leaves(found or ())
        return found[0] if found else None

    def parameter_gradient(self, fqn: str) -> torch.Tensor | None:
        """The sum over all micro-batches, added in their order."""
        found = self.sums[fqn].total() if fqn in self.chains else None
        self.lanes.leaves((found,))
        return found

    def release(self) -> None:
        """Drop the gradients that the caller has taken."""
        self.gradients, self.parameter_gradients, self.sums = {}, {}, {}

    def _play(self, workers: Sequence[Sequence[Action]], needs: Needs) -> None:
        stages = self.program.stages
        announcing = announced(self._act, lambda action: stages[action.stage].device, self.how.hooks)
        queued = self.lanes.queued(announcing, needs)

        caller = threading.get_ident()

        def act(action: Action) -> None:
            here = threading.get_ident() == caller
            with self._errors_say_where(action), contextlib.nullcontext() if here else self.how.inside():
                queued(action)

        # A backward of a stage stays in its worker. Autograd's thread for the device may be the one that waits here.
        with self.lanes.fenced(), torch.autograd.set_multithreading_enabled(False):
            if self.serial:
                play_serially(workers, needs, act)
            else:
                names = [f"stage {s}.{r}" for s, r in self.schedule.labels]
                play(workers, needs, act, names, self.how.intra_op)

    def _act(self, action: Action) -> None:
        """Replicas of a stage that writes to its buffers take turns: one may be computing the other's forward again."""
        with self.turns.get(action.stage, contextlib.nullcontext()):
            if action.kind == "F":
                self._forward(action)
            elif action.kind == "W":
                self._weight_half(action)
            else:
                if self.loss is not None and action.stage == self.program.stages[-1].index:
                    self._loss(self.loss, action)
                self._backward(action)

    def _loss(self, loss: LossInside, action: Action) -> None:
        """The loss of one micro-batch, and the gradients of the outputs."""
        i, last = action.micro_batch, self.program.stages[-1]
        taken = {v: self._take(v, i, last.index) for v in sorted(self.results)}
        gradients = loss.gradients(i, len(self.program.stages), taken)
        self.gradients.update(((v, i), row) for v, row in gradients.items())

    # -- actions -----------------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        stage, i = self.program.stages[action.stage], action.micro_batch
        with self._random_numbers(stage, i), torch.set_grad_enabled(self.how.grad):
            inputs = {name: self._take(name, i, stage.index) for name in stage.inputs}
            norms, norms_again = self._norms(stage, i)
            with (
                recomputation(self._is_recomputed(i), norms_again),
                transfers_cut(self.lanes.move) as crossings,
                norms(),
            ):
                if self.how.anomaly is None:
                    result = stage.module(*inputs.values())
                else:
                    result = run_watched(stage.module, inputs.values(), self.how.anomaly)
            outputs = dict(zip(stage.outputs, (result,) if len(stage.outputs) == 1 else result, strict=True))
            if self.how.grad:
                moved = {id(tensor): arrived for tensor, arrived in crossings}
                leaves = {name: tree_leaves(v) for name, v in inputs.items()}
                self.records[action.stage, i] = _Record(
                    inputs={
                        name: [moved.get(id(leaf), leaf) for leaf in row] for name, row in leaves.items()
                    },
                    homes={name: [_home(leaf) for leaf in row] for name, row in leaves.items()},
                    outputs={name: tree_leaves(v) for name, v in outputs.items()},
                )
            for name, value in outputs.items():
                self._publish(name, i, value)

    def _backward(self, action: Action) -> None:
        stage, i = self.program.stages[action.stage], action.micro_batch
        key = (action.stage, i)
        record = self.records[key] if self.keep_graph else self.records.pop(key)
        roots: list[torch.Tensor] = []
        seeds: list[torch.Tensor] = []

        def seed(tensors: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> None:
            for tensor, gradient in zip(tensors, gradients, strict=True):
                if gradient is not None and tensor.requires_grad:
                    roots.append(tensor)
                    seeds.append(self.lanes.move(gradient, tensor.device))
                    self.lanes.uses(stage.index, (gradient,))

        for name, leaves in record.outputs.items():
            seed(leaves, self.gradients.pop((name, i), [None] * len(leaves)))
        # Gradients from later readers enter here, so that autograd adds this stage's to them, in the order
        # of the unsplit model.
        wanted: list[torch.Tensor] = []
        for name, leaves in record.inputs.items():
            seed(leaves, self.gradients.get((name, i), [None] * len(leaves)))
            wanted += [leaf for leaf in leaves if _has_grad(leaf)]
        owned = [fqn for fqn in stage.parameters if fqn in self.parameters]
        shared = [fqn for fqn in owned if len(self.chains[fqn]) > 1]
        alone = [fqn for fqn in owned if len(self.chains[fqn]) == 1]
        for fqn in shared:
            seed([self.parameters[fqn]], [self.parameter_gradients.pop((fqn, i), None)])
        wanted += [self.parameters[fqn] for fqn in shared]
        weights = [self.parameters[fqn] for fqn in alone]
        found: list[torch.Tensor | None] = [None] * (len(wanted) + len(weights))
        late: Callable[[], list[torch.Tensor | None]] | None = None
        if roots and action.kind == "I" and self._is_halved(stage, i):
            found, early, late = input_half(roots, seeds, wanted, weights)
            found += early
        elif roots and (wanted or weights):
            with self._random_numbers(stage, i) if stage.rng_state else contextlib.nullcontext():
                found = list(
                    torch.autograd.grad(
                        roots, [*wanted, *weights], seeds, retain_graph=self.keep_graph, allow_unused=True
                    )
                )
        self._check_gradients(record, [*shared, *alone], found)
        following = iter(found)
        for name, leaves in record.inputs.items():
            gradients = [next(following) if _has_grad(leaf) else None for leaf in leaves]
            homes = record.homes[name]
            self.gradients[name, i] = [
                g if g is None or d is None else self.lanes.move(g, d)
                for g, d in zip(gradients, homes, strict=True)
            ]
        for fqn in shared:
            gradient = next(following)
            if self.chains[fqn][0] == stage.index:
                self.sums[fqn].add(i, gradient)
            elif gradient is not None:
                self.parameter_gradients[fqn, i] = gradient
        if late is not None:
            self.weight_halves[key] = _WeightHalf(dict(zip(alone, following, strict=True)), late)
            return
        for fqn in alone:
            self.sums[fqn].add(i, next(following))

    def _check_gradients(
        self, record: _Record, owned: Sequence[str], found: Sequence[torch.Tensor | None]
    ) -> None:
        """Look for anomalies in what a backward has found: of the inputs first, then of the parameters."""
        kind = self.how.anomaly
        if kind is None or not is_bad(list(found), kind):
            return
        names = [name for name, row in record.inputs.items() for leaf in row if _has_grad(leaf)]
        bad = [n for n, g in zip([*names, *owned], found, strict=True) if is_bad(g, kind)]
        raise AnomalyError(
            f"the gradient of {', '.join(bad[:3])} has {'a NaN' if kind == 'nan' else 'a NaN or infinity'}",
            remedy="look at the operations of this stage; torch.autograd.detect_anomaly() on pipe.unsplit() names one",
        )

    def _weight_half(self, action: Action) -> None:
        """The gradients of weights that are still to be computed; where nothing was put off, there are none."""
        half = self.weight_halves.pop((action.stage, action.micro_batch), None)
        if half is None:
            return
        for (fqn, early), late in zip(half.early.items(), half.compute(), strict=True):
            self.sums[fqn].add(action.micro_batch, late if early is None else early)

    def _is_halved(self, stage: Stage, micro_batch: int) -> bool:
        """Whether weights can wait: what is computed again for the inputs is there for the weights too."""
        recomputed = self._is_recomputed(micro_batch) and any(region_modules(stage.module))
        return stage.index in self.halved and not recomputed and not stage.rng_state

    # -- values ------------------------------------------------------------------------------------------------

    def _publish(self, name: str, i: int, value: Any) -> None:
        """Make a value readable for later stages: detached, and marked with whether it needs a gradient."""
        readers = len(self.readers[name]) + (name in self.results)
        if readers:
            self.values[name, i] = tree_map(_handed_over, value)
            self.unread[name, i] = readers

    def _take(self, name: str, i: int, stage: int) -> Any:
        """A leaf of its own for this reader; the value is dropped after the last one."""
        value = tree_map(_handed_over, self.values[name, i])
        self.lanes.uses(stage, tree_leaves(value))
        with self.lock:
            self.unread[name, i] -= 1
            if not self.unread[name, i]:
                del self.values[name, i]
        return value

    # -- circumstances -------------------------------------------------------------------------------------------

    def _is_recomputed(self, micro_batch: int) -> bool:
        if self.how.checkpoint == "except_last":
            return micro_batch > 0  # the first goes backward first: what it keeps is soon free
        return bool(self.how.checkpoint != "never")  # chosen regions are recomputed in every micro-batch

    def _norms(self, stage: Stage, i: int) -> tuple[Around, Around]:
        """What is around the computation of a stage whose batch normalisation is put off, and around later ones."""
        if self.norms is None or not stage.writes:
            return contextlib.nullcontext, contextlib.nullcontext
        return functools.partial(self.norms.recording, i), functools.partial(self.norms.recomputing, i)

    def _random_numbers(self, stage: Stage, i: int) -> contextlib.AbstractContextManager[object]:
        if self.base_seed is None or not stage.random:
            return contextlib.nullcontext()
        if stage.rng_state:  # a checkpoint of the user's saves and restores the default generator's own state
            return seeded(stage_seed(self.base_seed, i, stage.index), stage.device)
        return Stream(functools.partial(stage_seed, self.base_seed, i, stage.index))

    @contextlib.contextmanager
    def _errors_say_where(self, action: Action) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            stage = self.program.stages[action.stage]
            what = {"F": "forward", "W": "backward (weights)"}.get(action.kind, "backward")
            first, last = stage.modules
            span = first if first == last else f"{first} … {last}"
            error.add_note(
                f"fxsplit: in the {what} of stage {action.stage} ({span or 'the model'}, on {stage.device}), "
                f"micro-batch {action.micro_batch} of {len(self.chunks)}, action {action}{users_line(error)}"
            )
            raise


def _home(leaf: Any) -> torch.device | None:
    return leaf.device if isinstance(leaf, torch.Tensor) else None


def _has_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _handed_over(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)
