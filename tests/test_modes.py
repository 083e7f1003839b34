"""A program for each mode in which the model takes a path of its own, and what they have in common."""

import copy

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import errors
from fxsplit.schedules.catalog import one_f_one_b

X = torch.randn(6, 8)


class TwoPaths(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(self.a(x)) if self.training else self.c(self.b(self.a(x)).relu())


def compiled(model, **plan):
    return fxsplit.compile(model, fxsplit.Plan(stages=2, micro_batches=3, **plan), example_args=(X,))


@pytest.mark.parametrize("trained", [True, False])
def test_a_program_for_each_mode(trained):
    model = TwoPaths().train(trained)
    pipe = compiled(model, schedule="1f1b")
    assert pipe.compiled[True] is not pipe.compiled[False]
    assert pipe.traced is pipe.compiled[trained].traced and pipe.stages == pipe.compiled[trained].stages
    assert len(pipe) == len(pipe.stages) and pipe.active is pipe.compiled[trained]
    assert {"c" in str(pipe.compiled[mode].assignment.stages) for mode in (True, False)} == {True, False}
    pipe.train(not trained)
    assert pipe.active is pipe.compiled[not trained] and pipe.traced is pipe.compiled[trained].traced
    torch.testing.assert_close(pipe(X), model(X))
    assert str(pipe.compiled[True]) == "Compiled(2 stages, for train())"


def test_one_program_where_both_modes_take_one_path():
    pipe = compiled(nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)))
    assert pipe.compiled[True] is pipe.compiled[False] and len(pipe.engines()) == 1


def test_hooks_lock_and_questions_go_with_both_modes():
    pipe = compiled(TwoPaths())
    seen = []
    with pipe.register_action_hook(lambda event: seen.append(event.action)):
        for again in range(2):
            for mode in (True, False):
                pipe.train(mode)(X)
                assert len(seen) == 6
                seen.clear()
            if not again:
                pipe.recompile()  # keeps hooks and lock
    first, second = pipe.engines()
    assert first.common is second.common
    for mode in (True, False):
        assert "micro-batches" in pipe.train(mode).verify()
        assert pipe.memory() and pipe.report() == pipe.train(not mode).report()


def test_a_copy_and_a_folder_have_both_modes(tmp_path):
    pipe = compiled(TwoPaths())
    pipe.save_code(tmp_path)
    model = copy.deepcopy(pipe.model)
    by_state = fxsplit.load(tmp_path, pipe.state_dict())
    for twin in (copy.deepcopy(pipe), fxsplit.load(tmp_path, model), by_state, copy.deepcopy(by_state)):
        assert list(twin.compiled) == [True, False] and len(twin.engines()) == 2
        for mode in (True, False):
            torch.testing.assert_close(twin.train(mode)(X), pipe.train(mode)(X))
            torch.testing.assert_close(twin.unsplit()(X), pipe.unsplit()(X))


def test_a_schedule_of_ones_own_is_for_the_stages_of_one_mode(tmp_path):
    class Short(TwoPaths):
        def forward(self, x):
            return self.c(self.b(self.a(x)).relu()) if self.training else self.a(x)

    schedule = one_f_one_b(3, 3, [1, 1, 1])
    plan = fxsplit.Plan(stages=3, micro_batches=3, schedule=schedule)
    pipe = fxsplit.compile(Short(), plan, example_args=(X,))
    pipe.save_code(tmp_path)
    for one in (pipe, fxsplit.load(tmp_path, pipe.model), copy.deepcopy(pipe)):
        played = {mode: (len(c.stages), c.plan.schedule_name) for mode, c in one.compiled.items()}
        assert played == {True: (3, "1f1b"), False: (1, "gpipe")}
        for mode in (True, False):
            one.train(mode).step(X, target=X, loss_fn=nn.functional.mse_loss)


def test_a_mode_that_the_example_cannot_be_run_in_is_not_there():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    pipe = fxsplit.compile(model, fxsplit.Plan(), example_args=(X[:1],))
    assert list(pipe.compiled) == [False]
    with pytest.raises(errors.ArgumentError, match="the pipeline is in train mode"):
        pipe.train()(X)


# -- what is not done at both ends of a step ---------------------------------------------------------------------------


def test_a_step_with_the_loss_inside_merges_its_output_only_for_who_asks(monkeypatch):
    from fxsplit.runtime import autograd

    merged, seen = autograd.merged, []
    monkeypatch.setattr(autograd, "merged", lambda *args: seen.append(1) or merged(*args))
    pipe = compiled(TwoPaths(), schedule="1f1b")
    seen.clear()
    pipe.step(X, target=X, loss_fn=nn.functional.mse_loss)
    assert not seen
    _, output = pipe.step_with_output(X, target=X, loss_fn=nn.functional.mse_loss)
    assert seen and torch.equal(output, pipe(X).detach())


class Narrowed(nn.Module):
    """As wide as its first number says."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x)[:, : int(x[0, 0].item())]


@pytest.mark.parametrize("ask", ["step", "step_with_output"])
def test_rows_that_do_not_fit_together_are_no_batch_and_leave_no_gradient(ask):
    model = nn.Sequential(Narrowed())
    x = torch.randn(6, 8)
    x[:, 0] = 4
    plan = fxsplit.Plan(micro_batches=3, schedule="1f1b")
    pipe = fxsplit.compile(model, plan, example_args=(x,), leaf_modules=["0"])
    step, loss = getattr(pipe, ask), (lambda y: y.square().sum())
    step(x, loss_fn=loss, reduction="sum")
    model.zero_grad()
    x[2:4, 0] = 5
    with pytest.raises(errors.BatchError, match="do not fit together"):
        step(x, loss_fn=loss, reduction="sum")
    assert all(p.grad is None for p in model.parameters())


class Counting(nn.Module):
    """Counts its calls in both modes, and fails when it is told to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        if bool(x.isnan().any()):
            raise ValueError("no number")
        return x


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_buffers_are_kept_where_something_may_write_them(schedule):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), Counting())
    plan = fxsplit.Plan(cut=["2"], micro_batches=3, schedule=schedule)
    pipe = fxsplit.compile(model, plan, example_args=(X,), leaf_modules=["3"])
    pipe(X)

    def names():
        return [name for _, name in pipe._now.watch.written()]

    norms = ["running_mean", "running_var", "num_batches_tracked"]
    assert sorted(names()) == sorted([*norms, "calls"])
    pipe.eval()(X)
    assert names() == ["calls"]
    model[1].train()
    assert sorted(names()) == sorted([*norms, "calls"])
    before = {name: b.clone() for name, b in model.named_buffers()}
    for call in (pipe, lambda x: pipe.step(x, loss_fn=lambda y: y.sum(), reduction="sum")):
        for mode in (True, False):
            pipe.train(mode)
            bad = X.clone()
            bad[5] = float("nan")
            with pytest.raises(ValueError, match="no number"):
                call(bad)
            assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())


def test_a_norm_whose_hooks_may_write_is_kept_in_eval_mode():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    model[1].register_forward_hook(lambda module, args, out: None)
    pipe = fxsplit.compile(model, fxsplit.Plan(), example_args=(X,))
    pipe(X)
    assert len(pipe._now.watch.written()) >= 3
