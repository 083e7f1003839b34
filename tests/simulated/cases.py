"""What is played under the simulation: schedules, what travels, replicas, who meets, and which faults."""

import functools
import random
from dataclasses import dataclass, field

from fxsplit.schedules.catalog import IN_V, NAMES, SHARED, forward_only, schedule_of, usual_workers
from fxsplit.schedules.lower import Flow, lower
from fxsplit.schedules.schedule import Schedule
from fxsplit.schedules.tape import Tape

SCHEDULES = (*NAMES, "forward_only", "own")
PER_SCHEDULE = 24  # cases
COUNT = PER_SCHEDULE * len(SCHEDULES)


@dataclass(frozen=True, eq=False)
class Case:
    """A tape, and what it was made of.

    Attributes:
        values: name → the stage that makes it, and those that read it.
        results: names of what the loss is of.
        shared: parameter → the stages that read it.
        away: stages whose weights are fetched for them.
        recomputes: whether stages that write go forward again in their backward.
        serial: filled once with what playing it in one thread finds.
    """

    name: str
    tape: Tape
    flow: Flow
    micro_batches: int
    replicas: tuple[int, ...]
    values: dict[str, tuple[int, ...]]
    results: tuple[str, ...]
    shared: dict[str, tuple[int, ...]]
    recomputes: bool
    loss: bool
    away: frozenset[int]
    serial: dict

    def __str__(self):
        meets = f", meet {dict(self.tape.meets)}" if self.tape.meets else ""
        return (
            f"{self.name}, {self.flow.stages} stages, {self.micro_batches} micro-batches, replicas {self.replicas}{meets}, "
            f"in turn {sorted(self.flow.in_turn)}{' again' * self.recomputes}, loss {'inside' if self.loss else 'outside'}"
            f"{f', away {sorted(self.away)}' * bool(self.away)}"
        )


@functools.cache
def case(number, alone=False):
    """One of `COUNT`, each schedule in its turn; `alone` without replicas."""
    rng, name = random.Random(number), SCHEDULES[number % len(SCHEDULES)]
    stages = rng.choice((2, 4) if name in IN_V else (2, 3, 4))
    m = rng.randint(2, 4)
    replicas, meets = [1] * stages, {}
    if name in ("gpipe", "1f1b", "forward_only"):
        replicas = [rng.randint(1, 3) for _ in range(stages)]
        if rng.random() < 0.4:
            m = rng.choice((2, 4))
            size = m if name == "gpipe" else 2
            meets = {s: size for s in range(stages) if rng.random() < 0.5}
            replicas = [meets.get(s, r) for s, r in enumerate(replicas)]
    elif name != "own" and rng.random() < 0.5:  # stages that share a worker have the same number
        replicas = [rng.randint(2, 3)] * stages
    if alone:
        replicas, meets = [1] * stages, {}
    if name == "forward_only":
        schedule = forward_only(stages, m, replicas)
    elif name == "own":
        schedule = own_schedule(rng, stages, m, alone)
    else:
        workers = usual_workers(name, stages) if name in SHARED else None
        schedule = schedule_of(name, stages, m, workers, None if max(replicas) == 1 else replicas)
    read = {
        s: [m for m in range(s) if rng.random() < (0.7 if m == s - 1 else 0.35)] for s in range(1, stages)
    }
    read = {s: makers or [rng.randrange(s)] for s, makers in read.items()}
    values = {f"v{s}": (s, *(t for t in read if s in read[t])) for s in range(stages)}
    results = (f"v{stages - 1}", *(f"v{s}" for s in range(stages - 1) if rng.random() < 0.15))
    shared = {
        f"w{k}": tuple(s for s in range(stages) if rng.random() < 0.5) for k in range(rng.randint(0, 2))
    }
    shared = {fqn: chain for fqn, chain in shared.items() if len(chain) > 1}
    in_turn = frozenset(s for s in range(stages) if rng.random() < 0.5)
    recomputes = rng.random() < 0.5
    flow = Flow(
        stages,
        list(values.values()),
        list(shared.values()),
        frozenset(values[v][0] for v in results),
        in_turn,
        in_turn if recomputes else frozenset(),
        in_turn if rng.random() < 0.5 else frozenset(),
    )
    loss = name != "forward_only" and (name != "gpipe" or rng.random() < 0.5)
    tape = lower(schedule, flow, meets, loss=loss)
    offloads = not (alone or meets) and max(replicas) == 1 and rng.random() < 0.5
    away = frozenset(s for s in range(stages) if offloads and rng.random() < 0.8)
    writes = recomputes and bool(in_turn)
    return Case(name, tape, flow, m, tuple(replicas), values, results, shared, writes, loss, away, {})


def own_schedule(rng, stages, m, alone=False):
    """A schedule of somebody's own: any order that ends, on any workers; `alone` with one worker for each stage."""
    left = {(kind, s, i) for kind in rng.choice(("FB", "FIW")) for s in range(stages) for i in range(m)}
    workers = rng.randint(2, 4)
    where = {(s, i): rng.randrange(workers) for s in range(stages) for i in range(m)}
    together, rows = rng.random() < 0.7, [[] for _ in range(max(workers, stages))]
    while left:
        able = [a for a in sorted(left) if not left & _before(*a, stages)]
        kind, s, i = chosen = rng.choice(able)
        left.discard(chosen)
        worker = s if alone else where[s, i] if together else rng.randrange(workers)
        rows[worker].append(f"{s}{kind}{i}")
    return Schedule.from_csv("".join(",".join(row) + "\n" for row in rows if row), name="own")


def _before(kind, s, i, stages):
    """What surely comes before an action, in any flow."""
    if kind == "W":
        return {("I", s, i)}
    if kind == "F":
        return {("F", s - 1, i), ("F", s, i - 1)}
    return {(kind, s + 1, i), (kind, s, i - 1)} | ({("F", s, i)} if s == stages - 1 else set())


class OnPurpose(ValueError):  # noqa: N818
    """A fault."""


FAULTS = ("none", "one", "two", "interrupt", "caller", "delay", "mixed")
ALL_FAULTS = (*FAULTS, "fetch", "stuck", "unequal", "gone")  # of calls without tensors


@dataclass
class Faults:
    """What goes wrong in a run.

    Attributes:
        errors: number of an instruction → when in it, and what it raises.
        steps: at which the caller is interrupted.
        delays: number of an instruction → seconds.
        fetches: stage → what is raised where its weights are fetched.
        silent: number of a forward that does not come to where the others of its meeting wait for it; or of an
            instruction at which its worker ends without a word, as by ``pthread_exit``.
    """

    kind: str
    errors: dict
    steps: list
    delays: dict
    fetches: dict = field(default_factory=dict)
    silent: int | None = None
    fetched: bool = False  # whether that was raised

    @classmethod
    def drawn(cls, rng, tape, away=frozenset(), copies_wait=False):
        """For a tape, and stages whose weights are fetched; `copies_wait` for each other in modules."""
        kind, numbers = rng.choice(FAULTS), [x.number for x in tape.order]
        if copies_wait and tape.meets and rng.random() < 0.15:
            return cls._stuck(rng, tape)
        if copies_wait and not tape.meets and rng.random() < 0.05:
            return cls("gone", {}, [], {}, silent=rng.choice(numbers))
        if away and rng.random() < 0.15:
            stage = rng.choice(sorted(away))
            return cls("fetch", {}, [], {}, {stage: OnPurpose(f"weights of {stage}")})
        errors, steps, delays = {}, [], {}
        count = {"one": 1, "two": 2, "interrupt": 1, "mixed": rng.randint(0, 2)}.get(kind, 0)
        for number in rng.sample(numbers, min(count, len(numbers))):
            rude = kind == "interrupt" or (kind == "mixed" and rng.random() < 0.3)
            error = rng.choice((KeyboardInterrupt, SystemExit)) if rude else OnPurpose
            errors[number] = rng.choice(("before", "within", "after")), error(f"at {number}")
        if kind in ("caller", "mixed"):
            reach = rng.choice((30, 150, 600))
            steps = sorted({rng.randrange(1, reach): None for _ in range(rng.choice((1, 1, 2, 3)))})
        if kind in ("delay", "mixed"):
            delays = {rng.choice(numbers): rng.choice((0.5, 1.5, 30.0)) for _ in range(rng.randint(1, 3))}
        return cls(kind, errors, steps, delays)

    @classmethod
    def _stuck(cls, rng, tape):
        """One of those that meet fails, or ends without a word, and modules of the others wait for it for ever."""
        number = rng.choice([x.number for x in tape.order if x.beside])
        if rng.random() < 0.5:
            return cls("unequal", {}, [], {}, silent=number)
        return cls("stuck", {number: ("before", OnPurpose(f"at {number}"))}, [], {})

    def aim(self, simulation):
        """Let the caller be interrupted at its steps, while it waits for workers."""
        for step in self.steps:
            simulation.events[step] = functools.partial(
                _interrupt_caller, error=KeyboardInterrupt(f"at step {step}")
            )

    def __str__(self):
        errors = [f"{error!r} {when}" for when, error in self.errors.values()]
        rows = [*errors, *(f"interrupt at step {s}" for s in self.steps)]
        rows += [f"{seconds} s at {number}" for number, seconds in self.delays.items()]
        rows += [f"{error!r} in the thread that fetches" for error in self.fetches.values()]
        if self.kind in ("stuck", "unequal", "gone"):
            rows.append(f"{self.kind} {self.silent}")
        return ", ".join(rows) or "none"


def _interrupt_caller(simulation, error):
    caller = simulation.every[0]
    if caller.plays:
        caller.struck.append(error)


def comes_first(raised):
    """Of failures: interrupts, and then as in a loop over micro-batches."""
    x, error = raised
    half = 0 if x.kind == "forward" else 1 if x.kind == "loss" else 2
    return isinstance(error, Exception), x.micro_batches[0], half, x.stage if half == 0 else -x.stage, x.kind
