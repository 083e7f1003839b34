"""torch.distributed.pipelining: test/distributed/pipelining/{test_pipe,test_unflatten,test_transformer,test_chunkspec,
test_microbatch,test_stage,test_backward}.py. Schedules and ranks are in tests/schedules and tests/distributed."""

import copy

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import Plan
from fxsplit.errors import PlanError

HIDDEN, ROWS = 16, 8


class ExampleCode(nn.Module):
    """A parameter that is read twice, and a skip connection over two cuts."""

    def __init__(self):
        super().__init__()
        self.mm_param1 = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 4)
        self.mm_param2 = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 4)
        self.lin1, self.lin2 = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, y=0.5):
        x = x @ self.mm_param1
        skip = x
        x = torch.relu(x + y) @ self.mm_param1
        x = torch.relu(self.lin1(x)) + skip
        return torch.relu(self.lin2(x @ self.mm_param2))


class MultiMLP(nn.Module):
    def __init__(self, layers=4):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))
            for _ in range(layers)
        )

    def forward(self, x, y=0.5):
        for layer in self.layers:
            x = layer(x)
        return x - y


class ModelWithParamAlias(ExampleCode):
    def __init__(self):
        super().__init__()
        self.mm_param2 = self.mm_param1


def rows(seed=0, count=ROWS):
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("model_class", [ExampleCode, MultiMLP, ModelWithParamAlias])
def test_model_split(model_class):
    """As many stages as were asked for, the model's numbers, and in each stage names of the model's own.

    Differs: names are not lost where one parameter has two, and a value that is read in two stages is shared.
    """
    model, x, y = model_class(), rows(), rows(1)
    pipe = fxsplit.compile(model, Plan(stages=4, micro_batches=4), example_args=(x, y))
    assert len(pipe.stages) == 4
    torch.testing.assert_close(pipe(x, y), model(x, y))
    names = {name for stage in pipe.stages for name, _ in stage.named_parameters()}
    assert names <= set(model.state_dict())
    assert list(pipe.state_dict()) == list(model.state_dict())


def test_unflatten():
    """`pipe_split()` in forward. Differs: the model says nothing of cuts; an addition in place behind one is right."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.lin0, self.lin1 = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x, constant=None):
            x = self.lin0(self.conv(x))
            x.add_(constant)
            return torch.relu(self.lin1(x))

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.block0, self.block1 = Block(), Block()

        def forward(self, x, constant=None):
            return self.block1(self.block0(x, constant=constant), constant=constant)

    model, x, constant = M(), torch.randn(1, 4, 8, 8), torch.ones(1, 4, 8, 8)
    plan = Plan(cut=["block0.lin1", "block1", "block1.lin1"])
    pipe = fxsplit.compile(model, plan, example_args=(x,), example_kwargs={"constant": constant})
    assert len(pipe.stages) == 4
    for stage in pipe.stages:
        assert all(name in model.state_dict() for name, _ in stage.named_parameters())
    assert torch.equal(pipe(x, constant), model(x, constant))


def test_ir():
    """No layer is lost or doubled (`test_transformer`)."""
    model, x = MultiMLP(8), rows()
    pipe = fxsplit.compile(model, Plan(cut=["layers.4"]), example_args=(x,))
    layers = [{name.split(".")[1] for name, _ in stage.named_parameters()} for stage in pipe.stages]
    assert layers == [set("0123"), set("4567")]
    assert torch.equal(pipe(x), model(x))


def test_chunk_spec():
    """`TensorChunkSpec`: dimension 0 is split where it is the batch. `batch_dims=` says something else."""

    class Spec(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x, y, z=None):
            return self.lin(torch.relu(x + y) + z.t())

    model, x, y, z = Spec(), rows(), rows(1), rows(2).t().contiguous()
    plan = Plan(stages=2, micro_batches=4, batch_dims={"x": 0, "y": 0, "z": 1})
    pipe = fxsplit.compile(model, plan, example_args=(x, y), example_kwargs={"z": z})
    torch.testing.assert_close(pipe(x, y, z=z), model(x, y, z))


@pytest.mark.parametrize("count", [8, 9, 3])
def test_split_and_merge(count):
    """Rows come back once, in order. Differs: any number of them; padding, dropping and repeating are never seen."""
    model = nn.Identity()

    class Numbered(nn.Module):
        def forward(self, x, extra):
            return {"x": model(x) * 1, "both": (x + extra["y"], extra["y"] * 1)}

    x = torch.arange(count).reshape(count, 1).float()
    pipe = fxsplit.compile(Numbered(), Plan(stages=1, micro_batches=4), example_args=(x, {"y": x * 10}))
    out = pipe(x, {"y": x * 10})
    assert torch.equal(out["x"], x)
    assert torch.equal(out["both"][0], x * 11) and torch.equal(out["both"][1], x * 10)


@pytest.mark.parametrize("model_class", [ExampleCode, MultiMLP])
def test_tracer(model_class):
    """A stage that is run by a schedule gives the model's output, keeps its names, and refuses other inputs.

    Differs: a batch of another size runs, as the model runs it; another dtype is refused where it matters.
    """
    model, x = model_class(), rows()
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=4, schedule="1f1b"), example_args=(x,))
    torch.testing.assert_close(pipe(x), model(x))
    torch.testing.assert_close(pipe(rows(3, ROWS + 1)), model(rows(3, ROWS + 1)))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TypeError, match="int32"):
        pipe(x.to(torch.int32))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(pipe(x), model(x))


def test_tracer_kwargs():
    class ModelWithKwargs(MultiMLP):
        def forward(self, x, y=None):
            return super().forward(x) + y

    model, x, y = ModelWithKwargs(), rows(), rows(1)
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=4), example_args=(x,), example_kwargs={"y": y})
    torch.testing.assert_close(pipe(x, y=y), model(x, y=y))


def test_output_chunks_memory_usage():
    """Nothing of a step is kept once it is over: what was alive inside is gone with its result."""
    import gc
    import weakref

    model, x, target = MultiMLP(), rows(), rows(1)
    pipe = fxsplit.compile(model, Plan(stages=4, micro_batches=4), example_args=(x,))
    alive = []
    for layer in model.layers:
        layer[0].register_forward_hook(lambda module, args, out: alive.append(weakref.ref(out)))
    pipe.recompile()
    alive.clear()
    pipe.step(x, target=target, loss_fn=nn.MSELoss(reduction="sum"))
    gc.collect()
    assert len(alive) == 16 and not any(value() is not None for value in alive)


def test_stage_backward():
    """`test_backward`: inputs and parameters get the gradients of the model."""
    model, x, target = MultiMLP(), rows().requires_grad_(), rows(1)
    twin, other = copy.deepcopy(model), rows().requires_grad_()
    pipe = fxsplit.compile(model, Plan(stages=2), example_args=(x,))
    pipe.step(x, target=target, loss_fn=nn.MSELoss(reduction="sum"))
    nn.MSELoss(reduction="sum")(twin(other), target).backward()
    assert torch.equal(x.grad, other.grad)
    assert all(
        torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )


@pytest.mark.parametrize("frozen", [0, 1])
def test_stage_backward_input_and_weight_with_frozen_layers(frozen):
    """`test_stage_backward_weight…`: the two halves of a backward together are all of it, with some layers frozen too."""
    model, x, target = MultiMLP(), rows(), rows(1)
    for p in model.layers[frozen].parameters():
        p.requires_grad_(False)
    twin = copy.deepcopy(model)
    plan = Plan(stages=2, micro_batches=4, schedule="zb_h1")
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    pipe.step(x, target=target, loss_fn=nn.MSELoss(reduction="sum"))
    for part, wanted in zip(x.split(2), target.split(2), strict=True):
        nn.MSELoss(reduction="sum")(twin(part), wanted).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)


def test_custom_dw_errors():
    """Differs: there is no weight half to be given by hand (`dw_builder`): every stage's backward has its two halves."""
    with pytest.raises(PlanError, match="schedule"):
        Plan(stages=2, schedule="dw_builder")
