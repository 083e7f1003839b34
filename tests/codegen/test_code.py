"""Generated code reads like the model, and means what the graph means."""

import copy
import linecache
import operator
import random
import traceback

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxsplit
from fxsplit.graph.code import StageModule, write
from fxsplit.testing import assert_equivalent


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self, x)


def code_of(function, *args, **fields):
    args = args or (torch.randn(3, 4),)
    model = Model(function)
    pipe = fxsplit.compile(model, fxsplit.Plan(**fields), example_args=args)
    for rows in (1, 3, 5):
        assert_equivalent(model, pipe, torch.randn(rows, *args[0].shape[1:]))
    lines = [line.removeprefix("    ").partition("  # ")[0] for line in pipe[0].code.splitlines()]
    return [line for line in lines if line and not line.lstrip().startswith("#")]


def test_a_line_of_the_users_is_a_line():
    def forward(m, x):
        h = torch.tanh(m.a(x)) * 2**-x - (x - (x + 1)) / (3 - x)
        scores = (h @ h.transpose(-2, -1)).softmax(-1)
        return m.b(F.gelu(scores @ h))

    assert code_of(forward) == [
        "def forward(self, x):",
        "h = torch.tanh(self.a(x)) * 2 ** -x - (x - (x + 1)) / (3 - x)",
        "scores = (h @ h.transpose(-2, -1)).softmax(-1)",
        "b = self.b(F.gelu(scores @ h))",
        "return b",
    ]


def test_contexts_are_blocks_and_sizes_are_written_where_they_are_used():
    def forward(m, x):
        rows, width = x.shape
        with torch.no_grad():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                scale = m.a(x)
            scale = scale.float()[:, None, 1 : width // 2]
        with torch.set_grad_enabled(False):
            pass
        return m.b(x) * scale.sum() / rows + torch.arange(width)[..., -1]

    assert code_of(forward) == [
        "def forward(self, x):",
        "with torch.no_grad():",
        '    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=True, cache_enabled=True):',
        "        scale = self.a(x)",
        "    size = x.size(1)",
        "    scale = scale.float()[:, None, 1:size // 2]",
        "with torch.set_grad_enabled(False):",
        "    pass",
        "add = self.b(x) * scale.sum() / x.size(0) + torch.arange(size)[..., -1]",
        "return add",
    ]


def test_names_that_the_code_needs_may_be_the_models_too():
    class Shadows(nn.Module):
        def __init__(self):
            super().__init__()
            self.guard = nn.Linear(4, 4)

        def forward(self, torch, F, transfer):  # noqa: N803
            math = nn.functional.gelu(torch)
            return self.guard(math.exp() + nn.functional.relu(F)) * transfer.sigmoid()

    model, args = Shadows(), [torch.randn(3, 4) for _ in range(3)]
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=1), example_args=args)
    assert_equivalent(model, pipe, *args)


class Odd(nn.Module):
    """Names that Python or the generated code would trip over."""

    def __init__(self):
        super().__init__()
        self.checkpoint_0 = nn.Linear(4, 4)
        self.d = nn.ModuleDict({"a-b": nn.Linear(4, 4), "c d": nn.Linear(4, 4), "für": nn.Linear(4, 4)})
        self.p = nn.ParameterDict(
            {"my-key": nn.Parameter(torch.randn(4)), "class": nn.Parameter(torch.randn(4))}
        )
        self.q = nn.ParameterList([nn.Parameter(torch.randn(4))])

    def forward(net, x):  # noqa: N805
        self = net.checkpoint_0(x) + 1
        for layer in net.d.values():
            self = layer(self) * 2
        return self + net.p["my-key"] * net.p["class"] - net.q[0]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_odd_names(checkpoint, tmp_path):
    model = Odd()
    pipe = fxsplit.compile(
        model, fxsplit.Plan(stages=3, checkpoint=checkpoint), example_args=(torch.randn(3, 4),)
    )
    assert_equivalent(model, pipe, torch.randn(5, 4))
    pipe.save_code(tmp_path)
    for source in (model, model.state_dict()):
        assert_equivalent(model, fxsplit.load(tmp_path, source), torch.randn(5, 4))


def test_the_parts_of_a_tuple_have_their_own_names():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.l, self.o = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4)

        def forward(self, x):
            out, (h, c) = self.l(x[:, None])
            return self.o(h[-1].tanh()) + c[-1] + out[:, 0]

    model = Recurrent()
    pipe = fxsplit.compile(model, example_args=(torch.randn(3, 4),))
    code = pipe[0].code
    assert_equivalent(model, pipe, torch.randn(5, 4))
    assert "h[-1]" in code and "c[-1]" in code and "out[:, 0]" in code


def test_effects_stay_in_order():
    def forward(m, x):
        y = m.a(x)
        z = (y * 2) + _later(y) + y.clone()
        y[:, 0] = 1.0
        return m.b(z + y)

    def _later(y):
        y.mul_(3)
        return y + 1

    code_of(forward)


def test_a_mode_is_read_inside_the_call():
    def forward(m, x):
        return F.dropout(m.a(x), 0.5 if m.training else 0.0, m.training)

    code = code_of(forward)
    assert code[1:] == [
        "a = self.a(x)",
        "dropout = F.dropout(a, p=(0.0, 0.5)[self.model_mode.training], training=self.model_mode.training, inplace=False)",
        "return dropout",
    ]


def test_tracebacks_show_the_line():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if len(x) == 7:
                raise ValueError("seven")
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    model = Model(lambda m, x: m.b(Fails.apply(m.a(x))))
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=2), example_args=(torch.randn(3, 4),))
    with pytest.raises(ValueError, match="seven") as caught:
        pipe(torch.randn(7, 4))
    shown = "".join(traceback.format_exception(caught.value))
    assert "<fxsplit Stage" in shown and "Fails.apply(" in shown
    linecache.checkcache()
    assert "Fails.apply(" in "".join(traceback.format_exception(caught.value))


def test_the_text_means_what_the_graph_means():
    """Random arithmetic, on one line and on many: the printed text against fx's own interpreter."""
    chance = random.Random(0)
    for _ in range(150):
        graph = fx.Graph()
        values = [graph.placeholder("x"), graph.placeholder("y")]
        for i in range(chance.randint(1, 14)):
            a, b = chance.choice(values[-4:]), chance.choice([*values[-4:], 2.0, -3.0])
            kind = chance.randrange(7)
            if kind == 0:
                node = graph.call_method("mul_" if i % 2 else "clone", (a, b)[: 1 + i % 2])
            elif kind == 1:
                node = graph.call_function(torch.neg, (a,))
            elif kind == 2:
                node = graph.call_method("sub", (a,), {"other": b})
            elif kind == 3:
                node = graph.call_function(torch.maximum, (a, chance.choice(values)))
            else:
                node = graph.call_function(
                    chance.choice(OPERATORS), (b, a) if chance.random() < 0.5 else (a, b)
                )
            node.meta.update(source=chance.choice(SOURCES), module_path="")
            values.append(node)
        graph.output(tuple(chance.sample(values[2:], k=min(3, len(values) - 2))))
        inputs = [torch.rand(3) + 0.5, torch.rand(3) + 0.5]
        module = StageModule({}, graph, "Stage")
        found = module(*(t.clone() for t in inputs))
        expected = fx.Interpreter(fx.GraphModule({}, graph)).run(*(t.clone() for t in inputs))
        assert all(torch.equal(a, b) or (a != a).any() for a, b in zip(found, expected, strict=True)), write(
            graph
        ).code


class Line:
    def __init__(self, number):
        self.short = f"model.py:{number}"


SOURCES = [Line(1), Line(1), Line(2)]
OPERATORS = [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow]


@pytest.mark.slow
def test_a_deep_model_is_written_without_recursion():
    """Python allows a thousand calls in each other; this program has a chain of two thousand operations."""

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(500))

        def forward(self, x):
            for layer in self.layers:
                x = x + 0.01 * torch.relu(layer(x))
            return x

    model, x = Deep(), torch.randn(3, 2)
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=2), example_args=(x,))
    assert pipe.traced.front_end == "the value-carrying tracer"
    assert torch.equal(pipe(x), model(x))


class Named(nn.Module):
    """A tensor, or a layer, by a name of the caller's choice."""

    def __init__(self, name, thing):
        super().__init__()
        setattr(self, name, thing)
        self.name = name

    def forward(self, x):
        thing = getattr(self, self.name)
        return thing(x * 2) if isinstance(thing, nn.Module) else x * 2 + thing


OWN_NAMES = sorted(
    name
    for name in {*dir(StageModule), *dir(fxsplit.Pipeline), "text", "model", "self", "x", "torch", "program"}
    if not name.startswith("_") and not hasattr(nn.Module(), name)
)


@pytest.mark.parametrize("kind", ["parameter", "layer"])
def test_no_name_of_ours_hides_one_of_the_models(kind, tmp_path):
    x, wrong = torch.rand(4, 3), []
    for name in OWN_NAMES:
        model = Named(name, nn.Parameter(torch.ones(3)) if kind == "parameter" else nn.Linear(3, 3))
        try:
            pipe = fxsplit.compile(model, fxsplit.Plan(stages=1), example_args=(x,))
            pipe.save_code(tmp_path / name)
            again = fxsplit.load(tmp_path / name, model)
            same = all(torch.equal(p(x), model(x)) for p in (pipe, again, copy.deepcopy(pipe)))
            if not same or list(pipe.state_dict()) != list(model.state_dict()):
                wrong.append(name)
        except Exception as error:
            wrong.append((name, error))
    assert len(OWN_NAMES) > 40 and not wrong
