"""From a model without values to a pipeline that computes what the model would: sources, what does not fit, buffers."""

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import fxsplit
from fxsplit import Plan, errors

X = torch.randint(0, 11, (6, 5))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tied(nn.Module):
    """A head that is the embedding, a buffer in the checkpoint, and numbers that forward makes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) + torch.arange(ids.shape[1], device=ids.device)[:, None] * torch.tensor(0.1)
        x = self.norm(self.blocks(x).transpose(1, 2)).transpose(1, 2)
        return self.head(x * math.sqrt(2) + x.new_ones(8))


class Rotary(nn.Module):
    """A buffer that no checkpoint holds, which its own code computes."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.register_buffer("frequencies", torch.empty(4), persistent=False)
        self.reset_buffers()

    def reset_buffers(self):
        self.frequencies.copy_(1.0 / 10 ** torch.arange(4.0, device=self.frequencies.device))

    def forward(self, x):
        return self.proj(x) * self.frequencies


class Scaled(nn.Module):
    """A buffer that no checkpoint holds, and that nobody computes."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 3.0), persistent=False)

    def forward(self, x):
        return self.proj(x) * self.scale


def on_meta(make):
    with torch.device("meta"):
        return make()


def written(state, folder):
    """The state_dict as each kind of source."""
    plain = {name: t.clone() for name, t in state.items()}
    save_file(plain, folder / "model.safetensors")
    torch.save(plain, folder / "model.pt")
    shards = folder / "shards"
    shards.mkdir()
    names = list(plain)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: plain[name] for name in part}, shards / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    return {
        "state_dict": plain,
        "safetensors": folder / "model.safetensors",
        "pt": str(folder / "model.pt"),
        "index": shards / "model.safetensors.index.json",
        "folder": shards,
        "function": plain.get,
    }


@pytest.mark.parametrize("kind", ["state_dict", "safetensors", "pt", "index", "folder", "function"])
@pytest.mark.parametrize("example", ["cpu", "meta"])
def test_every_source_gives_the_model_s_numbers(kind, example, tmp_path):
    model = Tied()
    source = written(model.state_dict(), tmp_path)[kind]
    empty = on_meta(Tied)
    pipe = fxsplit.compile(
        empty, Plan(stages=3, micro_batches=2), example_args=(X.to(example),), weights=source
    )
    assert empty.head.weight is empty.embed.weight and not empty.head.weight.is_meta
    model.eval(), pipe.eval()
    assert torch.equal(pipe(X), model(X))
    model.train(), pipe.train()
    target = torch.randint(0, 11, (6, 11, 5)).float()
    same = fxsplit.compile(model, Plan(stages=3, micro_batches=2), example_args=(X,))
    for one in (same, pipe):
        one.step(X, target=target, loss_fn=lambda y, t: F.mse_loss(y.transpose(1, 2), t), reduction="mean")
    for (name, a), b in zip(model.named_parameters(), empty.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    assert "numbers:" in pipe.verify() and "numbers:" in same.verify()


def test_what_is_loaded_is_said():
    model = Rotary()
    pipe = fxsplit.compile(on_meta(Rotary), Plan(), example_args=(torch.randn(2, 4),))
    found = pipe.load_weights(model.state_dict())
    assert str(found) == "2 tensors, 80 B; computed: frequencies"
    x = torch.randn(2, 4)
    assert torch.equal(pipe(x), model(x))
    with pytest.raises(errors.WeightsError, match=r"scale \(in no checkpoint"):
        fxsplit.compile(on_meta(Scaled), Plan(), example_args=(x,), weights=Scaled().state_dict())
    state = {**Scaled().state_dict(), "scale": torch.full((4,), 3.0)}
    assert fxsplit.compile(on_meta(Scaled), Plan(), example_args=(x,), weights=state)(x).shape == (2, 4)


def test_buffers_that_have_values_stay():
    model = on_meta(Scaled)
    model.scale = torch.full((4,), 2.0)
    pipe = fxsplit.compile(model, Plan(), example_args=(torch.randn(2, 4),), weights=Scaled().state_dict())
    assert model.scale.tolist() == [2.0] * 4
    assert "numbers:" in pipe.verify()


def test_weights_that_are_there_are_replaced_in_place():
    model, other = Tied(), Tied()
    pipe = fxsplit.compile(model, Plan(stages=2), example_args=(X,))
    before = list(model.parameters())
    pipe.load_weights(other.state_dict())
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    pipe.eval(), other.eval()
    assert torch.equal(pipe(X), other(X))


def test_recurrent_layers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.lstm(x)[0])

    model, x = Net(), torch.randn(2, 3, 4)
    pipe = fxsplit.compile(on_meta(Net), Plan(stages=2), example_args=(x,), weights=model.state_dict())
    assert torch.equal(pipe(x), model(x))


def misfits():
    state = Tied().state_dict()
    lacks = {k: v for k, v in state.items() if k not in ("head.weight", "embed.weight", "norm.bias")}
    yield lacks, ["missing embed.weight = head.weight, norm.bias"]
    yield {**state, "extra": torch.ones(1), "more": torch.ones(1)}, ["not known to the model extra, more"]
    yield (
        {**state, "norm.bias": torch.ones(3)},
        ["norm.bias is float32[3] and not float32[8]", "instead: the checkpoint of this model"],
    )
    yield {k: v.half() if v.is_floating_point() else v for k, v in state.items()}, ["model.to(torch.float16)"]
    yield {f"model.{k}": v for k, v in state.items()}, ["checkpoint['model.' + name]"]
    yield (
        {k: v for k, v in state.items() if k != "head.weight"} | {"head.weight": torch.zeros(11, 8)},
        ["two values"],
    )


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("asked", [False, True])
def test_what_does_not_fit_is_said_at_once_and_nothing_is_loaded(number, asked):
    state, words = list(misfits())[number]
    if asked and number in (1, 4):  # a function has no names that could be unknown
        pytest.skip("of a state_dict")
    model = on_meta(Tied)
    pipe = fxsplit.compile(model, Plan(stages=2), example_args=(X,))
    with pytest.raises(errors.WeightsError) as caught:
        pipe.load_weights(state.get if asked else state)
    for word in words:
        assert word in str(caught.value)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    with pytest.raises(errors.ArgumentError, match="no weights yet"):
        pipe(X)
    pipe.load_weights(Tied().state_dict())
    pipe(X)


def test_what_an_error_says_to_type_works():
    state = {f"model.{k}": v for k, v in Tied().state_dict().items()}
    pipe = fxsplit.compile(on_meta(Tied), Plan(stages=2), example_args=(X,))
    with pytest.raises(errors.WeightsError, match="weights=lambda name: checkpoint"):
        pipe.load_weights(state)
    pipe.load_weights(lambda name: state["model." + name])
    half = {k: v.half() if v.is_floating_point() else v for k, v in Tied().state_dict().items()}
    with pytest.raises(errors.WeightsError, match=r"model.to\(torch.float16\)"):
        pipe.load_weights(half)
    model = on_meta(Tied).to(torch.float16)
    fxsplit.compile(model, Plan(stages=2), example_args=(X,), weights=half)
    assert model.head.weight.dtype == torch.float16


def test_files_that_are_damaged_or_not_there(tmp_path):
    sources = written(Tied().state_dict(), tmp_path)
    whole = sources["safetensors"].read_bytes()
    cut, empty, text = (tmp_path / f"{n}.safetensors" for n in ("cut", "empty", "text"))
    cut.write_bytes(whole[: len(whole) // 2])
    empty.write_bytes(b"")
    text.write_text("these are no tensors, whatever the name says")
    pickled = tmp_path / "pickled.pt"
    torch.save({"a": Tied()}, pickled)
    half = tmp_path / "half.pt"
    half.write_bytes((tmp_path / "model.pt").read_bytes()[:500])
    nested = tmp_path / "nested.pt"
    torch.save({"state_dict": Tied().state_dict(), "epoch": 3}, nested)
    shards = sources["folder"]
    (tmp_path / "nothing").mkdir()
    model = on_meta(Tied)
    pipe = fxsplit.compile(model, Plan(stages=2), example_args=(X,))

    def refused(source, *words):
        with pytest.raises(errors.FxsplitError) as caught:
            pipe.load_weights(source)
        for word in words:
            assert word in str(caught.value), caught.value
        assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))

    for path in (cut, empty, text, pickled, half):
        refused(path, path.name, "cannot be read")
    refused(nested, "['state_dict']", "mmap=True")
    refused(tmp_path / "not.safetensors", "there is no file")
    refused(tmp_path / "nothing", "has no checkpoint")
    refused(3, "int", "a state_dict")
    refused({"a": {"b": torch.ones(1)}}, "checkpoint['a']")
    refused(lambda name: 3, "gives a int")
    (shards / "b.safetensors").unlink()
    refused(shards, "b.safetensors", "not there")
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "a.safetensors")
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(shards, "a.safetensors", "does not have it")
    index["weight_map"] = {"embed.weight": "../model.safetensors"}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(shards, "no file beside it")
    (shards / "model.safetensors.index.json").write_text("{}")
    refused(shards, "no index")


def test_a_source_that_fails_in_the_middle_leaves_nothing(tmp_path):
    state, asked = Tied().state_dict(), []

    def fails(name):
        asked.append(name)
        if len(asked) > 7:
            raise OSError("the disk is gone")
        return state[name]

    model = on_meta(Tied)
    pipe = fxsplit.compile(model, Plan(stages=2), example_args=(X,))
    with pytest.raises(OSError, match="gone"):
        pipe.load_weights(fails)
    assert all(t.is_meta for t in model.parameters())
    pipe.load_weights(state)
    assert "numbers:" in pipe.verify()


def test_the_memory_of_a_file_is_not_shared(tmp_path):
    source = written(Tied().state_dict(), tmp_path)["safetensors"]
    pipe = fxsplit.compile(on_meta(Tied), Plan(stages=2), example_args=(X,), weights=source).eval()
    expected = pipe(X)
    source.write_bytes(b"")
    assert torch.equal(pipe(X), expected)


def test_what_could_not_be_compared_is_said():
    pipe = fxsplit.compile(on_meta(Tied), Plan(stages=2), example_args=(X,))
    assert "without values" in pipe.traced.report()
    assert pipe.verify().endswith("numbers: not compared, since the model has no weights yet")
    real = fxsplit.compile(Tied(), Plan(stages=2), example_args=(X,))
    assert "without values" not in real.traced.report()


def test_a_saved_pipeline_is_loaded_over_a_model_without_values(tmp_path):
    model = Tied()
    fxsplit.compile(model, Plan(stages=2), example_args=(X,)).save_code(tmp_path / "split")
    pipe = fxsplit.load(tmp_path / "split", on_meta(Tied))
    pipe.load_weights(model.state_dict())
    model.eval(), pipe.eval()
    assert torch.equal(pipe(X), model(X))
    empty = fxsplit.compile(on_meta(Tied), Plan(stages=2), example_args=(X,))
    empty.save_code(tmp_path / "planned")
    again = fxsplit.load(tmp_path / "planned", copy.deepcopy(model))
    assert torch.equal(again(X), model(X))


def test_what_is_planned_without_values_is_saved(tmp_path):
    fxsplit.compile(on_meta(Rotary), Plan(), example_args=(torch.randn(2, 4),)).save_code(tmp_path)
    model, x = Rotary(), torch.randn(3, 4)
    assert torch.equal(fxsplit.load(tmp_path, model)(x), model(x))
    trust = [f"{__name__}:Rotary"]
    with pytest.raises(errors.SerializeError, match=r"missing \['frequencies'\]"):
        fxsplit.load(tmp_path, model.state_dict(), trust=trust)
    state = {**model.state_dict(), "frequencies": model.frequencies}
    assert torch.equal(fxsplit.load(tmp_path, state, trust=trust)(x), model(x))


class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        return self.b(y) if y.sum() > 0 else y[y[:, 0].nonzero()[:, 0]]


def test_a_model_that_asks_for_values_is_refused_on_meta():
    model = on_meta(Asks)
    with pytest.raises(errors.TraceError, match="where nothing has a value") as caught:
        fxsplit.compile(model, Plan(stages=2), example_args=(torch.randn(2, 4),))
    assert "test_weights.py" in str(caught.value) and "compile the model with its weights" in str(
        caught.value
    )
    assert all(p.is_meta for p in model.parameters())


def test_how_outputs_merge_is_not_guessed_without_values():
    class Kept(nn.Module):
        def forward(self, x):
            return x.square().sum() if int(x.shape[0]) > 0 else x.sum()

    class Total(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), Kept()

        def forward(self, x):
            return self.b(self.a(x))

    x, plan = torch.randn(4, 4), Plan(stages=2, micro_batches=2)
    for model in (Total(), on_meta(Total)):  # what it did without values says it as well
        pipe = fxsplit.compile(model, plan, example_args=(x,), leaf_modules=[Kept])
        assert pipe.merges[0].how == "sum"


class Asking(nn.Module):
    """What a forward asks of devices, and makes without naming one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x) * torch.tensor([1.0, 2.0, 3.0, 4.0]) + torch.arange(x.shape[1])
        if x.device.type == "cpu" and not y.is_cuda and y.is_cpu:
            y = y * 2
        with torch.autocast(device_type=x.device.type, enabled=False):
            y = self.b(y)
        mask = torch.full((4, 4), float("-inf")).triu(1).to(x.device)
        return y.float().cpu() @ mask.exp()


@pytest.mark.parametrize(("micro_batches", "leaf_modules"), [(1, ()), (2, ()), (1, ["a"])])
def test_devices_are_those_of_the_cpu(micro_batches, leaf_modules):
    model, x = Asking(), torch.randn(6, 4)
    plan, empty = Plan(stages=2, micro_batches=micro_batches), on_meta(Asking)
    given = {"example_args": (x,), "leaf_modules": leaf_modules}
    pipe = fxsplit.compile(empty, plan, weights=model.state_dict(), **given)
    same = fxsplit.compile(model, plan, **given)
    assert torch.equal(pipe(x), same(x))
    assert [s.code for s in pipe.stages] == [s.code for s in same.stages]
    assert "numbers:" in pipe.verify()


class Flips(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.a(x)).flip(0)


def test_rows_are_not_told_by_shapes_alone():
    with pytest.raises(errors.BatchError, match="output"):
        fxsplit.compile(on_meta(Flips), Plan(stages=2, micro_batches=2), example_args=(torch.randn(4, 4),))


class Looks(Flips):
    def forward(self, x):
        y = self.b(self.a(x))
        return y + 1 if self.a.weight.is_meta else y


def test_with_weights_outputs_are_compared():
    x = torch.randn(4, 4)
    with pytest.raises(errors.VerifyError, match="another output 0 than the model: off by 1"):
        fxsplit.compile(on_meta(Looks), Plan(), example_args=(x,), weights=Looks().state_dict())


def test_what_would_be_lost_with_the_object_is_refused():
    def hooked():
        model = Flips()
        model.a.weight.register_hook(lambda g: g * 0.5)
        return model

    def shared():
        model = Flips()
        model.b.weight = nn.Parameter(model.a.weight.data)
        return model

    for make, words in (
        (hooked, "a.weight has hooks"),
        (shared, "a.weight and b.weight are two tensors over one"),
    ):
        with pytest.raises(errors.WeightsError, match=words):
            fxsplit.compile(
                on_meta(make), Plan(), example_args=(torch.randn(4, 4),), weights=Flips().state_dict()
            )


def test_sources_without_values():
    pipe = fxsplit.compile(on_meta(Flips), Plan(), example_args=(torch.randn(4, 4),))
    state = Flips().state_dict()
    for odd, words in (
        (on_meta(Flips).state_dict(), "is on meta"),
        ({**state, "a.weight": torch.ones(4, 4).to_sparse()}, "not dense"),
    ):
        with pytest.raises(errors.WeightsError, match=words):
            pipe.load_weights(odd)
    with torch.inference_mode():
        pipe.load_weights(state)
    pipe(torch.randn(4, 4)).sum().backward()
    assert pipe.model.a.weight.grad is not None


def test_what_computes_a_buffer_leaves_no_trace():
    class Redraws(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.log = nn.Linear(4, 4), []
            self.register_buffer("f", torch.ones(4), persistent=False)

        def reset_parameters(self):
            self.lin.reset_parameters()
            self.log.append(1)

        def forward(self, x):
            return self.lin(x) * self.f

    model = Redraws()
    before = model.lin.weight.detach().clone()
    model.f = model.f.to("meta")
    pipe = fxsplit.compile(model, Plan(), example_args=(torch.randn(4, 4),))
    with pytest.raises(errors.WeightsError, match="f"):
        pipe.load_weights(model.state_dict())
    assert torch.equal(model.lin.weight, before) and model.log == []


def test_before_there_are_weights(tmp_path):
    """What can be done is done; what cannot says which call is meant."""
    plan = Plan(stages=2, micro_batches=2)
    model, pipe = Tied(), fxsplit.compile(on_meta(Tied), plan, example_args=(X,))
    same = fxsplit.compile(model, plan, example_args=(X,))
    assert pipe.memory() == same.memory()
    with pytest.raises(errors.ArgumentError, match=r"pipe\.load_weights\(state_dict\)"):
        pipe.load_state_dict(model.state_dict())
    assert all(p.is_meta for p in pipe.parameters())
    pipe.save_code(tmp_path / "code")
    for other in (copy.deepcopy(pipe), fxsplit.load(tmp_path / "code", on_meta(Tied))):
        with pytest.raises(errors.ArgumentError, match="no weights yet"):
            other(X)
        other.load_weights(model.state_dict())
        assert torch.equal(other(X), same(X))


def test_tensors_that_are_assigned_are_weights():
    model, x = Rotary(), torch.randn(3, 4)
    pipe = fxsplit.compile(on_meta(lambda: nn.Linear(4, 4)), Plan(), example_args=(x,))
    pipe.load_state_dict(model.proj.state_dict(), assign=True)
    assert torch.equal(pipe(x), model.proj(x))
