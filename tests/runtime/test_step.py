"""`pipe.step` with the loss inside of the schedule: the loss and gradients of the whole batch, with less kept."""

import copy
import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxsplit
from fxsplit.errors import ArgumentError
from fxsplit.runtime.instructions import PLAYS
from fxsplit.schedules.catalog import SHARED as SHARED_WORKERS
from tests.helpers import of_all, oracle, plan_for
from tests.models import build
from tests.runtime.test_call import Faulty

ROWS, CLASSES = 9, 5


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def made(model, **fields):
    plan = fxsplit.Plan(stages=3, schedule="1f1b", **{"micro_batches": 4, **fields})
    return fxsplit.compile(model, plan, example_args=(torch.randn(ROWS, 6, dtype=torch.float64),))


@pytest.fixture
def classifier():
    torch.manual_seed(0)
    return Classifier().double()


def labels(ignored=()):
    target = torch.arange(ROWS) % CLASSES
    target[list(ignored)] = -100
    return target


WEIGHT = torch.tensor([1.0, 2.0, 0.5, 3.0, 0.1], dtype=torch.float64)
DENSE = torch.rand(ROWS, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LOSSES = {
    "cross entropy": (nn.CrossEntropyLoss(), labels()),
    "function": (F.cross_entropy, labels()),
    "ignored": (nn.CrossEntropyLoss(), labels([0, 3, 4])),
    "ignored, a whole micro-batch": (F.cross_entropy, labels([3, 4])),
    "another index is ignored": (functools.partial(F.cross_entropy, ignore_index=2), labels()),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHT), labels()),
    "class weights, ignored": (nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=1), labels()),
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), labels([1])),
    "weights and smoothing": (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1), labels([1])),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), labels([1])),
    "probabilities": (nn.CrossEntropyLoss(), DENSE.softmax(1)),
    "nll": (nn.NLLLoss(weight=WEIGHT), labels()),
    "mse": (nn.MSELoss(), DENSE),
    "mse, summed": (functools.partial(F.mse_loss, reduction="sum"), DENSE),
    "l1": (F.l1_loss, DENSE),
    "huber": (nn.HuberLoss(), DENSE),
    "bce": (nn.BCEWithLogitsLoss(), DENSE),
    "kl": (nn.KLDivLoss(reduction="batchmean"), DENSE),
    "kl, by elements": (nn.KLDivLoss(), DENSE),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:reduction:UserWarning")
@pytest.mark.parametrize("replicas", [1, [2, 1, 3]])
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_that_of_the_whole_batch(classifier, name, replicas):
    """Nine rows over four micro-batches: 3, 2, 2, 2."""
    loss_fn, target = LOSSES[name]
    x = torch.randn(ROWS, 6, dtype=torch.float64)
    eager = copy.deepcopy(classifier)
    loss = loss_fn(eager(x), target)
    loss.backward()
    pipe = made(classifier, replicas=replicas)
    torch.testing.assert_close(
        pipe.step(x, target=target, loss_fn=loss_fn), loss.detach(), rtol=1e-12, atol=1e-12
    )
    for a, b in zip(classifier.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


def test_without_any_target_the_loss_is_no_number(classifier):
    pipe = made(classifier)
    loss = pipe.step(
        torch.randn(ROWS, 6, dtype=torch.float64), target=labels(range(ROWS)), loss_fn=F.cross_entropy
    )
    assert loss.isnan()


def test_a_loss_that_is_not_known_has_to_be_told(classifier):
    x, target = torch.randn(ROWS, 6, dtype=torch.float64), torch.randn(ROWS, CLASSES, dtype=torch.float64)

    def robust(y, t):
        return (y - t).abs().sqrt().mean()

    pipe = made(classifier)
    with pytest.raises(ArgumentError, match=r'how robust reduces (?s:.*)reduction="mean"'):
        pipe.step(x, target=target, loss_fn=robust)
    assert all(p.grad is None for p in classifier.parameters())
    loss = pipe.step(x, target=target, loss_fn=robust, reduction="mean")
    torch.testing.assert_close(loss, robust(classifier(x), target).detach(), rtol=1e-12, atol=1e-12)
    loss = pipe.step(x, loss_fn=lambda y: y.square().sum(), reduction="sum")
    torch.testing.assert_close(loss, classifier(x).square().sum().detach(), rtol=1e-12, atol=1e-12)
    with pytest.raises(ArgumentError, match="reduction='max'"):
        pipe.step(x, target=target, loss_fn=robust, reduction="max")
    with pytest.raises(ArgumentError, match="no row for each of the 9"):
        pipe.step(x, target=target.flatten(), loss_fn=F.mse_loss)
    with pytest.raises(ArgumentError, match="not a single number"):
        pipe.step(x, loss_fn=lambda y: y.square(), reduction="mean")
    with pytest.raises(ArgumentError, match="that of MSELoss is 'mean'"):
        pipe.step(x, target=target, loss_fn=nn.MSELoss(), reduction="sum")
    for loss_fn in (
        functools.partial(F.mse_loss, size_average=False),
        functools.partial(F.mse_loss, target=target),
        nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1, 1, 1, 1]).double(), label_smoothing=0.1),
    ):
        with pytest.raises(ArgumentError, match="is not known"):
            pipe.step(x, target=labels(), loss_fn=loss_fn)
    for odd in ([1.0] * ROWS, {"a": target, "b": [2.0]}):
        with pytest.raises(ArgumentError, match="is not cut into micro-batches"):
            pipe.step(x, target=odd, loss_fn=robust, reduction="mean")
    assert pipe.step(x, target=target, loss_fn=nn.MSELoss(), reduction="mean").dim() == 0


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
@pytest.mark.parametrize("name", ["gpt", "resnet", "unet", "two_tower"])
def test_real_models(name, checkpoint):
    model, batch = build(name)
    eager = copy.deepcopy(model)
    args = batch(8)
    pipe = fxsplit.compile(
        model,
        fxsplit.Plan(stages=3, micro_batches=4, schedule="1f1b", checkpoint=checkpoint),
        example_args=args,
    )
    twin = fxsplit.compile(eager, fxsplit.Plan(stages=3, micro_batches=4), example_args=args)
    loss = pipe.step(*args, loss_fn=of_all, reduction="mean")
    torch.testing.assert_close(loss, twin.step(*args, loss_fn=of_all), rtol=1e-4, atol=1e-5)
    for (fqn, a), b in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4, msg=fqn)
    for a, b in zip(model.buffers(), eager.buffers(), strict=True):
        assert torch.equal(a, b)


def test_stage_s_keeps_at_most_p_minus_s_micro_batches(classifier, monkeypatch):
    most = dict.fromkeys(range(3), 0)
    forward = PLAYS["forward"]

    def counting(call, instruction):
        forward(call, instruction)
        now = sum(stage == instruction.stage for stage, _ in list(call.records))
        most[instruction.stage] = max(most[instruction.stage], now)

    monkeypatch.setitem(PLAYS, "forward", counting)
    pipe = made(classifier, micro_batches=8)
    pipe.step(torch.randn(16, 6, dtype=torch.float64), loss_fn=of_all, reduction="mean")
    assert most == {0: 3, 1: 2, 2: 1}


def test_the_forecast_knows_what_1f1b_keeps():
    model, batch = build("gpt")
    plan = fxsplit.Plan(stages=3, micro_batches=8, cost="memory", optimizer_states=0)
    args = batch(8)
    kept = {}
    for schedule in ("gpipe", "1f1b"):
        found = fxsplit.preview(model, plan.replace(schedule=schedule), example_args=args).assignment
        kept[schedule] = [s.memory - s.state for s in found.forecast.stages]
    for s in range(3):
        assert kept["1f1b"][s] == pytest.approx(kept["gpipe"][s] * (3 - s) / 8, rel=1e-3)


def test_gradients_accumulate_hooks_run_once_and_frozen_parameters_stay(classifier):
    classifier.a.bias.requires_grad_(False)
    seen = []
    classifier.b.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    pipe = made(classifier)
    x = torch.randn(ROWS, 6, dtype=torch.float64, requires_grad=True)
    pipe.step(x, target=labels(), loss_fn=F.cross_entropy)
    first = classifier.b.weight.grad.clone()
    pipe.step(x, target=labels(), loss_fn=F.cross_entropy)
    assert classifier.a.bias.grad is None and len(seen) == 2
    torch.testing.assert_close(classifier.b.weight.grad, 2 * first)
    eager = copy.deepcopy(classifier)
    y = x.detach().clone().requires_grad_()
    F.cross_entropy(eager(y), labels()).backward()
    torch.testing.assert_close(x.grad, 2 * y.grad, rtol=1e-12, atol=1e-12)


def test_parameters_of_the_loss_get_gradients(classifier):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, y, t):
            return self.scale * (y - t).square().mean()

    x, target, loss = torch.randn(ROWS, 6, dtype=torch.float64), DENSE, Scaled()
    made(classifier).step(x, target=target, loss_fn=loss, reduction="mean")
    torch.testing.assert_close(loss.scale.grad, (classifier(x) - target).square().mean().detach())


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("micro_batch", [0, 1, 3])
def test_a_failure_leaves_nothing_behind(stage, micro_batch, backward):
    torch.manual_seed(0)
    model = Faulty()
    plan = fxsplit.Plan(cut=["blocks.1", "blocks.2"], micro_batches=4, schedule="1f1b")
    x = torch.randn(8, 4)
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    before = copy.deepcopy(model.state_dict())
    error = ValueError("injected")
    model.arm(stage, micro_batch + 1, error, backward)
    with pytest.raises(ValueError, match="injected") as caught:
        pipe.step(x, loss_fn=of_all, reduction="mean")
    assert caught.value is error
    what = "backward" if backward else "forward"
    assert any(
        f"in the {what} of stage {stage}" in n and f"micro-batch {micro_batch} of 4" in n
        for n in error.__notes__
    )
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    model.disarm()
    twin = copy.deepcopy(model)
    pipe.step(x, loss_fn=of_all, reduction="mean")
    oracle(twin, (x,), [2, 2, 2, 2], of_all)
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )


def test_a_loss_that_fails_says_so(classifier):
    def broken(y):
        raise KeyError("no such thing")

    with pytest.raises(KeyError, match="no such thing") as caught:
        made(classifier).step(torch.randn(ROWS, 6, dtype=torch.float64), loss_fn=broken, reduction="sum")
    assert any("backward of stage 2" in note for note in caught.value.__notes__)


def test_one_micro_batch_and_hooks_of_the_model_itself_take_the_loss_outside(classifier):
    x = torch.randn(1, 6, dtype=torch.float64)
    loss = made(classifier).step(x, loss_fn=lambda y: y.exp().prod())
    torch.testing.assert_close(loss, classifier(x).exp().prod().detach())
    classifier.register_forward_hook(lambda m, a, y: y * 2)
    x = torch.randn(ROWS, 6, dtype=torch.float64)
    torch.testing.assert_close(made(classifier).step(x, loss_fn=of_all), of_all(classifier(x)).detach())


# -- found by a review ------------------------------------------------------------------------------------------------


class Outputs(Classifier):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        y = super().forward(x)
        return {
            "mean over rows": lambda: y.mean(0),
            "own mean": lambda: y.mean(),
            "own sum": lambda: y.square().sum(),
            "turned": lambda: y.t().contiguous(),
            "weights": lambda: (y, self.a.weight.square().sum()),
        }[self.how]()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("how", ["mean over rows", "own mean", "own sum", "turned", "weights"])
def test_outputs_that_are_not_rows_are_not_taken_for_rows(how):
    torch.manual_seed(0)
    model = Outputs(how).double()
    x = torch.randn(ROWS, 6, dtype=torch.float64)
    pipe = made(model)
    loss = nn.MSELoss() if how != "weights" else (lambda y, t: F.mse_loss(y[0], t) + y[1])
    target = (
        torch.randn(ROWS, CLASSES, dtype=torch.float64) if how == "weights" else torch.tensor(0.3).double()
    )
    reduction = "sum" if how == "weights" else None
    with pytest.raises(ArgumentError, match="an output is no tensor with a row for each"):
        pipe.step(x, target=target, loss_fn=loss, reduction=reduction)
    if how == "own mean":
        found = pipe.step(x, loss_fn=lambda y: y, reduction="mean")
        torch.testing.assert_close(found, model(x).detach(), rtol=1e-12, atol=1e-12)


def test_a_loss_without_gradient_is_an_error(classifier):
    x = torch.randn(ROWS, 6, dtype=torch.float64)
    pipe = made(classifier)
    with pytest.raises(fxsplit.errors.GradientError, match="depends on nothing"):
        pipe.step(x, loss_fn=lambda y: y.sum().detach(), reduction="sum")
    classifier.requires_grad_(False)
    with pytest.raises(fxsplit.errors.GradientError, match="depends on nothing"):
        pipe.step(x, target=DENSE, loss_fn=nn.MSELoss())


def test_what_the_loss_holds_gets_one_sum_at_the_end(classifier):
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    seen = {"scale": [], "weight": []}
    scale.register_post_accumulate_grad_hook(lambda p: seen["scale"].append(p.grad.clone()))
    classifier.a.weight.register_post_accumulate_grad_hook(lambda p: seen["weight"].append(p.grad.clone()))
    calls = []

    def loss(y, t):
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("third")
        return scale * (y - t).square().mean() + classifier.a.weight.square().sum()

    x = torch.randn(ROWS, 6, dtype=torch.float64)
    eager = copy.deepcopy(classifier)
    pipe = made(classifier)
    with pytest.raises(ValueError, match="third"):
        pipe.step(x, target=DENSE, loss_fn=loss, reduction="mean")
    assert scale.grad is None and all(p.grad is None for p in classifier.parameters())
    calls.extend([1, 1, 1])
    pipe.step(x, target=DENSE, loss_fn=loss, reduction="mean")
    twin = torch.ones((), dtype=torch.float64, requires_grad=True)
    (twin * (eager(x) - DENSE).square().mean() + eager.a.weight.square().sum()).backward()
    torch.testing.assert_close(scale.grad, twin.grad, rtol=1e-12, atol=1e-12)
    assert len(seen["scale"]) == len(seen["weight"]) == 1
    torch.testing.assert_close(seen["weight"][0], eager.a.weight.grad, rtol=1e-12, atol=1e-12)


def test_a_target_may_come_with_its_graph(classifier):
    teacher = nn.Linear(6, CLASSES).double()
    x = torch.randn(ROWS, 6, dtype=torch.float64)
    eager, twin = copy.deepcopy(classifier), copy.deepcopy(teacher)
    made(classifier).step(x, target=teacher(x), loss_fn=nn.MSELoss())
    F.mse_loss(eager(x), twin(x)).backward()
    torch.testing.assert_close(classifier.c.weight.grad, eager.c.weight.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(teacher.weight.grad, twin.weight.grad, rtol=1e-12, atol=1e-12)


def test_a_loss_that_calls_the_pipeline_does_not_wait_for_itself(classifier):
    x = torch.randn(ROWS, 6, dtype=torch.float64)
    pipe = made(classifier)
    with pytest.raises(ArgumentError, match="called from inside of its own call"):
        pipe.step(x, loss_fn=lambda y: y.sum() + pipe(x).sum(), reduction="sum")
    assert pipe(x).shape == (ROWS, CLASSES)


def test_a_loss_that_draws_disturbs_no_mask():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.v = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.drop(x) * self.w) * self.v

    model, x = Masked(), torch.rand(16, 6)
    plan = fxsplit.Plan(stages=2, micro_batches=8, checkpoint="always", schedule="1f1b")
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    found = set()
    for _ in range(5):
        torch.manual_seed(3)
        model.zero_grad()
        loss = pipe.step(
            x, loss_fn=lambda y: (y + 0 * torch.randn_like(y)).sum() + torch.rand(()), reduction="sum"
        )
        found.add(float(loss))
        torch.testing.assert_close(model.v.grad.sum(), model.w.grad.sum())  # each is the sum of the outputs
    assert len(found) == 1


def test_threads_and_hooks(classifier):
    count = []
    pipe, x = made(classifier), torch.randn(ROWS, 6, dtype=torch.float64)
    for p in classifier.parameters():
        p.register_hook(lambda g: count.append(1))
    threads = [
        threading.Thread(target=lambda: [pipe.step(x, target=DENSE, loss_fn=nn.MSELoss()) for _ in range(10)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(count) == 40 * len(list(classifier.parameters()))


def test_hooks_of_the_pipeline_itself_run(classifier):
    pipe, seen = made(classifier), []
    pipe.register_forward_hook(lambda m, args, y: seen.append(y.shape))
    pipe.step(torch.randn(ROWS, 6, dtype=torch.float64), target=DENSE, loss_fn=nn.MSELoss())
    assert seen == [(ROWS, CLASSES)]


def test_memory_follows_the_schedule():
    model, batch = build("gpt")
    args = batch(8)
    kept = {}
    for schedule in ("gpipe", "1f1b"):
        plan = fxsplit.Plan(stages=3, micro_batches=8, schedule=schedule, devices=["cpu:0", "cpu:1", "cpu:2"])
        pipe = fxsplit.compile(copy.deepcopy(model), plan, example_args=args, check=False)
        kept[schedule] = [live.kept for live in pipe.memory().values()]
    for s in range(3):
        assert kept["1f1b"][s] == pytest.approx(kept["gpipe"][s] * (3 - s) / 8, rel=1e-3)


class OwnLoss(nn.Module):
    """A mean of its own, weighted by the labels that are not ignored."""

    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, x, labels):
        logits = self.head(self.emb(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved_1f1b", "interleaved_zero_bubble", "zb_v"])
def test_a_weighted_mean_of_the_models_own_is_refused_before_anything_runs(schedule):
    x = torch.randint(0, 9, (4, 5))
    labels = x.clone()
    labels[0, :3] = -100
    model = OwnLoss()
    more = {"workers": 1} if schedule in SHARED_WORKERS else {}
    plan = fxsplit.Plan(cut=["head"], micro_batches=2, schedule=schedule, **more)
    pipe = fxsplit.compile(model, plan, example_args=(x, labels))
    seen = []
    pipe.register_action_hook(seen.append)
    call = {"loss_fn": lambda loss: loss, "reduction": "mean"}
    with pytest.raises(
        fxsplit.errors.ArgumentError, match=rf"'{schedule}': an output is a mean weighted(?s:.*)gpipe"
    ):
        pipe.step(x, labels, **call)
    assert not seen and model.head.weight.grad is None
    gpipe = fxsplit.compile(model, plan.replace(schedule="gpipe", workers=None), example_args=(x, labels))
    torch.testing.assert_close(gpipe.step(x, labels, **call), model(x, labels))


@pytest.mark.parametrize("said", ["sum", "mean"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_a_sum_of_the_models_own_over_what_counts(schedule, said):
    """As transformers' `num_items_in_batch`: what the whole batch counts is an argument, so each part knows it."""

    class Summed(OwnLoss):
        def forward(self, x, labels, count):
            logits = self.head(self.emb(x))
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
            return {"loss": loss / count, "logits": logits}

    x = torch.randint(0, 9, (4, 5))
    labels = x.clone()
    labels[0, :3] = -100
    count = (labels != -100).sum()
    model = Summed()
    pipe = fxsplit.compile(
        model, fxsplit.Plan(cut=["head"], micro_batches=3, schedule=schedule), example_args=(x, labels, count)
    )
    call = {"loss_fn": lambda out: out["loss"], "reduction": said}
    if said == "mean" and schedule != "gpipe":
        with pytest.raises(ArgumentError, match="no tensor with a row for each"):
            pipe.step(x, labels, count, **call)
        return
    twin = copy.deepcopy(model)
    twin.zero_grad()
    expected = twin(x, labels, count)["loss"]
    expected.backward()
    torch.testing.assert_close(pipe.step(x, labels, count, **call), expected.detach())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_outputs_that_are_constants_and_losses_without_a_gradient(schedule):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return {"o": self.b(self.a(x)), "n": None, "k": 3, "s": "name"}

    x = torch.randn(8, 4)
    pipe = fxsplit.compile(Pair(), plan_for(schedule, 2, micro_batches=4), example_args=(x,))
    _, output = pipe.step_with_output(x, loss_fn=lambda y: y["o"].square().mean(), reduction="mean")
    assert output["n"] is None and output["k"] == 3 and output["s"] == "name" and output["o"].shape == (8, 3)
    with pytest.raises(fxsplit.errors.GradientError, match="nothing that requires"):
        pipe.step(x, loss_fn=lambda y: y["o"].detach().mean(), reduction="mean")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_step_of_a_model_that_lost_a_module_says_so(schedule):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), torch.randn(8, 4)
    pipe = fxsplit.compile(model, plan_for(schedule, 2, micro_batches=2), example_args=(x,))
    model[1] = nn.Identity()
    with pytest.raises(fxsplit.errors.ArgumentError, match="compile again"):
        pipe.step(x, loss_fn=lambda y: y.sum(), reduction="sum")
