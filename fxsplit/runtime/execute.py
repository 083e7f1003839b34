"""One call of a pipeline: what a forward and a backward action do with a stage and a micro-batch."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..actions import Action, Needs, Schedule
from ..compat import parameter_hooks_silenced, tree_leaves, tree_map
from ..errors import AnomalyError
from ..graph import region_modules
from ..ir import Program, Stage
from ..ops import Again, recomputation, transfers_cut
from ..recompute import Around
from ..replicate.reduce import OrderedSum
from ..replicate.replicas import Replica
from ..rng import BaseSeed, Stream, seeded
from ..schedules.needs import dependencies, parameter_chains, step_needs, together, turns_of
from .anomaly import is_bad, run_watched
from .batchnorm import DeferredNorms
from .blame import users_line
from .device import lanes_of
from .events import ActionHook, announced
from .halves import can_be_halved, input_half
from .inside import LossInside
from .loss import check_differentiable
from .meeting import Meetings
from .travel import Travelling
from .unsaid import Shared, as_said, unchanged
from .worker import play, play_serially


@dataclass
class _Record:
    """What a forward leaves for the backward of the same stage and micro-batch."""

    inputs: dict[str, list[Any]]  # flat leaves of each input on the stage's device, detached
    homes: dict[str, list[torch.device | None]]  # where those leaves came from: their gradients go back there
    outputs: dict[str, list[Any]]  # flat leaves of each output, with their graph


@dataclass
class _Part:
    """The backward of one micro-batch: where it starts, with which gradients, and what it is to find."""

    stage: Stage
    micro_batch: int
    record: _Record
    shared: dict[str, torch.Tensor]  # parameters that other stages read too
    alone: dict[str, torch.Tensor]  # and those that none does
    roots: list[torch.Tensor] = field(default_factory=list)
    seeds: list[torch.Tensor] = field(default_factory=list)
    leaves: list[torch.Tensor] = field(default_factory=list)


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
        rounds: stage → how many of its micro-batches meet: they go forward at the same time, and backward as one.
        drawing: stages that may draw random numbers.
        shared: what modules of several stages can see.
        watched: stages whose modules are looked at, because replicas run at the same time.
        anomaly: ``"nan"`` or ``"inf"``: what to look for in values and gradients.
        rows: of a micro-batch's inputs, for messages; None where there is no batch.
        asked: whether to compare what forward asked of values when it was captured.
    """

    grad: bool
    checkpoint: Any
    inside: Around = contextlib.nullcontext
    intra_op: int | None = None
    serial: bool = False
    hooks: Sequence[ActionHook] = ()
    norms: DeferredNorms | None = None
    rounds: Mapping[int, int] = field(default_factory=dict)
    drawing: frozenset[int] = frozenset()
    shared: Sequence[Shared] = ()
    watched: frozenset[int] = frozenset()
    anomaly: str | None = None
    rows: Callable[[Sequence[torch.Tensor]], int | None] = lambda inputs: None
    asked: bool = False


class Call:
    """The values and gradients of one call, for all its micro-batches.

    Args:
        chunks: per micro-batch the flat tensor inputs.
        parameters: FQN → parameter, those that get gradients.
        how: the circumstances.
        replicas: of each stage.
    """

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        chunks: Sequence[Sequence[torch.Tensor]],
        parameters: dict[str, nn.Parameter],
        how: Circumstances,
        replicas: Mapping[int, Sequence[Replica]],
    ) -> None:
        self.program, self.schedule, self.chunks, self.parameters = program, schedule, chunks, parameters
        self.how, self.replicas = how, replicas
        # One micro-batch leaves nothing to overlap: the caller's own thread and random numbers.
        self.serial = how.serial or len(chunks) == 1
        self.norms = how.norms if len(chunks) > 1 else None
        self.seed = BaseSeed() if len(chunks) > 1 and how.drawing else None
        self.made_by, self.readers = program.producers(), program.readers()
        self.results = {v for v in program.outputs if isinstance(v, str)}
        self.values: dict[tuple[str, int], Any] = {}
        self.unread: dict[tuple[str, int], int] = {}
        self.records: dict[tuple[int, int], _Record] = {}
        halves = any(a.kind == "I" for actions in schedule.workers for a in actions)
        self.halved = {
            s.index
            for s in program.stages
            if halves and s.index not in how.rounds and can_be_halved(s.module)
        }
        self.meetings = Meetings(how.rounds)
        self.left: list[threading.Thread] = []
        self.weight_halves: dict[tuple[int, int], _WeightHalf] = {}
        self.gradients: dict[tuple[str, int], list[torch.Tensor | None]] = {}
        self.same: dict[tuple[str, int], str] = {}  # a value that is the same tensor as another one → that
        self.parameter_gradients: dict[tuple[str, int], torch.Tensor | None] = {}
        self.chains = parameter_chains(program)
        self.sums: dict[str, OrderedSum] = {}
        self.keep_graph = False
        self.loss: LossInside | None = None
        self.lanes = lanes_of([s.row for s in program.stages], how.rounds)
        self.written = Travelling(replicas, self.lanes)
        self.lock = threading.Lock()
        self.turns = {
            s.index: threading.Lock()
            for s in program.stages
            if (s.writes or s.stateful) and how.checkpoint != "never" and s.index not in how.rounds
        }
        for i, chunk in enumerate(chunks):
            for name, value in zip(program.inputs, chunk, strict=True):
                self._publish(name, i, value)

    # -- the two halves ----------------------------------------------------------------------------------------

    def forward(self) -> list[list[Any]]:
        """Play the forward half. Returns per micro-batch the flat outputs, without graph."""
        in_turn, _ = turns_of(self.program, self.how.checkpoint, self.how.rounds)
        needs = together(dependencies(self.program, in_turn=in_turn), self.how.rounds)
        with self._seeded(), unchanged(self.how.shared):
            self._play(self.schedule.half(forward=True), needs)
        self.written.arrive()
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
        self.gradients = {}
        for i, row in enumerate(gradients):
            for name, gradient in row.items():
                self._receive(name, i, [gradient])
        self.parameter_gradients = {}
        self.sums = {fqn: OrderedSum(len(self.chunks)) for fqn in self.parameters}
        self.meetings.again()
        _, again = turns_of(self.program, self.how.checkpoint, self.how.rounds)
        needs = together(
            dependencies(self.program, in_turn=frozenset(), again_in_turn=again), self.how.rounds
        )
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
        with (
            self._seeded(),
            unchanged(self.how.shared),
            parameter_hooks_silenced(list(self.parameters.values())),
        ):
            self._play(self.schedule.workers, step_needs(self.program, self.how.checkpoint, self.how.rounds))
        self.written.arrive()
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
        announcing = announced(self._act, self._device, self.how.hooks)
        queued = self.lanes.queued(announcing, needs)

        caller = threading.get_ident()

        def act(action: Action) -> None:
            here = threading.get_ident() == caller
            with self._errors_say_where(action), contextlib.nullcontext() if here else self.how.inside():
                queued(action)

        # A backward of a stage stays in its worker. Autograd's thread for the device may be the one that waits here.
        with self.lanes.fenced(), torch.autograd.set_multithreading_enabled(False):
            if self.serial and not self.how.rounds:
                play_serially(workers, needs, act)
            else:
                names = [f"stage {s}.{r}" for s, r in self.schedule.labels]
                meetings = self if self.how.rounds else None
                play(workers, needs, act, names, self.how.intra_op, meetings)

    def members(self, action: Action) -> list[Action]:
        """The actions of all micro-batches that meet with this one's."""
        return self.meetings.members(action)

    def close(self) -> None:
        """Nobody waits for another micro-batch any more."""
        self.meetings.close()
        if self.norms is not None:
            self.norms.close()

    def leave(self, thread: threading.Thread) -> None:
        """A worker waits for ever for a copy that has failed."""
        self.left.append(thread)

    def _act(self, action: Action) -> None:
        """Replicas of a stage that writes to its buffers take turns: one may be computing the other's forward again."""
        with self.turns.get(action.stage, contextlib.nullcontext()):
            if action.kind == "F":
                self.meetings.enter(action)
                self._forward(action)
            elif action.kind == "W":
                self._weight_half(action)
            else:
                with self.meetings.leading(action) as leads:
                    if leads:
                        self._backward(self.members(action))

    def _loss(self, loss: LossInside, action: Action) -> None:
        """The loss of one micro-batch, and the gradients of the outputs."""
        i, last = action.micro_batch, self.program.stages[-1]
        taken = {v: self._at_home(v, self._take(v, i, last.index)) for v in sorted(self.results)}
        gradients = loss.gradients(i, len(self.program.stages), taken)
        for v, row in gradients.items():
            self._receive(v, i, row)

    # -- actions -----------------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        stage, i = self.program.stages[action.stage], action.micro_batch
        replica = self._replica(action)
        with self._random_numbers(stage, i), torch.set_grad_enabled(self.how.grad):
            inputs = self._inputs(stage, i)
            norms, norms_again = self._norms(stage, i)
            with (
                recomputation(
                    self._is_recomputed(i),
                    norms_again,
                    own_numbers=len(self.chunks) == 1 or stage.rng_state,
                ),
                transfers_cut(self.lanes.move) as crossings,
                norms,
                self._as_said(stage, replica),
                self.written.carried(stage, i)
                if stage.index not in self.how.rounds
                else contextlib.nullcontext(),
            ):
                if self.how.anomaly is None and not self.how.asked:
                    result = replica.module(*inputs.values())
                else:
                    result = run_watched(
                        replica.module, inputs.values(), self.how.anomaly, asked=self.how.asked
                    )
            outputs = dict(zip(stage.outputs, (result,) if len(stage.outputs) == 1 else result, strict=True))
            for leaf in tree_leaves(
                result
            ):  # of a view that was written in place, autograd makes it when it is asked
                _ = leaf.grad_fn if isinstance(leaf, torch.Tensor) else None
            if self.how.grad:
                moved = {id(tensor): arrived for tensor, arrived in crossings}
                leaves = {name: tree_leaves(v) for name, v in inputs.items()}
                self.records[action.stage, i] = record = _Record(
                    inputs={
                        name: [moved.get(id(leaf), leaf) for leaf in row] for name, row in leaves.items()
                    },
                    homes={name: [_home(leaf) for leaf in row] for name, row in leaves.items()},
                    outputs={name: tree_leaves(v) for name, v in outputs.items()},
                )
                self._note_aliases(record, i)
            for name, value in outputs.items():
                self._publish(name, i, value)

    def _backward(self, actions: Sequence[Action]) -> None:
        """Go backward with one micro-batch of a stage, or with several that met: their gradients are found together."""
        if self.loss is not None and actions[0].stage == self.program.stages[-1].index:
            for action in actions:
                self._loss(self.loss, action)
        parts = [self._prepared(action) for action in actions]
        stage, i = parts[0].stage, parts[0].micro_batch
        roots = [root for part in parts for root in part.roots]
        seeds = [seed for part in parts for seed in part.seeds]
        wanted = [leaf for part in parts for leaf in part.leaves]
        # A parameter that was frozen since the forward gets no gradient, as in autograd.
        wanted += {id(p): p for part in parts for p in part.shared.values() if p.requires_grad}.values()
        weights = list({id(p): p for part in parts for p in part.alone.values() if p.requires_grad}.values())
        found: list[torch.Tensor | None] = [None] * (len(wanted) + len(weights))
        late: Callable[[], list[torch.Tensor | None]] | None = None
        if roots and actions[0].kind == "I" and self._is_halved(stage, i):
            found, early, late = input_half(roots, seeds, wanted, weights)
            found += early
        elif roots and (wanted or weights):
            with self._random_numbers(stage, i) if stage.rng_state else contextlib.nullcontext():
                found = list(
                    torch.autograd.grad(
                        roots, [*wanted, *weights], seeds, retain_graph=self.keep_graph, allow_unused=True
                    )
                )
        by_leaf = {id(leaf): g for leaf, g in zip([*wanted, *weights], found, strict=True)}
        for part in parts:
            self._check_gradients(part, by_leaf)
            self._hand_back(part, by_leaf, late)

    def _prepared(self, action: Action) -> _Part:
        """What the backward of a micro-batch starts from, and what it is to find."""
        stage, i = self.program.stages[action.stage], action.micro_batch
        key = (action.stage, i)
        record = self.records[key] if self.keep_graph else self.records.pop(key)
        here = self._replica(action).leaves
        owned = {
            fqn: here.get(fqn, self.parameters[fqn]) for fqn in stage.parameters if fqn in self.parameters
        }
        part = _Part(
            stage,
            i,
            record,
            shared={fqn: p for fqn, p in owned.items() if len(self.chains[fqn]) > 1},
            alone={fqn: p for fqn, p in owned.items() if len(self.chains[fqn]) == 1},
        )

        def seed(tensors: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> None:
            for tensor, gradient in zip(tensors, gradients, strict=True):
                if gradient is not None and tensor.requires_grad:
                    part.roots.append(tensor)
                    part.seeds.append(self.lanes.move(gradient, tensor.device))
                    self.lanes.uses(stage.index, i, (gradient,))

        for name, leaves in record.outputs.items():
            if self._tensor(name, i) == name:
                seed(leaves, self.gradients.pop((name, i), [None] * len(leaves)))
        # Gradients from later readers enter here, so that autograd adds this stage's to them, in the order
        # of the unsplit model.
        tensors: dict[str, None] = {}
        for name, leaves in record.inputs.items():
            tensor = self._tensor(name, i)
            if tensor not in tensors:
                seed(leaves, self.gradients.get((tensor, i), [None] * len(leaves)))
            tensors[tensor] = None
            known = {id(leaf) for leaf in part.leaves}
            part.leaves += [leaf for leaf in leaves if _has_grad(leaf) and id(leaf) not in known]
        for fqn, parameter in part.shared.items():
            seed([parameter], [self.parameter_gradients.pop((fqn, i), None)])
        return part

    def _hand_back(
        self,
        part: _Part,
        found: dict[int, torch.Tensor | None],
        late: Callable[[], list[torch.Tensor | None]] | None,
    ) -> None:
        """Give the gradients to those who wait for them. That of a parameter is taken by the first micro-batch."""
        stage, i = part.stage, part.micro_batch
        handed: set[int] = set()
        new: dict[str, None] = {}
        for name, leaves in part.record.inputs.items():
            if leaves and all(id(leaf) in handed for leaf in leaves):
                continue  # another name of the same leaf
            handed |= {id(leaf) for leaf in leaves}
            gradients = [found[id(leaf)] if _has_grad(leaf) else None for leaf in leaves]
            homes = part.record.homes[name]
            row = [
                g if g is None or d is None else self.lanes.move(g, d)
                for g, d in zip(gradients, homes, strict=True)
            ]
            tensor = self._tensor(name, i)
            self.gradients[tensor, i] = _sum(self.gradients[tensor, i], row) if tensor in new else row
            new[tensor] = None
        for fqn, leaf in part.shared.items():
            gradient = found.pop(id(leaf), None)
            if self.chains[fqn][0] == stage.index:
                self._add(fqn, i, gradient)
            elif gradient is not None:
                self.parameter_gradients[fqn, i] = gradient
        own = {fqn: found.pop(id(leaf), None) for fqn, leaf in part.alone.items()}
        if late is not None:
            for fqn in [fqn for fqn, p in part.alone.items() if not p.requires_grad]:
                self._add(fqn, i, own.pop(fqn))
            self.weight_halves[stage.index, i] = _WeightHalf(own, late)
            return
        for fqn, gradient in own.items():
            self._add(fqn, i, gradient)

    def _add(self, fqn: str, micro_batch: int, gradient: torch.Tensor | None) -> None:
        """Add to the gradient of a parameter, where the parameter is, in the order of micro-batches."""
        if gradient is not None:
            gradient = self.lanes.move(gradient, self.parameters[fqn].device)
        with self.lanes.adding(gradient):
            self.sums[fqn].add(micro_batch, gradient)

    def _check_gradients(self, part: _Part, found: dict[int, torch.Tensor | None]) -> None:
        """Look for anomalies in what a backward has found: of the inputs first, then of the parameters."""
        kind = self.how.anomaly
        if kind is None or not is_bad(list(found.values()), kind):
            return
        named = [(name, leaf) for name, row in part.record.inputs.items() for leaf in row if _has_grad(leaf)]
        named += [*part.shared.items(), *part.alone.items()]
        bad = [name for name, leaf in named if is_bad(found.get(id(leaf)), kind)]
        if bad:
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
            self._add(fqn, action.micro_batch, late if early is None else early)

    def _is_halved(self, stage: Stage, micro_batch: int) -> bool:
        """Whether weights can wait: what is computed again for the inputs is there for the weights too."""
        recomputed = self._is_recomputed(micro_batch) and any(region_modules(stage.module))
        return stage.index in self.halved and not recomputed and not stage.rng_state

    # -- values ------------------------------------------------------------------------------------------------

    def _tensor(self, name: str, i: int) -> str:
        """The value under whose name the gradient of this one goes: of several names of one tensor the first."""
        return self.same.get((name, i), name)

    def _note_aliases(self, record: _Record, i: int) -> None:
        """Which of the values that a stage gives are one tensor, in this micro-batch."""
        if not self.program.aliases:
            return
        known: dict[int, str] = {}
        for name, leaves in (*record.inputs.items(), *record.outputs.items()):
            if len(leaves) == 1 and isinstance(leaves[0], torch.Tensor):
                first = known.setdefault(id(leaves[0]), self._tensor(name, i))
                if first != name and name in self.program.aliases:
                    self.same[name, i] = first

    def _inputs(self, stage: Stage, i: int) -> dict[str, Any]:
        """The inputs of a stage; several names of one tensor are one leaf."""
        taken: dict[str, Any] = {}
        inputs = {}
        for name in stage.inputs:
            value = self._take(name, i, stage.index)
            inputs[name] = taken.setdefault(self._tensor(name, i), value)
        return inputs

    def _receive(self, name: str, i: int, row: list[torch.Tensor | None]) -> None:
        """Gradients of an output of the model, before anybody else's."""
        key = self._tensor(name, i), i
        self.gradients[key] = _sum(self.gradients[key], row) if key in self.gradients else row

    def _publish(self, name: str, i: int, value: Any) -> None:
        """Make a value readable for later stages: detached, and marked with whether it needs a gradient."""
        readers = len(self.readers[name]) + (name in self.results)
        if readers:
            self.values[name, i] = tree_map(_handed_over, value)
            self.unread[name, i] = readers

    def _take(self, name: str, i: int, stage: int) -> Any:
        """A leaf of its own for this reader; the value is dropped after the last one."""
        value = tree_map(_handed_over, self.values[name, i])
        self.lanes.uses(stage, i, tree_leaves(value))
        with self.lock:
            self.unread[name, i] -= 1
            if not self.unread[name, i]:
                del self.values[name, i]
        return value

    def _at_home(self, name: str, value: Any) -> Any:
        """A leaf where the device map sends it, or the first replica of its stage is: the loss is computed there."""
        maker = self.made_by[name]
        if maker < 0 or not (name in self.program.homes or self.program.stages[maker].is_apart):
            return value
        home = self.program.homes.get(name, self.program.stages[maker].device)

        def moved(leaf: Any) -> Any:
            return _handed_over(self.lanes.move(leaf, home)) if isinstance(leaf, torch.Tensor) else leaf

        return tree_map(moved, value)

    # -- replicas ------------------------------------------------------------------------------------------------

    def _replica(self, action: Action) -> Replica:
        row = self.replicas[action.stage]
        return row[action.micro_batch % len(row)]

    def _device(self, action: Action) -> torch.device:
        return self._replica(action).device

    # -- circumstances -------------------------------------------------------------------------------------------

    def _is_recomputed(self, micro_batch: int) -> bool:
        if self.how.checkpoint == "except_last":
            return micro_batch > 0  # the first goes backward first: what it keeps is soon free
        return bool(self.how.checkpoint != "never")  # chosen regions are recomputed in every micro-batch

    def _norms(self, stage: Stage, i: int) -> tuple[contextlib.AbstractContextManager[Any], Again]:
        """What is around the computation of a stage whose batch normalisation is put off, and around later ones."""
        if self.norms is None:
            return contextlib.nullcontext(), lambda: contextlib.nullcontext
        norming = self.norms.around(stage, i, meets=stage.index in self.how.rounds)
        return norming, norming.again

    def _random_numbers(self, stage: Stage, i: int) -> contextlib.AbstractContextManager[object]:
        if self.seed is None or stage.index not in self.how.drawing:
            return contextlib.nullcontext()
        if stage.rng_state:  # a checkpoint of the user's saves and restores the default generator's own state
            return seeded(self.seed.of(i, stage.index), stage.device)
        return Stream(functools.partial(self.seed.of, i, stage.index))

    def _as_said(self, stage: Stage, replica: Replica) -> contextlib.AbstractContextManager[None]:
        if (
            stage.index not in self.how.watched or stage.index in self.how.rounds
        ):  # copies that meet see to it themselves
            return contextlib.nullcontext()
        return as_said(stage, replica.module)

    @contextlib.contextmanager
    def _seeded(self) -> Iterator[None]:
        """The part of a call in which it draws random numbers for the first time, where it does."""
        try:
            yield
        finally:
            if self.seed is not None:
                self.seed.settle()

    def _rows(self, action: Action) -> str:
        """How many rows it has, where micro-batches are cut."""
        rows = self.how.rows(self.chunks[action.micro_batch])
        return f" ({rows} row{'s' * (rows != 1)})" if rows else ""

    @contextlib.contextmanager
    def _errors_say_where(self, action: Action) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            stage = self.program.stages[action.stage]
            what = {"F": "forward", "W": "backward (weights)"}.get(action.kind, "backward")
            first, last = stage.modules
            span = first if first == last else f"{first} … {last}"
            count = len(self.replicas[action.stage])
            replica = f"replica {action.micro_batch % count} of {count}, " if count > 1 else ""
            error.add_note(
                f"fxsplit: in the {what} of stage {action.stage} ({span or 'the model'}, on {self._device(action)}), "
                f"{replica}micro-batch {action.micro_batch} of {len(self.chunks)}{self._rows(action)}, "
                f"action {action}{users_line(error)}"
            )
            raise


def _home(leaf: Any) -> torch.device | None:
    return leaf.device if isinstance(leaf, torch.Tensor) else None


def _sum(
    first: Sequence[torch.Tensor | None], second: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    return [b if a is None else a if b is None else a + b for a, b in zip(first, second, strict=True)]


def _has_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _handed_over(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)
