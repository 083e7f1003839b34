"""Bad input ends in an error of `fxsplit.errors` that says what, where and what to type; nothing has changed."""

import copy
import re

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import errors
from tests.models import build


class Empty(nn.Module):
    def forward(self, x):
        return x


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)

    def forward(self, x):
        if x.sum() > 0:  # the line that the error names
            return self.lin(x)
        return x


class Opaque:
    def __init__(self, x):
        self.x = x


class ReturnsOpaque(nn.Module):
    def forward(self, x):
        return Opaque(x + 1)


class InPlaceChain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.b(self.a(x)) + 1


def x(rows=3, width=2):
    return torch.ones(rows, width)


CASES = {
    "not a module": (lambda: (lambda x: x, {}, (x(),)), errors.ModelError, ["function", "nn.Module"]),
    "computes nothing": (lambda: (Empty(), {}, (x(),)), errors.ModelError, ["Empty", "nothing"]),
    "no tensor": (lambda: (nn.Linear(2, 2), {}, (3,)), errors.ArgumentError, ["no tensor"]),
    "no example": (lambda: (nn.Linear(2, 2), {}, ()), errors.ArgumentError, ["input"]),
    "too many arguments": (lambda: (nn.Linear(2, 2), {}, (x(), x())), errors.ArgumentError, ["too many"]),
    "branch at the root": (
        lambda: (Branch(), {}, (x(),)),
        errors.TraceError,
        ["test_errors.py:26", "submodule", "torch.where"],
    ),
    "returns an unknown class": (
        lambda: (ReturnsOpaque(), {}, (x(),)),
        errors.TraceError,
        ["Opaque", "pytree"],
    ),
    "too many stages": (
        lambda: (nn.Linear(2, 2), {"stages": 2}, (x(),)),
        errors.PartitionError,
        ["stages=2", "1 unit"],
    ),
    "balance does not add up": (
        lambda: (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), {"balance": [2, 2]}, (x(),)),
        errors.PartitionError,
        ["adds up to 4", "2 children", "stages=2"],
    ),
    "unknown path in cut": (
        lambda: (build("gpt")[0], {"cut": ["h.9"]}, build("gpt")[1](2)),
        errors.PartitionError,
        ["'h.9'", "h.0"],
    ),
    "cut at the start": (
        lambda: (build("resnet")[0], {"cut": ["stem"]}, build("resnet")[1](2)),
        errors.PartitionError,
        ["'stem'", "stage 0"],
    ),
    "two cuts at one place": (
        lambda: (build("resnet")[0], {"cut": ["layer1", "layer1.0.conv1"]}, build("resnet")[1](2)),
        errors.PartitionError,
        ["'layer1'", "'layer1.0.conv1'", "keep one"],
    ),
    "cut through an in-place write": (
        lambda: (InPlaceChain(), {"cut": ["b"]}, (x(),)),
        errors.PartitionError,
        ["'b'", "writes in place", "test_errors.py"],
    ),
    "unknown path in device_map": (
        lambda: (build("gpt")[0], {"device_map": {"": "cpu", "haed": "cpu"}}, build("gpt")[1](2)),
        errors.PartitionError,
        ["'haed'", "did you mean 'head'"],
    ),
    "device_map leaves a parameter out": (
        lambda: (build("gpt")[0], {"device_map": {"h": "cpu"}}, build("gpt")[1](2)),
        errors.PartitionError,
        ["no device", "'wte'", '""'],
    ),
    "unknown argument in batch_dims": (
        lambda: (nn.Linear(2, 2), {"batch_dims": {"inptu": None}}, (x(),)),
        errors.PlanError,
        ["did you mean 'input'"],
    ),
    "no batch to split": (
        lambda: (nn.Linear(2, 2), {"micro_batches": 2, "batch_dims": {"input": None}}, (x(),)),
        errors.BatchError,
        ["batch_dims"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_compile_refuses(case):
    make, kind, said = CASES[case]
    model, fields, args = make()
    before = _snapshot(model)
    state = torch.get_rng_state()
    with pytest.raises(kind) as caught:
        fxsplit.compile(model, fxsplit.Plan(**fields), example_args=args)
    assert isinstance(caught.value, errors.FxsplitError)
    text = str(caught.value)
    assert all(part in text for part in said), text
    assert "instead:" in text
    assert _snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), state)


def _snapshot(model):
    if not isinstance(model, nn.Module):
        return None
    return [
        (
            name,
            id(m),
            m.training,
            sorted(m.__dict__),
            [(k, id(t), t._version, t.device) for k, t in m.named_parameters()],
        )
        for name, m in model.named_modules()
    ] + [(name, id(b), b.tolist()) for name, b in model.named_buffers()]


def test_wrong_plan_type():
    with pytest.raises(errors.PlanError, match="int"):
        fxsplit.compile(nn.Linear(2, 2), 2, example_args=(x(),))


@pytest.fixture
def pipe():
    model, batch = build("two_tower")
    plan = fxsplit.Plan(stages=2, micro_batches=2)
    return fxsplit.compile(model, plan, example_args=batch(4), example_kwargs={"temperature": 2.0})


def batch_with(**changes):
    return {"query": torch.randn(4, 6), "item": torch.randint(20, (4,)), **changes}


@pytest.mark.parametrize(
    ("args", "kwargs", "kind", "said"),
    [
        ((), {"temperature": 2.0}, errors.ArgumentError, ["missing", "batch"]),
        (
            (batch_with(),),
            {"temperatur": 2.0},
            errors.ArgumentError,
            ["temperatur", "did you mean 'temperature'"],
        ),
        ((batch_with(),), {}, errors.ArgumentError, ["'temperature' was 2.0", "1.0 now"]),
        ((batch_with(), torch.tensor(2.0)), {}, errors.ArgumentError, ["'temperature' was 2.0"]),
        (
            (batch_with(extra=torch.ones(4)),),
            {"temperature": 2.0},
            errors.ArgumentError,
            ["nested", "batch['extra']"],
        ),
        (({"query": torch.randn(4, 6)},), {"temperature": 2.0}, errors.ArgumentError, ["batch['item']"]),
        ((batch_with(query=3),), {"temperature": 2.0}, errors.ArgumentError, ["batch['query']", "int"]),
        (
            (batch_with(query=torch.randn(4, 6, 1)),),
            {"temperature": 2.0},
            errors.ArgumentError,
            ["batch['query']", "dimensions"],
        ),
        (
            (batch_with(item=torch.randn(4)),),
            {"temperature": 2.0},
            errors.ArgumentError,
            ["batch['item']", "floating"],
        ),
        (
            (batch_with(query=torch.randn(4, 6, device="meta")),),
            {"temperature": 2.0},
            errors.ArgumentError,
            ["device", "meta"],
        ),
        (
            (batch_with(item=torch.randint(20, (5,))),),
            {"temperature": 2.0},
            errors.BatchError,
            ["batch['query']", "4", "batch['item']", "5"],
        ),
    ],
)
def test_a_call_refuses(pipe, args, kwargs, kind, said):
    with pytest.raises(kind) as caught:
        pipe(*args, **kwargs)
    text = str(caught.value)
    assert all(part in text for part in said), text
    assert "instead:" in text


def test_moving_is_refused_and_dtype_is_not(pipe):
    for move in (
        lambda: pipe.to("cuda"),
        lambda: pipe.to(torch.device("meta")),
        lambda: pipe.to(device="meta"),
        lambda: pipe.to(torch.empty(0, device="meta")),
        lambda: pipe.cuda(),
        lambda: pipe.to_empty(device="meta"),
        lambda: nn.Sequential(pipe).to("meta"),
    ):
        with pytest.raises(errors.MoveError, match="plan owns"):
            move()
    assert pipe.to("cpu") is pipe  # nothing moves
    assert pipe.to(torch.float64) is pipe
    assert pipe.double() is pipe
    double = batch_with(query=torch.randn(4, 6, dtype=torch.float64))
    assert pipe(double, temperature=2.0)["score"].dtype == torch.float64


def test_pickling_is_refused(pipe, tmp_path):
    with pytest.raises(errors.SerializeError, match="state_dict"):
        torch.save(pipe, tmp_path / "pipe.pt")
    torch.save(pipe.state_dict(), tmp_path / "state.pt")
    pipe.load_state_dict(torch.load(tmp_path / "state.pt"))


def test_a_module_that_went_away_is_named(pipe):
    del pipe.model.query
    with pytest.raises(errors.ArgumentError, match="query"):
        pipe(batch_with(), temperature=2.0)


def test_step_needs_a_single_loss(pipe):
    with pytest.raises(errors.ArgumentError, match="single number"):
        pipe.step(batch_with(), temperature=2.0, loss_fn=lambda y: y["score"])


def test_every_error_is_also_the_builtin_that_a_caller_would_catch():
    for kind in vars(errors).values():
        if (
            isinstance(kind, type)
            and issubclass(kind, errors.FxsplitError)
            and kind is not errors.FxsplitError
        ):
            assert issubclass(kind, ValueError | TypeError | RuntimeError | AttributeError), kind
            assert kind.__doc__
    assert copy.copy(errors.PlanError("a", where="b")).where == "b"


CLASSES = {
    name: c for name, c in vars(errors).items() if isinstance(c, type) and issubclass(c, errors.FxsplitError)
}
NOT_RUN = {
    "FxsplitError",
    "WorkerError",
}  # the base; and one that ends a thread, in tests/runtime/test_faults.py


def test_each_class_has_a_section_and_its_docstring():
    assert list(errors.sections()) == list(CLASSES)
    assert all(c.__doc__ for c in CLASSES.values())


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in NOT_RUN])
def test_the_example_of_a_section_ends_in_its_class(name):
    """That it does is run by tests/docs."""
    text = errors.sections()[name]
    assert re.search(
        rf"^```python\n(?!# not run).*?^```\n\n```output\n{name}: ", text, re.DOTALL | re.MULTILINE
    )
    assert f"  more: fxsplit explain {name}\n```" in text
    assert "**What to do.**" in text


def test_a_message_ends_in_the_command_that_explains_it():
    class OfMine(errors.GuardError):
        pass

    assert str(OfMine("what", where="where", remedy="remedy")).splitlines() == [
        "what",
        "  where: where",
        "  instead: remedy",
        "  more: fxsplit explain GuardError",
    ]
