"""Stages under torch.compile: what is compiled is the stages' code, and what comes out is the model's."""

import copy
import shutil
import threading

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

import fxsplit
from fxsplit import Plan, errors

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own imports

X, Y = torch.randn(12, 8), torch.randint(0, 3, (12,))


class Block(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.lin, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(drop)

    def forward(self, x):
        return x + self.drop(self.norm(F.gelu(self.lin(x))))


def model_of(drop=0.0):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(drop) for _ in range(4)), nn.Linear(8, 3))


class Backend:
    """Counts what it is given to compile, and hands it on."""

    def __init__(self, name="aot_eager"):
        self.graphs, self.threads, self.name = [], set(), name

    def __call__(self, graph, example):
        self.graphs.append([str(n.target) for n in graph.graph.nodes if n.op != "placeholder"])
        self.threads.add(threading.current_thread().name)
        return torch._dynamo.lookup_backend(self.name)(graph, example)


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def steps(pipe, count=2, rows=12):
    return [
        pipe.step(X[:rows], target=Y[:rows], loss_fn=F.cross_entropy, reduction="mean") for _ in range(count)
    ]


def state(model):
    return [*(p.grad for p in model.parameters()), *model.buffers()]


def close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "breadth_first"])
def test_every_schedule(schedule):
    plan = Plan(stages=2, micro_batches=4, schedule=schedule, workers=2 if "_" in schedule else None)
    one, other, backend = model_of(), model_of(), Backend()
    pipe = fxsplit.compile(one, plan, example_args=(X,))
    same = fxsplit.compile(other, plan, example_args=(X,))
    assert pipe.compile_stages(backend=backend) is pipe
    for rows in (12, 9, 8):
        close(steps(pipe, rows=rows), steps(same, rows=rows))
        close(state(one), state(other))
    assert backend.graphs and all("batch_norm" in str(graph) for graph in backend.graphs)
    one.eval(), other.eval()
    before = len(backend.graphs)
    with torch.no_grad():
        torch.testing.assert_close(pipe(X), same(X))
    assert len(backend.graphs) > before
    assert "numbers:" in pipe.verify()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor wants a C++ compiler")
def test_inductor():
    one, other = model_of(), model_of()
    plan = Plan(stages=2, micro_batches=3, schedule="1f1b")
    pipe = fxsplit.compile(one, plan, example_args=(X,))
    same = fxsplit.compile(other, plan, example_args=(X,))
    pipe.compile()
    close(steps(pipe), steps(same))
    close(state(one), state(other))


def test_torch_compile_of_a_pipeline():
    one, other, backend = model_of(), model_of(), Backend()
    plan = Plan(stages=2, micro_batches=4)
    pipe = fxsplit.compile(one, plan, example_args=(X,))
    same = fxsplit.compile(other, plan, example_args=(X,))
    compiled = torch.compile(pipe, backend=backend)
    for _ in range(2):
        found, wanted = compiled(X), same(X)
        torch.testing.assert_close(found, wanted)
        F.cross_entropy(found, Y).backward()
        F.cross_entropy(wanted, Y).backward()
    close(state(one), state(other))
    assert backend.graphs and all("batch_norm" in str(graph) for graph in backend.graphs)
    assert backend.threads == {"MainThread"}  # one after the other
    before = len(backend.graphs)
    pipe(X[:8])
    assert len(backend.graphs) == before  # that call was not compiled


def test_all_is_compiled_in_the_first_call():
    backend = Backend()
    pipe = fxsplit.compile(
        model_of(), Plan(stages=2, micro_batches=4, schedule="1f1b"), example_args=(X,)
    ).compile_stages(backend=backend)
    torch.set_num_threads(2)  # of which each worker has one
    for _ in range(3):
        steps(pipe, count=1)
    assert torch.get_num_threads() == 2
    assert len(backend.graphs) == 2 and backend.threads == {"MainThread"}


def test_masks_depend_on_neither_schedule_nor_timing():
    found = []
    for schedule in ("gpipe", "1f1b", "1f1b"):
        model = model_of(drop=0.5)
        pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=3, schedule=schedule), example_args=(X,))
        pipe.compile_stages(backend="aot_eager")
        steps(pipe, count=1)
        model.zero_grad()
        torch.manual_seed(5)
        steps(pipe, count=1)
        found.append([*state(model), torch.get_rng_state()])
    for other in found[1:]:
        close(other, found[0])


def test_what_is_replaced_is_seen():
    model, backend = model_of().eval(), Backend()
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=2), example_args=(X,))
    pipe.compile_stages(backend=backend)
    torch.testing.assert_close(pipe(X), model(X))
    pipe.load_state_dict({k: v + 0.1 if v.is_floating_point() else v for k, v in model.state_dict().items()})
    torch.testing.assert_close(pipe(X), model(X))
    pipe.load_state_dict({k: v.clone() for k, v in model_of().state_dict().items()}, assign=True)
    torch.testing.assert_close(pipe(X), model(X))
    pipe.double()
    torch.testing.assert_close(pipe(X.double()), model(X.double()))


@pytest.mark.parametrize("by", ["recompile", "copy"])
def test_who_comes_after_is_compiled_too(by):
    backend = Backend()
    pipe = fxsplit.compile(model_of(), Plan(stages=2), example_args=(X,)).compile_stages(backend=backend)
    pipe = pipe.recompile() if by == "recompile" else copy.deepcopy(pipe)
    pipe(X)
    assert len(backend.graphs) == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schedule": "zb_h1"}, "two halves"),
        ({"schedule": "interleaved_zero_bubble", "workers": 2}, "two halves"),
        ({"schedule": "zb_v", "workers": 1}, "two halves"),
        ({"schedule": "dual_pipe_v", "workers": 1}, "two halves"),
        ({"checkpoint": "always"}, "computed again"),
        ({"replicas": 2}, "replicas"),
        ({"sync_batch_norm": True}, "sync_batch_norm"),
        ({"deferred_batch_norm": True}, "deferred_batch_norm"),
        ({"detect_anomaly": "nan"}, "detect_anomaly"),
    ],
)
def test_what_cannot_be_compiled_is_refused(fields, words):
    model = model_of()
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=4, **fields), example_args=(X,))
    wanted = steps(pipe)
    with pytest.raises(errors.PlanError, match=words):
        pipe.compile_stages(backend="aot_eager")
    with pytest.raises(errors.PlanError, match=words):
        torch.compile(pipe, backend="aot_eager")(X)
    assert len(wanted) == 2 and torch.isfinite(steps(pipe)[0])


class Trains(nn.Module):
    def __init__(self, pipe):
        super().__init__()
        self.pipe = pipe

    def forward(self, x, y):
        first = self.pipe.step(x * 1, target=y, loss_fn=F.cross_entropy)
        second, out = self.pipe.step_with_output(x * 1, target=y, loss_fn=F.cross_entropy)
        return first + second + out.mean() * 0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.filterwarnings("error:Dynamo does not know")
def test_a_step_in_what_the_user_compiles_is_played_as_it_is(schedule, inside):
    model = model_of()
    reference = copy.deepcopy(model)
    pipe = fxsplit.compile(model, Plan(stages=2, micro_batches=3, schedule=schedule), example_args=(X,))
    other = fxsplit.compile(reference, Plan(stages=2, micro_batches=3, schedule=schedule), example_args=(X,))

    @torch.compile(backend=Backend())
    def by_a_function(x, y):
        return Trains(pipe).forward(x, y)

    run = torch.compile(Trains(pipe), backend=Backend()) if inside else by_a_function
    found = run(X, Y)
    expected = Trains(other)(X, Y)
    assert torch.equal(found, expected)
    for mine, its in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)
