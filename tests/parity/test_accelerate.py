"""Accelerate's device maps: tests/{test_big_modeling,test_modeling_utils}.py, on devices that every machine has.

How maps are made and read case by case is in tests/partition/test_device_map.py; devices that differ in tests/on_devices.
"""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import Plan
from fxsplit.errors import PartitionError, PlanError


class ModelForTest(nn.Module):
    """Its sizes, in bytes: linear1 64, batchnorm 72 (with the counter), linear2 100."""

    def __init__(self):
        super().__init__()
        self.linear1, self.batchnorm, self.linear2 = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)

    def forward(self, x):
        return self.linear2(self.batchnorm(self.linear1(x)))


def model_and_batch():
    torch.manual_seed(0)
    return ModelForTest().eval(), torch.randn(2, 3)


def preview(model, **fields):
    return fxsplit.preview(model, Plan(**fields), example_args=(torch.randn(2, 3),))


def test_init_empty_weights():
    """`init_empty_weights()`: torch's own `meta` device. It costs nothing, whatever its size is."""
    with torch.device("meta"):
        model = nn.Linear(100_000, 100_000)
    pipe = fxsplit.compile(model, Plan(stages=1), example_args=(torch.empty(1, 100_000, device="meta"),))
    assert {p.device.type for p in pipe.parameters()} == {"meta"}


def test_dispatch_model():
    model, x = model_and_batch()
    expected = model(x)
    device_map = {"linear1": "cpu", "batchnorm": "cpu", "linear2": "cpu"}
    pipe = fxsplit.compile(model, Plan(device_map=device_map), example_args=(x,))
    assert torch.equal(pipe(x), expected)
    assert pipe.hf_device_map and list(device_map) == ["linear1", "batchnorm", "linear2"]


def test_dispatch_model_tied_weights():
    """A tied weight is one tensor still. Differs: two places for it have one home, and the value travels."""
    model = nn.Sequential(OrderedDict(a=nn.Linear(4, 4), b=nn.ReLU(), c=nn.Linear(4, 4)))
    model.c.weight = model.a.weight
    x = torch.randn(2, 4)
    pipe = fxsplit.compile(model, Plan(device_map={"a": "cpu", "b": "cpu", "c": "cpu"}), example_args=(x,))
    assert pipe.unsplit().c.weight is pipe.unsplit().a.weight
    pipe(x).sum().backward()
    twin = copy.deepcopy(model)
    twin.zero_grad()
    twin(x).sum().backward()
    assert torch.equal(model.a.weight.grad, twin.a.weight.grad)


def test_dispatch_model_copy():
    """A deep copy computes with its own weights and attributes."""
    model, x = model_and_batch()
    pipe = fxsplit.compile(model, Plan(device_map={"": "cpu"}), example_args=(x,))
    copied = copy.deepcopy(pipe)
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
    assert torch.equal(pipe(x), model(x)) and not torch.equal(copied(x), model(x))


def test_dispatch_model_move_model():
    """Moving what is dispatched is an error. Differs: at once, and not a warning and then an error of the next call."""
    model, x = model_and_batch()
    pipe = fxsplit.compile(model, Plan(device_map={"": "cpu"}), example_args=(x,))
    with pytest.raises(TypeError, match="placement"):
        pipe.to("meta")


def test_dispatch_model_with_non_persistent_buffers():
    class Buffered(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.ones(3), persistent=True)
            self.register_buffer("made", torch.ones(3) * 2, persistent=False)

        def forward(self, x):
            return x + self.kept + self.made

    model, x = Buffered(), torch.zeros(2, 3)
    pipe = fxsplit.compile(model, Plan(device_map={"": "cpu"}), example_args=(x,))
    assert (pipe(x) == 3).all() and list(pipe.state_dict()) == ["kept"]


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_load_checkpoint_and_dispatch(name, tmp_path):
    """The weights of a folder go straight to their stages, and are the folder's, in its dtype."""
    pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    dtype = getattr(torch, name)
    model, x = model_and_batch()
    model = model.to(dtype)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = ModelForTest().eval().to(dtype)
    pipe = fxsplit.compile(
        empty,
        Plan(device_map={"linear1": "cpu", "batchnorm": "cpu", "linear2": "cpu"}),
        example_args=(torch.empty(2, 3, dtype=dtype, device="meta"),),
        weights=tmp_path,
    )
    assert torch.equal(pipe(x.to(dtype)), model(x.to(dtype)))


# of test_modeling_utils.py


def test_infer_auto_device_map():
    """Within the limits, in the order of execution, without a module too many for its device.

    Differs: 'sequential' fills to the last byte (no room is kept for the largest layer; say it in `max_memory`).
    """
    model, _ = model_and_batch()
    limits = {"cpu": 1000}
    assert len(preview(model, device_map="sequential", max_memory=limits).assignment.stages) == 1
    with pytest.raises((PartitionError, PlanError), match="fit"):
        preview(model, device_map="sequential", max_memory={"cpu": 200})


def test_infer_auto_device_map_with_tied_weights():
    """A tied weight counts once."""
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])
    for layer in model:
        layer.weight = model[0].weight
    fxsplit.preview(
        model, Plan(device_map="auto", max_memory={"cpu": 8 * 8 * 4}), example_args=(torch.randn(2, 8),)
    )


def test_infer_auto_device_map_no_split():
    """`no_split_module_classes` keeps a block on one device, as a class, its name, or a list of them."""
    model = nn.Sequential(ModelForTest(), nn.Linear(5, 3), ModelForTest())
    sizes = {"cuda:0": 400, "cuda:1": 1000}  # a block is 236 bytes, and with the layer behind it 308
    for classes in ("ModelForTest", ["ModelForTest"], ["ModelForTest", "Linear"]):
        with torch.device("meta"):
            empty = nn.Sequential(ModelForTest(), nn.Linear(5, 3), ModelForTest()).eval()
        plan = Plan(device_map="sequential", max_memory=sizes, no_split_module_classes=classes)
        made = fxsplit.preview(empty, plan, example_args=(torch.empty(2, 3, device="meta"),))
        assert made.assignment.device_map == {"0": "cuda:0", "1": "cuda:0", "2": "cuda:1"}, classes
    assert len(list(model.parameters())) == 14


def test_check_device_map():
    """Differs: a module that no key names is where what it reads was computed last; Accelerate refuses the map."""
    model, x = model_and_batch()
    pipe = fxsplit.compile(model, Plan(device_map={"linear1": "cpu", "linear2": "cpu"}), example_args=(x,))
    assert torch.equal(pipe(x), model(x))
    with pytest.raises(ValueError, match="linear3"):
        preview(model, device_map={"linear1": "cpu", "linear3": "cpu"})


def test_offload_to_disk():
    """Differs: there is none, which is said at once and with what there is."""
    with pytest.raises(PlanError, match="disk"):
        Plan(device_map={"": "disk"})


@pytest.mark.parametrize(
    ("text", "count"), [("10GiB", 10 << 30), ("10GB", 10**10), ("1.5MiB", 3 << 19), (12, 12)]
)
def test_convert_file_size_to_int(text, count):
    assert Plan(device_map="auto", max_memory={"cpu": text}) == Plan(
        device_map="auto", max_memory={"cpu": count}
    )


def test_get_balanced_memory():
    """`"balanced"` shares out evenly what all can hold, and `"balanced_low_0"` spares the first device."""
    limits = {"cuda:0": 2000, "cuda:1": 2000, "cuda:2": 2000}
    for word, shares in (("balanced", [2, 2, 2]), ("balanced_low_0", [3, 3])):
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(6)])
        plan = Plan(device_map=word, max_memory=limits)
        made = fxsplit.preview(model, plan, example_args=(torch.empty(2, 8, device="meta"),))
        assert [len(stage) for stage in made.assignment.stages] == shares
        assert [str(device) for device in made.assignment.devices] == [*limits][-len(shares) :]
