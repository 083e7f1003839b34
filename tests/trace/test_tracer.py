"""The fx tracer with leaf fallback: what is inlined, what stays whole and why, and no trace on the model."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxsplit
from fxsplit.testing import assert_equivalent, graphs_equal
from fxsplit.trace.front import trace
from tests.helpers import Pair


def compiled(model, *args, stages=1, **kwargs):
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=stages), example_args=args, example_kwargs=kwargs)
    assert_equivalent(model, pipe, *args, **kwargs)
    return pipe


class Inner(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.count = 0
        self.function = forward

    def forward(self, x):
        return self.function(self, x)


class Outer(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = Inner(forward)
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


def function(m, x):
    return Double.apply(m.lin(x))


def no_grad(m, x):
    with torch.no_grad():
        scale = m.lin(x)
    return x * scale


def autocast(m, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m.lin(x)
    return y.float() + x


def alias(m, x):
    y = m.lin(x)
    z = y
    y += 1
    return z * y


def counter(m, x):
    m.count += 1
    return m.lin(x)


def branch(m, x):
    return m.lin(x) if x.sum() > 0 else -m.lin(x)


def training(m, x):
    return m.lin(x) if m.training else m.lin(x) * 2 + 1


def buffer_write(m, x):
    m.calls.add_(1)
    return m.lin(x) * m.calls


def buffer_assign(m, x):
    m.calls = m.calls + 1
    return m.lin(x)


def constant(m, x):
    return m.lin(x) + torch.tensor([1.0, 2.0, 3.0, 4.0])


def shapes(m, x):
    n, d = x.shape
    n += 0  # a number, not a tensor: nothing is written in place
    return m.lin(x).view(n, 2, d // 2).flatten(1) + torch.arange(d, device=x.device) + torch.zeros(n, 1)


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (counter, "self.count"),
        (branch, "values of a tensor"),
        (training, "self.training"),
        (buffer_assign, "self.calls"),
    ],
)
def test_what_cannot_be_inlined_stays_whole(forward, why):
    model = Outer(forward)
    before = _snapshot(model)
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=3), example_args=(torch.randn(3, 4),))
    assert _snapshot(model) == before
    assert list(pipe.traced.kept_whole) == ["inner"]
    assert why in pipe.traced.kept_whole["inner"]
    assert "inner" in pipe.traced.report()
    if forward is not counter:
        assert_equivalent(model, pipe, torch.randn(5, 4))
    pipe.eval()
    x = torch.randn(2, 4)
    assert torch.equal(pipe(x), model(x))


@pytest.mark.parametrize("forward", [alias, autocast, buffer_write, constant, function, no_grad, shapes])
def test_what_is_inlined(forward):
    model = Outer(forward)
    before = _snapshot(model)
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=3), example_args=(torch.randn(3, 4),))
    assert _snapshot(model) == before
    assert not pipe.traced.kept_whole
    assert_equivalent(model, pipe, torch.randn(5, 4))
    twin = copy.deepcopy(pipe)
    assert_equivalent(model, twin, torch.randn(5, 4))


def _snapshot(model):
    return [
        (
            name,
            id(m),
            m.training,
            {k: len(v) if isinstance(v, dict) else id(v) for k, v in m.__dict__.items()},
        )
        for name, m in model.named_modules()
    ] + [(name, b.tolist(), id(b)) for name, b in model.named_buffers()]


def test_modules_with_hooks_stay_whole_and_their_hooks_run():
    model = Outer(shapes)
    seen = []
    model.inner.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    pipe = compiled(model, torch.randn(3, 4), stages=3)
    assert pipe.traced.kept_whole == {"inner": "it has hooks"}
    seen.clear()
    pipe(torch.randn(6, 4))
    assert seen == [(6, 4)]


def test_modules_with_a_replication_callback_stay_whole():
    class Callback(nn.Linear):
        def __data_parallel_replicate__(self, ctx, copy_id):
            pass

    pipe = compiled(
        nn.Sequential(nn.Sequential(Callback(4, 4)), nn.Linear(4, 4)), torch.randn(3, 4), stages=2
    )
    assert [n.target for n in pipe.traced.graph.nodes if n.op == "call_module"] == ["0.0", "1"]


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, pair, *rest, scale=None, flag=True, **more):
        y = self.lin(pair.left) + pair.right + rest[0]
        if scale is not None:
            y = y * scale
        if flag:
            y = y + more["extra"]["bias"]
        return Pair(y, [y + 1, None, {"n": 3}])


def test_any_structure_in_and_out():
    def args(rows):
        return (Pair(torch.randn(rows, 4), torch.randn(rows, 4)), torch.randn(rows, 4))

    def kwargs(rows):
        return {"extra": {"bias": torch.randn(rows, 4)}, "flag": True}

    model = Structured()
    plan = fxsplit.Plan(stages=2, micro_batches=2)
    pipe = fxsplit.compile(model, plan, example_args=args(4), example_kwargs=kwargs(4))
    output = pipe(*args(3), **kwargs(3))
    assert type(output) is Pair and output.right[1:] == [None, {"n": 3}]
    assert_equivalent(model, pipe, *args(3), **kwargs(3))
    assert [a.placeholder for a in pipe.traced.signature.arguments] == [
        "pair_left",
        "pair_right",
        "rest_0",
        "more_extra_bias",
    ]


def test_outputs_of_a_module_kept_whole():
    class Many(nn.Module):
        def forward(self, x):
            if x.sum() > 1e9:
                raise ValueError
            return {"a": x + 1, "b": (x * 2, Pair(x, x - 1))}

    model = nn.Sequential(nn.Linear(4, 4), Many())
    pipe = compiled(model, torch.randn(3, 4), stages=2)
    plan = fxsplit.Plan(stages=2, micro_batches=2)
    pipe = fxsplit.compile(model, plan, example_args=(torch.randn(3, 4),))
    assert type(pipe(torch.randn(5, 4))["b"][1]) is Pair
    assert_equivalent(model, pipe, torch.randn(5, 4))


def test_a_module_used_twice_and_shared_under_two_names():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = self.a
            self.mid = nn.Linear(4, 4)

        def forward(self, x):
            return self.b(self.mid(self.a(x)) + self.a(x))

    for stages in (1, 2, 3):
        pipe = compiled(Twice(), torch.randn(3, 4), stages=stages)
        assert [name for name, _ in pipe.named_parameters()] == [
            "a.weight",
            "a.bias",
            "mid.weight",
            "mid.bias",
        ]


def test_every_node_knows_its_module_and_the_users_line():
    traced = trace(Outer(shapes), (torch.randn(3, 4),), {})
    facts = [traced.facts[n.name] for n in traced.graph.nodes if n.op.startswith("call")]
    assert all(f.source.short.startswith("test_tracer.py:") for f in facts)
    assert {f.module_path for f in facts} == {"first", "inner", "inner.lin", "last"}
    assert all(str(f.value) for f in facts)


def test_graphs_equal_gives_a_reason():
    graphs = [trace(Outer(f), (torch.randn(3, 4),), {}).graph for f in (shapes, shapes, alias)]
    assert graphs_equal(graphs[0], graphs[1]) == (True, "")
    equal, reason = graphs_equal(graphs[0], graphs[2])
    assert not equal and "node" in reason


def test_a_ready_graph_module_is_a_model_too():
    model = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    compiled(model, torch.randn(3, 4), stages=3)


def test_frozen_parts_and_mixed_modes():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    model[1].eval()
    model[0].weight.requires_grad_(False)
    compiled(model, torch.randn(3, 4), stages=3)
    assert [m.training for m in model] == [True, False, True, True]


def test_a_single_row_example_with_batch_normalisation():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).eval()
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=2), example_args=(torch.randn(1, 4),))
    assert any(stage.writes for stage in pipe)  # not seen, but assumed
    assert_equivalent(model, pipe, torch.randn(5, 4))
    pipe.train()
    with pytest.raises(fxsplit.errors.ArgumentError, match="train mode"):
        pipe(torch.randn(5, 4))


@pytest.mark.slow
def test_compile_from_four_threads():
    failures = []

    def work():
        try:
            for i in range(50):
                model = Outer(shapes)
                pipe = fxsplit.compile(model, fxsplit.Plan(stages=2), example_args=(torch.randn(3, 4),))
                if i % 10 == 0:
                    assert_equivalent(model, pipe, torch.randn(3, 4))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    assert isinstance(torch.arange(3), torch.Tensor)


def test_modules_that_the_user_wants_whole():
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()), Outer(shapes), nn.Sequential(nn.Linear(4, 4))
    )
    for leaf_modules in (["0", Outer], [Outer, "0"]):
        pipe = fxsplit.compile(
            model, fxsplit.Plan(stages=2), example_args=(torch.randn(3, 4),), leaf_modules=leaf_modules
        )
        assert [n.target for n in pipe.traced.graph.nodes if n.op == "call_module"] == ["0", "1", "2.0"]
        assert set(pipe.traced.kept_whole.values()) == {"leaf_modules asks for it"}
        assert_equivalent(model, pipe, torch.randn(5, 4))
    with pytest.raises(fxsplit.errors.TraceError, match="did you mean"):
        fxsplit.compile(model, example_args=(torch.randn(3, 4),), leaf_modules=["1.inner.lim"])


def test_a_module_that_is_written_for_one_batch_size_stays_whole():
    def unrolled(m, x):
        return torch.stack([m.lin(row) for row in x])

    pipe = compiled(Outer(unrolled), torch.randn(3, 4), stages=3)
    assert "does not run with 2 rows" in pipe.traced.kept_whole["inner"]
    for rows in (1, 4, 9):
        assert_equivalent(pipe.unsplit(), pipe, torch.randn(rows, 4))


def test_a_model_that_is_written_for_one_batch_size_is_right_for_that_one():
    with pytest.warns(UserWarning, match=r"batches of 3 rows only: .*test_tracer.py:"):
        pipe = fxsplit.compile(Unrolled(), fxsplit.Plan(stages=2), example_args=(torch.randn(3, 4),))
    assert "torch.export" in pipe.traced.report()
    assert_equivalent(pipe.unsplit(), pipe, torch.randn(3, 4))
    with pytest.raises(fxsplit.errors.GuardError, match="another path"):
        pipe(torch.randn(4, 4))


class Unrolled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.stack([self.b(row) for row in self.a(x)])


def test_sizes_stay_symbolic():
    def sizes(m, x):
        n, d = x.shape
        half = d // 2
        scale = 1.0 / n + 2 * half**0.5
        pad = F.pad(x, (0, half))
        grid = torch.zeros(n, half).to(x) + torch.arange(half, dtype=x.dtype)
        return (
            m.lin(pad[:, :d]) * scale
            + torch.cat([grid, grid.new_ones(x.size(0), d - half)], -1)
            + len(x.shape)
            + n
        )

    model = Outer(sizes)
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=2), example_args=(torch.randn(3, 4),))
    assert not pipe.traced.kept_whole
    for rows in (1, 2, 9):
        assert_equivalent(model, pipe, torch.randn(rows, 4))


def test_sizes_that_depend_on_data_are_never_baked():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(4, 3)
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            choice, y = self.gate(x).argmax(-1), torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                rows = (choice == i).nonzero()[:, 0]
                if rows.numel() > 0:
                    y = y.index_add(0, rows, expert(x[rows]))
            return y

    model = nn.Sequential(nn.Linear(4, 4), Experts(), nn.Linear(4, 4))
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=3), example_args=(torch.randn(2, 4),))
    assert "values of a tensor" in pipe.traced.kept_whole["1"]
    for rows in (1, 8, 40):
        assert_equivalent(model, pipe, torch.randn(rows, 4))


def test_a_mode_that_is_an_argument_is_read_when_the_program_runs():
    def functional(m, x):
        p = 0.5 if m.training else 0.0
        y = F.dropout(m.lin(x), 0.5, training=m.training)
        return F.dropout(y, p) + F.dropout(x, 0.25, m.training, not m.training)

    model = Outer(functional)
    for mode in (True, False):
        model.train(mode)
        pipe = fxsplit.compile(model, fxsplit.Plan(stages=3), example_args=(torch.randn(3, 4),))
        assert not pipe.traced.kept_whole
        assert ".training" in pipe[1].code + pipe[0].code + pipe[2].code
        assert list(pipe.state_dict()) == list(model.state_dict())
        for twin in (pipe, copy.deepcopy(pipe)):
            for now in (True, False):
                twin.train(now)
                assert_equivalent(twin.unsplit(), twin, torch.randn(5, 4))
            twin.train()
            twin.unsplit().inner.eval()  # a part of the model in another mode
            assert_equivalent(twin.unsplit(), twin, torch.randn(5, 4))


def test_kernels_that_are_chosen_and_hooks_on_values_keep_the_module_whole():
    seen = []

    def chooses(m, x):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return F.scaled_dot_product_attention(x, m.lin(x), x)

    def hooks(m, x):
        y = m.lin(x)
        y.register_hook(lambda grad: (seen.append(1), grad * 2)[1])
        return y

    for forward, why in ((chooses, "kernels"), (hooks, "register_hook")):
        model = Outer(forward)
        pipe = fxsplit.compile(model, fxsplit.Plan(stages=3), example_args=(torch.randn(3, 4),))
        assert why in pipe.traced.kept_whole["inner"]
        assert_equivalent(model, pipe, torch.randn(5, 4))
    assert seen


def test_tensor_type_is_a_conversion():
    class Converts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            y = self.a(x).type(torch.float64).type("torch.FloatTensor").type(torch.DoubleTensor)
            return y.type(x.type()) * 2

    model, x = Converts(), torch.randn(3, 4)
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=2), example_args=(x,))
    assert pipe.traced.front_end == "the value-carrying tracer" and not pipe.traced.constants
    assert torch.equal(pipe(x), model(x))


def test_a_class_that_is_wanted_whole_means_all_of_its_kind():
    class Block(nn.Module):
        def forward(self, x):
            return torch.tanh(x) * 2

    class Special(Block):
        pass

    model = nn.Sequential(Block(), Special(), nn.Linear(3, 3), Block())
    pipe = fxsplit.compile(model, example_args=(torch.randn(2, 3),), leaf_modules=[Block])
    assert list(pipe.traced.kept_whole) == ["0", "1", "3"]
