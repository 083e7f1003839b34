"""What a compile costs beside the model: copies of its weights, and runs of it; and that a model that writes to its
parameters in forward is as it was all the same."""

import contextlib
import copy
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxsplit
from fxsplit import Plan, compiler
from tests.helpers import run_python

PEAK = """
import resource
import torch, fxsplit
from torch import nn

torch.set_num_threads(1)
model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12)))
weights = sum(p.nbytes for p in model.parameters())
fxsplit.compile(nn.Sequential(nn.Linear(2, 2)), example_args=(torch.randn(2, 2),), check=False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
fxsplit.compile(model, fxsplit.Plan(stages=2, micro_batches=2), example_args=(torch.randn(4, 2048),), check=False)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / weights)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is in kilobytes on Linux")
def test_a_compile_without_checks_makes_no_copy_of_the_weights():
    assert float(run_python(PEAK)) < 0.6


class Matmuls(TorchDispatchMode):
    """Counts the matrix products of one layer."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.found = weight, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.addmm.default:
            self.found += args[2].untyped_storage().data_ptr() == self.weight.untyped_storage().data_ptr()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("micro_batches", "runs"), [(1, 4), (2, 6)])
def test_a_compile_without_checks_runs_the_model_in_each_mode_and_the_graph_in_each_mode(micro_batches, runs):
    """And for micro-batches the graph on a batch and on a part of it, to derive how outputs merge."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4))
    with Matmuls(model[0].weight) as matmuls:
        plan = Plan(stages=2, micro_batches=micro_batches)
        fxsplit.compile(model, plan, example_args=(torch.randn(4, 4),), check=False)
    assert matmuls.found == runs


def in_place(self):
    with torch.no_grad():
        self.weight.mul_(0.5)


def past_autograd(self):
    self.weight.data.add_(1)


def by_a_view(self):
    self.weight.data.view(-1)[2:5].zero_()


def replaced(self):
    self.weight.data = torch.zeros(2, 3)


def into(self):
    torch.add(self.bias.data, 1, out=self.bias.data)


def by_list(self):
    torch._foreach_mul_([self.weight.data, self.bias.data], 2.0)


def renormalised(self):
    nn.functional.embedding(torch.tensor([0, 1]), self.weight, max_norm=0.1)


class Writes(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.how, self.after = how, nn.Linear(4, 4)

    def forward(self, x):
        y = nn.functional.linear(x, self.weight, self.bias)
        self.how(self)
        return self.after(y)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("how", [in_place, past_autograd, by_a_view, replaced, into, by_list, renormalised])
def test_parameters_that_forward_writes_are_as_they_were(how, check):
    model = Writes(how)
    before, memory = copy.deepcopy(model.state_dict()), [p.data_ptr() for p in model.parameters()]
    with contextlib.suppress(fxsplit.errors.FxsplitError):
        fxsplit.compile(model, Plan(), example_args=(torch.randn(4, 4),), check=check)
    assert all(torch.equal(a, before[name]) for name, a in model.state_dict().items())
    assert memory == [p.data_ptr() for p in model.parameters()]


LEFT = """
import sys, threading, warnings
import torch
from torch import nn
import fxsplit


class Exported(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x, i):
        return self.a(x) * int(i.max())


model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4))
args = (torch.randn(4, 4),)
if "export" in sys.argv:
    model, args = Exported(), (torch.randn(4, 4), torch.tensor([2, 3]))
folder = sys.argv[1]
threads, filters = threading.enumerate(), list(warnings.filters)
micro_batches = 1 if "export" in sys.argv else 2
if "load" in sys.argv:
    pipe = fxsplit.load(folder, model)
else:
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=1, micro_batches=micro_batches), example_args=args)
    pipe.save_code(folder)
pipe(*args).sum().backward()
assert "export" in sys.argv or "torch._dynamo" not in sys.modules  # its import takes seconds
pipe.memory()
if "load" not in sys.argv:
    fxsplit.verify(pipe)
    print(pipe.traced.front_end)
assert threading.enumerate() == threads, threading.enumerate()
assert warnings.filters == filters, [f for f in warnings.filters if f not in filters]
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["compile", "export"])
def test_a_compile_leaves_no_thread_and_no_filter_of_warnings(how, tmp_path):
    runs = [how, "load"] if how == "compile" else [how]
    for run in runs:
        said = run_python(LEFT, tmp_path / "split", run)
        assert "torch.export" in said or run != "export"


def test_a_cut_that_is_over_its_memory_by_simulation_is_made_again_with_less_room(monkeypatch):
    model, x, rooms = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4), []
    partition, over = compiler.partition_with_homes, [0]

    def with_room(*given):
        rooms.append(given[-1])
        return partition(*given)

    def with_memory(model, traced, assignment, *rest):
        needed = 2 if len(rooms) <= over[0] else 1
        stages = tuple(replace(s, memory=needed, limit=1) for s in assignment.forecast.stages)
        return replace(assignment, forecast=replace(assignment.forecast, stages=stages))

    monkeypatch.setattr(compiler, "partition_with_homes", with_room)
    monkeypatch.setattr(compiler, "with_simulated_memory", with_memory)
    for over[0], wanted in ((0, [1.0]), (2, [1.0, 0.97, 0.9])):
        rooms.clear()
        fxsplit.preview(model, fxsplit.Plan(stages=2), example_args=(x,))
        assert rooms == wanted
    over[0] = 9
    with pytest.raises(fxsplit.errors.PartitionError, match="more memory than cpu has, by simulation"):
        fxsplit.preview(model, fxsplit.Plan(stages=2), example_args=(x,))
