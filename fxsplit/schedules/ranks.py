"""From one tape to that of each rank: who sends what to whom, after what, and who waits for it, before what.

Two stages on two ranks, 1F1B of two micro-batches; what a rank does is one row, in the order of simulated time::

    rank 0   0F0 send▶  0F1 send▶  ............  ▶receive 0B0  ▶receive 0B1
    rank 1   ▶receive 1F0 1L0 1B0 send▶  ▶receive 1F1 1L1 1B1 send▶

Messages have one order for all ranks, in which each rank sends and expects its own. So a send that waits until it is
received never waits for ever, and what arrives needs neither tag nor name: both ends know what comes next.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import ScheduleError
from .lower import Chain
from .simulate import length_of
from .tape import Instruction, Packet, Tape

_BACK = ("backward", "inputs")


@dataclass(frozen=True)
class Routes:
    """The ways of values forward and of gradients back, by name.

    Attributes:
        values: each value: the stage that makes it (-1: the caller), and those that read it, in order.
        parameters: each parameter: the stages that read it.
        aliases: the first name of a tensor that has several → the stages that make and read any of them.
        results: values that the loss is of; it is computed where the last stage is.
        last: the last stage.
    """

    values: Mapping[str, Chain]
    last: int
    parameters: Mapping[str, Chain] = field(default_factory=dict)
    aliases: Mapping[str, Chain] = field(default_factory=dict)
    results: frozenset[str] = frozenset()

    def hops(self) -> Iterator[tuple[str, int, int]]:
        """Value, stage that has gone backward, stage that goes on with its gradient. The loss is stage ``last + 1``."""
        for name, chain in itertools.chain(self.values.items(), self.aliases.items()):
            row = [s for s in chain if s >= 0]
            if name in self.results:
                row.append(self.last + 1)
            yield from ((name, b, a) for a, b in itertools.pairwise(row))


def tapes_of_ranks(tape: Tape, rank_of: Sequence[int], routes: Routes) -> tuple[Tape, ...]:
    """What each rank plays.

    Args:
        tape: of all stages; none of them meet.
        rank_of: by stage.

    Raises:
        ScheduleError: messages would wait for each other for ever.
    """
    made = _Ranks(tape, rank_of, routes).tapes()
    check_messages(made)
    return made


class _Ranks:
    def __init__(self, tape: Tape, rank_of: Sequence[int], routes: Routes) -> None:
        self.tape, self.rank_of, self.routes = tape, [*rank_of, rank_of[routes.last]], routes
        self.count = max(rank_of) + 1
        self.rows: list[list[Instruction]] = [[] for _ in range(self.count)]
        # What has come, and has not been waited for yet: rank → the packet's instruction.
        self.coming: list[list[Instruction]] = [[] for _ in range(self.count)]
        self.sent = 0
        self.has_loss = any(x.kind == "loss" for x in tape.order)

    def tapes(self) -> tuple[Tape, ...]:
        order = self._in_time()
        turned = False
        for n, x in enumerate(order):
            if not turned and not x.is_forward and not self.has_loss:
                turned = True
                self._turn(order[n:])
            rank = self.rank_of[x.stage]
            self._receive(rank, x)
            self.rows[rank].append(x)
            self._send(x)
        for rank, left in enumerate(self.coming):  # results that the caller waits for
            self.rows[rank] += left
        return tuple(self._numbered(rank) for rank in range(self.count))

    def _in_time(self) -> list[Instruction]:
        """By the end of each, if a rank is one worker and a backward is twice as long as a forward."""
        free = [0] * self.count
        end: dict[int, int] = {}
        for x in self.tape.order:
            rank = self.rank_of[x.stage]
            start = max([free[rank], *(end.get(n, 0) for n in x.after)])
            end[x.number] = free[rank] = start + length_of(x)
        return sorted(self.tape.order, key=lambda x: (end[x.number], x.number))

    def _send(self, x: Instruction) -> None:
        if x.kind == "forward":
            self._pack(x, x.stage, self._values_of(x.stage), {}, forward=True)
        elif x.kind in _BACK:
            self._pack(x, x.stage, self._gradients_of(x.stage), self._tied(x.stage), forward=False)
        elif x.kind == "loss":
            self._pack(x, self.routes.last, self._gradients_of(self.routes.last + 1), {}, forward=False)

    def _turn(self, rest: Sequence[Instruction]) -> None:
        """The loss is outside: its gradients go to those that read outputs last, before any backward."""
        for rank, left in enumerate(self.coming):
            self.rows[rank] += left
            left.clear()
        for i in sorted({i for x in rest for i in x.micro_batches}):
            loss = Instruction("loss", self.routes.last, (i,), (), (), 0)
            self._pack(loss, self.routes.last, self._gradients_of(self.routes.last + 1), {}, forward=False)

    def _values_of(self, stage: int) -> dict[int, list[str]]:
        """Rank → what it gets of what the stage makes."""
        found: dict[int, list[str]] = {}
        for name, (maker, *readers) in self.routes.values.items():
            if maker == stage:
                readers += [self.routes.last] if name in self.routes.results else []
                for rank in sorted({self.rank_of[s] for s in readers} - {self.rank_of[stage]}):
                    found.setdefault(rank, []).append(name)
        return found

    def _gradients_of(self, stage: int) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for name, behind, before in self.routes.hops():
            rank = self.rank_of[before]
            if behind == stage and rank != self.rank_of[stage] and name not in found.setdefault(rank, []):
                found[rank].append(name)
        return {rank: names for rank, names in found.items() if names}

    def _tied(self, stage: int) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for name, chain in self.routes.parameters.items():
            for before, behind in itertools.pairwise(chain):
                if behind == stage and self.rank_of[before] != self.rank_of[stage]:
                    found.setdefault(self.rank_of[before], []).append(name)
        return found

    def _pack(
        self,
        x: Instruction,
        stage: int,
        values: Mapping[int, list[str]],
        parameters: Mapping[int, list[str]],
        *,
        forward: bool,
    ) -> None:
        source, targets = self.rank_of[stage], sorted({*values, *parameters})
        stays = set() if forward else self._asked_for_here(x, source)
        for target in targets:
            names = values.get(target, [])
            going = (
                {n for t in targets for n in values.get(t, [])} - stays if target == targets[-1] else set()
            )
            packet = Packet(
                source,
                target,
                str(x),
                forward,
                tuple(names),
                tuple(parameters.get(target, ())),
                () if forward else tuple(sorted(going)),
                self.sent,
            )
            self.sent += 1
            self.rows[source].append(Instruction("send", stage, x.micro_batches, (), (), 0, packet))
            self.coming[target].append(Instruction("receive", stage, x.micro_batches, (), (), 0, packet))

    def _asked_for_here(self, x: Instruction, rank: int) -> set[str]:
        """The gradients that another stage of the same rank goes on with."""
        stage = x.stage + 1 if x.kind == "loss" else x.stage
        return {
            name
            for name, behind, before in self.routes.hops()
            if behind == stage and self.rank_of[before] == rank
        }

    def _receive(self, rank: int, x: Instruction) -> None:
        """What it needs, and whatever the same rank has sent before that: in the order in which it comes."""
        needed = [p for p in self.coming[rank] if self._needs(x, p)]
        for p in needed:
            assert p.packet is not None
            earlier = [q for q in self.coming[rank] if q.packet and q.packet.source == p.packet.source]
            for q in earlier[: earlier.index(p) + 1] if p in earlier else ():
                self.rows[rank].append(q)
                self.coming[rank].remove(q)

    def _needs(self, x: Instruction, message: Instruction) -> bool:
        packet = message.packet
        assert packet is not None
        if not set(x.micro_batches) & set(message.micro_batches):
            return False
        if x.kind == "forward":
            return packet.forward and any(x.stage in self.routes.values[n][1:] for n in packet.values)
        if x.kind == "loss":
            return packet.forward and bool(self.routes.results & {*packet.values})
        if x.kind not in _BACK or packet.forward:
            return False
        read = {n for n, chain in self.routes.values.items() if x.stage in chain}
        read |= {n for n, chain in self.routes.aliases.items() if x.stage in chain}
        tied = {n for n, chain in self.routes.parameters.items() if x.stage in chain}
        return bool(read & {*packet.values} or tied & {*packet.parameters})

    def _numbered(self, rank: int) -> Tape:
        row = tuple(x._replace(number=n, after=(), beside=()) for n, x in enumerate(self.rows[rank]))
        first = min((s for s, r in enumerate(self.rank_of[:-1]) if r == rank), default=0)
        return replace(self.tape, instructions=row, workers=(row,), labels=((first, 0),), meets={})


def expected_from(tape: Tape) -> dict[int, list[Instruction]]:
    """Rank → what comes from there, in the order in which it comes."""
    found: dict[int, list[Instruction]] = {}
    for x in tape.order:
        if x.kind == "receive" and x.packet is not None:
            found.setdefault(x.packet.source, []).append(x)
    return found


def check_messages(tapes: Sequence[Tape]) -> None:
    """Prove that all ranks come to their ends though every send waits until its message is taken.

    A rank takes messages of each other rank in their order, at any time: somebody listens while it computes.

    Raises:
        ScheduleError: names what waits for ever, or what is sent and not expected.
    """
    rows = [tape.order for tape in tapes]
    listening = {(w, s): list(xs) for w, tape in enumerate(tapes) for s, xs in expected_from(tape).items()}
    taken: set[tuple[int, Packet]] = set()
    at = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for w, row in enumerate(rows):
            while at[w] < len(row):
                x = row[at[w]]
                if x.kind == "receive" and x.packet is not None and (w, x.packet) not in taken:
                    break
                if x.kind == "send" and x.packet is not None:
                    ahead = listening.get((x.packet.target, w), [])
                    if not ahead or ahead[0].packet != x.packet:
                        break
                    taken.add((x.packet.target, ahead.pop(0).packet))  # type: ignore[arg-type]
                at[w] += 1
                moved = True
    for w, row in enumerate(rows):
        if at[w] < len(row):
            raise ScheduleError(f"rank {w} would wait for ever at {row[at[w]]}", where=str(row[at[w]]))
    lost = [x for left in listening.values() for x in left]
    if lost:
        raise ScheduleError(f"nobody sends what is expected at {lost[0]}", where=str(lost[0]))
