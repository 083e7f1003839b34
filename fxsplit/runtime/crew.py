"""Who plays a program: the schedule of a batch, the replicas of stages, and which micro-batches meet."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from ..batch.merge import sizes
from ..batchnorm.deferred import DeferredNorms, batch_counters
from ..batchnorm.synchronised import SyncNorms
from ..compat import modes_in_force
from ..errors import ArgumentError, BatchError
from ..graph.effects import draws_now, rated_layers
from ..graph.flow import flow_of
from ..graph.ir import Program
from ..graph.nodes import resolve
from ..plan.plan import Plan
from ..replicas.meet import meets_of, owners_of
from ..replicas.replicas import Company, Replica, Replicas
from ..schedules.check import check_schedule
from ..schedules.lower import lower
from ..schedules.schedule import Schedule
from ..schedules.tape import Tape
from .allocator import keep_pages
from .call import Call
from .unsaid import Shared, has_whole, shared_objects
from .wiring import Wiring

# The model → the copies that its modules talk to, where they do.
_LATEST: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Company]] = weakref.WeakKeyDictionary()


class Crew:
    """What the calls of one program have in common.

    Args:
        company: the copies of the model, which it shares with the program of the other mode.
        left: threads that wait for a copy that has failed, in calls of either.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, program: Program, company: Company, left: list[threading.Thread]
    ) -> None:
        self._model, self._plan, self._program = model, plan, program
        self._tapes: dict[tuple[int, frozenset[tuple[int, int]]], Tape] = {}
        self.wiring = Wiring(program)
        self._kept = False  # whether workers keep the memory that they free
        self._replicas: Replicas | None = None
        self._generation = 0
        self._company, self._left = company, left
        self._rates = {
            s.index: [row for path in s.rates for row in rated_layers(resolve(model, path))]
            for s in program.stages
        }
        self._random = [s for s in program.stages if s.random]
        self._shared = shared_objects(program)
        several = _on_several_workers(plan)
        self._watched = frozenset(
            s.index
            for s in program.stages
            if (len(s.row) > 1 or s.index in several) and not s.stateful and has_whole(s)
        )
        # The number of micro-batches is a multiple of this: copies of a module are called equally often.
        self._told = [len(s.row) for s in program.stages if owners_of(model, s)]
        self._equally = math.lcm(*self._told)

    def rows(self, batch: int | None) -> list[int]:
        """The rows of each micro-batch of a batch; a single one where there is no batch.

        Raises:
            BatchError: some of the copies of a module would be called more often than others.
        """
        each = self._equally
        count = min(batch or 0, self._plan.micro_batches) // each * each
        if each > 1 and not count:
            raise BatchError(
                f"{'an input without rows' if batch is None else f'a batch of {batch}'} cannot be shared out evenly to "
                f"{each} replicas, whose modules have replication callbacks and may wait for each other",
                remedy=f"{each} rows or more, or pipe.unsplit()",
            )
        return [1] if batch is None else sizes(batch, max(count, 1))

    def schedule_for(self, micro_batches: int, meets: Mapping[int, int]) -> Schedule:
        """The schedule of a batch that is split into this many micro-batches, some of which meet."""
        # Where all micro-batches meet, each has a worker of its own.
        workers = [max(len(s.row), meets.get(s.index, 1)) for s in self._program.stages]
        return self._plan.schedule_for(len(workers), micro_batches, workers)

    @property
    def tapes(self) -> list[Tape]:
        """Those that were made so far; that of the example was when the program was."""
        return list(self._tapes.values())

    def tape_for(self, micro_batches: int, meets: Mapping[int, int]) -> Tape:
        """Its tape, proven; made once."""
        key = micro_batches, frozenset(meets.items())
        if key not in self._tapes:
            schedule = self.schedule_for(micro_batches, meets)
            check_schedule(schedule, len(self._program.stages), micro_batches)
            flow = flow_of(self._program, self._plan.recomputation)
            loss = self._plan.loss_inside and micro_batches > 1
            self._tapes[key] = tape = lower(schedule, flow, meets, loss=loss)
            if not self._kept and sum(map(bool, tape.workers)) > 1:
                self._kept = True
                keep_pages(self)
        return self._tapes[key]

    def meets(self, micro_batches: int) -> dict[int, int]:
        """Stage → how many of its micro-batches meet, in the modes in which the modules are now."""
        if micro_batches == 1 or not (self._told or self._plan.sync_batch_norm):
            return {}
        return meets_of(self._model, self._plan, self._program, micro_batches)

    def replicas(self) -> Replicas:
        """What the replicas of stages run; made when first asked for, and when the model has other modules.

        Raises:
            ArgumentError: a later pipeline of the same model has told its copies.
        """
        company = self._company
        if not company.is_current():
            company.give_up()
        if self._replicas is None or self._generation != company.generation:
            self._replicas = Replicas(self._model, self._program, company)
            self._generation = company.generation
            _LATEST[self._model] = weakref.ref(company)
        elif self._equally > 1 and _LATEST[self._model]() is not company:
            raise ArgumentError(
                "another pipeline was compiled from this model since, and the modules of the model that talk to their "
                "copies now talk to those",
                remedy="one pipeline at a time; compile again",
            )
        return self._replicas

    def drawing(self) -> frozenset[int]:
        """The stages that may draw random numbers in a call, by the rates and modes of their layers now."""
        if not self._random:
            return frozenset()
        return frozenset(
            s.index
            for s in self._random
            if not s.rates or any(itertools.starmap(draws_now, self._rates[s.index]))
        )

    def watching(self, micro_batches: int) -> tuple[Sequence[Shared], frozenset[int]]:
        """What several stages can see, and stages whose modules are looked at, because replicas run at the same time."""
        return (self._shared, self._watched) if micro_batches > 1 else ((), frozenset())

    def refresh(self) -> None:
        """Copy everything anew in the next call, whether it seems to have changed or not."""
        for tree in self._company.trees.values():
            tree.forget()

    def check_can_meet(self, meets: Mapping[int, int]) -> None:
        """Refuse a call in which micro-batches could not wait for each other.

        Raises:
            ArgumentError: somebody else still waits, or a mode is in force.
        """
        if self._left and any(thread.is_alive() for thread in self._left):
            raise ArgumentError(
                "copies of a module still wait, since a call of the pipeline in which another one failed, and would take "
                "what the copies of this call say to each other",
                remedy="make the model anew; or end their wait, in the module",
            )
        if meets and modes_in_force():
            raise ArgumentError(
                "micro-batches that meet have threads of their own, but a TorchFunctionMode or TorchDispatchMode is in force",
                remedy="leave the mode, or call pipe.unsplit() in it",
            )

    @contextlib.contextmanager
    def anew_after_failure(self, call: Call) -> Iterator[None]:
        """Copies that were talking to each other when one failed are not talked to again."""
        try:
            yield
        except BaseException:
            if call.tape.meets:
                self._company.give_up()
                self._left += call.left
            raise

    def norms(
        self, meets: Mapping[int, int], replicas: Mapping[int, Sequence[Replica]]
    ) -> DeferredNorms | None:
        """What keeps the statistics of batch normalisation in a call, where the plan says so."""
        if not (self._plan.deferred_batch_norm or self._plan.sync_batch_norm):
            return None
        counters = batch_counters(self._model)
        norms = SyncNorms(counters, meets) if self._plan.sync_batch_norm else DeferredNorms(counters)
        norms.follow(self._originals(replicas))
        return norms

    def _originals(self, replicas: Mapping[int, Sequence[Replica]]) -> dict[int, torch.Tensor]:
        """Buffers of replicas that are copies → what they are copies of."""
        every = [replica for row in replicas.values() for replica in row]
        return {
            id(copy): resolve(self._model, name)
            for replica in every
            for name, copy in replica.buffers.items()
        }


def _on_several_workers(plan: Plan) -> set[int]:
    """The stages with which a schedule of the user's own lets several workers go forward."""
    if not isinstance(plan.schedule, Schedule):
        return set()
    rows = [{a.stage for a in row if a.kind == "F"} for row in plan.schedule.workers]
    counts = Counter(itertools.chain.from_iterable(rows))
    return {stage for stage, count in counts.items() if count > 1}
