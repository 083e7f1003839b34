"""One call of a pipeline: its circumstances, and what its instructions leave for each other."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..batchnorm.deferred import DeferredNorms
from ..compat import tree_leaves
from ..compiled import Compiled
from ..inserted.recompute import Around
from ..loss.inside import LossInside
from ..plan.checkpoint import Checkpoint
from ..replicas.meeting import Meetings
from ..replicas.replicas import Replica
from ..replicas.sums import OrderedSum
from ..schedules.tape import Instruction, Tape
from .blame import users_line, what_takes_less
from .device import lanes_of
from .events import Listener
from .fetching import Fetching
from .hub import Here
from .travel import Travelling
from .unsaid import Shared
from .values import Values
from .wiring import Wiring

Terms = Sequence[torch.Tensor | None]
_NUMBERS = itertools.count()


@dataclass
class Record:
    """What a forward leaves for the backward of the same stage and micro-batch.

    Attributes:
        inputs: name → flat leaves on the stage's device, detached.
        homes: id of such a leaf → where it came from, if from another device: its gradient goes back there.
        outputs: name → flat leaves, with their graph.
    """

    inputs: dict[str, list[Any]]
    homes: dict[int, torch.device]
    outputs: dict[str, list[Any]]


@dataclass(frozen=True)
class Owned:
    """The parameters that a replica of a stage reads and that get gradients, as autograd sees them there.

    Attributes:
        alone: those that no other stage reads.
        shared: those that others read too.
        owns: of these, the ones whose gradient is complete with this stage's.
    """

    alone: Mapping[str, torch.Tensor]
    shared: Mapping[str, torch.Tensor]
    owns: frozenset[str]


@dataclass(frozen=True)
class Circumstances:
    """How a call is played.

    Attributes:
        grad: whether a backward may follow.
        checkpoint: which micro-batches are recomputed.
        inside: entered by each worker.
        intra_op: threads of each worker inside of an operation; None to share the caller's out.
        serial: play everything in the calling thread.
        compiled_as: what the compiler made: the program that is played, and what it was made of.
        listeners: called after every instruction.
        norms: keeps the statistics of batch normalisation, where its update is put off.
        drawing: stages that may draw random numbers.
        halved: stages that can go backward in two.
        shared: what modules of several stages can see.
        watched: stages whose modules are looked at, because replicas run at the same time.
        anomaly: ``"nan"`` or ``"inf"``: what to look for in values and gradients.
        rows: of a micro-batch's inputs, for messages; None where there is no batch.
        compiled: whether the stages are, by `torch.compile`.
        asked: whether to compare what forward asked of values when it was captured.
        hub: where the stages are.
    """

    grad: bool
    checkpoint: Checkpoint
    compiled_as: Compiled
    inside: Around = contextlib.nullcontext
    intra_op: int | None = None
    serial: bool = False
    listeners: Sequence[Listener] = ()
    norms: DeferredNorms | None = None
    drawing: frozenset[int] = frozenset()
    halved: frozenset[int] = frozenset()
    shared: Sequence[Shared] = ()
    watched: frozenset[int] = frozenset()
    anomaly: str | None = None
    rows: Callable[[Sequence[torch.Tensor]], int | None] = lambda inputs: None
    compiled: bool = False
    asked: bool = False
    hub: Here = field(default_factory=Here)


class Call:
    """The values and gradients of one call, for all its micro-batches.

    Args:
        tape: what is played, in a call or in a step.
        chunks: per micro-batch the flat tensor inputs.
        parameters: FQN → parameter, those that get gradients.
        how: the circumstances.
        replicas: of each stage.
    """

    def __init__(
        self,
        wiring: Wiring,
        tape: Tape,
        chunks: Sequence[Sequence[torch.Tensor]],
        parameters: dict[str, nn.Parameter],
        how: Circumstances,
        replicas: Mapping[int, Sequence[Replica]],
    ) -> None:
        self.number = next(_NUMBERS)  # of all calls in this process
        self.wiring, self.program, self.tape = wiring, wiring.program, tape
        self.chunks, self.parameters, self.how, self.replicas = chunks, parameters, how, replicas
        stages, several = self.program.stages, len(chunks) > 1
        # One micro-batch leaves nothing to overlap: the caller's own thread and random numbers.
        self.serial = how.serial or not several
        self.norms = how.norms if several else None
        self.seed = how.hub.seed(several=several) if how.drawing else None
        self.values = Values(wiring.readers if how.hub.everything else how.hub.readers(wiring, tape))
        self.records: dict[tuple[int, int], Record] = {}
        self.put_off: dict[tuple[int, int], Callable[[], Terms]] = {}
        self.meetings = Meetings()
        self.left: list[threading.Thread] = []
        self.sums: dict[int, OrderedSum] = {}  # of the parameters that a stage reads alone
        self.homes: dict[int, list[torch.device]] = {}  # and where these are
        self.sums_of_shared: dict[str, OrderedSum] = {}
        self.keep_graph = False
        self.loss: LossInside | None = None
        self.lanes = lanes_of([s.row for s in stages], tape.meets)
        self.written = Travelling(replicas, self.lanes)
        away = {s: row[0].offloaded for s, row in replicas.items() if row[0].offloaded is not None}
        self.fetching = Fetching(away, self.lanes) if away else None
        self.turns: dict[int, threading.Lock] = {}
        if how.checkpoint.anything:
            self.turns = {s: threading.Lock() for s in wiring.writing if s not in tape.meets}
        self._owned: dict[tuple[int, int], Owned] = {}
        for i, chunk in enumerate(chunks):
            for name, value in zip(self.program.inputs, chunk, strict=True):
                self.values.give(name, i, value)

    def results(self) -> list[list[Any]]:
        """Per micro-batch the flat outputs, without graph; none in a process that has not the last stage."""
        if not (self.how.hub.everything or self.how.hub.has(len(self.program.stages) - 1)):
            return []
        rows = [self.values.results(self.program.outputs, i) for i in range(len(self.chunks))]
        self.values.forget()
        if self.lanes.has_queues:
            self.lanes.leaves(tree_leaves(rows))
        return rows

    def input_gradient(self, name: str, micro_batch: int) -> torch.Tensor | None:
        """The gradient of one graph input of one micro-batch."""
        found = self.values.gradient(name, micro_batch)
        if found and self.lanes.has_queues:
            self.lanes.leaves(found)
        return found[0] if found else None

    def parameter_gradients(self) -> list[torch.Tensor | None]:
        """Those of `parameters`: sums over all micro-batches, added in their order."""
        totals = {fqn: total.total()[0] for fqn, total in self.sums_of_shared.items()}
        for stage, total in self.sums.items():
            totals.update(zip(self.owned(stage, 0).alone, total.total(), strict=True))
        found = [totals.get(fqn) for fqn in self.parameters]
        if self.lanes.has_queues:
            self.lanes.leaves(found)
        return found

    def begin_sums(self) -> None:
        """Nothing has been added to the gradients of parameters."""
        count = len(self.chunks)
        for role in self.wiring.roles:
            if not (self.how.hub.everything or self.how.hub.has(role.stage.index)):
                continue
            owned = self.owned(role.stage.index, 0)
            if owned.alone:
                self.sums[role.stage.index] = OrderedSum(count, len(owned.alone))
                self.homes[role.stage.index] = [self.parameters[fqn].device for fqn in owned.alone]
            self.sums_of_shared.update((fqn, OrderedSum(count, 1)) for fqn in owned.owns)

    def release(self) -> None:
        """Drop the gradients that the caller has taken."""
        self.values.forget_gradients()
        self.sums, self.sums_of_shared = {}, {}

    # -- what instructions ask -----------------------------------------------------------------------------------

    def replica(self, stage: int, micro_batch: int) -> Replica:
        """Who computes it."""
        row = self.replicas[stage]
        return row[micro_batch % len(row)]

    def owned(self, stage: int, micro_batch: int) -> Owned:
        """The parameters of the replica that computes it."""
        key = stage, micro_batch % len(self.replicas[stage])
        if key not in self._owned:
            role, here, known = self.wiring.roles[stage], self.replica(*key).leaves, self.parameters
            self._owned[key] = Owned(
                {fqn: here.get(fqn, known[fqn]) for fqn in role.alone if fqn in known},
                {fqn: here.get(fqn, known[fqn]) for fqn, _ in role.shared if fqn in known},
                frozenset(fqn for fqn, owns in role.shared if owns and fqn in known),
            )
        return self._owned[key]

    def is_halved(self, stage: int, micro_batch: int) -> bool:
        """Whether weights can wait: what is computed again for the inputs is there for the weights too."""
        role = self.wiring.roles[stage]
        recomputed = role.regions and self.how.checkpoint.recomputes(micro_batch)
        halved = stage in self.how.halved and stage not in self.tape.meets
        return halved and not recomputed and not role.stage.rng_state

    def add(self, stage: int, micro_batch: int, terms: Terms) -> None:
        """Add to the gradients of the parameters that no other stage reads, in the order of micro-batches."""
        if terms:
            self._add(self.sums[stage], self.homes[stage], micro_batch, terms)

    def add_shared(self, micro_batch: int, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """The same for parameters that others read too, which this stage was the last to go backward through."""
        for fqn, gradient in gradients.items():
            home = self.parameters[fqn].device
            self._add(self.sums_of_shared[fqn], (home,), micro_batch, (gradient,))

    def _add(self, total: OrderedSum, homes: Sequence[torch.device], micro_batch: int, terms: Terms) -> None:
        """Where the parameters are."""
        moved = [
            g if g is None or g.device == home else self.lanes.move(g, home)
            for g, home in zip(terms, homes, strict=True)
        ]
        if not self.lanes.has_queues:
            total.add(micro_batch, moved)
            return
        with contextlib.ExitStack() as adding:
            for term in moved:
                adding.enter_context(self.lanes.adding(term))
            total.add(micro_batch, moved)

    # -- who waits for others --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Nobody waits for another micro-batch any more."""
        self.meetings.close()
        if self.norms is not None:
            self.norms.close()

    def leave(self, thread: threading.Thread) -> None:
        """A worker waits for ever for a copy that has failed."""
        self.left.append(thread)

    # -- what is said ----------------------------------------------------------------------------------------------

    def device_of(self, instruction: Instruction) -> torch.device:
        """Where it is played."""
        return self.replica(instruction.stage, instruction.micro_batches[0]).device

    def where(self, instruction: Instruction, error: BaseException) -> str:
        """What was done, where, when an error came."""
        stage, i = self.program.stages[instruction.stage], instruction.micro_batches[0]
        what = {"forward": "forward", "loss": "loss, before the backward", "weights": "backward (weights)"}
        first, last = stage.modules
        span = first if first == last else f"{first} … {last}"
        count = len(self.replicas[stage.index])
        replica = f"replica {i % count} of {count}, " if count > 1 else ""
        rows = self.how.rows(self.chunks[i])
        size = f" ({rows} row{'s' * (rows != 1)})" if rows else ""
        return (
            f"fxsplit: in the {what.get(instruction.kind, 'backward')} of stage {stage.index} "
            f"({span or 'the model'}, on {self.device_of(instruction)}), "
            f"{replica}micro-batch {i} of {len(self.chunks)}{size}, "
            f"action {instruction}{users_line(error)}{what_takes_less(error)}"
        )
