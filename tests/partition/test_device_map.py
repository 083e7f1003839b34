"""What Accelerate's device maps do, without their bugs: words, limits, keys, and the map that comes back."""

import copy
import itertools
import json
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxsplit
from fxsplit.codegen.emit import generate
from fxsplit.errors import PartitionError, PlanError
from fxsplit.partition.shared import partition_with_homes
from fxsplit.partition.weights import free_memory
from fxsplit.partition.words import device_map_for, even, fill
from fxsplit.partition.written import fewest_keys
from fxsplit.proof.structure import verify_structure
from fxsplit.testing import assert_equivalent
from fxsplit.trace.front import trace
from tests.models import MODELS, ResNet, build
from tests.partition.test_placement import run_fake, stages_of, transfers
from tests.strategies import batches, modules

WORDS = ("auto", "balanced", "balanced_low_0", "sequential")
X = (torch.ones(3, 4),)
LAYER = 64  # bytes of a Linear(4, 4) without bias


class Weight(nn.Module):
    """Holds `count` numbers of 4 bytes."""

    def __init__(self, count):
        super().__init__()
        self.p = nn.Parameter(torch.ones(count))

    def forward(self, x):
        return x * self.p.mean()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))


def linear():
    return nn.Linear(4, 4, bias=False)


def chain(*counts):
    """Modules "0", "1", … of so many bytes."""
    return nn.Sequential(*[Weight(count // 4) for count in counts])


def compiled(model, device_map, *limits, args=X, **fields):
    """On devices cpu:0, cpu:1, … with these limits."""
    if limits:
        fields["max_memory"] = {f"cpu:{i}": limit for i, limit in enumerate(limits)}
    plan = fxsplit.Plan(device_map=device_map, **fields)
    return fxsplit.compile(model, plan, example_args=args, check=False)


def mapped(model, word, *limits, args=X, no_split=(), **more):
    limits = {**{f"cpu:{i}": limit for i, limit in enumerate(limits)}, **more}
    return device_map_for(model, trace(model, args, {}), word, limits, no_split)


def split(model, plan, args=X):
    """The program, without asking whether its devices are there."""
    traced, assignment = partition_with_homes(model, trace(model, args, {}), plan, args)
    program = generate(model, traced, assignment)
    verify_structure(model, traced, program)
    return traced, program


def same_again(pipe, model, args):
    """`pipe.hf_device_map` given to a new compile makes the same stages."""
    found = pipe.hf_device_map
    again = fxsplit.compile(model, fxsplit.Plan(device_map=found), example_args=args, check=False)
    assert [s.code for s in again] == [s.code for s in pipe]
    assert again.devices == pipe.devices
    assert again.hf_device_map == found
    return found


# -- the plan -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", WORDS)
def test_a_plan_with_a_word_round_trips(word, tmp_path):
    plan = fxsplit.Plan(
        device_map=word,
        max_memory={0: "10GiB", "cuda:1": 5, torch.device("cpu"): "1.5 GB"},
        no_split_module_classes=["Block", nn.Linear],
    )
    assert plan.max_memory == {"cuda:0": 10 * 2**30, "cuda:1": 5, "cpu": 1_500_000_000}
    assert plan.no_split_module_classes == ("Block", "Linear")
    assert fxsplit.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    plan.save(tmp_path / "plan.json")
    assert list(fxsplit.Plan.load(tmp_path / "plan.json").max_memory) == ["cuda:0", "cuda:1", "cpu"]
    assert eval(repr(plan), {"Plan": fxsplit.Plan}) == plan


@pytest.mark.parametrize(
    ("fields", "said"),
    {
        "unknown word": ({"device_map": "balance"}, ["'balance' is not known", "did you mean 'balanced'"]),
        "a device is no word": ({"device_map": "cuda:1"}, ['device_map={"": "cuda:1"}']),
        "an int is no map": ({"device_map": 0}, ["device_map=0", 'device_map={"": "cuda:0"']),
        "disk as word": ({"device_map": "disk"}, ["does not offload to disk", '"cpu"']),
        "disk as device": ({"device_map": {"head": "disk"}}, ["device_map['head']", "disk", '"cpu"']),
        "disk as limit": (
            {"device_map": "auto", "max_memory": {"disk": "1GiB"}},
            ["max_memory key 'disk'", "does not offload", '"cpu"'],
        ),
        "negative int device": ({"device_map": {"": -1}}, ["device_map['']", "-1"]),
        "word and devices": ({"device_map": "auto", "devices": "cpu"}, ["devices=", "keys of max_memory"]),
        "word and stages": ({"device_map": "auto", "stages": 2}, ["stages=", "device_map=", "keep one"]),
        "limits that are no dict": ({"max_memory": "10GiB"}, ["max_memory='10GiB'", '{0: "10GiB"']),
        "no limits": ({"max_memory": {}}, ["max_memory={}"]),
        "unit missing": ({"max_memory": {0: "10"}}, ["max_memory[0]='10'", '"10GiB"']),
        "unit unknown": ({"max_memory": {0: "10 gigs"}}, ["max_memory[0]='10 gigs'"]),
        "a negative size": ({"max_memory": {"cpu": -1}}, ["max_memory['cpu']=-1"]),
        "a size of True": ({"max_memory": {0: True}}, ["max_memory[0]=True"]),
        "a limit of half a byte": ({"max_memory": {0: 0.5}}, ["max_memory[0]=0.5"]),
        "device unknown": ({"max_memory": {"gpu7": 1}}, ["max_memory key 'gpu7'", '"cuda:0"']),
        "one device twice": ({"max_memory": {0: 1, "cuda:0": 2}}, ["0 and 'cuda:0' are both cuda:0"]),
        "no_split with a map": (
            {"device_map": {"": "cpu"}, "no_split_module_classes": ["Block"]},
            ["no_split_module_classes=", "device_map= names the modules", 'device_map="auto"'],
        ),
        "no_split alone": ({"no_split_module_classes": ["Block"]}, ["device_map= is not set"]),
        "no_split of a number": (
            {"device_map": "auto", "no_split_module_classes": [3]},
            ["no_split_module_classes=[3]", '["Block"]'],
        ),
    }.items(),
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_a_wrong_field_says_what_to_type(fields, said):
    given, parts = said
    with pytest.raises(PlanError) as caught:
        fxsplit.Plan(**given)
    assert all(part in str(caught.value) for part in [*parts, "instead:"]), (fields, str(caught.value))


def test_keys_that_json_has_made_strings_are_indices_again():
    assert fxsplit.Plan(device_map="auto", max_memory={"0": 7}) == fxsplit.Plan(
        device_map="auto", max_memory={0: 7}
    )


@pytest.mark.parametrize(
    ("size", "count"),
    [("10GiB", 10 * 2**30), ("5MB", 5_000_000), ("0.5KiB", 512), ("100KB", 100_000), (" 7 b ", 7), (0, 0)],
)
def test_sizes_are_those_of_budget(size, count):
    assert fxsplit.Plan(max_memory={"cpu": size}).max_memory == {"cpu": count}
    if count:
        assert fxsplit.Budget(size).nbytes == count


def test_max_memory_with_another_way_to_cut_is_kept():
    plan = fxsplit.Plan(stages=2, max_memory={0: "1KiB"})
    assert plan.max_memory == {"cuda:0": 1024} and plan.replace(stages=3).max_memory == {"cuda:0": 1024}


def test_what_the_caller_gave_is_not_changed():
    limits, classes = {0: "10GiB", "cpu": "1GiB"}, ["Block"]
    plan = fxsplit.Plan(device_map="auto", max_memory=limits, no_split_module_classes=classes)
    assert limits == {0: "10GiB", "cpu": "1GiB"} and classes == ["Block"]
    limits["cpu"], classes[0] = "2GiB", "Other"
    assert plan.max_memory["cpu"] == 2**30 and plan.no_split_module_classes == ("Block",)


@pytest.mark.parametrize("classes", ["Block", Block, ("Block",), [Block]])
def test_one_class_needs_no_list(classes):
    plan = fxsplit.Plan(device_map="auto", no_split_module_classes=classes)
    assert plan.no_split_module_classes == ("Block",)


# -- words: how much goes where ----------------------------------------------------------------------------------------


def all_ends(n, devices):
    return ([*ends, n] for ends in itertools.combinations_with_replacement(range(n + 1), devices - 1))


def loads(weights, ends):
    return [sum(weights[a:b]) for a, b in itertools.pairwise([0, *ends])]


@given(
    st.lists(st.integers(0, 9), max_size=7),
    st.lists(st.integers(0, 25), min_size=1, max_size=4),
)
def test_the_most_even_split_equals_brute_force(weights, sizes):
    ways = [
        ends
        for ends in all_ends(len(weights), len(sizes))
        if all(load <= size for load, size in zip(loads(weights, ends), sizes, strict=True))
    ]
    assert (fill(weights, sizes)[-1] == len(weights)) == bool(ways)
    if ways:
        found = even(weights, sizes, [0] * len(weights))
        assert found in ways
        assert max(loads(weights, found)) == min(max(loads(weights, ends)) for ends in ways)


def test_auto_makes_the_heaviest_device_as_light_as_possible():
    model = chain(40, 8, 8, 40, 24)
    pipe = compiled(model, "auto", 1000, 1000)
    assert pipe.hf_device_map == {"0": "cpu:0", "1": "cpu:0", "2": "cpu:0", "3": "cpu:1", "4": "cpu:1"}
    assert mapped(model, "balanced", 1000, 1000) == pipe.hf_device_map
    assert_equivalent(model, pipe, torch.randn(5, 4))


def test_a_balance_within_limits_that_are_not_equal():
    assert mapped(chain(8, 8, 8, 8), "balanced", 8, 1000, 8) == {
        "0": "cpu:0",
        "1": "cpu:1",
        "2": "cpu:1",
        "3": "cpu:2",
    }


def test_no_device_is_left_empty_where_there_is_something_for_it():
    found = mapped(chain(80, 8, 8, 8), "auto", 1000, 1000, 1000)
    assert list(found.values()) == ["cpu:0", "cpu:1", "cpu:1", "cpu:2"]


def test_a_device_is_not_left_empty_to_keep_a_module_whole():
    found = mapped(nn.Sequential(chain(80), chain(8, 8)), "auto", 1000, 1000, 1000)
    assert found == {"0": "cpu:0", "1.0": "cpu:1", "1.1": "cpu:2"}


def test_a_module_is_not_split_where_the_heaviest_device_is_another():
    found = mapped(nn.Sequential(chain(80), chain(8, 8), chain(8, 24)), "auto", 1000, 1000, 1000)
    assert found == {"0": "cpu:0", "1": "cpu:1", "2": "cpu:2"}


def test_more_devices_than_modules():
    assert mapped(chain(8), "auto", 99, 99, 99) == {"": "cpu:0"}
    assert mapped(chain(8, 8), "auto", 99, 99, 99) == {"0": "cpu:0", "1": "cpu:1"}


def test_sequential_fills_a_device_to_the_last_byte():
    assert mapped(chain(16, 16, 16), "sequential", 32, 99) == {"0": "cpu:0", "1": "cpu:0", "2": "cpu:1"}
    assert mapped(chain(16, 16, 16), "sequential", 31, 99) == {"0": "cpu:0", "1": "cpu:1", "2": "cpu:1"}
    assert mapped(chain(16, 16, 16), "sequential", 48, 99) == {"": "cpu:0"}


def test_sequential_does_not_return_to_a_device_that_was_left():
    assert mapped(chain(8, 40, 8), "sequential", 20, 48) == {"0": "cpu:0", "1": "cpu:1", "2": "cpu:1"}


@pytest.mark.parametrize(
    ("limits", "first"), [((99, 24, 24), 0), ((99, 16, 8), 1), ((99, 8, 8), 2), ((99,), 4)]
)
def test_balanced_low_0_gives_the_first_device_only_what_the_others_cannot_hold(limits, first):
    found = mapped(chain(8, 8, 8, 8), "balanced_low_0", *limits)
    placed = [found.get(str(i), found.get("")) for i in range(4)]
    assert placed[:first] == ["cpu:0"] * first and "cpu:0" not in placed[first:]
    if first == 0:
        assert placed == ["cpu:1", "cpu:1", "cpu:2", "cpu:2"]


@pytest.mark.parametrize("word", WORDS)
def test_the_cpu_holds_only_what_the_accelerators_cannot(word):
    model = chain(8, 8, 8, 8)
    limits = {"cpu": 1000, "cuda:0": 16, "cuda:1": 16}  # last, wherever it is named
    traced = trace(model, X, {})
    assert set(device_map_for(model, traced, word, limits).values()) == {"cuda:0", "cuda:1"}
    limits.update({"cuda:0": 8, "cuda:1": 8})
    assert device_map_for(model, traced, word, limits) == {
        "0": "cuda:0",
        "1": "cuda:1",
        "2": "cpu",
        "3": "cpu",
    }


def test_a_device_with_a_limit_of_nothing_is_not_used():
    assert mapped(chain(8, 8), "auto", 0, 99) == {"": "cpu:1"}
    assert mapped(chain(8, 8), "sequential", 0, 99) == {"": "cpu:1"}


def test_devices_are_filled_in_the_order_of_the_keys():
    pipe = compiled(chain(8, 8), "sequential", max_memory={"cpu:1": 8, "cpu:0": 8})
    assert pipe.hf_device_map == {"0": "cpu:1", "1": "cpu:0"}


def test_modules_are_taken_in_execution_order_not_in_that_of_their_definition():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.middle, self.first = linear(), linear(), linear()

        def forward(self, x):
            return self.last(self.middle(self.first(x)))

    pipe = compiled(Backwards(), "sequential", 2 * LAYER, 2 * LAYER)
    assert pipe.hf_device_map == {"first": "cpu:0", "middle": "cpu:0", "last": "cpu:1"}
    assert len(pipe) == 2  # definition order would be 1, 0
    assert_equivalent(pipe.unsplit(), pipe, torch.randn(5, 4))


def test_ten_is_not_inside_of_one():
    model = chain(*[8] * 11)
    pipe = compiled(model, {"": "cpu:0", "1": "cpu:1"})
    assert [s.modules for s in pipe if s.device.index == 1] == [("1", "1")]
    assert mapped(model, "sequential", 16, 999)["10"] == "cpu:1"


# -- words: what is not split ---------------------------------------------------------------------------------------------


def test_a_module_is_split_only_where_that_makes_the_balance_better():
    three = nn.Sequential(Block(), Block(), Block())
    assert mapped(three, "balanced", 999, 999, 999) == {"0": "cpu:0", "1": "cpu:1", "2": "cpu:2"}
    found = mapped(three, "balanced", 999, 999)
    assert found == {"0": "cpu:0", "1.a": "cpu:0", "1.b": "cpu:1", "2": "cpu:1"}
    assert mapped(three, "sequential", 3 * LAYER, 999) == found


def test_a_class_that_is_not_split():
    model = nn.Sequential(Block(), Block(), Block())
    pipe = compiled(model, "sequential", 3 * LAYER, 999, no_split_module_classes=["Block"])
    assert pipe.hf_device_map == {"0": "cpu:0", "1": "cpu:1", "2": "cpu:1"}
    assert [s.modules for s in pipe] == [("0.a", "0"), ("1.a", "2")]
    assert_equivalent(model, pipe, torch.randn(5, 4))


def test_the_class_of_the_model_itself_is_not_split():
    assert mapped(Block(), "auto", 999, 999, no_split=["Block"]) == {"": "cpu:0"}


def test_a_class_that_is_not_split_and_does_not_fit():
    with pytest.raises(PartitionError, match=r"cpu:1 has 100 bytes left, '0' takes 128: 28 bytes") as caught:
        mapped(nn.Sequential(Block()), "auto", 100, 100, no_split=["Block"])
    assert "fewer classes in no_split_module_classes" in str(caught.value)


def test_a_class_that_no_module_has():
    with pytest.raises(PartitionError, match=r"'Blok'.*\n.*did you mean 'Block'"):
        compiled(nn.Sequential(Block()), "auto", 999, no_split_module_classes=["Blok"])
    # Libraries list the classes of all their models.
    assert mapped(nn.Sequential(Block()), "auto", 999, no_split=["Block", "VisionBlock"]) == {"": "cpu:0"}


def test_a_module_that_the_tracer_kept_whole_is_not_split():
    model, batch = build("experts")
    pipe = compiled(model, "balanced", 5000, 5000, 5000, args=batch(4))
    assert set(pipe.traced.kept_whole) == {"mixtures.0", "mixtures.1", "mixtures.2"}
    assert not [key for key in pipe.hf_device_map if key.startswith("mixtures.") and key.count(".") > 1]
    assert_equivalent(model, pipe, *batch(5))


def test_leaf_modules_are_not_split():
    model = nn.Sequential(Block(), Block(), Block())
    plan = fxsplit.Plan(device_map="balanced", max_memory={"cpu:0": 999, "cpu:1": 999})
    pipe = fxsplit.compile(model, plan, example_args=X, leaf_modules=[Block], check=False)
    assert pipe.hf_device_map == {"0": "cpu:0", "1": "cpu:0", "2": "cpu:1"}


class Inside(nn.Module):
    """An operation that follows device 0 runs between a value and the write to it on device 1."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()

    def forward(self, x):
        y = self.a(x)
        z = self.b(y)
        w = torch.relu(y)
        z.add_(1)
        return self.c(z + w)


def test_a_cut_that_the_program_does_not_allow_is_taken_back():
    with pytest.raises(PartitionError, match="may not be cut"):
        compiled(Inside(), {"a": "cpu:0", "b": "cpu:1", "c": "cpu:1"})
    pipe = compiled(Inside(), "sequential", LAYER, 3 * LAYER)
    assert pipe.hf_device_map == {"": "cpu:1"}
    pipe = compiled(Inside(), "auto", 3 * LAYER, 3 * LAYER)
    assert pipe.hf_device_map == {"a": "cpu:0", "b": "cpu:0", "c": "cpu:1"}
    assert_equivalent(pipe.unsplit(), pipe, torch.randn(5, 4))


@pytest.mark.parametrize("tenths", [3, 5, 7, 9])
def test_writes_in_place_stay_with_what_they_write_to(tenths):
    model, batch = build("resnet")
    whole = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    pipe = compiled(model, "sequential", whole * tenths // 10, whole, args=batch(4))
    assert len(pipe) == 2
    assert_equivalent(model, pipe, *batch(5))


# -- words: what counts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [True, False])
def test_buffers_count_and_are_placed(persistent):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = linear()
            self.register_buffer("scalar", torch.ones(4), persistent)

        def forward(self, x):
            return self.lin(x) * self.scalar

    model = nn.Sequential(Scaled(), Scaled())
    size = LAYER + 16
    assert mapped(model, "sequential", size, size) == {"0": "cpu:0", "1": "cpu:1"}
    assert mapped(model, "sequential", size - 1, 999) == {"0.lin": "cpu:0", "0.scalar": "cpu:1", "1": "cpu:1"}
    with pytest.raises(PartitionError, match="16 bytes are missing"):
        mapped(model, "sequential", size, LAYER)


class OwnTensors(nn.Module):
    """Parameters of the model itself, one of them as the first operand."""

    def __init__(self):
        super().__init__()
        self.p, self.q = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.layer = linear()

    def forward(self, x):
        return self.q * self.layer(x + self.p)


def test_parameters_of_the_model_itself_are_named():
    pipe = compiled(OwnTensors(), "sequential", 16, LAYER, 16)
    assert pipe.hf_device_map == {"p": "cpu:0", "layer": "cpu:1", "q": "cpu:2"}
    assert [dict(s.named_parameters()).keys() for s in pipe] == [{"p"}, {"layer.weight"}, {"q"}]
    assert_equivalent(pipe.unsplit(), pipe, torch.randn(5, 4))


def test_a_tied_weight_counts_once_and_brings_its_modules_together():
    model, batch = build("tied_head")
    pipe = compiled(model, "sequential", 384, 9999, args=batch(4))  # the embedding alone fills the first
    assert pipe.hf_device_map["embed"] == pipe.hf_device_map["head"] == "cpu:0"
    assert [s.parameters.count("embed.weight") for s in pipe if s.device.index == 1] == [0]
    assert_equivalent(model, pipe, *batch(5))


def test_tied_modules_that_do_not_fit_on_one_device_are_apart():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.mid, self.b = linear(), linear(), nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.mid(self.a(x)))

    assert mapped(Tied(), "sequential", LAYER + 16, 999) == {"a": "cpu:0", "mid": "cpu:1", "b": "cpu:0"}
    pipe = compiled(Tied(), "sequential", LAYER, LAYER + 16)  # no room for the bias of b
    assert pipe.hf_device_map == {"a": "cpu:0", "mid": "cpu:1", "b": "cpu:1"}
    assert [s.parameters.count("a.weight") for s in pipe] == [1, 0]  # it travels
    assert_equivalent(pipe.unsplit(), pipe, torch.randn(5, 4), rtol=1e-5, atol=1e-6)


def test_two_tied_tensors_of_neighbours():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight, second.bias = first.weight, first.bias
    assert mapped(nn.Sequential(first, second), "auto", LAYER + 16, LAYER + 16) == {"": "cpu:0"}


def test_a_module_that_is_called_twice_counts_once():
    shared = linear()
    model = nn.Sequential(shared, linear(), shared)
    pipe = compiled(model, "sequential", LAYER, LAYER)
    assert pipe.hf_device_map == {"0": "cpu:0", "1": "cpu:1"}
    assert [d.index for d in pipe.devices] == [0, 1, 0]
    assert_equivalent(model, pipe, torch.randn(5, 4))


def test_a_module_that_does_not_run_counts_nothing():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.aside, self.body = nn.Linear(100, 100), chain(8, 8)

        def forward(self, x):
            return self.body(x)

    assert mapped(Unused(), "auto", 8, 8) == {"body.0": "cpu:0", "body.1": "cpu:1"}


def test_bytes_count_not_numbers():
    model = chain(16, 16)
    model[1].double()
    assert mapped(model, "sequential", 16, 32) == {"0": "cpu:0", "1": "cpu:1"}
    with pytest.raises(PartitionError, match="takes 32: 1 bytes are missing"):
        mapped(model, "sequential", 16, 31)


@pytest.mark.parametrize("word", WORDS)
def test_a_model_without_weights(word):
    pipe = compiled(nn.Sequential(nn.ReLU(), nn.Tanh()), word, 0, 0)
    assert pipe.hf_device_map == {"": "cpu:0"} and len(pipe) == 1


# -- limits -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", WORDS)
def test_weights_that_do_not_fit(word):
    with pytest.raises(PartitionError) as caught:
        compiled(chain(16, 16, 16, 16), word, 20, 20)
    text = str(caught.value)
    assert "cpu:1 has 4 bytes left, '2.p' takes 16: 12 bytes are missing" in text
    assert "max_memory={..., 'cpu:1': 48}" in text and 'such as "cpu"' in text
    compiled(chain(16, 16, 16, 16), word, 20, 48)  # what it says to type


def test_a_map_that_does_not_fit_its_limits_changes_nothing():
    model, device_map = chain(16, 16), {"0": "cpu", "1": "meta"}
    plan = fxsplit.Plan(device_map=device_map, max_memory={"cpu": 16, "meta": 15})
    with pytest.raises(
        PartitionError, match="16 bytes of weights on meta, but max_memory allows 15"
    ) as caught:
        fxsplit.compile(model, plan, example_args=X, check=False)
    assert "max_memory={'meta': 16}" in str(caught.value)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    _, program = split(model, plan.replace(max_memory={"cpu": 16, "meta": 16}))  # what it says to type
    assert [s.device.type for s in program.stages] == ["cpu", "meta"]


def test_a_device_without_a_limit_is_not_limited():
    assert len(compiled(chain(16, 16), {"0": "cpu:0", "1": "cpu:1"}, 16)) == 2


def test_a_map_on_its_limit_counts_a_tied_weight_at_its_home():
    model, batch = build("tied_head")
    fields = {"device_map": {"": "cpu:0", "head": "cpu:1"}, "args": batch(4)}
    compiled(model, **fields, max_memory={"cpu:1": 0})
    with pytest.raises(PartitionError, match="on cpu:0"):
        compiled(model, **fields, max_memory={"cpu:0": 384, "cpu:1": 0})


# -- the machine ----------------------------------------------------------------------------------------------------------------


def test_a_word_without_an_accelerator_is_one_stage_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: None)
    for word in WORDS:
        pipe = fxsplit.compile(Block(), fxsplit.Plan(device_map=word), example_args=X)
        assert [str(d) for d in pipe.devices] == ["cpu"] and pipe.hf_device_map == {"": "cpu"}


def test_a_word_takes_the_free_memory_of_all_accelerators(monkeypatch):
    library = types.SimpleNamespace(mem_get_info=lambda index: (LAYER * (index + 1), 10**9))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda *_: library)
    model = nn.Sequential(linear(), linear(), linear())
    _, program = split(model, fxsplit.Plan(device_map="auto"))
    assert [(str(s.device), s.modules) for s in program.stages] == [
        ("cuda:0", ("0", "0")),
        ("cuda:1", ("1", "2")),
    ]
    with pytest.raises(PartitionError, match=rf"'3' takes {LAYER}: {LAYER} bytes are missing"):
        split(nn.Sequential(*model, linear()), fxsplit.Plan(device_map="auto"))


def test_weights_that_are_there_already_leave_room_for_themselves(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    library = types.SimpleNamespace(mem_get_info=lambda index: (10, 10**9))
    monkeypatch.setattr(torch, "get_device_module", lambda *_: library)
    model = linear()
    with FakeTensorMode():
        model.weight = nn.Parameter(torch.empty(4, 4, device="cuda:1"))
    assert free_memory(model) == {"cuda:0": 10, "cuda:1": 10 + LAYER}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the devices are there")
def test_an_index_without_an_accelerator_is_refused_at_compile():
    for fields in ({"device_map": {"": 0}}, {"device_map": "auto", "max_memory": {0: "1GiB"}}):
        with pytest.raises(PlanError, match="cuda:0, which is not there"):
            fxsplit.compile(Block(), fxsplit.Plan(**fields), example_args=X)


# -- words and the program -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("word", ["auto", "sequential"])
def test_every_model_runs_and_its_map_makes_it_again(name, word):
    model, batch = build(name)
    whole = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    pipe = compiled(model, word, whole * 7 // 10, whole * 7 // 10, args=batch(4))
    assert {d.index for d in pipe.devices} == {0, 1}
    assert_equivalent(model, pipe, *batch(5))
    same_again(pipe, build(name)[0], batch(4))


@pytest.mark.parametrize("name", ["gpt", "tied_head", "two_tower"])
def test_words_on_fake_devices_mix_none(name):
    """Constants and factories follow the stage, and each value goes once to each device that reads it."""
    limits = (
        {0: "10KB", 1: "100KB"}
        if name == "gpt"
        else {0: 500, 1: "100KB"}
        if name == "tied_head"
        else {0: 2000, 1: 2000}
    )
    plan = fxsplit.Plan(device_map="sequential", max_memory=limits)
    model, batch, _, program = stages_of(name, plan)
    moved = [
        (s.index, n.args[0].name)
        for s in program.stages
        for n in transfers(program)
        if n.graph is s.module.graph
    ]
    assert len(moved) == len(set(moved))
    assert moved and "cpu" not in "".join(s.code for s in program.stages)
    outputs = run_fake(program, model, batch)
    assert {t.device.type for t in outputs} == {"cuda"}


def test_no_transfer_where_all_of_it_fits_on_one_device():
    _, program = split(Block(), fxsplit.Plan(device_map="sequential", max_memory={0: "1GiB", 1: "1GiB"}))
    assert len(program.stages) == 1
    assert [n.args[0].name for n in transfers(program)] == ["x"]  # the caller's tensor, which is on the CPU


@pytest.mark.parametrize("word", WORDS)
def test_the_other_mode_keeps_every_module_on_its_device(word):
    class Modes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = linear(), linear(), linear()

        def forward(self, x):
            x = self.a(x)
            return self.b(self.c(x)) if self.training else self.c(self.b(x))

    model = Modes()
    pipe = compiled(
        model, word, 2 * LAYER, 2 * LAYER
    )  # alone, the other mode would have b and c the other way
    assert pipe.compiled[True] is not pipe.compiled[False]
    homes = [
        {name: s.device for s in one.stages for name, _ in s.named_parameters()}
        for one in pipe.compiled.values()
    ]
    assert homes[0] == homes[1] and len(set(homes[0].values())) == 2
    assert_equivalent(model, pipe, torch.randn(5, 4))
    assert_equivalent(model.eval(), pipe.eval(), torch.randn(5, 4))


def test_a_tied_weight_inside_of_a_module_that_stays_whole_in_both_modes():
    class Modes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.whole, self.c = linear(), nn.Sequential(linear(), linear()), linear()
            self.whole[0].weight = self.a.weight

        def forward(self, x):
            x = self.whole(self.a(x))
            return self.c(x) if self.training else self.c(x * 2)

    model = Modes()
    plan = fxsplit.Plan(device_map={"": "cpu:0", "whole": "cpu:1"})
    pipe = fxsplit.compile(model, plan, example_args=X, leaf_modules=["whole"], check=False)
    for mode in (True, False):
        model.train(mode)
        pipe.train(mode)
        assert [d.index for d in pipe.active.devices] == [0, 1, 0]
        assert_equivalent(model, pipe, torch.randn(5, 4), rtol=1e-5, atol=1e-6)
    assert pipe.active is pipe.compiled[False]


@pytest.mark.slow
@settings(max_examples=30)
@given(modules(), batches(1), st.sampled_from(WORDS), st.lists(st.integers(4, 20), min_size=2, max_size=3))
def test_words_on_random_programs(model, batch, word, tenths):
    """Cut only where that is allowed, within the limits, and the map that comes back makes the same code."""
    whole = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    limits = [whole * t // 10 for t in tenths]
    try:
        pipe = compiled(model, word, *limits, args=batch)
    except PartitionError as error:
        assert "do not fit" in str(error)
        assert max(limits) < whole  # on one device everything fits
        return
    for device in set(pipe.devices):
        here = {id(p): p.nbytes for s in pipe if s.device == device for _, p in s.named_parameters()}
        assert sum(here.values()) <= limits[device.index]
    same_again(pipe, model, batch)


# -- keys ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["0.", ".0", "module.0", "0.a.", "module.0.b.weight"])
def test_a_key_that_is_nearly_a_path(key):
    bare = key.strip(".").removeprefix("module.")
    with pytest.raises(PartitionError, match=f"device_map names '{key}'.*\n.*instead: '{bare}'"):
        compiled(nn.Sequential(Block()), {"": "cpu:0", key: "cpu:1"})


def test_an_unknown_key_is_an_error_before_anything_has_moved():
    model, device_map = Block(), {"a": "meta", "b": "meta", "bb": "cpu"}
    with pytest.raises(PartitionError, match=r"'bb'.*\n.*did you mean 'b'"):
        fxsplit.compile(model, fxsplit.Plan(device_map=device_map), example_args=X, check=False)
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_the_deepest_of_three_keys_wins_in_any_order():
    model = nn.Sequential(Block(), nn.Sequential(Block(), Block()))
    keys = {"": "cpu:0", "1": "cpu:1", "1.0.b": "cpu:2"}
    for order in itertools.permutations(keys):
        pipe = compiled(model, {key: keys[key] for key in order})
        homes = {name: s.device.index for s in pipe for name, _ in s.named_parameters()}
        assert list(homes.values()) == [0, 0, 1, 2, 1, 1]


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_pair_sends_the_output_on(kind):
    """The second device is where operations that no key holds find the value."""

    class After(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = linear()

        def forward(self, x):
            return torch.relu(self.a(x)) + 1

    model = After()
    pipe = compiled(model, {"a": kind(["cpu:0", "cpu:1"])})
    assert [(s.device.index, len(s.nodes)) for s in pipe] == [(0, 1), (1, 2)]
    assert pipe.hf_device_map == {"a": ("cpu:0", "cpu:1")}
    assert_equivalent(model, pipe, torch.randn(5, 4))


def test_a_key_that_names_a_parameter_places_what_reads_it():
    pipe = compiled(OwnTensors(), {"": "cpu:0", "q": "cpu:1"})
    assert [s.device.index for s in pipe] == [0, 1]
    assert [dict(s.named_parameters()).keys() for s in pipe] == [{"p", "layer.weight"}, {"q"}]
    assert_equivalent(pipe.unsplit(), pipe, torch.randn(5, 4))


def test_keys_of_all_parameters_of_a_module_place_the_module():
    """What Accelerate writes when it splits a module into its tensors."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    device_map = {"0": "cpu:0", "1.weight": "cpu:1", "1.bias": "cpu:1"}
    pipe = compiled(model, device_map)
    assert [(s.device.index, s.modules) for s in pipe] == [(0, ("0", "0")), (1, ("1", "1"))]
    assert_equivalent(model, pipe, torch.randn(5, 4))


def test_a_key_that_names_a_tied_parameter_of_one_of_its_modules():
    model, batch = build("tied_head")
    device_map = {"": "cpu:0", "blocks": "cpu:1", "head.weight": "cpu:1", "embed.weight": "cpu:0"}
    pipe = compiled(model, device_map, args=batch(4))
    assert [s.index for s in pipe if "self.head" in s.code] == [len(pipe) - 1]
    assert pipe.devices[-1].index == 1 and "call_with(self.head" in pipe[-1].code
    assert_equivalent(model, pipe, *batch(5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "device_map",
    [{"0.weight": "cpu:0", "0.bias": "cpu:1"}, {"": "cpu:1", "0.weight": "cpu:0"}],
    ids=["named", "one named"],
)
def test_one_module_with_tensors_on_two_devices_is_refused(device_map):
    with pytest.raises(PartitionError, match=r"'0.weight' to cpu:0 and '0.bias' to cpu:1.*(?s:.*)name '0'"):
        compiled(nn.Sequential(nn.Linear(4, 4)), device_map)


def test_a_key_inside_of_a_module_that_is_kept_whole_is_not_ignored():
    model, batch = build("experts")
    with pytest.raises(PartitionError, match=r"runs as one(?s:.*)name 'mixtures.1'"):
        compiled(model, {"": "cpu:0", "mixtures.1.experts.2": "cpu:1"}, args=batch(4))


class Again(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Sequential(Block()), linear()
        self.again = self.one

    def forward(self, x):
        return self.other(self.again(x))


@pytest.mark.parametrize("key", ["again", "again.0", "again.0.a"])
def test_a_key_below_an_alias_is_resolved(key):
    pipe = compiled(Again(), {"": "cpu:0", key: "cpu:1"})
    assert "one.0.a.weight" in pipe[0].parameters and pipe[0].device.index == 1


def test_aliases_that_agree_and_a_tensor_whose_aliases_do_not():
    assert len(compiled(Again(), {"one": "cpu:1", "again": "cpu:1", "other": "cpu:1"})) == 1
    with pytest.raises(
        PartitionError, match=r"one tensor to two devices: 'one.0.a.weight' to cpu:0, its alias 'again"
    ):
        compiled(Again(), {"": "cpu:0", "one.0.a.weight": "cpu:0", "again.0.a.weight": "cpu:1"})


def test_an_operation_follows_the_operand_that_was_computed_last():
    """Not the last one of its arguments: the skip connection would pull the sum back to the first device."""

    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, x):
            skip = self.a(x)
            return self.b(skip) + skip

    pipe = compiled(Skip(), {"a": "cpu:0", "b": "cpu:1"})
    assert [(s.device.index, len(s.nodes)) for s in pipe] == [(0, 1), (1, 2)]


def test_an_operation_on_the_inputs_alone_needs_no_key():
    class Aside(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = linear()

        def forward(self, x):
            return self.a(x), x * 2

    pipe = compiled(Aside(), {"a": "cpu:1"})
    assert [str(s.device) for s in pipe] == ["cpu:1"]
    assert_equivalent(pipe.unsplit(), pipe, torch.randn(5, 4))


def test_a_map_that_names_every_module_even_those_that_do_not_run():
    model, batch = build("resnet")
    model.unused = linear()
    device_map = {
        path: f"cpu:{int(path > 'layer2')}" for path, m in model.named_modules() if not list(m.children())
    }
    pipe = compiled(model, device_map, args=batch(4))
    assert {d.index for d in pipe.devices} == {0, 1}
    assert_equivalent(model, pipe, *batch(5))


# -- the map that comes back ------------------------------------------------------------------------------------------------------


def test_the_map_of_one_device():
    assert fxsplit.compile(Block(), example_args=X).hf_device_map == {"": "cpu"}
    plan = fxsplit.Plan(stages=2, devices="cpu:0")
    assert fxsplit.compile(Block(), plan, example_args=X).hf_device_map == {"": "cpu:0"}


def test_the_map_of_a_written_map_is_a_copy_of_it():
    pipe = compiled(Block(), {"": "cpu:0", "b": ["cpu:1", "cpu:0"]})
    found = pipe.hf_device_map
    assert found == {"": "cpu:0", "b": ("cpu:1", "cpu:0")}
    found["a"] = "cpu:7"
    assert "a" not in pipe.hf_device_map and "a" not in pipe.plan.device_map


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gpt", {"cut": ["h.1", "h.2"]}),
        ("gpt", {"cut": ["h.1", "ln_f"]}),  # the head's weight is tied to the embedding's
        ("unet", {"cut": ["down.1", "up.1"]}),
        ("resnet", {"cut": ["layer1", "layer2.0.conv1"]}),
        ("two_tower", {"cut": ["item", "item.1"]}),
        ("experts", {"cut": ["mixtures.0", "mixtures.2"]}),
    ],
)
def test_a_cut_between_modules_can_be_said_as_a_map(name, fields):
    model, batch = build(name)
    plan = fxsplit.Plan(**fields, devices=["cpu:0", "cpu:1", "cpu:2"])
    pipe = fxsplit.compile(model, plan, example_args=batch(4), check=False)
    found = same_again(pipe, build(name)[0], batch(4))
    assert set(found.values()) == {"cpu:0", "cpu:1", "cpu:2"}


def test_the_map_of_balance_is_minimal():
    model = nn.Sequential(Block(), Block(), nn.Sequential(linear(), nn.ReLU()), linear())
    plan = fxsplit.Plan(balance=[1, 3], devices=["cpu:0", "cpu:1"])
    pipe = fxsplit.compile(model, plan, example_args=X, check=False)
    assert same_again(pipe, copy.deepcopy(model), X) == {
        "0": "cpu:0",
        "1": "cpu:1",
        "2": "cpu:1",
        "3": "cpu:1",
    }


def test_operations_that_follow_no_operand_get_the_key_of_their_module():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, x):
            y = self.a(x)
            z = self.b(y)
            return z, y * 2

    pipe = fxsplit.compile(
        Late(), fxsplit.Plan(cut=["b"], devices=["cpu:0", "cpu:1"]), example_args=X, check=False
    )
    assert same_again(pipe, Late(), X) == {"a": "cpu:0", "b": "cpu:1", "": "cpu:1"}


def test_a_weight_that_is_read_before_its_module_runs():
    class Away(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.owner = linear(), linear()

        def forward(self, x):
            return self.owner(nn.functional.linear(self.first(x), self.owner.weight))

    plan = fxsplit.Plan(cut=["owner"], devices=["cpu:0", "cpu:1"])
    pipe = fxsplit.compile(Away(), plan, example_args=X, check=False)
    assert same_again(pipe, Away(), X) == {"first": "cpu:0", "owner": "cpu:1", "": "cpu:0"}


def test_a_cut_inside_of_a_modules_own_forward_has_no_map():
    class Plain(nn.Module):
        def forward(self, x):
            for _ in range(6):
                x = torch.relu(x + 1)
            return x

    plan = fxsplit.Plan(stages=3, devices=["cpu:0", "cpu:1", "cpu:2"])
    pipe = fxsplit.compile(Plain(), plan, example_args=X, check=False)
    with pytest.raises(PlanError, match=r"no device map(?s:.*) at .*test_device_map.py(?s:.*)cut between"):
        _ = pipe.hf_device_map


def test_a_module_that_runs_on_two_devices_has_no_map():
    shared = linear()
    plan = fxsplit.Plan(balance=[1, 1], devices=["cpu:0", "cpu:1"])
    pipe = fxsplit.compile(nn.Sequential(shared, shared), plan, example_args=X, check=False)
    with pytest.raises(PlanError, match="'0' itself runs on several devices"):
        _ = pipe.hf_device_map


def test_the_map_of_a_loaded_pipeline(tmp_path):
    model, batch = build("gpt")
    pipe = compiled(model, "auto", 20_000, 30_000, args=batch(4))
    pipe.save_code(tmp_path / "saved")
    loaded = fxsplit.load(tmp_path / "saved", build("gpt")[0])
    assert loaded.plan == pipe.plan and loaded.hf_device_map == pipe.hf_device_map
    assert len(set(loaded.hf_device_map.values())) == 2


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "a.b", "a.b.c", "a.b.d", "a.e", "ab", "f"]), st.sampled_from("xy"))
    )
)
def test_the_fewest_keys_say_where_every_leaf_is(rows):
    placed = {p: d for p, d in rows if not any(q != p and q.startswith(p + ".") for q, _ in rows)}
    found = fewest_keys(placed.items())
    for path, device in placed.items():
        keys = [k for k in found if not k or path == k or path.startswith(k + ".")]
        assert found[max(keys, key=len)] == device
    assert len(found) <= max(1, len(placed))


def test_a_word_plans_a_model_that_has_no_memory_yet():
    with torch.device("meta"):
        model = ResNet()
    plan = fxsplit.Plan(device_map="auto", max_memory={"cpu": "1GiB"})
    pipe = fxsplit.compile(model, plan, example_args=(torch.empty(2, 3, 8, 8, device="meta"),), check=False)
    assert pipe.hf_device_map == {"": "cpu"}
