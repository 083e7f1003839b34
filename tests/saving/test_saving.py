"""`save_code` and `load`: plain files that are the program, in another process, with the model or a state_dict."""

import importlib
import json
import os
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import errors
from fxsplit.testing import assert_equivalent
from tests.helpers import Pair, compiled, run_python
from tests.models import MODELS, build
from tests.trace.test_capture import Blocks, OtherOutputs, ReadsASize, Scaled


@dataclass
class Answer:
    value: torch.Tensor
    note: str = "none"


class Keeper(nn.Module):
    """Stays whole: it branches on values. Its attributes are plain."""

    def __init__(self, width):
        super().__init__()
        self.lin, self.act, self.limits = nn.Linear(width, width), nn.functional.gelu, (0.0, [1, {"a": None}])

    def forward(self, x):
        return self.act(self.lin(x)) if x.sum() > self.limits[0] else self.lin(x)


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm, self.drop = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.BatchNorm1d(4),
            nn.Dropout(0.5),
        )
        self.keep, self.tied = Keeper(4), nn.Linear(4, 4)
        self.tied.weight = self.a.weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.offset = torch.tensor([0.5])
        self.b.weight.requires_grad_(False)

    def forward(self, x, *, scale=2.0, mask=None):
        h = self.norm(self.a(x)) * scale + torch.tensor([1.0, -2.0, 0.5, float("inf")]).clamp(max=3.0)
        with torch.no_grad():
            h = h + self.b(x)[..., None, :].squeeze(-2)
        h = self.keep(self.drop(Scaled.apply(h, 2.0)))
        if mask is not None:
            h = h.masked_fill(mask[:, None], -1e9)
        return Answer(self.tied(h) + self.table + self.offset)


def everything():
    model = Everything()
    args, kwargs = (torch.randn(4, 4),), {"mask": torch.tensor([True, False, False, True])}
    plan = fxsplit.Plan(stages=4, checkpoint="always")
    pipe = fxsplit.compile(model, plan, example_args=args, example_kwargs=kwargs)
    return model, pipe


@pytest.mark.slow
@pytest.mark.parametrize("by", ["model", "state_dict"])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_loaded_computes_the_same(name, by, tmp_path):
    model, batch = build(name)
    pipe = compiled(model, batch(4), stages=3, micro_batches=2, checkpoint="except_last")
    pipe.save_code(tmp_path)
    if by == "model":
        loaded = fxsplit.load(tmp_path, model)
    else:  # experts are the user's own modules
        trust = ["tests.models:Experts"] if name == "experts" else []
        loaded = fxsplit.load(tmp_path, model.state_dict(), trust=trust)
    assert [s.code for s in loaded] == [s.code for s in pipe]
    for mode in (True, False):
        model.train(mode), loaded.train(mode)
        assert_equivalent(model, loaded, *batch(5))
    assert loaded.report() == pipe.report()
    assert "same-graph: holds" in loaded.verify()
    assert list(loaded.state_dict()) == list(pipe.state_dict())


@pytest.mark.parametrize("by", ["model", "state_dict"])
def test_a_bit_of_everything(by, tmp_path):
    model, pipe = everything()
    pipe.save_code(tmp_path)
    if by == "model":
        loaded = fxsplit.load(tmp_path, model)
    else:
        loaded = fxsplit.load(
            tmp_path,
            model.state_dict(),
            trust=["tests.saving.test_saving", "tests.trace.test_capture:Scaled"],
        )
    for mode in (True, False):
        model.train(mode), loaded.train(mode)
        for rows in (4, 7):
            x, mask = torch.randn(rows, 4), torch.arange(rows) % 2 == 0
            assert_equivalent(model, loaded, x, mask=mask)
    assert type(loaded(x, mask=mask)) is Answer
    twin = loaded.unsplit()
    assert twin.a.weight is twin.tied.weight and not twin.b.weight.requires_grad
    assert "table" not in twin.state_dict() and torch.equal(twin.table, model.table)
    with pytest.raises(errors.ArgumentError, match="scale"):
        loaded(x, scale=3.0, mask=mask)


@pytest.mark.slow
def test_other_front_ends_and_modes(tmp_path):
    cases = [
        (OtherOutputs(), (torch.randn(4, 4),)),
        (ReadsASize(), (torch.randn(6, 4), torch.tensor([0, 1, 1, 2, 0, 3]))),
        (Blocks(), (torch.randn(4, 4),)),
    ]
    for i, (model, args) in enumerate(cases):
        compiled(model, args, stages=2).save_code(tmp_path / str(i))
        for source in (model, model.state_dict()):
            loaded = fxsplit.load(tmp_path / str(i), source)
            for mode in (False, True):
                model.train(mode), loaded.train(mode)
                assert_equivalent(model, loaded, *args)


@pytest.mark.slow
def test_another_process_computes_the_same_bits(tmp_path):
    model, batch = build("gpt")
    pipe = compiled(model, batch(4), stages=3, checkpoint="always")
    pipe.save_code(tmp_path / "program")
    torch.save(pipe.state_dict(), tmp_path / "state.pt")
    args = batch(5)
    torch.save(args, tmp_path / "args.pt")
    script = (
        "import torch, fxsplit\ntorch.set_num_threads(1)\n"
        f"folder = {str(tmp_path)!r}\n"
        "pipe = fxsplit.load(folder + '/program', torch.load(folder + '/state.pt'))\n"
        "out = pipe(*torch.load(folder + '/args.pt'))\n"
        "out.sum().backward()\n"
        "torch.save([out.detach(), *(p.grad for p in pipe.parameters())], folder + '/result.pt')\n"
        "assert not any(name.startswith('tests') or name.endswith('demo.gpt') for name in __import__('sys').modules)\n"
    )
    run_python(script)
    found = torch.load(tmp_path / "result.pt")
    output = pipe(*args)
    output.sum().backward()
    expected = [output.detach(), *(p.grad for p in pipe.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_folder_holds_plain_text_only_and_no_path(tmp_path):
    _, pipe = everything()
    pipe.save_code(tmp_path)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["__init__.py", "program.json", "stage_0.py", "stage_1.py", "stage_2.py", "stage_3.py"]
    for file in tmp_path.iterdir():
        text = file.read_text(encoding="utf-8")
        for path in (os.path.dirname(__file__), os.path.expanduser("~"), sys.prefix, "site-packages"):
            assert path not in text
    json.loads((tmp_path / "program.json").read_text())


def test_the_package_can_be_imported_and_a_stage_used_alone(tmp_path, monkeypatch):
    model, pipe = everything()
    pipe.save_code(tmp_path / "saved_program")
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module("saved_program")
    assert [s.__name__ for s in package.STAGES] == ["Stage0", "Stage1", "Stage2", "Stage3"]
    model.eval()
    values = {"x": torch.randn(5, 4), "mask": torch.arange(5) % 2 == 0}
    for made, stage in zip(package.STAGES, pipe, strict=True):
        given = made(model)(*(values[name] for name in stage.inputs))
        values.update(zip(stage.outputs, given if isinstance(given, tuple) else (given,), strict=True))
    expected = model(values["x"], mask=values["mask"])
    assert torch.equal(values[pipe.program.outputs[0]], expected.value)


class Constants(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.l = nn.Linear(4, 4), nn.LSTM(4, 4, 2, batch_first=True, dropout=0.1)
        self.tables = [torch.tensor([1.0, float("inf"), -float("inf"), 4.0]), torch.zeros(0, 4)]

    def forward(self, x):
        y = torch.minimum(self.a(x), self.tables[0]) + torch.matmul(self.tables[1], x.T).sum()
        return self.l(y[:, None].clamp(-9, 9))[0]


def test_constants_and_recurrent_modules(tmp_path, monkeypatch):
    model = Constants().eval()
    compiled(model, (torch.randn(4, 4),)).save_code(tmp_path / "saved_constants")
    for source in (model, model.state_dict()):
        loaded = fxsplit.load(tmp_path / "saved_constants", source)
        assert_equivalent(model, loaded.eval(), torch.randn(5, 4))
    monkeypatch.syspath_prepend(tmp_path)
    stage = importlib.import_module("saved_constants").Stage0(model)
    x = torch.randn(5, 4)
    assert torch.equal(stage(x), model(x))


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, pair):
        return Pair(self.a(pair.left), [self.b(pair.right), None])


def test_namedtuples(tmp_path):
    model, pair = Pairs(), Pair(torch.randn(4, 4), torch.randn(4, 4))
    compiled(model, (pair,), stages=2).save_code(tmp_path)
    for source, trust in ((model, []), (model.state_dict(), ["tests.helpers:Pair"])):
        loaded = fxsplit.load(tmp_path, source, trust=trust)
        assert_equivalent(model, loaded, pair)
        assert type(loaded(pair)) is Pair


def test_a_module_that_gets_a_parameter_from_another_device(tmp_path):
    model, batch = build("tied_head")
    plan = fxsplit.Plan(device_map={"": "cpu:0", "head": "cpu:1"}, checkpoint="always")
    fxsplit.compile(model, plan, example_args=batch(4)).save_code(tmp_path)
    for source in (model, model.state_dict()):
        loaded = fxsplit.load(tmp_path, source)
        assert any("call_with(self.head" in stage.code for stage in loaded)
        assert_equivalent(model, loaded, *batch(5), rtol=1e-5, atol=1e-6)


def test_a_file_in_the_way(tmp_path):
    model, batch = build("two_tower")
    (tmp_path / "taken").write_text("")
    with pytest.raises(errors.SerializeError, match="cannot be a folder"):
        compiled(model, batch(4)).save_code(tmp_path / "taken")
    with pytest.raises(errors.ArgumentError, match="takes a pipeline"):
        fxsplit.verify(model)
    with pytest.raises(errors.PlanError, match=r"fxsplit\.Budget\('2GiB'\)"):
        fxsplit.Plan(checkpoint="2GiB")


class TwoScales(nn.Module):
    """Two functions of one name, from two modules."""

    def __init__(self, inner):
        super().__init__()
        self.a, self.inner = nn.Linear(4, 4), inner

    def forward(self, x):
        return self.inner(Scaled.apply(self.a(x), 2.0))


def test_two_functions_of_one_name_stay_two(tmp_path, monkeypatch):
    (tmp_path / "other_scales.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Scaled(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n        return x * 3\n"
        "    @staticmethod\n    def backward(ctx, grad):\n        return grad * 3\n"
        "class Inner(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.l = nn.Linear(4, 4)\n"
        "    def forward(self, x):\n        return Scaled.apply(self.l(x))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = TwoScales(importlib.import_module("other_scales").Inner())
    compiled(model, (torch.randn(4, 4),), checkpoint=["inner"]).save_code(tmp_path / "saved_scales")
    assert_equivalent(model, fxsplit.load(tmp_path / "saved_scales", model), torch.randn(3, 4))
    stage = importlib.import_module("saved_scales").Stage0(model)
    x = torch.randn(5, 4)
    assert torch.equal(stage(x), model(x))


def test_what_does_not_fit_is_refused(tmp_path):
    model, pipe = everything()
    pipe.save_code(tmp_path)
    with pytest.raises(errors.SerializeError, match="does not fit"):
        fxsplit.load(tmp_path, build("gpt")[0])
    with pytest.raises(errors.SerializeError, match=r"missing \['a\.bias'\], unknown \['other'\]"):
        state = {k: v for k, v in model.state_dict().items() if k != "a.bias"}
        fxsplit.load(tmp_path, {**state, "other": torch.zeros(1)}, trust=["tests"])
    file = tmp_path / "stage_1.py"
    file.write_text(file.read_text().replace("self.", "self. "))
    with pytest.raises(errors.SerializeError, match=r"stage_1\.py is not the code"):
        fxsplit.load(tmp_path, model)
    with pytest.raises(errors.SerializeError, match="holds no pipeline"):
        fxsplit.load(tmp_path / "nowhere", model)


def test_what_no_file_can_name_is_refused_before_anything_is_written(tmp_path):
    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return Local.apply(self.a(x))

    with pytest.raises(errors.SerializeError, match="imported"):
        compiled(Calls(), (torch.randn(4, 4),)).save_code(tmp_path / "new")
    assert not (tmp_path / "new").exists()

    class Unknown(Keeper):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Unknown(4))
    pipe = compiled(model, (torch.randn(4, 4),), stages=2)
    pipe.save_code(tmp_path)
    assert_equivalent(model, fxsplit.load(tmp_path, model), torch.randn(3, 4))
    with pytest.raises(
        errors.SerializeError, match=r"'1' cannot be made from a state_dict: .*cannot be imported"
    ):
        fxsplit.load(tmp_path, model.state_dict())


class Shapes(nn.Module):
    """Constants without dimensions, with strides, and sparse ones."""

    def __init__(self):
        super().__init__()
        self.a, table = nn.Linear(4, 4), torch.arange(12.0).reshape(3, 4)
        self.kept = [
            torch.tensor(1.5), table.T, torch.ones(1).expand(4, 3), table[:, ::2], torch.tensor(True),
            torch.eye(4).to_sparse(), torch.tensor(2 + 1j),
        ]  # fmt: skip

    def forward(self, x):
        scalar, turned, wide, gaps, flag, coo, number = self.kept
        h = (self.a(x) * scalar) @ turned.contiguous() @ torch.ones(3, 4) + wide.sum(1) + gaps.sum()
        h = torch.where(flag, h, -h) + torch.sparse.mm(coo, h.T).T
        return h + number.real + turned.as_strided((4,), (1,))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_constants_of_all_kinds_keep_values_and_strides(tmp_path):
    from fxsplit.saving.trust import Names
    from fxsplit.saving.values import Decoder, encode

    decode, model = Decoder(Names(None)), Shapes()
    for tensor in (
        *model.kept,
        torch.eye(4).to_sparse_bsr((2, 2)),
        torch.eye(4).to_sparse_csr(),
        torch.eye(4).to_sparse_csc(),
        torch.zeros(0, 3),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ):
        found = decode(json.loads(json.dumps(encode(tensor))))
        assert found.layout is tensor.layout and found.dtype is tensor.dtype
        assert (
            torch.equal(found.to_dense(), tensor.to_dense())
            if found.layout is not torch.strided
            else torch.equal(found, tensor)
        )
        if found.layout is torch.strided:
            assert found.stride() == tensor.stride()
    pipe = compiled(model.eval(), (torch.randn(4, 4),), stages=2)
    pipe.save_code(tmp_path / "saved_shapes")
    assert_equivalent(model, fxsplit.load(tmp_path / "saved_shapes", model), torch.randn(3, 4))
    sys.path.insert(0, str(tmp_path))
    try:
        package, value = importlib.import_module("saved_shapes"), torch.randn(3, 4)
        values = {"x": value}
        for made, stage in zip(package.STAGES, pipe, strict=True):
            given = made(model)(*(values[name] for name in stage.inputs))
            values.update(zip(stage.outputs, given if isinstance(given, tuple) else (given,), strict=True))
        assert torch.equal(values[pipe.program.outputs[0]], model(value))
    finally:
        sys.path.remove(str(tmp_path))


def test_one_name_of_a_tied_parameter_is_enough(tmp_path):
    model, batch = build("tied_head")
    compiled(model, batch(4), stages=2).save_code(tmp_path)
    state = model.state_dict()
    tied = [n for n, p in model.named_parameters(remove_duplicate=False) if p is model.head.weight]
    assert len(tied) == 2
    for name in tied:
        loaded = fxsplit.load(tmp_path, {k: v.clone() for k, v in state.items() if k != name})
        assert_equivalent(model, loaded, *batch(5))
    with pytest.raises(errors.SerializeError, match="with two values"):
        fxsplit.load(tmp_path, {**state, tied[1]: state[tied[1]] + 1})
    with pytest.raises(errors.SerializeError, match="of shape"):
        fxsplit.load(tmp_path, {k: v[..., :1] for k, v in state.items()})


def test_files_of_the_users_are_neither_deleted_nor_overwritten(tmp_path):
    model, batch = build("gpt")
    (tmp_path / "stage_9.py").write_text("mine = 1\n")
    (tmp_path / "stage_notes.py").write_text("mine = 2\n")
    compiled(model, batch(4), stages=3).save_code(tmp_path)
    compiled(model, batch(4), stages=2).save_code(tmp_path)
    assert not (tmp_path / "stage_2.py").exists()  # ours
    assert (tmp_path / "stage_9.py").read_text() == "mine = 1\n" and (tmp_path / "stage_notes.py").exists()
    (tmp_path / "stage_2.py").write_text("mine = 3\n")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(errors.SerializeError, match=r"stage_2\.py is there already"):
        compiled(model, batch(4), stages=3).save_code(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    other = tmp_path / "other"
    other.mkdir()
    (other / "__init__.py").write_text("import this_is_mine\n")
    with pytest.raises(errors.SerializeError, match="is there already"):
        compiled(model, batch(4), stages=2).save_code(other)
    assert [p.name for p in other.iterdir()] == ["__init__.py"]


def test_another_format_is_refused_and_the_proof_is_made_at_load(tmp_path, monkeypatch):
    import fxsplit.loading as loading

    model, batch = build("gpt")
    compiled(model, batch(4), stages=2).save_code(tmp_path)
    proven = []
    prove = loading.verify_structure
    monkeypatch.setattr(loading, "verify_structure", lambda *a: proven.append(a) or prove(*a))
    fxsplit.load(tmp_path, model)
    assert len(proven) == 1
    file = tmp_path / "program.json"
    data = json.loads(file.read_text())
    for number in (data["format"] + 1, data["format"] - 1, str(data["format"]), None):
        file.write_text(json.dumps({**data, "format": number}))
        with pytest.raises(errors.SerializeError, match="format"):
            fxsplit.load(tmp_path, model)


def test_a_link_to_nowhere_is_not_written_through(tmp_path):
    pipe = fxsplit.compile(nn.Linear(2, 2), example_args=(torch.randn(2, 2),))
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "saved"
    folder.mkdir()
    (folder / "program.json").symlink_to(elsewhere)
    with pytest.raises(fxsplit.errors.SerializeError, match="is there already"):
        pipe.save_code(folder)
    assert not elsewhere.exists()
