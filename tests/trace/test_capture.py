"""Which models are captured, and right: a test for each lesson of the tracer, and for each front end."""

import collections
import copy
import pickle
import random
from dataclasses import dataclass

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxsplit
from fxsplit import errors
from fxsplit.testing import assert_equivalent
from fxsplit.trace.front import trace


class Net(nn.Module):
    """Two linear layers; `forward` is the function that it is made with."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        return self.function(self, x)


def inside(function):
    """A model whose middle child runs `function`."""
    return nn.Sequential(nn.Linear(4, 4), Net(function), nn.Linear(4, 4))


def compiled(model, *args, stages=1, **options):
    args = args or (torch.randn(4, 4),)
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=stages), example_args=args, **options)
    assert_equivalent(model, pipe, *args)
    return pipe


def right_in_both_modes(model, pipe, *rows):
    for mode in (True, False):
        pipe.train(mode)
        for n in rows:
            assert_equivalent(model, pipe, torch.randn(n, 4))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * 7, None


# -- the eleven lessons ----------------------------------------------------------------------------------------------


def test_1_real_tensors_go_through_every_operation():
    def forward(m, x):
        assert isinstance(x, torch.Tensor) and type(x) is torch.Tensor
        return torch.pow(m.a(x), 3.0) + torch.pow(2.0, m.b(x)) + 2**x

    model = Net(forward)
    right_in_both_modes(model, compiled(model), 1, 5)


def test_2_factories_take_sizes_and_contexts_become_nodes():
    def forward(m, x):
        n, d = x.shape
        grid = (
            torch.zeros(n, 8, device=x.device)[:, :d] + torch.arange(n).unsqueeze(1) + torch.full((n, d), 0.5)
        )
        noise = torch.rand(n, d) * 0 + torch.ones_like(x)
        with torch.no_grad():
            scale = m.b(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m.a(x)
        return (y.float() + grid) * scale * noise

    model = Net(forward)
    pipe = compiled(model)
    assert {"no_grad", "autocast"} <= {getattr(n.target, "__name__", "") for n in pipe.traced.graph.nodes}
    right_in_both_modes(model, pipe, 1, 9)


DATA = {
    "nonzero": lambda m, x: (
        m.a(x)[(x[:, 0] > 0).nonzero()[:, 0]].sum(0, keepdim=True) if len(x.nonzero()) else x
    ),
    "masked_select": lambda m, x: m.a(x) * max(1, x.masked_select(x > 0).numel()),
    "boolean index": lambda m, x: m.a(x) * (2 if x[x > 0].shape[0] > 3 else 3),
    "unique": lambda m, x: m.a(x) * (x > 0).unique().shape[0],
    "item": lambda m, x: m.a(x) if x.sum().item() > 0 else m.b(x),
    "bool": lambda m, x: m.a(x) if (x > 0).any() else m.b(x),
    "tolist": lambda m, x: m.a(x) * x[0].tolist()[0],
    "written constant": lambda m, x: m.a(x) if _wrote(x) else m.b(x),
    "numpy": lambda m, x: m.a(x) * float(x.detach().numpy().sum()),
}


def _wrote(x):
    total = torch.zeros(3)
    total[0] = x.sum().detach()
    return total.sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("function", DATA.values(), ids=DATA)
def test_3_what_depends_on_data_is_never_baked_in(function):
    model = inside(function)
    pipe = compiled(model, stages=3)
    assert list(pipe.traced.kept_whole) in (["1"], [])
    for seed in range(6):
        torch.manual_seed(seed)
        assert_equivalent(model, pipe, torch.randn(3, 4))
        assert_equivalent(model, pipe, torch.randn(3, 4).abs())
        assert_equivalent(model, pipe, -torch.randn(3, 4).abs())


def test_3_numbers_read_from_tensors_are_nodes():
    def forward(m, x):
        length = (x[0] > -9).sum().item()
        return m.a(x)[:, :length] * x.abs().max().item()

    model = Net(forward)
    pipe = compiled(model, stages=2)
    assert "item" in [str(n.target) for n in pipe.traced.graph.nodes]
    for scale in (1, 3, -2):
        assert_equivalent(model, pipe, torch.randn(5, 4) * scale)


def test_3_what_depends_on_sizes_alone_is_guarded():
    def forward(m, x):
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        causal = bool((mask == torch.full((4, 4), float("-inf")).triu(1)).all())
        return m.a(x) if causal else m.b(x)

    model = Net(forward)
    pipe = compiled(model)
    assert not pipe.traced.kept_whole and "causal == True" in str(pipe.traced.baked_in())
    right_in_both_modes(model, pipe, 1, 9)


def test_4_sizes_stay_nodes_and_decisions_by_them_are_reported():
    def forward(m, x):
        if x.shape[1] > 3:
            x = x.reshape(x.shape[0], 2, x.shape[1] // 2).flatten(1)
        return m.a(x) / x.shape[0]

    model = Net(forward)
    pipe = compiled(model)
    assert pipe.traced.baked_in() == [
        f"x.size(1) > 3 (test_capture.py:{forward.__code__.co_firstlineno + 1})"
    ]
    right_in_both_modes(model, pipe, 1, 9)


def snapshot(model):
    def copied(value):
        return dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value

    tensors = [
        (n, t, t._version, t.detach().clone()) for n, t in (*model.named_parameters(), *model.named_buffers())
    ]
    return [(n, m, {k: copied(v) for k, v in m.__dict__.items()}) for n, m in model.named_modules()], tensors


def same(a, b):
    modules, tensors = a
    assert [(n, id(m)) for n, m, _ in modules] == [(n, id(m)) for n, m, _ in b[0]]
    for (_, _, before), (_, _, now) in zip(modules, b[0], strict=True):
        assert list(before) == list(now)
        for key in before:
            assert before[key] is now[key] or str(before[key]) == str(now[key]), key
    for (_, t, _, value), (_, now, _, later) in zip(tensors, b[1], strict=True):
        assert t is now and torch.equal(value, later)


def writes_everything(m, x):
    m.seen += 1
    m.count = getattr(m, "count", 0) + 1
    m.cache = x
    if not m._forward_hooks:
        m.b.register_forward_hook(lambda *_: None)
    random.random()
    numpy.random.rand()
    torch.rand(2)
    return m.b(m.a(x))


def fails(m, x):
    writes_everything(m, x)
    if x.sum() > 0:
        return x
    return -x


@pytest.mark.parametrize("wrap", [inside, Net])
@pytest.mark.parametrize("function", [writes_everything, fails])
def test_5_the_model_and_the_random_numbers_are_as_they_were(function, wrap):
    torch.manual_seed(0)
    model, before = wrap(function), None
    model.zero_grad()
    next(model.parameters()).grad = torch.ones(4, 4)
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    before = snapshot(model)
    try:
        fxsplit.compile(model, example_args=(torch.randn(4, 4, generator=torch.Generator()),))
        assert wrap is inside
    except errors.TraceError:
        assert wrap is Net
    same(before, snapshot(model))
    assert torch.equal(next(model.parameters()).grad, torch.ones(4, 4))
    now = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    assert torch.equal(states[0], now[0]) and states[1:] == now[1:]
    assert torch.is_grad_enabled() and isinstance(torch.arange(2), torch.Tensor)


def test_6_a_module_that_fails_half_way_is_rolled_back():
    def forward(m, x):
        torch.set_grad_enabled(False)
        y = m.a(x) + torch.rand(4)
        total = [y.exp(), y.exp()]
        torch.set_grad_enabled(True)
        return m.b(x) + total[0] if y.sum() > 0 else m.b(x)

    def leaves_the_mode(m, x):
        torch.set_grad_enabled(False)
        if x.sum() > 1e9:
            return x
        torch.set_grad_enabled(True)
        return m.a(x)

    for function in (forward, leaves_the_mode):
        model = inside(function)
        pipe = compiled(model, stages=3)
        assert list(pipe.traced.kept_whole) == ["1"]
        assert [str(n.target) for n in pipe.traced.graph.nodes if n.op.startswith("call")] == ["0", "1", "2"]
        right_in_both_modes(model, pipe, 2, 7)


def test_7_the_graph_survives_deepcopy_and_pickle():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    traced = trace(model, (torch.randn(4, 4),), {})
    model.eval()
    for twin in (copy.deepcopy(traced.module), pickle.loads(pickle.dumps(traced.module))):
        x = torch.randn(5, 4)
        assert torch.equal(twin.eval()(x)[0], model(x))
    assert len(copy.deepcopy(traced.graph).nodes) == len(traced.graph.nodes)


class OtherOutputs(nn.Module):
    """Like GoogLeNet: more outputs in train mode."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.head, self.aux = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        h = self.drop(self.norm(self.stem(x)))
        if self.training:
            return {"out": self.head(h), "aux": [self.aux(h), F.dropout(x, 0.5, self.training)]}
        return self.head(h)


@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("plan", [{"stages": 3}, {"stages": 2, "micro_batches": 2, "checkpoint": "always"}])
def test_8_a_model_that_takes_another_path_in_eval_mode(start, plan):
    model = OtherOutputs().train(start)
    pipe = fxsplit.compile(model, fxsplit.Plan(**plan), example_args=(torch.randn(4, 4),))
    assert pipe.traced.modes == (start,) and pipe.compiled[not start].traced.modes == (not start,)
    assert "another path" in pipe.traced.report()
    for twin in (pipe, copy.deepcopy(pipe)):
        for mode in (True, False, True):
            twin.train(mode)
            if plan.get("micro_batches", 1) == 1 or not mode:  # masks of micro-batches are their own
                assert_equivalent(twin.unsplit(), twin, torch.randn(5, 4))
            assert isinstance(twin(torch.randn(6, 4)), dict) is mode
            assert "same-graph: holds" in twin.verify()
    assert list(pipe.state_dict()) == list(model.state_dict())


@dataclass
class Result:
    logits: torch.Tensor
    hidden: list
    name: str = "result"


@dataclass(frozen=True)
class Batch:
    image: torch.Tensor
    scale: float


class Named(dict):
    pass


def test_9_dataclasses_and_dict_subclasses_keep_their_type():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, batch):
            y = self.a(batch.image) * batch.scale
            return Named(result=Result(y, [y + 1, (y, 3)]), other=collections.OrderedDict(z=-y))

    model = Model()
    for micro_batches in (1, 2):
        plan = fxsplit.Plan(stages=2, micro_batches=micro_batches)
        pipe = fxsplit.compile(model, plan, example_args=(Batch(torch.randn(4, 4), 2.0),))
        batch = Batch(torch.randn(5, 4), 2.0)
        output, expected = pipe(batch), model(batch)
        assert type(output) is Named and type(output["result"]) is Result
        assert output["result"].name == "result" and output["result"].hidden[1][1] == 3
        assert torch.equal(output["result"].hidden[0], expected["result"].hidden[0])
        assert_equivalent(model, pipe, batch)
    assert [a.name for a in pipe.traced.signature.arguments] == ["batch.image"]
    with pytest.raises(errors.ArgumentError, match=r"batch\.scale"):
        pipe(Batch(torch.randn(5, 4), 3.0))


def test_10_buffers_stay_non_persistent_and_hooks_are_run():
    seen = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(4), persistent=False)
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            self.inner.register_forward_hook(lambda m, a, o: seen.append("inner") or o * 2)

        def forward(self, x):
            return self.inner(x) * self.table

    model = Model()
    model.register_forward_pre_hook(lambda m, a: (seen.append(("pre", m)), a[0] + 1)[1])
    model.register_forward_hook(lambda m, a, k, o: (seen.append(("post", m)), o * 3)[1], with_kwargs=True)
    model.register_full_backward_hook(lambda m, gi, go: seen.append(("backward", m)))
    pipe = compiled(model, torch.randn(4, 4, requires_grad=True))
    assert "table" not in pipe.state_dict() and list(pipe.state_dict()) == list(model.state_dict())
    seen.clear()
    x = torch.randn(5, 4, requires_grad=True)
    output = pipe(x)
    assert seen == [("pre", model), "inner", ("post", model)]
    output.sum().backward()
    assert seen[-1] == ("backward", model)
    handle = model.register_forward_hook(lambda m, a, o: o + 100)  # one that comes later counts too
    assert torch.equal(pipe(x), model(x)) and pipe(x).min() > 50
    handle.remove()
    assert torch.equal(pipe(x), output)


def test_11_numbered_modules_have_names_that_read_well():
    model = nn.Module()
    model.h = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    model.forward = lambda x: model.h[1](model.h[0](x))
    pipe = fxsplit.compile(model, example_args=(torch.randn(4, 4),))
    assert "self.h_0(x)" in pipe[0].code and "getattr" not in pipe[0].code
    assert list(pipe.state_dict()) == ["h.0.weight", "h.0.bias", "h.1.weight", "h.1.bias"]


# -- state on the side of Python --------------------------------------------------------------------------------------


def draws(m, x):
    return m.a(x) * random.random() + numpy.random.rand()


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_random_numbers_of_python_are_drawn_in_every_call(checkpoint):
    model = inside(draws)
    plan = fxsplit.Plan(stages=3, checkpoint=checkpoint)
    pipe = fxsplit.compile(model, plan, example_args=(torch.randn(4, 4),))
    assert "random numbers" in pipe.traced.kept_whole["1"]
    for _ in range(2):
        x = torch.randn(5, 4)
        random.seed(1), numpy.random.seed(1)
        expected = model(x)
        expected.sum().backward()
        gradients = [p.grad.clone() for p in model[1].a.parameters()]
        model.zero_grad()
        random.seed(1), numpy.random.seed(1)
        output = pipe(x)
        assert torch.equal(output, expected)
        output.sum().backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model[1].a.parameters(), gradients, strict=True))
        model.zero_grad()


def test_random_numbers_of_python_in_the_model_itself_are_refused():
    with pytest.raises(errors.TraceError, match="Python's or NumPy's random numbers"):
        fxsplit.compile(Net(draws), example_args=(torch.randn(4, 4),))


def test_a_counter_in_the_model_itself_is_refused():
    def counts(m, x):
        m.calls = getattr(m, "calls", 0) + 1
        return m.a(x) * m.calls

    with pytest.raises(errors.TraceError, match=r"writes self\.calls"):
        fxsplit.compile(Net(counts), example_args=(torch.randn(4, 4),))


def test_a_name_for_a_value_that_is_changed_in_place():
    def forward(m, x):
        y = m.a(x)
        other = y
        y += m.b(x)
        return other * y

    model = Net(forward)
    right_in_both_modes(model, compiled(model, stages=2), 2, 5)


def test_a_custom_function_in_the_model_itself_keeps_its_backward():
    model = Net(lambda m, x: m.b(Scaled.apply(m.a(x), 2.0)))
    pipe = compiled(model, stages=3)
    assert "Scaled.apply(" in pipe[0].code + pipe[1].code + pipe[2].code
    right_in_both_modes(model, pipe, 1, 5)
    assert_equivalent(model, copy.deepcopy(pipe), torch.randn(3, 4))


# -- front ends -------------------------------------------------------------------------------------------------------


class ReadsASize(nn.Module):
    """As in graph networks: a size that is read from the values, in the model itself."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x, index):
        count = int(index.max()) + 1
        h = self.drop(self.norm(self.a(x)))
        return self.b(h.new_zeros(count, 4).index_add(0, index, h))


@pytest.mark.slow
@pytest.mark.parametrize("start", [True, False])
def test_export_is_the_second_front_end(start):
    model = ReadsASize().train(start)
    x, index = torch.randn(6, 4), torch.tensor([0, 1, 1, 2, 0, 3])
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=3), example_args=(x, index))
    assert pipe.traced.front_end.startswith("torch.export")
    report = pipe.traced.report()
    assert "not used: the value-carrying tracer" in report and "values of a tensor" in report
    assert {id(p) for p in pipe.parameters()} == {id(p) for p in model.parameters()}
    assert "# test_capture.py:" in pipe[0].code
    assert {f.module_path for f in pipe.traced.facts.values()} >= {"a", "b", "norm", "drop"}
    for mode in (True, False):
        pipe.train(mode)
        for n in (2, 6, 9):
            assert_equivalent(model, pipe, torch.randn(n, 4), torch.randint(0, n, (n,)))


@pytest.mark.slow
def test_regions_of_an_exported_graph_are_regions_of_the_split():
    def forward(m, x):
        with torch.no_grad():
            y = m.a(x) * int(x.abs().max() + 1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = m.b(x)
        m.seen.add_(1)
        return m.a(z.float()) * y + m.seen

    model = Net(forward)
    pipe = compiled(model, stages=2)
    assert pipe.traced.front_end.startswith("torch.export")
    assert {"no_grad", "autocast"} <= {getattr(n.target, "__name__", "") for n in pipe.traced.graph.nodes}
    for checkpoint in ("never", "always"):
        plan = fxsplit.Plan(stages=2, checkpoint=checkpoint)
        pipe = fxsplit.compile(model, plan, example_args=(torch.randn(4, 4),))
        right_in_both_modes(model, pipe, 2, 5)  # export takes a size of 1 for another program


def test_export_does_not_lose_what_forward_writes():
    def forward(m, x):
        m.calls = getattr(m, "calls", 0) + 1
        return m.a(x) * int(x.abs().max())

    with pytest.raises(errors.TraceError, match="values of a tensor") as caught:
        fxsplit.compile(Net(forward), example_args=(torch.randn(4, 4),))
    assert any(
        "torch.export would lose that the model writes self.calls" in n for n in caught.value.__notes__
    )


class KeepsBlocks(fx.Tracer):
    def is_leaf_module(self, module, path):
        return isinstance(module, nn.Sequential) or super().is_leaf_module(module, path)


@pytest.mark.parametrize(
    "tracer", [KeepsBlocks, KeepsBlocks(), lambda model: fx.GraphModule(model, KeepsBlocks().trace(model))]
)
def test_the_users_own_tracer(tracer):
    model = Blocks()
    pipe = compiled(model, torch.randn(4, 4), stages=2, tracer=tracer)
    assert pipe.traced.front_end.startswith("tracer=")
    assert [str(n.target) for n in pipe.traced.graph.nodes if n.op == "call_module"] == ["body", "head"]
    assert "tracer=" in pipe.traced.kept_whole["body"]
    right_in_both_modes(model, pipe, 1, 5)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(F.dropout(self.body(x), 0.5, self.training))


def test_a_tracer_that_is_wrong_or_fails_is_said():
    model = Net(lambda m, x: m.a(x) if x.sum() > 0 else m.b(x))
    with pytest.raises(errors.TraceError, match="tracer=Tracer cannot capture Net"):
        fxsplit.compile(model, example_args=(torch.randn(4, 4),), tracer=fx.Tracer)
    with pytest.raises(errors.TraceError, match=r"returned int, not a torch\.fx graph"):
        fxsplit.compile(model, example_args=(torch.randn(4, 4),), tracer=lambda model: 3)
    aliased = Net(lambda m, x: _alias_and_add(m.a(x), m.b(x)))
    with pytest.raises(errors.VerifyError, match="another output"):
        fxsplit.compile(aliased, example_args=(torch.randn(4, 4),), tracer=fx.Tracer)


def _alias_and_add(y, z):
    other = y
    y += z  # plain fx writes this out of place
    return other * y


def test_a_branch_on_a_tensor_in_the_model_itself_names_the_line_and_the_expression():
    def forward(m, x):
        if m.a(x).mean() > 0.25:
            return m.b(x)
        return x

    with pytest.raises(errors.TraceError) as caught:
        fxsplit.compile(Net(forward), example_args=(torch.randn(4, 4),))
    line = forward.__code__.co_firstlineno + 1
    for part in (
        f"test_capture.py:{line}: if m.a(x).mean() > 0.25:",
        "values of a tensor",
        "torch.where",
        "submodule",
    ):
        assert part in str(caught.value)
