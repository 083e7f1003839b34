"""From a schedule, and what travels between stages, to the tape.

Gradients of a value go from its last reader to the one before it, and so on to the stage that made it, so that they are
added in the order in which autograd adds them in the unsplit model. For a value that stage 0 makes and 1, 2 and 3 read::

    forward    0 ──▶ 1      0 ──▶ 2      0 ──▶ 3           each reader comes after the maker
    backward   0 ◀── 1 ◀── 2 ◀── 3                         each comes after the next one in the chain
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import ScheduleError
from .schedule import Action, Schedule
from .tape import Instruction, Kind, Tape

_KINDS: Mapping[str, Kind] = {"F": "forward", "B": "backward", "I": "inputs", "W": "weights"}
Chain = Sequence[int]


@dataclass(frozen=True)
class Flow:
    """What travels between stages, and which of them take their micro-batches in turn.

    Attributes:
        stages: how many there are.
        values: for each value that travels, the stage that makes it and those that read it, in order.
        gradients: for each argument and parameter, the stages that read it, in order.
        outputs: the stages that make what the loss is of.
        in_turn: stages that have to go forward with their micro-batches one after the other, in order.
        again_in_turn: and backward, because they go forward again then.
        read_back: stages whose backward may read what their forward writes: replicas of them, which share it, never do
            one while another does the other.
    """

    stages: int
    values: Sequence[Chain]
    gradients: Sequence[Chain] = ()
    outputs: frozenset[int] = frozenset()
    in_turn: frozenset[int] = frozenset()
    again_in_turn: frozenset[int] = frozenset()
    read_back: frozenset[int] = frozenset()


def lower(
    schedule: Schedule, flow: Flow, meets: Mapping[int, int] | None = None, *, loss: bool = False
) -> Tape:
    """The tape of a schedule.

    Args:
        meets: stage → how many of its micro-batches meet there, one round after the other: they go forward at the same
            time, each in a worker of its own, and backward as one, in the worker that can begin first; they take no turns.
        loss: whether the loss of each micro-batch is computed before the last stage goes backward with it.

    Raises:
        ScheduleError: workers wait for each other for ever.
    """
    return _Lowering(schedule, flow, meets or {}, loss=loss).tape()


class _Lowering:
    """Plays a schedule with a single worker, and writes down what it does."""

    def __init__(self, schedule: Schedule, flow: Flow, meets: Mapping[int, int], *, loss: bool) -> None:
        self.schedule, self.flow, self.meets, self.loss = schedule, flow, meets, loss
        self.makers: list[set[int]] = [set() for _ in range(flow.stages)]  # of what a stage reads
        self.followers: list[set[int]] = [set() for _ in range(flow.stages)]  # in chains of gradients
        for maker, *reading in flow.values:
            for reader in reading:
                self.makers[reader].add(maker)
        for chain in itertools.chain(flow.values, flow.gradients):
            for earlier, later in itertools.pairwise(chain):
                self.followers[earlier].add(later)
        self.everything = {action for row in schedule.workers for action in row}
        self.made: list[Instruction] = []
        self.number: dict[Action, int] = {}
        self.player: list[int] = []  # number → worker
        self.losses: dict[int, int] = {}  # micro-batch → number
        self.directions: dict[tuple[int, bool], list[int]] = {}  # stage, whether forward → numbers
        self.rows: list[list[Instruction]] = [[] for _ in schedule.workers]
        self.arrived: dict[Action, int] = {}  # who waits for those that it meets → in which worker
        self.elsewhere: list[list[int]] = [
            [] for _ in schedule.workers
        ]  # played by others in a worker's stead

    def tape(self) -> Tape:
        position = [0] * len(self.rows)
        while True:
            moved = False
            for w, actions in enumerate(self.schedule.workers):
                while position[w] < len(actions) and self._play(w, actions[position[w]]):
                    position[w] += 1
                    moved = True
            waiting = [a[k] for a, k in zip(self.schedule.workers, position, strict=True) if k < len(a)]
            if not waiting:
                return Tape(
                    tuple(self.made), tuple(map(tuple, self.rows)), self.schedule.labels, dict(self.meets)
                )
            if not moved:
                raise self._stuck(waiting[0])

    def _play(self, worker: int, action: Action) -> bool:
        """Whether it is done: it was before, or can be now."""
        if action in self.number:
            if self.player[self.number[action]] != worker:
                self.elsewhere[worker].append(self.number[action])
            return True
        together = self._members(action)
        before = [n for member in together for n in self._before(member) if n not in together]
        if any(n not in self.number for n in before) or self._waits_for_loss(together):
            return False
        self.arrived[action] = worker
        if action.kind == "F":
            return self._forward(together, before)
        if self.loss and action.kind != "W" and action.stage == self.flow.stages - 1:
            for i in sorted({a.micro_batch for a in together}):
                self.losses[i] = self._write(worker, "loss", action.stage, (i,), self._outputs(i))
        joint = [action] if action.kind == "W" else together
        micro_batches = tuple(a.micro_batch for a in joint)
        number = self._write(worker, _KINDS[action.kind], action.stage, micro_batches, before)
        self.number.update(dict.fromkeys(joint, number))
        return True

    def _waits_for_loss(self, together: Sequence[Action]) -> bool:
        backward = self.loss and together[0].kind in ("B", "I") and together[0].stage != self.flow.stages - 1
        return backward and any(a.micro_batch not in self.losses for a in together)

    def _forward(self, together: Sequence[Action], before: Sequence[Action]) -> bool:
        """Whether all that meet could begin."""
        if any(member not in self.arrived for member in together):
            return False
        first = len(self.made)
        beside = tuple(range(first, first + len(together))) if len(together) > 1 else ()
        for member in together:
            row, i = self.arrived[member], member.micro_batch
            self.number[member] = self._write(row, "forward", member.stage, (i,), before, beside)
        return True

    def _write(
        self,
        worker: int,
        kind: Kind,
        stage: int,
        micro_batches: tuple[int, ...],
        before: Iterable[Action],
        beside: tuple[int, ...] = (),
    ) -> int:
        after = {self.number[a] for a in before} | {*self.elsewhere[worker]}
        if kind in ("backward", "inputs"):
            after |= {self.losses[i] for i in micro_batches if i in self.losses}
        number = len(self.made)
        if stage in self.flow.read_back and stage not in self.meets and kind != "loss":
            against = self.directions.get((stage, kind != "forward"), ())
            after.update(n for n in against if self.player[n] != worker)
            self.directions.setdefault((stage, kind == "forward"), []).append(number)
        made = Instruction(kind, stage, micro_batches, tuple(sorted(after)), beside, number)
        self.made.append(made)
        self.player.append(worker)
        self.rows[worker].append(made)
        self.elsewhere[worker].clear()
        return number

    def _members(self, action: Action) -> list[Action]:
        """The same action of all micro-batches that meet with this one, itself among them."""
        size = self.meets.get(action.stage)
        if size is None:
            return [action]
        first = action.micro_batch // size * size
        return [action._replace(micro_batch=i) for i in range(first, first + size)]

    def _before(self, action: Action) -> list[Action]:
        """What has to be done before, of what is played at all."""
        kind, stage, i = action
        if kind == "W":
            return [Action("I", stage, i)]
        sources = self.makers[stage] if kind == "F" else self.followers[stage]
        before = [Action(kind, s, i) for s in sorted(sources)]
        if kind != "F":
            before.append(Action("F", stage, i))
            if self.loss and stage == self.flow.stages - 1:
                before += self._outputs(i)
        turns = self.flow.in_turn if kind == "F" else self.flow.again_in_turn
        if i > 0 and stage in turns and stage not in self.meets:
            before.append(Action(kind, stage, i - 1))
        return [a for a in before if a in self.everything]

    def _outputs(self, i: int) -> list[Action]:
        """What the loss of a micro-batch is of."""
        last = self.flow.stages - 1
        return [Action("F", s, i) for s in sorted(self.flow.outputs | {last})]

    def _stuck(self, action: Action) -> ScheduleError:
        together = self._members(action)
        wanted = [n for member in together for n in self._before(member)] + together
        missing = dict.fromkeys(str(a) for a in wanted if a not in self.number and a != action)
        return ScheduleError(
            f"the schedule can never finish: {action} waits for {', '.join(missing)}", where=str(action)
        )
