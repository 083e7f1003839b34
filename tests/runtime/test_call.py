"""The pipeline as one differentiable call; failures; threads."""

import copy
import gc
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import Plan
from fxsplit.errors import GradientError
from tests.helpers import Wide, run_python
from tests.models import build


class Fault(nn.Module):
    """Raises on request, at the n-th call or in its backward."""

    def __init__(self):
        super().__init__()
        self.at, self.error, self.backward = None, None, False
        self.calls = 0

    def forward(self, x):
        self.calls += 1  # keeps the tracer out
        if self.at is not None and self.calls == self.at:
            if not self.backward:
                raise self.error
            x = x.clone()
            x.register_hook(self._raise)
        return x * 1

    def _raise(self, grad):
        raise self.error


class Faulty(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Fault(), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def arm(self, stage, at, error, backward=False):
        fault = self.blocks[stage][2]
        fault.at, fault.error, fault.backward, fault.calls = at, error, backward, 0

    def disarm(self):
        for block in self.blocks:
            block[2].at = None


@pytest.fixture
def faulty():
    model = Faulty()
    plan = fxsplit.Plan(cut=["blocks.1", "blocks.2"], micro_batches=4)
    return model, fxsplit.compile(model, plan, example_args=(torch.randn(8, 4),))


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("micro_batch", range(4))
@pytest.mark.parametrize("stage", range(3))
def test_a_failure_reaches_the_caller_and_the_next_step_is_right(faulty, stage, micro_batch, backward):
    model, pipe = faulty
    x = torch.randn(8, 4)
    reference = copy.deepcopy(pipe)
    buffers = copy.deepcopy(dict(model.named_buffers()))
    error = ValueError("broken on purpose")
    model.arm(stage, micro_batch + 1, error, backward)
    with pytest.raises(ValueError) as caught:
        output = pipe(x)
        buffers = copy.deepcopy(dict(model.named_buffers()))  # the forward was done: its buffers are eager's
        output.sum().backward()
    assert caught.value is error
    note = "\n".join(error.__notes__)
    assert (
        f"stage {stage}" in note and f"micro-batch {micro_batch} of 4" in note and f"blocks.{stage}" in note
    )
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert all(p.grad is None for p in model.parameters())
    model.disarm()
    if not backward:
        expected = reference(x)
        output = pipe(x)
        assert torch.equal(output, expected)
        expected.sum().backward()
        output.sum().backward()
        assert all(
            torch.equal(p.grad, q.grad)
            for p, q in zip(pipe.parameters(), reference.parameters(), strict=True)
        )


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupts_propagate(faulty, kind):
    model, pipe = faulty
    model.arm(1, 2, kind("stop"))
    with pytest.raises(kind):
        pipe(torch.randn(8, 4))
    model.disarm()
    assert pipe(torch.randn(8, 4)).shape == (8, 4)


def test_nothing_starts_after_a_failure(faulty):
    model, pipe = faulty
    model.arm(0, 1, ValueError("first"))
    with pytest.raises(ValueError):
        pipe(torch.randn(8, 4))
    assert model.blocks[0][2].calls == 1
    assert not [t for t in threading.enumerate() if t.name.startswith("fxsplit")]


def test_who_need_not_wait_stops_after_a_failure_too():
    pipe = fxsplit.compile(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        Plan(stages=2, micro_batches=4),
        example_args=(torch.randn(8, 4),),
    )
    seen, failed = [], threading.Event()

    def hook(event):
        seen.append(str(event.action))
        if seen[-1] == "1F0":
            failed.set()
            raise KeyError("mine")
        if seen[-1] == "0F1":
            failed.wait(60)
            while any(t.name == "fxsplit stage 1.0" for t in threading.enumerate()):
                time.sleep(0.01)

    pipe.register_action_hook(hook)
    with pytest.raises(KeyError, match="mine"):
        pipe(torch.randn(8, 4))
    assert sorted(seen) == ["0F0", "0F1", "1F0"]


def test_a_backward_after_one_that_failed_begins_anew():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(6, 4)
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=3), example_args=(x,))

    left = [1]

    def fails(event):
        if str(event.action) == "0B1" and left:
            left.clear()
            raise KeyError("mine")

    pipe.register_action_hook(fails)
    output = pipe(x).square().sum()
    with pytest.raises(KeyError, match="mine"):
        torch.autograd.grad(output, list(model.parameters()), retain_graph=True)
    found = torch.autograd.grad(output, list(model.parameters()))
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    torch.testing.assert_close(found, expected)


def test_calls_from_several_threads():
    model, batch = build("gpt")
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=2, micro_batches=2), example_args=batch(4))
    inputs = [batch(3 + i % 4) for i in range(8)]
    expected = [pipe(*args).detach() for args in inputs]
    wrong = []

    def call(i):
        for _ in range(10):
            if not torch.equal(pipe(*inputs[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.fixture
def pair():
    model, batch = build("two_tower")
    plan = fxsplit.Plan(stages=3, micro_batches=2)
    reference = copy.deepcopy(model).double()
    pipe = fxsplit.compile(model.double(), plan, example_args=_double(batch(4)))
    return reference, pipe, _double(batch(5))


def _double(args):
    return ({"query": args[0]["query"].double(), "item": args[0]["item"]},)


def test_autograd_grad_with_respect_to_inputs_and_parameters(pair):
    model, pipe, args = pair
    for requires in (True, False):
        args[0]["query"].requires_grad_(requires)
        inputs = [args[0]["query"]] if requires else []
        expected = torch.autograd.grad(model(*args)["score"].square().sum(), [*model.parameters(), *inputs])
        found = torch.autograd.grad(pipe(*args)["score"].square().sum(), [*pipe.parameters(), *inputs])
        for a, b in zip(expected, found, strict=True):
            torch.testing.assert_close(a, b)
        assert all(p.grad is None for p in pipe.parameters())


def test_backward_into_some_parameters_only(pair):
    _, pipe, args = pair
    chosen = list(pipe.parameters())[:2]
    pipe(*args)["score"].sum().backward(inputs=chosen)
    assert all((p.grad is not None) == any(p is c for c in chosen) for p in pipe.parameters())


def test_frozen_and_unused_parameters_keep_no_gradient(pair):
    _, pipe, args = pair
    pipe.model.item[0].weight.requires_grad_(False)
    pipe(*args)["towers"][0].sum().backward()
    grads = {name for name, p in pipe.named_parameters() if p.grad is not None}
    assert grads == {"query.0.weight", "query.0.bias", "query.2.weight", "query.2.bias"}


def test_a_partial_loss_and_two_forwards_before_their_backwards(pair):
    model, pipe, args = pair
    other = ({"query": args[0]["query"] * 2, "item": args[0]["item"].flip(0)},)
    for m in (model, pipe):
        first, second = m(*args), m(*other)
        second["towers"][1].square().sum().backward()
        (first["score"] * 3).sum().backward()
    for p, q in zip(model.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_backward_twice(pair, checkpoint):
    model, pipe, args = pair
    pipe = fxsplit.compile(pipe.unsplit(), pipe.plan.replace(checkpoint=checkpoint), example_args=args)
    for m in (model, pipe):
        loss = m(*args)["score"].square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    for p, q in zip(model.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_double_backward_is_refused(pair):
    _, pipe, args = pair
    args[0]["query"].requires_grad_()
    for loss in (pipe(*args)["score"].square().sum(), pipe(*args)["score"].sum()):
        with pytest.raises(fxsplit.errors.GradientError, match="second derivative"):
            torch.autograd.grad(loss, args[0]["query"], create_graph=True)


def test_hooks_on_parameters_see_the_sum_once(pair):
    _, pipe, args = pair
    seen, after = [], []
    scale = pipe.model.scale
    scale.register_hook(lambda grad: (seen.append(grad.clone()), grad * 2)[1])
    scale.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.clone()))
    pipe(*args)["score"].sum().backward()
    assert len(seen) == len(after) == 1
    assert torch.equal(scale.grad, seen[0] * 2)


def test_gradients_accumulate_and_clip(pair):
    model, pipe, args = pair
    for _ in range(2):
        model(*args)["score"].sum().backward()
        pipe.step(*args, loss_fn=lambda y: y["score"].sum())
    a = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    b = nn.utils.clip_grad_norm_(pipe.parameters(), 0.5)
    torch.testing.assert_close(a, b)


def test_step_gives_the_loss_of_the_whole_batch():
    model, batch = build("gpt")
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=2, micro_batches=2), example_args=batch(4))
    (tokens,) = batch(5)
    target = torch.randint(12, (5, 9)).masked_fill(torch.rand(5, 9) < 0.4, -100)
    weight = torch.rand(12)
    for reduction in ("mean", "sum"):
        for ignore in (-100, 3):

            def loss_fn(output, target, reduction=reduction, ignore=ignore):
                where = target.clamp(min=0) if ignore == 3 else target
                return nn.functional.cross_entropy(
                    output.flatten(0, 1), where.flatten(), weight, ignore_index=ignore, reduction=reduction
                )

            expected = loss_fn(model(tokens), target)
            grads = torch.autograd.grad(expected, list(model.parameters()))
            pipe.zero_grad()
            torch.testing.assert_close(pipe.step(tokens, target=target, loss_fn=loss_fn), expected.detach())
            for p, g in zip(model.parameters(), grads, strict=True):
                torch.testing.assert_close(p.grad, g, rtol=1e-4, atol=1e-6)


def test_autocast_is_in_force_in_the_workers():
    model, batch = build("gpt")
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=3, micro_batches=2), example_args=batch(4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (tokens,) = batch(4)
        expected = torch.cat([model(tokens[:2]), model(tokens[2:])])
        output = pipe(tokens)
        assert output.dtype == torch.bfloat16
        assert torch.equal(output, expected)


def test_nothing_is_kept_without_gradients():
    model, batch = build("gpt")
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=3, micro_batches=2), example_args=batch(4))
    with torch.no_grad():
        assert pipe(*batch(4)).grad_fn is None
    for p in model.parameters():
        p.requires_grad_(False)
    assert pipe(*batch(4)).grad_fn is None


@pytest.mark.slow
def test_values_are_freed_when_their_last_reader_ran():
    alive = []

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda m, args, y: alive.append(weakref.ref(y.untyped_storage())))
    pipe = fxsplit.compile(
        model, fxsplit.Plan(balance=[1, 1, 1], micro_batches=2), example_args=(torch.randn(4, 4),)
    )
    alive.clear()
    with torch.no_grad():
        output = pipe(torch.randn(4, 4))
    gc.collect()
    assert len(alive) == 2 and output.shape == (4, 4)
    assert all(ref() is None for ref in alive)


def test_the_callers_intra_op_threads_are_as_before():
    model, batch = build("gpt")
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=2, micro_batches=2), example_args=batch(4))
    torch.set_num_threads(2)
    pipe(*batch(4)).sum().backward()
    assert torch.get_num_threads() == 2
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [2]


@pytest.mark.slow
def test_the_interpreter_exits_at_once_with_a_live_pipeline():
    script = """
import torch, fxsplit
from torch import nn
pipe = fxsplit.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), fxsplit.Plan(stages=2, micro_batches=2),
                       example_args=(torch.randn(4, 4),))
output = pipe(torch.randn(4, 4))
pipe.step(torch.randn(4, 4), loss_fn=lambda y: y.sum())
try:
    pipe.step(torch.randn(4, 4), loss_fn=lambda y: 1 / 0)
except ZeroDivisionError:
    print("done", flush=True)
"""
    assert run_python(script, timeout=60) == "done\n"


def _flat(output):
    return torch.cat([t.flatten() for t in torch.utils._pytree.tree_leaves(output)])


def test_deepcopy_computes_with_its_own_weights():
    for name in ("gpt", "resnet", "two_tower"):
        model, batch = build(name)
        plan = fxsplit.Plan(stages=3, micro_batches=2, checkpoint="always")
        pipe = fxsplit.compile(model, plan, example_args=batch(4))
        twin = copy.deepcopy(pipe)
        assert [s.code for s in twin] == [s.code for s in pipe]
        assert "numbers: outputs" in twin.verify()
        args = batch(4)
        pipe.eval(), twin.eval()
        before = _flat(pipe(*args)).detach()
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(0.5)
        assert torch.equal(_flat(pipe(*args)), before)
        assert not torch.equal(_flat(twin(*args)), before)
        _flat(twin(*args)).sum().backward()
        assert all(p.grad is None for p in pipe.parameters())
        assert any(p.grad is not None for p in twin.parameters())


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_checkpoint_around_the_pipeline(micro_batches):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    eager, x = copy.deepcopy(model), torch.randn(8, 6, requires_grad=True)
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=2, micro_batches=micro_batches), example_args=(x,))
    torch.utils.checkpoint.checkpoint(lambda v: pipe(v).relu(), x, use_reentrant=False).sum().backward()
    got, x.grad = x.grad, None
    eager(x).relu().sum().backward()
    torch.testing.assert_close(got, x.grad)
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


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
    kinds = (torch.Tensor, torch.nn.Parameter)  # not those that other tests have left, without memory
    found = [o for o in gc.get_objects() if type(o) in kinds and o.shape == shape]
    return len({t.untyped_storage().data_ptr() for t in found})


@pytest.mark.slow
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
