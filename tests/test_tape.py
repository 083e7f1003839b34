"""A tape says what has to be done before an instruction: exactly that, on every schedule and many programs."""

import itertools
import random
from types import SimpleNamespace

import pytest

from fxsplit.actions import Action
from fxsplit.schedules.catalog import (
    breadth_first,
    forward_only,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
    zb_h1,
)
from fxsplit.schedules.lower import flow_of, lower

MAKE = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "forward_only": forward_only,
    "zb_h1": lambda stages, m, _: zb_h1(stages, m),
    "interleaved_1f1b": lambda stages, m, workers: interleaved_1f1b(stages, m, len(workers)),
    "breadth_first": lambda stages, m, workers: breadth_first(stages, m, len(workers)),
    "interleaved_zero_bubble": lambda stages, m, workers: interleaved_zero_bubble(stages, m, len(workers)),
}


class Made:
    """What `flow_of` asks of a program: values, tied weights, outputs anywhere, aliases, buffers and other state."""

    def __init__(self, rng):
        count = rng.randint(1, 4)
        weights = [f"w{k}" for k in range(rng.randint(0, 3))]
        self.stages = [
            SimpleNamespace(
                index=s,
                parameters=tuple(w for w in weights if rng.random() < 0.5),
                writes=("mean",) if rng.random() < 0.2 else (),
                stateful=rng.random() < 0.1,
            )
            for s in range(count)
        ]
        self.values = {"x": -1, "y": -1} | {
            f"v{s}{k}": s for s in range(count) for k in range(rng.randint(0, 2))
        }
        self.read = {
            v: tuple(s for s in range(made + 1, count) if rng.random() < 0.6)
            for v, made in self.values.items()
        }
        self.outputs = [v for v in self.values if rng.random() < 0.3] + [(3,)]
        crossing = [v for v in self.values if self.read[v]]
        self.aliases = {}
        if len(crossing) > 1 and rng.random() < 0.4:
            first, other = sorted(rng.sample(crossing, 2), key=self.values.get)
            self.aliases = {first: first, other: first}

    def producers(self):
        return self.values

    def readers(self):
        return self.read


def needed(program, checkpoint, meets, loss, action):
    """What has to be done before an action, said one rule after the other. The loss of a micro-batch is ("L", …)."""
    kind, stage, i = action
    made, read, last = program.values, program.read, len(program.stages) - 1
    if kind == "L":
        return {
            Action("F", s, i)
            for s in {made[v] for v in program.outputs if isinstance(v, str)} | {last}
            if s >= 0
        }
    if kind == "W":
        return {Action("I", stage, i)}
    here = program.stages[stage]
    if kind == "F":
        found = {Action("F", made[v], i) for v in made if made[v] >= 0 and stage in read[v]}
        in_turn = bool(here.writes) or here.stateful
    else:
        found = {Action("F", stage, i)}
        chains = [[made[v], *read[v]] for v in made]
        chains += [[s.index for s in program.stages if w in s.parameters] for w in ("w0", "w1", "w2")]
        if program.aliases:
            first = next(iter(program.aliases.values()))
            chains.append([made[first], *sorted({s for v in program.aliases for s in read[v]})])
        for chain in chains:
            found |= {Action(kind, b, i) for a, b in itertools.pairwise(chain) if a == stage}
        in_turn = bool(here.writes) and checkpoint != "never"
        if loss:
            found.add(("L", last, i))
    if in_turn and i and stage not in meets:
        found.add(Action(kind, stage, i - 1))
    return found


def members(action, meets):
    size = meets.get(action[1], 1)
    first = action[2] // size * size
    return [(action[0], action[1], i) for i in range(first, first + size)]


def closure(nodes, before):
    """Node → everything that is done before it, one way or another."""
    found = {}

    def visit(node):
        if node not in found:
            found[node] = set()
            found[node] = set().union(*({b} | visit(b) for b in before(node)))
        return found[node]

    for node in nodes:
        visit(node)
    return found


def drawn(rng):
    """A program, its schedule, and who meets."""
    program, name = Made(rng), rng.choice(list(MAKE))
    count, m = len(program.stages), rng.randint(1, 5)
    meets, replicas = {}, [1] * count
    if name in ("gpipe", "1f1b", "forward_only"):
        replicas = [rng.randint(1, 3) for _ in range(count)]
        if rng.random() < 0.4:
            m = m * 2 if name != "gpipe" else m
            meets = {s: 2 if name != "gpipe" else m for s in range(count) if rng.random() < 0.5}
            meets = {s: size for s, size in meets.items() if size > 1}
            replicas = [meets.get(s, r) for s, r in enumerate(replicas)]
        schedule = MAKE[name](count, m, replicas)
    else:
        schedule = MAKE[name](count, m, range(rng.randint(1, count)))
    return program, schedule, meets, rng.choice(["never", "always"])


def check(program, schedule, meets, checkpoint, loss):
    tape = lower(schedule, flow_of(program, checkpoint), meets, loss=loss)
    played = {a for row in schedule.workers for a in row}
    loss = loss and any(a.kind in "BI" for a in played)
    if loss:
        played |= {("L", len(program.stages) - 1, a.micro_batch) for a in played}
    names = {
        x.number: x.actions or tuple(("L", x.stage, i) for i in x.micro_batches) for x in tape.instructions
    }
    number = {a: n for n, row in names.items() for a in row}
    assert set(number) == played and len(number) == sum(map(len, names.values()))

    def before(
        action,
    ):  # those that meet begin, or go backward, together: each after what any of them is after
        everybody = [action] if action[0] == "L" else members(action, meets)
        found = {n for a in everybody for n in needed(program, checkpoint, meets, loss, a)}
        found |= {b for n in found if n[0] in "BI" for b in members(n, meets)}
        return {Action(*n) if n[0] != "L" else n for n in found if n in played}

    order, follows = in_rows(tape, schedule, number)
    mine = closure(played, lambda a: before(a) | order.get(a, set()))
    tapes = closure(range(len(tape.instructions)), lambda n: follows[n].union(tape.instructions[n].after))
    for action in played:
        found = {a for n in tapes[number[action]] for a in names[n]}
        assert found == mine[action], (action, found ^ mine[action])
    check_slices(tape, schedule)
    return tape


def in_rows(tape, schedule, number):
    """Beside that, a worker's list is in order: what comes before an action, and before an instruction, in it.

    Where another worker goes backward for it, what comes next waits for that, and that waits for nobody else's list.
    """
    order, follows = {}, {x.number: set() for x in tape.instructions}
    for w, row in enumerate(schedule.workers):
        before = set()
        for a in row:
            if tape.worker_of[number[a]] == w:
                everybody = [b for b, n in number.items() if n == number[a]]
                losses = [("L", a.stage, b.micro_batch) for b in everybody if a.kind in "BI"]
                for together in (
                    *([b] for b in losses if b in number),
                    everybody,
                ):  # the losses come just before
                    for b in together:
                        order.setdefault(b, set()).update(before - set(together))
                    before = {*together}
            else:
                before |= {b for b, n in number.items() if n == number[a]}
    for row in tape.workers:
        for x, y in itertools.pairwise(row):
            follows[y.number].add(x.number)
    return order, follows


def check_slices(tape, schedule):
    """Every worker's list is the schedule's; the halves are the tape without the rest; who waits is told."""
    for row, actions in zip(tape.workers, schedule.workers, strict=True):
        assert [a for x in row for a in x.actions if a in actions] == list(
            dict.fromkeys(a for a in actions if any(a in x.actions for x in row))
        )
    for half, kinds in ((tape.forward, "F"), (tape.backward, "BIW")):
        assert {a for x in half.order for a in x.actions} == {
            a for row in schedule.workers for a in row if a.kind in kinds
        }
    for part in (tape, tape.forward, tape.backward):
        done, heard = set(), [set() for _ in part.workers]
        for x in part.order:  # each worker has heard of all that comes before, from itself or from others
            w = part.worker_of[x.number]
            for number in part.waits.get(x.number, ()):
                assert number in done and w in part.tells[number]
                other = part.worker_of[number]
                heard[w] |= {n for n in done if part.worker_of[n] == other and n <= number}
            mine = {n for n in done if part.worker_of[n] == w}
            assert {n for n in x.after if n in part.worker_of} <= heard[w] | mine
            done.add(x.number)


@pytest.mark.parametrize("loss", [False, True])
def test_a_tape_says_what_has_to_be_done_before(loss):
    met = 0
    for seed in range(300):
        made = drawn(random.Random(seed))
        tape = check(*made, loss)
        met += any(len(x.micro_batches) > 1 for x in tape.instructions)
    assert met > 20
