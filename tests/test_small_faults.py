"""Small faults of a runtime that other tests would not notice: masks that repeat, parts that are forgotten."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import Plan
from fxsplit.codegen.emit import generate
from fxsplit.errors import GradientError
from fxsplit.partition.problem import Problem, Slot, Weights, lower_bound
from fxsplit.proof.structure import RULES


class Masks(nn.Module):
    """Gives the masks of three dropouts, two of them in one stage."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Dropout(0.5) for _ in range(3))
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        one, two = self.a(x), self.b(x)
        x = x + 0 * self.first(one)
        return one, two, self.c(x) + 0 * self.second(x)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_every_draw_of_every_micro_batch_and_stage_has_a_mask_of_its_own(schedule):
    x = torch.ones(6, 64)
    plan = Plan(cut=["c"], micro_batches=3, schedule=schedule)
    pipe = fxsplit.compile(Masks(), plan, example_args=(x,))
    assert len(pipe) == 2
    masks = [part for out in pipe(x) for part in out.split(2)] + [
        part for out in pipe(x) for part in out.split(2)
    ]
    assert len(masks) == 2 * 3 * 3
    for i, mask in enumerate(masks):
        assert 0.3 < (mask != 0).float().mean() < 0.7
        assert all(not torch.equal(mask, other) for other in masks[:i])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_an_argument_that_is_not_split_gets_the_gradients_of_all_micro_batches(schedule):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, table):
            return self.b(torch.tanh(self.a(x) @ table)) * table.sum()

    model, x = Table().double(), torch.randn(6, 4).double()
    plan = Plan(stages=2, micro_batches=3, schedule=schedule, batch_dims={"table": None})
    pipe = fxsplit.compile(model, plan, example_args=(x, torch.randn(4, 4).double()))
    tables = [torch.randn(4, 4).double().requires_grad_() for _ in range(2)]
    tables[1].data.copy_(tables[0])

    def loss(y, t):
        return (y * t).sum()

    pipe.step(x, tables[0], target=x, loss_fn=loss, reduction="sum")
    loss(model(x, tables[1]), x).backward()
    torch.testing.assert_close(tables[0].grad, tables[1].grad)


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_hooks_of_modules_see_and_change_gradients(schedule):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double(), torch.randn(6, 4).double()
    seen = []
    model[2].register_full_backward_hook(
        lambda module, given, grads: seen.append(len(grads[0])) or (given[0] * 3,)
    )
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=3, schedule=schedule), example_args=(x,))
    seen.clear()
    found = torch.autograd.grad(pipe(x).square().sum(), list(model.parameters()))
    assert seen == [2, 2, 2]
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_backward_a_second_time_says_so():
    pipe = fxsplit.compile(nn.Linear(4, 4), Plan(micro_batches=2), example_args=(torch.randn(6, 4),))
    loss = (pipe(torch.randn(6, 4)) * 1.0).sum(dtype=torch.float64)
    out = pipe(torch.randn(6, 4))
    torch.autograd.grad(out, list(pipe.parameters()), torch.ones_like(out))
    with pytest.raises(GradientError, match="second time"):
        torch.autograd.grad(out, list(pipe.parameters()), torch.ones_like(out))
    loss.backward()
    out = pipe(torch.randn(6, 4))
    first = torch.autograd.grad(out, list(pipe.parameters()), torch.ones_like(out), retain_graph=True)
    again = torch.autograd.grad(out, list(pipe.parameters()), torch.ones_like(out))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def alive(shape):
    """How many memories of this shape there are."""
    gc.collect()
    found = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and o.shape == shape]
    return len({t.untyped_storage().data_ptr() for t in found})


class Wide(nn.Module):
    """What crosses has a shape that nothing else has."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 37), nn.Linear(37, 4)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "step"])
def test_values_and_gradients_are_freed_when_they_have_been_used(schedule, grad):
    count = 8
    plan = Plan(cut=["b"], micro_batches=count, schedule=schedule)
    pipe = fxsplit.compile(Wide(), plan, example_args=(torch.randn(2 * count, 4),))
    left: dict[str, int] = {}
    last = {"F": "1", "B": "0", "W": "0", "I": "0"}

    def look(event):
        stage, kind, i = str(event.action)
        if int(i) == count - 1 and stage == last[kind]:
            left[kind] = alive((2, 37))

    handle = pipe.register_action_hook(look)
    x = torch.randn(2 * count, 4)
    if grad:
        pipe.step(x, loss_fn=lambda y: y.square().sum(), reduction="sum")
        assert left.pop("F") >= 1  # they are kept for backward
        # the last weights of another stage may still be waiting
        assert left and all(n <= 2 * len(pipe) + 1 for n in left.values()) and min(left.values()) <= 2, left
    else:
        with torch.no_grad():
            pipe(x)
        assert left["F"] <= 2, left
    handle.remove()
    assert alive((2, 37)) == 0


@pytest.mark.parametrize(
    ("checkpoint", "again"),
    [("except_last", [0, 1, 1, 1]), ("always", [1, 1, 1, 1]), ("never", [0, 0, 0, 0])],
)
def test_except_last_keeps_the_micro_batch_that_goes_backward_first(checkpoint, again, monkeypatch):
    plan = Plan(cut=["b"], micro_batches=4, checkpoint=checkpoint)
    pipe = fxsplit.compile(Wide(), plan, example_args=(torch.randn(8, 4),))
    x = torch.arange(4.0).repeat_interleave(2).unsqueeze(1).expand(8, 4).contiguous()
    linear, calls = nn.functional.linear, []  # of the first layer, by the number that fills its rows

    def counted(x, *args):
        calls.extend([int(x[0, 0])] if x.shape[-1] == 4 else [])
        return linear(x, *args)

    monkeypatch.setattr(nn.functional, "linear", counted)
    loss = pipe(x).sum()
    assert sorted(calls) == [0, 1, 2, 3]
    loss.backward()
    assert [calls.count(i) - 1 for i in range(4)] == again


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("n", torch.zeros(4))

    def forward(self, x):
        self.n.add_(1)
        return self.b(self.a(x)) * self.n


def test_a_reader_of_a_buffer_after_its_last_write_is_in_the_writers_stage():
    """The next micro-batch writes again, before or after another stage reads."""
    model, x = Counts(), torch.randn(4, 4)
    pipe = fxsplit.compile(model, Plan(), example_args=(x,))
    rule = next(rule for rule in RULES if rule.name == "effects-together")
    assert not list(rule.check(model, pipe.traced, pipe.program))
    (names,) = pipe.assignment.stages
    at = names.index("b")
    parts = (names[:at], names[at:])
    cut = replace(
        pipe.assignment,
        stages=parts,
        devices=pipe.assignment.devices * 2,
        loads=pipe.assignment.loads * 2,
        rows=pipe.assignment.rows * 2,
    )
    program = generate(model, pipe.traced, cut)
    found = list(rule.check(model, pipe.traced, program))
    assert found and all("in another stage" in violation.what for violation in found)
    with pytest.raises(fxsplit.errors.PartitionError, match="cut"):
        fxsplit.compile(model, Plan(cut=["b"]), example_args=(x,))


def chain(works, *slots):
    """Units one after the other, a stage on each slot."""
    moves = (*(((i + 1, slot),) for i, slot in enumerate(slots)), ())
    before = tuple((u - 1,) if u else () for u in range(len(works[0])))
    return Problem(works, (), (), (), before, moves, (len(slots),))


@pytest.mark.parametrize(
    ("problem", "bound"),
    [
        (chain(((1.0,) * 8,), *(Slot(0, Weights(1.0), devices=(d,)) for d in range(4))), 2.0),
        (chain(((1.0, 1.0, 5.0, 1.0),), *(Slot(0, Weights(1.0), devices=(d,)) for d in range(4))), 5.0),
        (chain(((1.0,) * 8, (3.0,) * 8), *(Slot(d, Weights(1.0), devices=(d,)) for d in range(2))), 6.0),
        (
            chain(((4.0,) * 6,), Slot(0, Weights(0.5), devices=(0, 1)), Slot(0, Weights(1.0), devices=(2,))),
            8.0,
        ),
    ],
    ids=["shared evenly", "the heaviest unit", "unequal devices", "replicas"],
)
def test_the_bound_of_the_planner_is_as_high_as_work_alone_says(problem, bound):
    assert lower_bound(problem) == pytest.approx(bound)
