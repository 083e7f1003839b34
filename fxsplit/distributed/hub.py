"""What a rank plays of a tape, and the packets of a call: the other side of `fxsplit.runtime.hub`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..graph.flow import routes_of
from ..inserted.random import BaseSeed
from ..runtime.call import Call
from ..runtime.hub import Act, Here
from ..runtime.wiring import Wiring
from ..schedules.ranks import expected_from, tapes_of_ranks
from ..schedules.tape import Instruction, Packet, Tape
from .channel import Channel, Key
from .gradients import Averages, last_backwards
from .packets import Item
from .sharding import synchronizes
from .watch import Watch

_SAID = {"inputs": "backward (inputs)", "weights": "backward (weights)"}


def ranks_of_stages(tape: Tape, ranks: int) -> list[int]:
    """By stage. Workers are shared out in rows of neighbours: a schedule of as many workers as ranks has one on each."""
    worker = {x.stage: tape.worker_of[x.number] for x in tape.order if x.kind == "forward"}
    workers = sorted(set(worker.values()))
    row = {w: n * min(ranks, len(workers)) // len(workers) for n, w in enumerate(workers)}
    return [row[worker[s]] for s in sorted(worker)]


class RankHub(Here):
    """Of one rank of a pipeline.

    Args:
        rank_of: by stage.
    """

    everything = False

    def __init__(self, channel: Channel, watch: Watch, rank_of: Sequence[int]) -> None:
        self.channel, self.watch, self.rank_of, self.rank = channel, watch, rank_of, channel.rank
        self._tapes: dict[int, tuple[Tape, Tape]] = {}
        self._orders: dict[int, dict[tuple[str, int], int]] = {}
        self._calls = self.digest = 0
        self.sharded: dict[int, nn.Module] = {}  # stages whose parameters FSDP has
        self.averages: Averages | None = None  # of the step that is played, where there are replicas

    def has(self, stage: int) -> bool:
        return self.rank_of[stage] == self.rank

    @property
    def last(self) -> int:
        """The rank that has the last stage, and the loss."""
        return self.rank_of[-1]

    def tape(self, tape: Tape, wiring: Wiring) -> Tape:
        if id(tape) not in self._tapes:
            mine = tapes_of_ranks(tape, self.rank_of, routes_of(wiring.program))[self.rank]
            self._tapes[id(tape)] = tape, mine
        return self._tapes[id(tape)][1]

    def readers(self, wiring: Wiring, tape: Tape) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for name, stages in wiring.program.readers().items():
            found[name] = sum(map(self.has, stages))
        if self.has(len(self.rank_of) - 1):
            for name in wiring.results:
                found[name] += 1
        going = set[tuple[str, int]]()
        for x in tape.order:
            if x.kind == "send" and x.packet is not None and x.packet.forward:
                going |= {(name, x.packet.target) for name in x.packet.values}
        for name, _ in going:
            found[name] += 1
        return {name: count for name, count in found.items() if count}

    def seed(self, *, several: bool) -> BaseSeed | None:
        seed = BaseSeed()
        seed.use()  # on all ranks alike, whether or not this one's stages come to draw
        return seed

    def begins(self, call: Call, tape: Tape, act: Act) -> Act:
        if tape is not call.tape.backward:
            self._calls += 1
            self._orders.clear()
        chunks = [
            [(str(x.dtype).removeprefix("torch."), tuple(x.shape)) for x in chunk] for chunk in call.chunks
        ]
        seed = "" if call.seed is None else f", random numbers from {call.seed.of(0, 0)}"
        said = f"call {self._calls} with {len(chunks)} micro-batches of {chunks}{seed}"
        self.watch.says(said)
        self.digest = int.from_bytes(
            hashlib.blake2b(said.encode(), digest_size=8).digest(), "little", signed=True
        )
        for source, coming in expected_from(tape).items():
            self.channel.expect(source, [self._key(call, x) for x in coming], self.digest)
        return self._announced(call, tape, act)

    def _announced(self, call: Call, tape: Tape, act: Act) -> Act:
        watch, stages, averages = self.watch, call.program.stages, self.averages
        last = last_backwards(tape) if averages is not None else {}

        def told(instruction: Instruction) -> None:
            if instruction.packet is None:
                (i, *_), stage = instruction.micro_batches, stages[instruction.stage]
                span = " … ".join(dict.fromkeys(stage.modules)) or "the model"
                watch.computes(
                    f"the {_SAID.get(instruction.kind, instruction.kind)} of stage {stage.index} ({span}), micro-batch {i}"
                )
            act(instruction)
            for done in last.get(instruction.number, ()):
                assert averages is not None
                averages.begin(call, done)

        return told

    def _key(self, call: Call, x: Instruction) -> Key:
        packet = x.packet
        assert packet is not None
        sizes = tuple(tuple(v.shape) for i in x.micro_batches for v in call.chunks[i])
        return packet.forward, x.stage, packet.values, packet.parameters, sizes

    def accumulates(self, call: Call, stage: int, micro_batch: int) -> bool:
        module = self.sharded.get(stage)
        if module is None:
            return False
        last = max(
            i for x in call.tape.order if x.kind == "backward" and x.stage == stage for i in x.micro_batches
        )
        synchronizes(module, last=micro_batch == last)
        return True

    def message(self, call: Call, instruction: Instruction) -> None:
        packet = instruction.packet
        assert packet is not None
        if instruction.kind == "send":
            items = (
                self._values(call, instruction, packet)
                if packet.forward
                else self._gradients(call, instruction, packet)
            )
            self.channel.send(packet.target, self._key(call, instruction), self.digest, items)
            return
        stage = call.program.stages[instruction.stage]
        what = f"what {packet.made} gives (stage {stage.index}, micro-batch {instruction.micro_batches[0]})"
        for name, k, same, value in self.channel.receive(packet.source, what):
            i = instruction.micro_batches[k]
            if packet.forward:
                if same is not None:
                    call.values.same[name, i] = same
                call.values.give(name, i, value)
            else:
                self._take_gradient(call, packet, name, i, same, value)

    def _values(self, call: Call, x: Instruction, packet: Packet) -> list[Item]:
        return [
            (name, k, call.values.same.get((name, i)), call.values.take(name, i))
            for k, i in enumerate(x.micro_batches)
            for name in packet.values
        ]

    def _gradients(self, call: Call, x: Instruction, packet: Packet) -> list[Item]:
        values, items = call.values, list[Item]()
        for k, i in enumerate(x.micro_batches):
            names = dict.fromkeys(values.same.get((name, i), name) for name in packet.values)
            items += [(name, k, None, row) for name in names if (row := values.gradient(name, i)) is not None]
            for name in packet.dropped:
                if values.same.get((name, i), name) in packet.dropped:
                    values.take_gradient(values.same.get((name, i), name), i)
            tied = [(fqn, values.take_of_parameter(fqn, i)) for fqn in packet.parameters]
            items += [(fqn, k, "", gradient) for fqn, gradient in tied if gradient is not None]
        return items

    def _take_gradient(
        self, call: Call, packet: Packet, name: str, i: int, tied: str | None, value: Any
    ) -> None:
        if tied is not None:
            call.values.give_of_parameter(name, i, value)
            return
        orders = self._orders.setdefault(id(call), {})
        if orders.get((name, i), -1) < packet.order:
            orders[name, i] = packet.order
            call.values.give_gradient(name, i, value)
