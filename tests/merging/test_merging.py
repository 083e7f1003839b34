"""How the outputs of micro-batches become those of the batch: by the operations that made them."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxsplit
from fxsplit import Plan
from fxsplit.errors import BatchError

CLASSES, LENGTH = 11, 7


class Language(nn.Module):
    """A model of words whose forward ends as the test says: ``end(model, hidden, scores, labels)``."""

    def __init__(self, end):
        super().__init__()
        self.words, self.mix, self.head = nn.Embedding(CLASSES, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.gate = nn.Parameter(torch.zeros(()))
        self.register_buffer("rates", torch.rand(CLASSES) + 0.1)
        self.loss = nn.CrossEntropyLoss(weight=torch.rand(CLASSES) + 0.1)
        self.end = end

    def forward(self, x, labels):
        hidden = torch.tanh(self.mix(self.words(x)))
        return self.end(self, hidden, self.head(hidden), labels)


def flat(scores, labels):
    return scores.reshape(-1, CLASSES), labels.reshape(-1)


def ones(labels):
    return (labels != -100).float()


LOSSES = {
    "cross entropy": lambda m, h, y, t: F.cross_entropy(*flat(y, t)),
    "cross entropy by dimension": lambda m, h, y, t: F.cross_entropy(y.transpose(1, 2), t),
    "a module with weights of classes": lambda m, h, y, t: m.loss(*flat(y, t)),
    "smoothed labels": lambda m, h, y, t: F.cross_entropy(*flat(y, t), weight=m.rates, label_smoothing=0.1),
    "another index is ignored": lambda m, h, y, t: F.cross_entropy(*flat(y, t.clamp(min=3)), ignore_index=3),
    "nll": lambda m, h, y, t: F.nll_loss(F.log_softmax(y, -1).flatten(0, 1), t.flatten()),
    "next word": lambda m, h, y, t: (F.cross_entropy(*flat(y[:, :-1], t[:, 1:])), y),
    "a sum": lambda m, h, y, t: F.cross_entropy(*flat(y, t), reduction="sum"),
    "a sum by its mask": lambda m, h, y, t: (h.pow(2).mean(-1) * ones(t)).sum() / ones(t).sum(),
    "a mask that may be empty": lambda m, h, y, t: (
        (h.pow(2).mean(-1) * ones(t)).sum() / ones(t).sum().clamp(min=1)
    ),
    "a mask and a small number": lambda m, h, y, t: (h.sum(-1) * ones(t)).sum() / (ones(t).sum() + 1e-6),
    "soft weights": lambda m, h, y, t: (h.sigmoid().mean(-1) * h.sum(-1)).sum() / h.sigmoid().mean(-1).sum(),
    "soft weights that are bounded": lambda m, h, y, t: (
        (h.sigmoid().mean(-1) * h.sum(-1)).sum() / h.sigmoid().mean(-1).sum().clamp(min=15.0)
    ),
    "what a mask selects": lambda m, h, y, t: h[t != -100].pow(2).mean(),
    "mean squared error of a selection": lambda m, h, y, t: F.mse_loss(
        h[t != -100], h[t != -100].detach() * 2
    ),
    "divided by the rows": lambda m, h, y, t: y.pow(2).sum() / y.size(0),
    "rows divided by their number": lambda m, h, y, t: (y.pow(2).sum((1, 2)) / y.size(0)).sum(),
    "two means": lambda m, h, y, t: F.cross_entropy(*flat(y, t)) + 0.1 * h.pow(2).mean(),
    "two heads": lambda m, h, y, t: (
        (F.cross_entropy(y[:, 0], t[:, 0]) + F.cross_entropy(y[:, 6], t[:, 6])) / 2
    ),
    "a penalty": lambda m, h, y, t: F.cross_entropy(*flat(y, t)) + 0.1 * m.mix.weight.pow(2).sum(),
    "a sum and a mean": lambda m, h, y, t: h.pow(2).sum() - (h.mean() - 3) * 2 + m.gate,
    "behind a gate of zero": lambda m, h, y, t: (y, m.gate * h.pow(2).mean()),
    "a sum behind a gate of zero": lambda m, h, y, t: (y, m.gate * h.pow(2).sum()),
    "a hinge": lambda m, h, y, t: (h - 100).relu().mean() + (h + 0.5).relu().mean(),
    "the last word that counts": lambda m, h, y, t: y[
        torch.arange(y.size(0)), (t != -100).sum(1).clamp(1, 7) - 1
    ],
    "two batches that part again": lambda m, h, y, t: torch.cat([y, -y]).chunk(2)[1],
    "classes beside rows": lambda m, h, y, t: torch.einsum("btc,dc->bdt", h, m.mix.weight),
    "what needs no gradient": lambda m, h, y, t: ((t != -100).sum(), y.argmax(-1), y.isfinite().all()),
}


def batch(rows, *, empty=()):
    x = torch.randint(0, CLASSES, (rows, LENGTH))
    labels = x.clone()
    for row in range(rows):
        labels[row, LENGTH - row % 5 :] = -100
    for row in empty:
        labels[row] = -100
    return x, labels


def outputs_and_gradients(run, model, inputs):
    model.zero_grad()
    out = run(*inputs)
    outputs = list(out) if isinstance(out, tuple) else [out]
    roots = [v.pow(2).sum() for v in outputs if v.requires_grad]
    if roots:
        sum(roots).backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [*outputs, *gradients]


@pytest.mark.parametrize("checkpoint", ["never", pytest.param("always", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LOSSES)
def test_outputs_and_gradients_are_the_whole_batches(name, checkpoint):
    torch.manual_seed(0)
    model = Language(LOSSES[name]).double()
    plan = Plan(stages=2, micro_batches=4, checkpoint=checkpoint)
    x = torch.randint(0, CLASSES, (8, LENGTH))
    pipe = fxsplit.compile(model, plan, example_args=(x, x.clone()))  # nothing is ignored in the example
    for inputs in (batch(8), batch(6, empty=(0, 1)), batch(9, empty=(3,)), batch(1), batch(2)):
        if not (inputs[1][:, [0, 6]] != -100).any() and name == "two heads":
            continue
        expected = outputs_and_gradients(model, model, inputs)
        found = outputs_and_gradients(pipe, model, inputs)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, equal_nan=True)


MIXED = {
    "a spread": (lambda m, h, y, t: (y, m.gate * h.std()), "computes the std"),
    "the root of a mean": (lambda m, h, y, t: m.gate * h.pow(2).mean().sqrt(), "made of all rows"),
    "the largest": (lambda m, h, y, t: m.gate * h.max(), "computes the max"),
    "less its mean": (lambda m, h, y, t: y - y.mean(0), "made of all rows"),
    "pairs": (lambda m, h, y, t: m.gate * (h.mean(1) @ h.mean(1).t()).sum(), "by other rows"),
    "twice the batch": (lambda m, h, y, t: torch.cat([y, -y]), "another order"),
    "the other way round": (lambda m, h, y, t: y.flip(0), "neither rows"),
    "the numbers of rows": (
        lambda m, h, y, t: y + m.gate * torch.arange(y.size(0))[:, None, None],
        "numbers of rows",
    ),
    "the first row": (lambda m, h, y, t: y - m.gate * y[:1], "some of the rows"),
    "a place that the number of rows says": (
        lambda m, h, y, t: y * m.rates[y.size(0) : y.size(0) + 1],
        "number of rows",
    ),
    "softmax over rows": (lambda m, h, y, t: m.gate * h.softmax(0), "meet other rows"),
    "balance of a batch": (
        lambda m, h, y, t: (
            F.cross_entropy(*flat(y, t)) + m.gate * (h.mean((0, 1)) * y.mean((0, 1))[:8]).sum()
        ),
        "made of all rows",
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_rows_is_refused_and_the_line_is_named(name):
    end, why = MIXED[name]
    model, (x, labels) = Language(end), batch(8)
    with pytest.raises(BatchError, match=why) as caught:
        fxsplit.compile(model, Plan(stages=2, micro_batches=4), example_args=(x, labels))
    text = str(caught.value)
    assert "pipe.step" in text and "micro_batches=1" in text
    fxsplit.compile(model, Plan(stages=2, micro_batches=1), example_args=(x, labels))


class Whole(nn.Module):
    """A loss in a module that cannot be looked into, because it asks what is in its tensors."""

    def forward(self, scores, labels):
        if bool((labels == -1).all()):
            return scores.sum() * 0
        return F.cross_entropy(*flat(scores, labels))


def test_a_loss_that_cannot_be_looked_into_is_tried_with_labels_that_are_ignored():
    class Model(Language):
        def __init__(self):
            super().__init__(None)
            self.end = Whole()

        def forward(self, x, labels):
            return self.end(self.head(torch.tanh(self.mix(self.words(x)))), labels)

    x = torch.randint(0, CLASSES, (8, LENGTH))
    with pytest.raises(BatchError, match="kept whole"):
        fxsplit.compile(Model(), Plan(stages=2, micro_batches=4), example_args=(x, x.clone()))


def test_numbers_decide_where_nothing_is_derived_and_the_report_says_so():
    class Sorted(nn.Module):
        """Takes rows apart by what is in them, and puts them together again."""

        def forward(self, x):
            order = x.sum(-1).argsort()
            out = torch.tanh(x[order])
            return out[order.argsort()]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = Sorted(), nn.Linear(4, 3)

        def forward(self, x, t):
            return F.cross_entropy(self.head(self.inner(x)), t)

    model, x, t = Model(), torch.randn(8, 4), torch.randint(0, 3, (8,))
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=4), example_args=(x, t))
    assert "taken for rows by their numbers only" in pipe.report()
    t[:3] = -100
    torch.testing.assert_close(pipe(x, t), model(x, t))


@pytest.mark.parametrize("name", ["cross entropy", "two means", "a mask that may be empty"])
def test_weights_and_terms_are_saved(name, tmp_path):
    model = Language(LOSSES[name])
    model.end.__qualname__ = "end"
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=4), example_args=batch(8))
    pipe.save_code(tmp_path)
    again = fxsplit.load(tmp_path, model)
    assert again.merges == pipe.merges
    inputs = batch(8, empty=(0, 1))
    torch.testing.assert_close(again(*inputs), model(*inputs))


def test_parts_that_are_not_gathered_have_their_weights():
    model = Language(LOSSES["next word"])
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=4, gather=False), example_args=batch(8))
    inputs = batch(8, empty=(2, 3))
    out = pipe(*inputs)
    assert len(out[0]) == 2
    loss, _ = out.gather()
    expected = model(*inputs)[0]
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    wanted = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_a_step_before_the_end_of_the_batch_does_not_weigh_by_rows():
    plan = Plan(stages=2, micro_batches=4, schedule="1f1b")
    pipe = fxsplit.compile(Language(LOSSES["cross entropy"]), plan, example_args=batch(8))
    with pytest.raises(fxsplit.errors.ArgumentError, match="gpipe"):
        pipe.step(*batch(8), loss_fn=lambda loss: loss, reduction="mean")


OPERATIONS = {
    "tanh": torch.tanh,
    "double": lambda v: v * 2 - 1,
    "view": lambda v: v.reshape(v.shape[0], 2, -1).transpose(1, 2).flatten(1),
    "merge": lambda v: v.reshape(-1, 2).softmax(-1).reshape(v.shape),
    "turn": lambda v: (v.t() * 0.5).t(),
    "halves": lambda v: torch.cat(v.chunk(2, -1)[::-1], -1),
    "norm": lambda v: F.layer_norm(v, v.shape[-1:]),
    "twice": lambda v: torch.cat([v, v * 3])[: v.shape[0]],
    "stack": lambda v: torch.stack([v, v * v], 1).sum(1),
    "pad": lambda v: F.pad(v, (0, 2))[:, :-2],
    "outer": lambda v: torch.bmm(v[:, :, None], v[:, None]).mean(-1),
}
ENDS = {
    "rows": lambda v: v,
    "mean": lambda v: v.mean(),
    "sum": lambda v: v.sum(0),
    "features": lambda v: v.mean(0).sum(),
    "by count": lambda v: v.sum() / v.size(0),
    "masked": lambda v: (v * (v > 0)).sum() / (v > 0).sum(),
    "centred": lambda v: v - v.mean(0, keepdim=True),
    "norm": lambda v: v.norm(),
    "turned": lambda v: v.t().flatten(),
    "both": lambda v: (v.sum() + v.mean(), v.argmax(-1)),
}


class Chain(nn.Module):
    def __init__(self, operations, end, gate):
        super().__init__()
        self.operations, self.end = operations, end
        self.first, self.gate = nn.Linear(6, 6), nn.Parameter(torch.tensor(gate))

    def forward(self, x):
        value = self.first(x)
        for operation in self.operations:
            value = OPERATIONS[operation](value)
        return ENDS[self.end](value * self.gate)


@pytest.mark.slow
@settings(deadline=None)
@given(
    operations=st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=4),
    end=st.sampled_from(sorted(ENDS)),
    gate=st.sampled_from([0.0, 1.0]),
    example=st.integers(1, 6),
    rows=st.integers(1, 9),
)
def test_random_programs_give_the_whole_batch_or_are_refused(operations, end, gate, example, rows):
    torch.manual_seed(0)
    model = Chain(operations, end, gate).double()
    try:
        pipe = fxsplit.compile(
            model, Plan(micro_batches=3), example_args=(torch.randn(example, 6, dtype=torch.double),)
        )
    except BatchError:
        assert end in ("centred", "norm", "turned")
        return
    x = torch.randn(rows, 6, dtype=torch.double)
    with torch.no_grad():
        model.gate.fill_(1.5)
    expected = outputs_and_gradients(model, model, (x,))
    for a, b in zip(outputs_and_gradients(pipe, model, (x,)), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)


class AsksItsMode(nn.Module):
    """Kept whole, since it reads self.training."""

    def __init__(self, mixes):
        super().__init__()
        self.first, self.mixes = nn.Linear(4, 4), mixes

    def forward(self, x):
        y = torch.tanh(self.first(x) if self.training else self.first(x) * 1.0)
        return y - y.mean(0) if self.mixes else y


@pytest.mark.parametrize("mixes", [False, True])
def test_a_module_that_is_kept_whole_and_runs_without_values_is_known_by_what_it_did(mixes):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), AsksItsMode(mixes), nn.Linear(4, 4))

    with torch.device("meta"):
        model = make()
    x, plan = torch.randn(8, 4), Plan(stages=2, micro_batches=4)
    if mixes:
        with pytest.raises(BatchError, match="all rows of the batch"):
            fxsplit.compile(model, plan, example_args=(x,), leaf_modules=["1"])
        return
    pipe = fxsplit.compile(model, plan, example_args=(x,), leaf_modules=["1"], weights=make().state_dict())
    torch.testing.assert_close(pipe(x), make()(x))


def test_a_term_of_a_sum_may_be_an_output_too():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            y = self.a(x)
            mean, total = y.square().mean(), y.sum()
            return mean + total, mean

    model, x = Both().double(), torch.randn(6, 4).double()
    pipe = fxsplit.compile(model, fxsplit.Plan(micro_batches=3), example_args=(x,))
    found, expected = (
        torch.autograd.grad(sum(v * (k + 2) for k, v in enumerate(m(x))), list(model.parameters()))
        for m in (pipe, model)
    )
    torch.testing.assert_close(found, expected)


def test_a_dimension_that_is_summed_and_stays_moves_no_rows():
    class Summed(nn.Module):
        def forward(self, x):
            return x.sin().sum(0, keepdim=True), x.cos().sum(0)

    plan = Plan(micro_batches=2, batch_dims={"x": 1})
    pipe = fxsplit.compile(Summed(), plan, example_args=(torch.randn(3, 6, 2),))
    assert [(m.how, m.dim, m.note) for m in pipe.merges] == [("rows", 1, ""), ("rows", 0, "")]


@pytest.mark.parametrize(
    "mixes",
    [lambda x: (x[:, None] * x[None]).sum(-1), lambda x: F.layer_norm(x, x.shape)],
    ids=["pairs of rows", "a norm over rows"],
)
def test_rows_that_meet_others_are_seen_without_numbers(mixes):
    class Mixing(nn.Module):
        def forward(self, x):
            return mixes(x)

    with pytest.raises(BatchError, match="lets rows of the batch meet other rows"):
        fxsplit.compile(Mixing(), Plan(micro_batches=2), example_args=(torch.randn(6, 4),))


@pytest.mark.parametrize(
    ("moves", "dim"),
    [
        (lambda x: x.permute(2, 0, 1), 1),
        (lambda x: x.unsqueeze(0), 1),
        (lambda x: x.unsqueeze(1), 0),
        (lambda x: x.transpose(0, 2), 2),
        (lambda x: F.pad(x, (1, 2)), 0),
    ],
    ids=["permute", "before", "behind", "transpose", "pad"],
)
def test_where_rows_go_is_known_without_numbers(moves, dim):
    class Moving(nn.Module):
        def forward(self, x):
            return moves(x.sin())

    pipe = fxsplit.compile(Moving(), Plan(micro_batches=2), example_args=(torch.randn(6, 4, 3),))
    assert [(m.how, m.dim, m.note) for m in pipe.merges] == [("rows", dim, "")]


def test_rows_beside_those_of_the_batch_are_seen_without_numbers():
    class Padded(nn.Module):
        def forward(self, x):
            return F.pad(x.sin(), (0, 0, 1, 0))

    with pytest.raises(BatchError, match="puts other rows beside those of the batch"):
        fxsplit.compile(Padded(), Plan(micro_batches=2), example_args=(torch.randn(6, 4),))


def test_statistics_of_a_micro_batch_are_said():
    class Normed(nn.Module):
        def forward(self, x):
            return F.batch_norm(x, None, None, training=True)

    with pytest.warns(
        UserWarning, match="output is normalised by the statistics of the batch: with micro-batches"
    ):
        fxsplit.compile(Normed(), Plan(micro_batches=2), example_args=(torch.randn(6, 4),))
