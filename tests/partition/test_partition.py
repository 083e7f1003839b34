"""Units; balance, cut and automatic cuts of models; the planner itself is in test_planner.py."""

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.partition.units import bonds, find_units
from fxsplit.testing import assert_equivalent
from fxsplit.trace.front import trace
from tests.models import ResNet, build


def test_equal_blocks_are_cut_between_blocks():
    model, batch = build("gpt")
    model = type(model)(12, width=16, layers=6, heads=2, context=16)
    pipe = fxsplit.compile(model, fxsplit.Plan(cut=["h.2", "h.4"]), example_args=batch(2))
    assert [s.modules for s in pipe] == [("wte", "h.1"), ("h.2.ln_1", "h.3"), ("h.4.ln_1", "head")]


def test_nodes_without_parameters_are_counted_where_there_are_no_parameters():
    class Plain(nn.Module):
        def forward(self, x):
            for _ in range(6):
                x = torch.relu(x + 1)
            return x

    pipe = fxsplit.compile(Plain(), fxsplit.Plan(stages=3), example_args=(torch.randn(3, 4),))
    assert [len(s.nodes) for s in pipe] == [4, 4, 4]


def test_units_keep_in_place_writes_with_what_they_write_to():
    traced = trace(ResNet(), (torch.randn(2, 3, 8, 8),), {})
    names = [n.name for n in traced.graph.nodes if n.op in ("call_module", "call_function", "call_method")]
    groups = [names[u.start : u.end] for u in find_units(traced)]
    assert ["layer1_0_bn2", "out", "layer1_0_relu_1"] in groups
    assert [
        "layer2_0_bn2",
        "layer2_0_downsample_0",
        "layer2_0_downsample_1",
        "out_2",
        "layer2_0_relu_1",
    ] in groups
    assert ["stem_1", "stem_2"] in groups and ["stem_0"] in groups
    assert all(b.writer is not None for b in bonds(traced))


class InputWriter(nn.Module):
    """Writes to the caller's tensor: all that read it stay in one stage."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x * 1)
        x.mul_(2)
        y = self.b(y) + x
        return self.c(y)


class BufferReader(nn.Module):
    """One buffer, written and read far apart."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        y = self.a(x)
        self.mean.mul_(0.5).add_(y.detach().mean(0))
        y = self.b(y)
        return self.c(y - self.mean)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("make", [InputWriter, BufferReader])
def test_writers_and_readers_stay_together(make, checkpoint):
    torch.manual_seed(0)
    model = make()
    for stages in (1, 2):
        plan = fxsplit.Plan(stages=stages, checkpoint=checkpoint)
        pipe = fxsplit.compile(model, plan, example_args=(torch.randn(3, 4),))
        assert_equivalent(model, pipe, torch.randn(5, 4))
    with pytest.raises(fxsplit.errors.PartitionError, match="writes in place") as caught:
        fxsplit.compile(model, fxsplit.Plan(cut=["b"]), example_args=(torch.randn(3, 4),))
    assert str(caught.value).count("test_partition.py:") == 2


def test_balance_counts_the_children_of_a_sequential():
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4), nn.ReLU()
    )
    pipe = fxsplit.compile(model, fxsplit.Plan(balance=[2, 1, 1]), example_args=(torch.randn(3, 4),))
    assert [s.modules for s in pipe] == [("0", "1.1"), ("2", "2"), ("3", "3")]
    assert len(pipe) == 3 and pipe[1] is pipe.stages[1] and list(pipe) == list(pipe.stages)


def test_a_child_that_is_called_twice_counts_twice():
    shared = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = nn.Sequential(nn.Linear(4, 4), shared, shared, nn.Linear(4, 4))
    pipe = fxsplit.compile(model, fxsplit.Plan(balance=[2, 2]), example_args=(torch.randn(3, 4),))
    assert [len(s.nodes) for s in pipe] == [3, 3]
    assert_equivalent(model, pipe, torch.randn(5, 4))


def test_a_child_with_several_results_is_one_child():
    layers = (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(4))
    pipe = fxsplit.compile(
        nn.Sequential(*layers), fxsplit.Plan(balance=[1, 3]), example_args=(torch.randn(2, 3, 8),)
    )
    assert [stage.modules[0].split(".")[0] for stage in pipe] == ["0", "1"]


def test_balance_counts_units_elsewhere():
    model, batch = build("two_tower")
    units = len(find_units(trace(model, batch(4), {})))
    pipe = fxsplit.compile(model, fxsplit.Plan(balance=[3, units - 3]), example_args=batch(4))
    assert len(pipe) == 2
    with pytest.raises(fxsplit.errors.PartitionError, match=f"has {units} units"):
        fxsplit.compile(model, fxsplit.Plan(balance=[3, units]), example_args=batch(4))


def test_cost_time_leaves_the_model_as_it_was():
    model, batch = build("resnet")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=3, cost="time"), example_args=batch(4))
    assert all(load > 0 for load in pipe.assignment.loads)
    assert " ms" in pipe.report() or " µs" in pipe.report()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert len(state) == len(torch.get_rng_state())
