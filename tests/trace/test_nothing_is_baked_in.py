"""What must never be baked in: each of these was once a silent wrong number, or a trace left on the user's objects."""

import collections
import contextlib
import random
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxsplit
from fxsplit import errors
from fxsplit.testing import assert_equivalent

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


class Base(nn.Module):
    def __init__(self, function=None, **attributes):
        super().__init__()
        self.a, self.b, self.bn, self.function = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args):
        return self.function(self, *args)


def compiled(model, *args):
    return fxsplit.compile(model, fxsplit.Plan(stages=2), example_args=args or (X,))


def right_or_refused(model, pipe, *args):
    """Where the model takes these arguments, the pipeline is right, or says which size it was not made for."""
    try:
        model(*args)
    except (IndexError, KeyError):
        return
    try:
        assert_equivalent(model, pipe, *args)
    except errors.GuardError as error:
        assert "takes another path" in str(error)


def export_branch(m, x, idx):
    y = m.a(x)
    if x.shape[1] > 6:
        y = y * 2
    return m.b(y) * (int(idx.max()) + 1)


def export_loop(m, x, idx):
    y = m.a(x)
    return m.b(sum(y[:, t] for t in range(x.shape[1]))) * (int(idx.max()) + 1)


def export_mean(m, x, idx):
    return m.b(m.a(x).sum(1) / x.shape[1]) * (int(idx.max()) + 1)


@pytest.mark.slow
@pytest.mark.parametrize("function", [export_branch, export_loop, export_mean])
@pytest.mark.parametrize("length", [1, 5])
def test_what_export_decides_by_sizes_is_guarded(function, length):
    model, idx = Base(function), torch.arange(4)
    pipe = compiled(model, torch.randn(4, length, 4), idx)
    assert pipe.traced.front_end.startswith("torch.export")
    for other in (1, 3, 5, 6, 7):
        right_or_refused(model, pipe, torch.randn(4, other, 4), idx)
    assert_equivalent(model, pipe, torch.randn(4, length, 4), idx)


def test_a_size_that_is_looked_up():
    model = Base(lambda m, x: m.b(m.a(x)) * {5: 2.0, 6: 3.0}[x.shape[1]])
    pipe = compiled(model, torch.randn(4, 5, 4))
    right_or_refused(model, pipe, torch.randn(4, 6, 4))
    by_name = Base(
        lambda m, x: m.b(m.d[str(x.shape[1])](m.a(x))),
        d=nn.ModuleDict({"5": nn.Linear(4, 4), "6": nn.Linear(4, 4)}),
    )
    pipe = compiled(by_name, torch.randn(4, 5, 4))
    right_or_refused(by_name, pipe, torch.randn(4, 6, 4))
    in_text = Base(lambda m, x: m.b(m.a(x)) * int(f"{x.shape[1]}"))
    right_or_refused(in_text, compiled(in_text, torch.randn(4, 5, 4)), torch.randn(4, 6, 4))


def test_a_size_in_a_message_decides_nothing():
    def checks(m, x):
        torch._assert(x.dim() == 2, f"expected rows, got {x.shape} and {x.shape[0]}")
        assert x.shape[1] == 4, f"{x.shape[0]} rows of another width"
        if x.shape[1] != 4:
            raise ValueError(f"{x.shape}")
        return m.b(m.a(x))

    model = Base(checks)
    pipe = compiled(model)
    assert_equivalent(model, pipe, torch.randn(9, 4))


def anneal(m, x):
    m.step += 1
    y = m.b(m.a(x))
    return y if m.step > 3 else y * 0.5


@pytest.mark.parametrize("function", [anneal, lambda m, x: m.b(m.a(x)) / m.step.item()])
def test_tensor_attributes_are_no_constants(function):
    model = nn.Sequential(Base(function, step=torch.tensor(1)), nn.Linear(4, 4))
    pipe = compiled(model)
    for value in (1, 5):
        model[0].step.fill_(value)
        assert_equivalent(model, pipe, X)


def read_then_write(m, x):
    y = m.b(m.a(x)) * (2 if m.table.sum() > 0 else 3)
    m.table[0] = x.detach().sum()
    return y


def test_a_decision_by_what_an_earlier_call_has_written():
    model = nn.Sequential(Base(read_then_write, table=torch.zeros(3)), nn.Linear(4, 4))
    pipe = compiled(model)
    for x in (X, X, -X):
        assert_equivalent(model, pipe, x)
        model(x), pipe(x)


DRAWS = {
    "beta": lambda m, x: m.b(m.a(x) * torch.distributions.Beta(0.4, 0.4).sample().item()),
    "geometric": lambda m, x: m.b(m.a(x)) * torch.empty(1).geometric_(0.5).item(),
    "random": lambda m, x: m.b(m.a(x)) * torch.empty(1).random_(0, 5).item(),
    "gumbel": lambda m, x: m.b(m.a(x)) * F.gumbel_softmax(torch.zeros(3), hard=True)[0],
    "dropout": lambda m, x: m.b(m.a(x)) * F.dropout2d(torch.ones(1, 3, 1, 1)).sum(),
}


@pytest.mark.parametrize("function", DRAWS.values(), ids=DRAWS)
def test_numbers_that_are_drawn_are_drawn_in_every_call(function):
    model = Base(function)
    pipe = compiled(model)
    for seed in range(4):
        torch.manual_seed(seed)
        expected = model(X)
        torch.manual_seed(seed)
        assert torch.equal(pipe(X), expected)


def test_a_rank_that_depends_on_sizes():
    def squeezes(m, x):
        h = m.a(x).squeeze()
        return m.b(h.unsqueeze(0) if h.dim() == 1 else h)

    model = Base(squeezes)
    pipe = compiled(model)
    assert_equivalent(model, pipe, torch.randn(7, 4))
    with pytest.raises(errors.GuardError, match="test_nothing_is_baked_in"):
        pipe(torch.randn(1, 4))


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.scale = nn.Linear(4, 4), None

    def forward(self, x):
        self.scale = self.l.weight.detach().abs().max()
        return self.l(x) / self.scale


def test_tensors_that_a_whole_module_leaves_behind_are_not_constants():
    model = Base(lambda m, x: m.b(m.q(m.a(x))) * m.q.scale, q=Scales())
    with pytest.raises(errors.TraceError, match="left behind"):
        compiled(model)
    inner = nn.Sequential(Base(lambda m, x: m.b(m.q(m.a(x))) * m.q.scale, q=Scales()), nn.Linear(4, 4))
    pipe = compiled(inner)
    with torch.no_grad():
        inner[0].q.l.weight.mul_(2)
    assert_equivalent(inner, pipe, X)


def test_the_flag_of_another_module():
    model = Base(lambda m, x: m.b(F.dropout(m.a(x), 0.5, m.bn.training)))
    for before in (True, False):
        model.bn.train(before)
        pipe = compiled(model)
        for now in (True, False):
            model.bn.train(now)
            assert_equivalent(model, pipe, X)
    other_path = Base(lambda m, x: m.b(m.a(x)) if m.bn.training else m.a(m.b(x)).exp())
    with pytest.raises(errors.TraceError, match="by the mode of 'bn'"):
        compiled(other_path)


HIDDEN = {
    "generator": (lambda m, x: m.a(x) * m.s.random(), lambda: random.Random(0), lambda s: s.getstate()),
    "namespace": (
        lambda m, x: (setattr(m.s, "aux", m.a(x).sum()), m.b(x))[1],
        types.SimpleNamespace,
        lambda s: dict(vars(s)),
    ),
    "nested dict": (
        lambda m, x: (m.s["a"].__setitem__("n", m.s["a"]["n"] + 1), m.b(x))[1],
        lambda: {"a": {"n": 0}},
        lambda s: s["a"]["n"],
    ),
}


@pytest.mark.parametrize(("function", "make", "look"), HIDDEN.values(), ids=HIDDEN)
def test_state_that_is_no_attribute_is_seen_and_put_back(function, make, look):
    model = Base(function, s=make())
    before = look(model.s)
    with pytest.raises(errors.TraceError, match=r"writes self\.s"):
        compiled(model)
    assert look(model.s) == before
    inner = nn.Sequential(Base(function, s=make()), nn.Linear(4, 4))
    pipe = compiled(inner)
    assert "0" in pipe.traced.kept_whole and look(inner[0].s) == before
    pipe(X)
    assert look(inner[0].s) != before


def test_modules_in_plain_lists_are_put_back():
    model = Base(lambda m, x: m.b(m.a(x)) + m.teachers[0](x).detach(), teachers=[nn.BatchNorm1d(4)])
    with contextlib.suppress(errors.FxsplitError):
        compiled(model)
    assert model.teachers[0].num_batches_tracked.item() == 0


def test_transforms_of_torch_func_do_not_poison_the_process():
    def maps(m, x):
        return m.b(torch.vmap(lambda v: v.sin() * v.sum())(m.a(x)))

    with pytest.raises(errors.FxsplitError):
        compiled(Base(maps))
    torch.zeros(2).requires_grad_()
    inner = nn.Sequential(Base(maps), nn.Linear(4, 4))
    assert_equivalent(inner, compiled(inner), X)


def test_gradients_inside_of_forward():
    def forces(m, x):
        energy = m.b(m.a(x).tanh()).tanh().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]

    x = X.clone().requires_grad_()
    with pytest.raises(errors.TraceError, match=r"torch\.autograd\.grad"):
        compiled(Base(forces), x)


def test_a_backward_that_does_not_run_is_said():
    def reentrant(m, x):
        return m.b(torch.utils.checkpoint.checkpoint(m.a, m.b(x), use_reentrant=True))

    with pytest.raises(errors.FxsplitError):
        compiled(Base(reentrant))


class Output(collections.OrderedDict):
    pass


def test_ordered_dicts_of_the_users():
    model = Base(lambda m, x: Output(a=m.b(x), n=x.shape[1]))
    pipe = compiled(model)
    assert type(pipe(X[:3])) is Output and list(pipe(X)) == ["a", "n"]
    assert_equivalent(model, pipe, X[:3])


def test_a_size_that_is_asked_whether_it_is_zero():
    class Odd(nn.Module):
        def forward(self, x):
            return x * 2 if x.shape[1] % 2 else x.sin()

    pipe = fxsplit.compile(Odd(), fxsplit.Plan(), example_args=(torch.randn(4, 3),))
    x = torch.randn(2, 5)
    assert torch.equal(pipe(x), x * 2)
    with pytest.raises(fxsplit.errors.GuardError, match="takes another path"):
        pipe(torch.randn(4, 2))
