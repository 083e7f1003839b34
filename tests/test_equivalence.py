"""The split computes what the model computes, bit for bit. The oracle here is written without fxsplit."""

import copy

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import fxsplit
from tests.helpers import ramp
from tests.models import MODELS, build


def micro_batches(args, count):
    """Rows that differ by at most one, larger first, as plain Python."""
    rows = tree_leaves(args)[0].shape[0]
    count = min(rows, count)
    chunks, start = [], 0
    for i in range(count):
        end = start + rows // count + (i < rows % count)
        chunks.append(tree_map(lambda t, rows=slice(start, end): t[rows], args))
        start = end
    return chunks


def eager(model, args, count):
    """Outputs of micro-batches in order, then their backwards in the same order."""
    chunks = micro_batches(args, count)
    outputs = [tree_leaves(model(*chunk)) for chunk in chunks]
    merged = [torch.cat(values) if len(values) > 1 else values[0] for values in zip(*outputs, strict=True)]
    pieces = [
        ramp(m).split([v.shape[0] for v in vs])
        for m, vs in zip(merged, zip(*outputs, strict=True), strict=True)
    ]
    for row, grads in zip(outputs, zip(*pieces, strict=True), strict=True):
        torch.autograd.backward(row, list(grads))
    return merged


def assert_same_state(a, b):
    for (name, p), (other, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert name == other
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), f"gradient of {name}"
    for (name, p), (_, q) in zip(a.named_buffers(), b.named_buffers(), strict=True):
        assert torch.equal(p, q), f"buffer {name}"


@pytest.mark.parametrize(
    "checkpoint", ["never", "always", pytest.param("except_last", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("stages", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))])
@pytest.mark.parametrize("name", MODELS)
def test_bit_equal_to_eager(name, stages, count, checkpoint):
    model, batch = build(name)
    reference = copy.deepcopy(model)
    plan = fxsplit.Plan(stages=stages, micro_batches=count, checkpoint=checkpoint)
    pipe = fxsplit.compile(model, plan, example_args=batch(4))
    assert len(pipe) == stages
    for rows in (7, 2):  # another batch size than the example's, twice: buffers and gradients go on
        args = batch(rows)
        expected = eager(reference, args, count)
        output = pipe(*args)
        for a, b in zip(expected, tree_leaves(output), strict=True):
            assert torch.equal(a, b)
        torch.autograd.backward(tree_leaves(output), [ramp(t) for t in tree_leaves(output)])
        assert_same_state(reference, model)
        reference.zero_grad()
        pipe.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_replicas_are_bit_equal_too(name):
    model, batch = build(name)
    reference = copy.deepcopy(model)
    plan = fxsplit.Plan(stages=2, micro_batches=5, replicas=2, checkpoint="except_last")
    pipe = fxsplit.compile(model, plan, example_args=batch(4))
    for _ in range(5):
        args = batch(9)
        expected = eager(reference, args, 5)
        output = pipe(*args)
        assert all(torch.equal(a, b) for a, b in zip(expected, tree_leaves(output), strict=True))
        torch.autograd.backward(tree_leaves(output), [ramp(t) for t in tree_leaves(output)])
        assert_same_state(reference, model)
        reference.zero_grad()
        pipe.zero_grad()


@pytest.mark.parametrize("name", MODELS)
def test_step_trains_an_optimizer_made_before_compile(name):
    model, batch = build(name)
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (reference, model)]
    keys, parameters = list(model.state_dict()), list(model.parameters())
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=3), example_args=batch(4))
    assert list(pipe.state_dict()) == keys
    assert all(a is b for a, b in zip(pipe.parameters(), parameters, strict=True))

    def loss_fn(output):
        return sum(t.square().mean() for t in tree_leaves(output))

    for _ in range(3):
        args = batch(6)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_fn(reference(*args))
        loss.backward()
        assert torch.equal(pipe.step(*args, loss_fn=loss_fn), loss.detach())
        for optimizer in optimizers:
            optimizer.step()
        assert all(torch.equal(p, q) for p, q in zip(reference.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_eval_and_no_grad_after_compile(name):
    model, batch = build(name)
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=3), example_args=batch(4))
    pipe.eval()
    assert not any(m.training for m in model.modules())
    args = batch(5)
    with torch.no_grad():
        assert all(
            torch.equal(a, b)
            for a, b in zip(tree_leaves(pipe(*args)), tree_leaves(model(*args)), strict=True)
        )
    with torch.inference_mode():
        assert all(t.is_inference() for t in tree_leaves(pipe(*args)))
    pipe.train()
    assert all(m.training for m in model.modules())


@pytest.mark.parametrize("cost", ["params", "time"])
def test_the_output_keeps_its_type(cost):
    model, batch = build("two_tower")
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=3, cost=cost, micro_batches=2), example_args=batch(4))
    output = pipe(*batch(5))
    assert list(output) == ["score", "towers"]
    assert isinstance(output["towers"], tuple)
    assert output["score"].shape == (5,)


def test_dropout_with_one_micro_batch_is_eagers():
    model = torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)) for _ in range(4)]
    )
    reference = copy.deepcopy(model)
    for checkpoint in ("never", "always"):
        pipe = fxsplit.compile(
            model, fxsplit.Plan(stages=3, checkpoint=checkpoint), example_args=(torch.randn(2, 4),)
        )
        x = torch.randn(8, 4)
        state = torch.get_rng_state()
        expected = reference(x)
        expected.sum().backward()
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        output = pipe(x)
        output.sum().backward()
        assert torch.equal(expected, output)
        assert torch.equal(torch.get_rng_state(), after)
        assert_same_state(reference, model)
        reference.zero_grad()
        pipe.zero_grad()


def test_dropout_masks_do_not_depend_on_checkpoint_or_timing():
    model = torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)) for _ in range(4)]
    )
    x = torch.randn(8, 4)
    seen = []
    for checkpoint in ("never", "always", "except_last"):
        for replicas in (1, 2):
            plan = fxsplit.Plan(stages=3, micro_batches=4, checkpoint=checkpoint, replicas=replicas)
            pipe = fxsplit.compile(copy.deepcopy(model), plan, example_args=(x,))
            for _ in range(3):
                torch.manual_seed(7)
                pipe.zero_grad()
                output = pipe(x)
                output.square().sum().backward()
                seen.append(
                    (output.detach(), [p.grad.clone() for p in pipe.parameters()], torch.get_rng_state())
                )
    for output, grads, state in seen[1:]:
        assert torch.equal(output, seen[0][0])
        assert all(torch.equal(a, b) for a, b in zip(grads, seen[0][1], strict=True))
        assert torch.equal(state, seen[0][2])
    masks = seen[0][0].eq(0)
    assert masks.any() and not masks.all()
