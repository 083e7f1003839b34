"""A tape says what has to be done before an instruction: exactly that, on every schedule and many programs."""

import itertools
import os
import random
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn

import fxsplit
from fxsplit.graph.flow import flow_of
from fxsplit.plan.checkpoint import Checkpoint
from fxsplit.runtime import crew
from fxsplit.schedules.catalog import (
    IN_V,
    breadth_first,
    dual_pipe_v,
    forward_only,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from fxsplit.schedules.lower import Flow, lower
from fxsplit.schedules.schedule import Action

MAKE = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "forward_only": forward_only,
    "zb_h1": lambda stages, m, _: zb_h1(stages, m),
    "interleaved_1f1b": lambda stages, m, workers: interleaved_1f1b(stages, m, len(workers)),
    "breadth_first": lambda stages, m, workers: breadth_first(stages, m, len(workers)),
    "interleaved_zero_bubble": lambda stages, m, workers: interleaved_zero_bubble(stages, m, len(workers)),
    "zb_v": lambda stages, m, _: zb_v(stages, m, stages // 2),
    "dual_pipe_v": lambda stages, m, _: dual_pipe_v(stages, m, stages // 2),
}


NORM = fx.Graph()
NORM.output(NORM.call_module("norm", (NORM.placeholder("x"),)))
NORM = fx.GraphModule({"norm": nn.BatchNorm1d(4)}, NORM)


class Made:
    """What `flow_of` asks of a program: values, tied weights, outputs anywhere, aliases, buffers and other state."""

    def __init__(self, rng):
        count = rng.randint(1, 4)
        weights = [f"w{k}" for k in range(rng.randint(0, 3))]
        self.stages = [
            SimpleNamespace(
                index=s,
                parameters=tuple(w for w in weights if rng.random() < 0.5),
                writes=(("mean",) if word < 0.1 else ("norm.running_mean",))
                if (word := rng.random()) < 0.2
                else (),
                stateful=rng.random() < 0.1,
                module=NORM,
                paths={"norm": "norm"},
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
    program = Made(rng)
    count, m = len(program.stages), rng.randint(1, 5)
    name = rng.choice([name for name in MAKE if count % 2 == 0 or name not in IN_V])
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
    tape = lower(schedule, flow_of(program, Checkpoint.of(checkpoint)), meets, loss=loss)
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
    tapes = closure(range(len(tape.instructions)), lambda n: follows[n].union(tape.instructions[n].after))
    for stage in program.stages:  # what backward may read is not written meanwhile: one, then the other
        if (stage.stateful or "mean" in stage.writes) and stage.index not in meets:
            mine_of = [a for a in played if a[0] != "L" and a[1] == stage.index]
            for a, b in itertools.combinations(sorted(mine_of, key=number.get), 2):
                if (a[0] == "F") != (b[0] == "F"):
                    assert number[a] in tapes[number[b]], (a, b)
                    order.setdefault(b, set()).add(a)
    mine = closure(played, lambda a: before(a) | order.get(a, set()))
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


@pytest.mark.slow
@pytest.mark.parametrize("loss", [False, True])
def test_a_tape_says_what_has_to_be_done_before(loss):
    met = 0
    for seed in range(400):
        made = drawn(random.Random(seed))
        tape = check(*made, loss)
        met += any(len(x.micro_batches) > 1 for x in tape.instructions)
    assert met > 20


@pytest.mark.parametrize("make", [one_f_one_b, gpipe])
def test_nobody_waits_for_what_he_has_heard_of(make):
    flow = Flow(3, [(0, 1, 2), (1, 2)], outputs=frozenset({0, 2}))  # loss and backward come after 0F…
    tape = lower(make(3, 4), flow, loss=True)
    for w, row in enumerate(tape.workers):
        heard = [n for x in row for n in tape.waits.get(x.number, ())]
        assert heard and all(tape.worker_of[n] != w for n in heard)
        for other in set(map(tape.worker_of.get, heard)):  # each later than the one before
            of_one = [n for n in heard if tape.worker_of[n] == other]
            assert of_one == sorted(set(of_one))


# -- of a pipeline ----------------------------------------------------------------------------------------------------


def made(**plan):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return fxsplit.compile(
        model, fxsplit.Plan(cut=["2"], micro_batches=3, **plan), example_args=(torch.randn(6, 8),)
    )


def test_a_tape_prints():
    assert str(made(schedule="zb_h1").tape).splitlines() == [
        " 0  0F0  stage 0.0",
        " 1  0F1  stage 0.0",
        " 2  1F0  stage 1.0  after 0",
        " 3  1L0  stage 1.0  after 2",
        " 4  1I0  stage 1.0  after 2 3",
        " 5  1F1  stage 1.0  after 1",
        " 6  1L1  stage 1.0  after 5",
        " 7  1I1  stage 1.0  after 5 6",
        " 8  1W0  stage 1.0  after 4",
        " 9  0I0  stage 0.0  after 0 3 4",
        "10  0W0  stage 0.0  after 9",
        "11  0F2  stage 0.0",
        "12  0I1  stage 0.0  after 1 6 7",
        "13  0W1  stage 0.0  after 12",
        "14  1F2  stage 1.0  after 11",
        "15  1L2  stage 1.0  after 14",
        "16  1I2  stage 1.0  after 14 15",
        "17  1W1  stage 1.0  after 7",
        "18  1W2  stage 1.0  after 16",
        "19  0I2  stage 0.0  after 11 15 16",
        "20  0W2  stage 0.0  after 19",
    ]


def test_micro_batches_that_meet_begin_together_and_go_backward_as_one():
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    plan = fxsplit.Plan(cut=["2"], micro_batches=2, sync_batch_norm=True)
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    assert str(pipe.tape).splitlines() == [
        "0  0F0    stage 0.0  beside 1",
        "1  0F1    stage 0.1  beside 0",
        "2  1F0    stage 1.0  after 0",
        "3  1F1    stage 1.0  after 1",
        "4  1B0    stage 1.0  after 2",
        "5  1B1    stage 1.0  after 3",
        "6  0B0+1  stage 0.0  after 0 1 4 5",
    ]
    assert pipe.staircase().splitlines() == [
        "stage 0.0 │ F0 ·  ·  ·  ·  B0",
        "stage 0.1 │ F1 ·  ·  ·  ·  B1",
        "stage 1.0 │ ·  F0 F1 B0 B1 ·",
    ]
    seen = []
    with pipe.register_action_hook(lambda event: seen.append(event.action)):
        pipe(x).sum().backward()
    assert sorted(seen) == sorted(a for row in pipe.schedule.workers for a in row)


def test_a_tape_is_made_once(monkeypatch):
    made_here, pipe = [], made(schedule="1f1b")
    monkeypatch.setattr(crew, "lower", lambda *args, **how: made_here.append(1) or lower(*args, **how))
    for rows in (6, 6, 2, 6, 2):
        pipe(torch.randn(rows, 8)).sum().backward()
        pipe.step(torch.randn(rows, 8), loss_fn=lambda y: y.square().mean(), reduction="mean")
    assert len(made_here) == 1  # two micro-batches; that of three was made to be proven
    assert pipe.tape is pipe.tape_for(3)


def python_calls(call):
    """How many functions of fxsplit one call enters, in all threads."""
    root, counted = os.path.dirname(fxsplit.__file__) + os.sep, []

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(root):
            counted.append(frame.f_code)

    for _ in range(3):
        call()
    threading.setprofile(count), sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None), threading.setprofile(None)
    return len(counted)


def test_what_is_known_before_a_call_is_not_worked_out_in_it():
    """Python calls of fxsplit's own, for two stages and three micro-batches."""
    gpipe_, inside, x = made(), made(schedule="1f1b"), torch.randn(6, 8)

    def step(pipe):
        return python_calls(lambda: pipe.step(x, target=x, loss_fn=nn.functional.mse_loss))

    with torch.no_grad():
        assert python_calls(lambda: gpipe_(x)) < 235
    assert python_calls(lambda: gpipe_(x).sum().backward()) < 480
    assert step(gpipe_) < 505
    assert step(inside) < 470


def test_a_loss_that_fails_comes_before_the_backward_of_its_micro_batch():
    pipe = made(schedule="1f1b")

    def loss(y, target):
        if bool((target == 7).any()):
            raise KeyError("mine")
        return nn.functional.mse_loss(y, target)

    target = torch.zeros(6, 8)
    target[3] = 7
    with pytest.raises(KeyError) as caught:
        pipe.step(torch.randn(6, 8), target=target, loss_fn=loss, reduction="mean")
    assert "loss, before the backward of stage 1" in caught.value.__notes__[-1]
    assert "micro-batch 1 of 3 (2 rows), action 1L1" in caught.value.__notes__[-1]
