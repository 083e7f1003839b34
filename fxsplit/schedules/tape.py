"""The tape: what is done in a call, by whom and after what, as data. Made once (`lower`), played in every call.

1F1B of two stages and two micro-batches with the loss inside, as its staircase and as its tape::

    stage 0.0 │ F0 F1 ·  B0 ·  B1       0  0F0  stage 0.0              5  1F1  stage 1.0  after 1
    stage 1.0 │ ·  F0 B0 F1 B1 ·        1  0F1  stage 0.0              6  1L1  stage 1.0  after 5
                                        2  1F0  stage 1.0  after 0     7  1B1  stage 1.0  after 5 6
                                        3  1L0  stage 1.0  after 2     8  0B0  stage 0.0  after 0 3 4
                                        4  1B0  stage 1.0  after 2 3   9  0B1  stage 0.0  after 1 6 7

Whatever has to wait for something else reads the same `after`: workers, streams of devices, the proof that a schedule
ends, simulated time and its pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from .schedule import Action

Kind = Literal["forward", "loss", "backward", "inputs", "weights", "send", "receive"]
_LETTERS: Mapping[str, str] = dict(zip(get_args(Kind), "FLBIWSR", strict=True))


class Packet(NamedTuple):
    """What one rank hands another after an instruction: values of a forward, or gradients.

    Attributes:
        source, target: ranks.
        made: what is done before it is sent.
        forward: whether it has values; otherwise gradients.
        values: names of what it has, or has the gradients of.
        parameters: FQNs of tied parameters, of which it has what the gradients have come to.
        dropped: names whose gradients nobody here asks for afterwards.
        order: its number in the one order of all messages. Of two that have one gradient, the later has all of it.
    """

    source: int
    target: int
    made: str
    forward: bool
    values: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    order: int = 0


class Instruction(NamedTuple):
    """One thing that a worker does.

    Attributes:
        kind: a stage's forward or backward, or half a backward: the gradients of its inputs, or those of its weights;
            or the loss of what the last stage gives; or, where stages are on several ranks, a packet that goes or comes.
        stage: whose.
        micro_batches: several where those that met go backward as one.
        after: numbers of what has to be done before: what makes its inputs, what hands on a gradient before it, what
            wrote a buffer before it, what comes before it in its worker's list and is played by another worker.
        beside: numbers of the forwards that begin at the same time as this one, because they meet; itself among them.
        number: its own; in the order of numbers a single worker can play everything.
    """

    kind: Kind
    stage: int
    micro_batches: tuple[int, ...]
    after: tuple[int, ...]
    beside: tuple[int, ...]
    number: int
    packet: Packet | None = None

    @property
    def actions(self) -> tuple[Action, ...]:
        """What a schedule calls it; a schedule names neither loss nor packets."""
        if self.kind == "loss" or self.packet is not None:
            return ()
        letter: Literal["F", "B", "I", "W"] = _LETTERS[self.kind]  # type: ignore[assignment]
        return tuple(Action(letter, self.stage, i) for i in self.micro_batches)

    @property
    def is_forward(self) -> bool:
        """Whether it is of the half that goes forward; the loss is of neither."""
        return self.kind == "forward" if self.packet is None else self.packet.forward

    def __str__(self) -> str:
        if self.packet is not None:
            way = (
                f"to rank {self.packet.target}" if self.kind == "send" else f"from rank {self.packet.source}"
            )
            return f"{self.kind} {self.packet.made} {way}"
        return f"{self.stage}{_LETTERS[self.kind]}{'+'.join(map(str, self.micro_batches))}"


@dataclass(frozen=True)
class Tape:
    """Instructions, and per worker those that it plays, in order.

    Attributes:
        instructions: all, by number.
        workers: per worker what it plays. Whatever is in none of these lists is done already.
        labels: per worker the (first stage, replica) that it is.
        meets: stage → how many of its micro-batches meet: they go forward at the same time, and backward as one.
    """

    instructions: tuple[Instruction, ...]
    workers: tuple[tuple[Instruction, ...], ...]
    labels: tuple[tuple[int, int], ...]
    meets: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def order(self) -> tuple[Instruction, ...]:
        """What is played, in an order in which a single worker can play it."""
        return tuple(sorted((x for row in self.workers for x in row), key=lambda x: x.number))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the workers."""
        return tuple(f"stage {stage}.{replica}" for stage, replica in self.labels)

    @cached_property
    def worker_of(self) -> Mapping[int, int]:
        """Number of an instruction → who plays it."""
        return {x.number: w for w, row in enumerate(self.workers) for x in row}

    @cached_property
    def waits(self) -> Mapping[int, tuple[int, ...]]:
        """Number of an instruction → what its worker has to hear of before it: the last of what each other one does.

        What it has heard of before, and what it has done itself, is left out.
        """
        place = {x.number: (w, k) for w, row in enumerate(self.workers) for k, x in enumerate(row)}
        found = {}
        for w, row in enumerate(self.workers):
            heard: dict[int, int] = {}
            for instruction in row:
                last: dict[int, tuple[int, int]] = {}
                for number in instruction.after:
                    other, k = place.get(number, (w, -1))
                    if other != w and k > heard.get(other, -1):
                        heard[other] = k
                        last[other] = (k, number)
                if last:
                    found[instruction.number] = tuple(number for _, number in last.values())
        return found

    @cached_property
    def tells(self) -> Mapping[int, tuple[int, ...]]:
        """Number of an instruction → the workers that have to hear of it."""
        found: dict[int, list[int]] = {}
        for waiting, numbers in self.waits.items():
            for number in numbers:
                found.setdefault(number, []).append(self.worker_of[waiting])
        return {number: tuple(workers) for number, workers in found.items()}

    @cached_property
    def halves(self) -> bool:
        """Whether it goes backward in two."""
        return any(x.kind == "inputs" for x in self.instructions)

    @cached_property
    def forward(self) -> Tape:
        """Its forwards alone: what ``pipe(x)`` plays."""
        return self._only(lambda x: x.is_forward)

    @cached_property
    def backward(self) -> Tape:
        """Its backwards alone, with the loss outside."""
        return self._only(lambda x: not x.is_forward and x.kind != "loss")

    def _only(self, wanted: Callable[[Instruction], bool]) -> Tape:
        workers = tuple(tuple(x for x in row if wanted(x)) for row in self.workers)
        return replace(self, workers=workers)

    def __str__(self) -> str:
        digits = len(str(len(self.instructions)))
        width = max((len(str(x)) for x in self.order), default=0)
        return "\n".join(
            "  ".join(
                part
                for part in (
                    f"{x.number:>{digits}}",
                    f"{x!s:<{width}}",
                    self.names[self.worker_of[x.number]],
                    _listed("after", x.after),
                    _listed("beside", [n for n in x.beside if n != x.number]),
                )
                if part
            )
            for x in self.order
        )


def _listed(word: str, numbers: Sequence[int]) -> str:
    return f"{word} {' '.join(map(str, numbers))}" if numbers else ""
