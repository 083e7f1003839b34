"""Costs in, timeline, bubble and pictures out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .tape import Instruction, Tape

_LENGTH = {"forward": 1, "loss": 0, "backward": 2, "inputs": 1, "weights": 1, "send": 0, "receive": 0}


def timeline(
    tape: Tape,
    cost: Callable[[Instruction], float],
    travel: Callable[[Instruction, Instruction], float] = lambda made, read: 0.0,
) -> list[tuple[float, float]]:
    """By number, start and end of every instruction, when each starts as soon as its worker is free and it may.

    Args:
        cost: units of time of an instruction.
        travel: units of time from the end of an instruction to when another one that comes after it may start.
    """
    free = [0.0] * len(tape.workers)
    times = [(0.0, 0.0)] * len(tape.instructions)
    for instruction in tape.order:
        w = tape.worker_of[instruction.number]
        there = (times[n][1] + travel(tape.instructions[n], instruction) for n in instruction.after)
        start = max([free[w], *there])
        free[w] = start + cost(instruction)
        times[instruction.number] = (start, free[w])
    return times


def planned(tape: Tape, loads: Sequence[float]) -> list[tuple[float, float]]:
    """The timeline of stages whose forward of one micro-batch takes `loads`.

    A backward is taken to be twice as long as a forward, each of its two halves as long. Transfers and the loss take no
    time.
    """
    weights = list(loads) if any(loads) else [1.0] * len(loads)
    return timeline(tape, lambda x: weights[x.stage] * length_of(x))


def bubble(tape: Tape, loads: Sequence[float]) -> float:
    """Idle share of the workers, as `planned`, whatever the unit of `loads`. Equal stages under GPipe give (p - 1) / (m + p - 1)."""
    times = planned(tape, loads)
    busy = sum(end - start for start, end in times)
    return 1 - busy / (len(tape.workers) * max(end for _, end in times))


def length_of(instruction: Instruction) -> int:
    """Units of time that it takes by what it is."""
    return _LENGTH[instruction.kind] * len(instruction.micro_batches)


def staircase(tape: Tape) -> str:
    """The tape as a picture: one row a worker, one column for each action of equal length.

    Where micro-batches that met go backward as one, each of their workers shows its own.
    """
    times = timeline(tape, lambda x: x.kind != "loss")
    rows: dict[tuple[int, int], int] = {}  # stage and micro-batch → whose they are
    for x in tape.order:
        if x.kind == "forward":
            rows[x.stage, x.micro_batches[0]] = tape.worker_of[x.number]
    cells = [["·"] * int(max(end for _, end in times)) for _ in tape.workers]
    for x in tape.order:
        for kind, stage, i in x.actions:
            cells[rows[stage, i]][int(times[x.number][0])] = f"{kind}{i}"
    width = max(len(cell) for row in cells for cell in row)
    lines = [" ".join(cell.ljust(width) for cell in row).rstrip() for row in cells]
    return "\n".join(f"{name} │ {line}" for name, line in zip(tape.names, lines, strict=True))
