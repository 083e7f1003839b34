"""A folder that anybody may have written: nothing that it names is imported or run, and all ends in an error of ours."""

import json
import os
import random
import sys
import textwrap

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import errors
from fxsplit.testing import assert_equivalent
from tests.helpers import ROOT, Pair, run_python
from tests.trace.test_capture import Scaled

HOSTILE_NAMES = [
    "os:system", "posix:system", "subprocess:run", "subprocess:Popen", "builtins:eval", "builtins:exec", "builtins:open",
    "builtins:__import__", "builtins:compile", "builtins:setattr", "builtins:type", "builtins:globals", "builtins:breakpoint",
    "torch:load", "torch:save", "torch:hub.load", "torch:ops.load_library", "torch:ops.aten.from_file.default", "torch:from_file",
    "torch:utils.cpp_extension.load", "torch.utils.cpp_extension:load", "torch:jit.load", "torch:_C.import_ir_module",
    "torch:classes.load_library", "torch:multiprocessing.spawn", "torch:Tensor.apply_", "torch:Tensor.map_",
    "torch:Tensor.register_hook", "torch:Tensor.numpy", "torch:Tensor.share_memory_", "torch:UntypedStorage.from_file",
    "torch:distributed.init_process_group", "torch:compile", "torch:vmap", "torch:set_num_threads", "torch:manual_seed",
    "torch:serialization.pickle.loads", "torch:os.system", "torch:sys.exit", "torch:nn.Module.__init__.__globals__",
    "torch.nn.functional:importlib.import_module", "torch.nn.functional:warnings.warn", "torch.nn.parallel:DataParallel",
    "operator:methodcaller", "operator:attrgetter", "operator:call", "functools:partial", "functools:reduce", "math:__loader__",
    "importlib:import_module", "pickle:loads", "shutil:rmtree", "pathlib:Path.unlink", "antigravity:geohash", "this:s",
    "tests.saving.test_trust:wipe", "tests.saving.test_trust:os.system", "fxsplit:load", "fxsplit.loading:load",
    "fxsplit.saving.save:save_code", "", ":", "os", "torch", "builtins", "builtins:", "..:x", "\x00:x", "torch:nn..x", "é:ñ",
]  # fmt: skip
done = []


def wipe(*args):
    """A function of the model's own file that its forward does not call."""
    done.append(args)
    return args[0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.drop, self.offset = nn.Dropout(0.1), torch.tensor([0.5, 1.0, 2.0, 3.0])

    def forward(self, x, *, scale=2.0):
        h = torch.nn.functional.gelu(self.norm(self.a(x))) * scale
        h = Scaled.apply(self.drop(h), 2.0).transpose(0, 1).transpose(0, 1).reshape(x.shape[0], -1)
        with torch.no_grad():
            h = h + torch.tensor(1.5)
        return Pair(self.b(h)[:, :2].float(), h.clamp(max=9.0) + self.offset)


def saved(folder, model=None, *args, **fields):
    model = Net() if model is None else model
    plan = fxsplit.Plan(**{"stages": 2, "micro_batches": 2, "checkpoint": "always", **fields})
    pipe = fxsplit.compile(model, plan, example_args=args or (torch.randn(4, 4),))
    pipe.save_code(folder)
    return model, json.loads((folder / "program.json").read_text())


def write(folder, data):
    (folder / "program.json").write_text(json.dumps(data))


def first_call(data):
    return next(row for row in data["graph"]["nodes"] if row["op"] == "call_function")


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield from places(item, (*path, key))


def changed(data, path, change):
    copy = json.loads(json.dumps(data))
    owner = copy
    for key in path[:-1]:
        owner = owner[key]
    change(owner, path[-1])
    return copy


class Watched:
    """Notes what is imported, opened for writing, run or connected to, while it is on."""

    on, seen = False, []

    def __call__(self, event, args):
        if self.on and (
            event
            in (
                "os.system",
                "subprocess.Popen",
                "os.exec",
                "os.posix_spawn",
                "os.remove",
                "os.rename",
                "os.mkdir",
            )
            or event.startswith(("socket.", "shutil.", "ctypes.", "pty.", "os.fork"))
            or (event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"))
            or (event == "import" and args[0].partition(".")[0] not in ("torch", "fxsplit", "encodings"))
        ):
            self.seen.append((event, str(args)[:200]))


WATCHED = Watched()


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_name_that_is_not_the_models_is_neither_imported_nor_called(name, tmp_path):
    model, data = saved(tmp_path)
    modules = set(sys.modules)
    for place in ("target", "argument", "apply", "named", "class", "pytree", "default", "module"):
        bad = json.loads(json.dumps(data))
        row = first_call(bad)
        source = model
        if place == "target":
            row["target"] = {"function": name}
        elif place == "argument":
            row["args"]["tuple"].append({"function": name})
        elif place == "apply":
            row["target"] = {"apply": name}
        elif place == "named":
            row["args"]["tuple"].append({"named": [name, ["id"]]})
        elif place == "class":
            bad["graph"]["classes"].append(name)
        elif place == "pytree":
            module, _, qualified = name.partition(":")
            spec = {"type": "fxsplit.Record", "context": [module, qualified, []], "children_spec": []}
            bad["graph"]["out_spec"] = json.dumps([1, spec])
        elif place == "default":
            module, _, qualified = name.partition(":")
            context = {
                "default_factory_module": module,
                "default_factory_name": qualified,
                "dict_context": [],
            }
            spec = {"type": "collections.defaultdict", "context": context, "children_spec": []}
            bad["graph"]["spec"] = json.dumps([1, spec])
        else:
            next(r for r in bad["model"]["modules"] if r[3])[3] = {"class": name, "attributes": {}}
            source = model.state_dict()
        write(tmp_path, bad)
        trust = ["tests.trace.test_capture", "tests.helpers:Pair"] if place == "module" else []
        with pytest.raises(errors.SerializeError):
            fxsplit.load(tmp_path, source, trust=trust)
    assert set(sys.modules) == modules and not done


def test_the_error_says_what_to_type_and_that_works(tmp_path):
    model, data = saved(tmp_path)
    with pytest.raises(errors.SerializeError) as caught:
        fxsplit.load(tmp_path, model.state_dict())
    trust = caught.value.remedy.partition("trust=")[2].rstrip(")")
    assert trust == '["tests.helpers:Pair", "tests.trace.test_capture:Scaled"]'
    loaded = fxsplit.load(tmp_path, model.state_dict(), trust=json.loads(trust))
    model.eval(), loaded.eval()
    assert_equivalent(model, loaded, torch.randn(5, 4))
    first_call(data)["target"] = {"function": "tests.saving.test_trust:wipe"}
    write(tmp_path, data)
    with pytest.raises(errors.SerializeError, match=r'trust=\["tests\.saving\.test_trust:wipe"\]'):
        fxsplit.load(tmp_path, model)
    with pytest.raises(errors.SerializeError, match="is not the code"):  # trusted, and looked up
        fxsplit.load(tmp_path, model, trust=["tests.saving.test_trust"])
    for wrong in ("tests", [3], None, [""]):
        with pytest.raises(errors.ArgumentError, match="trust="):
            fxsplit.load(tmp_path, model, trust=wrong)
    for other in (
        "tests.saving.test_tr",
        "tests.saving.test_trust:wip",
        "tests.saving.test_trust:wipe.x",
    ):
        with pytest.raises(errors.SerializeError, match=r"wipe\"\]"):
            fxsplit.load(tmp_path, model, trust=[other])


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row.update(op="call_method", target="numpy"),
        lambda row: row.update(op="call_method", target="__class__"),
        lambda row: row.update(op="call_method", target="apply_"),
        lambda row: row.update(op="call_method", target="add; import os"),
        lambda row: row.update(op="get_attr", target="a.__class__.__init__.__globals__"),
        lambda row: row.update(op="call_module", target="a.__init__"),
        lambda row: row.update(op="get_attr", target="a.forward"),
        lambda row: row.update(
            target={"function": "builtins:getattr"}, args={"tuple": [{"node": "x"}, "__class__"]}
        ),
        lambda row: row.update(
            target={"function": "builtins:getattr"}, args={"tuple": [{"node": "x"}, {"node": "x"}]}
        ),
        lambda row: row["meta"].update(source=["m.py\n    import os; os.system('x') #", 3]),
        lambda row: row["kwargs"]["dict"].append(["a=__import__('os').system('x'), b", 1]),
        lambda row: row.update(name="x): __import__('os')"),
        lambda row: row["args"]["tuple"].append({"torch": "load"}),
        lambda row: row["args"]["tuple"].append({"spec": [[1], "torch.load", "cpu"]}),
        lambda row: row["facts"].update(value={"spec": [[1], "load", "cpu"]}),
    ],
)
def test_calls_that_no_program_has(change, tmp_path):
    model, data = saved(tmp_path)
    change(first_call(data))
    write(tmp_path, data)
    with pytest.raises(errors.FxsplitError):
        fxsplit.load(tmp_path, model)


def test_names_in_code_are_names(tmp_path):
    model, data = saved(tmp_path)
    for word in (
        "a: __import__('os').system('x')",
        "forward",
        "_modules",
        "training",
        "class",
        "checkpoint_1",
        "a b",
    ):
        bad = json.loads(json.dumps(data))
        bad["graph"]["local_names"]["a"] = word
        write(tmp_path, bad)
        with pytest.raises(errors.SerializeError):
            fxsplit.load(tmp_path, model)


def test_what_stands_in_the_place_of_a_file(tmp_path):
    model, _ = saved(tmp_path)
    file = tmp_path / "program.json"
    good = file.read_text()

    def refused(match):
        with pytest.raises(errors.SerializeError, match=match):
            fxsplit.load(tmp_path, model)

    for text, match in (
        (b"\xff\xfe", "holds no pipeline"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" * 500 + b"]" * 500, "nested more than"),
        (b'{"format": NaN}', "NaN is no number"),
        (b'{"format": ' + b"9" * 5000 + b"}", "holds no pipeline"),
        (b"[]", "no object"),
        (b"null", "no object"),
        (b"", "holds no pipeline"),
        (b'{"format": 3}', "format 3"),
        (b"[" + b"0," * 10_000_001 + b"0]", "values"),
    ):
        file.write_bytes(text)
        refused(match)
    file.unlink()
    refused("holds no pipeline")
    os.mkfifo(file)
    refused("no regular file")
    file.unlink()
    file.symlink_to("/dev/zero")
    refused("no regular file")
    file.unlink()
    with open(file, "wb") as sparse:
        sparse.truncate(10 * 2**30)
    refused("larger than")
    file.unlink()
    file.write_text(good)
    stage = tmp_path / "stage_0.py"
    text = stage.read_text()
    for stands in (lambda: os.mkfifo(stage), lambda: stage.symlink_to("/dev/zero"), lambda: stage.mkdir()):
        stage.unlink()
        stands()
        refused("stage_0.py is not the code")
        stage.rmdir() if stage.is_dir() and not stage.is_symlink() else stage.unlink()
        stage.write_text(text)
    stage.write_text(text + "\nraise SystemExit\n")
    refused("stage_0.py is not the code")
    stage.write_bytes(b"\xff")
    refused("stage_0.py is not the code")
    (tmp_path / "__init__.py").write_text("raise SystemExit")  # compared or not, it is not run
    stage.write_text(text)
    assert len(fxsplit.load(tmp_path, model)) == 2
    for folder in (None, 3, "\x00", model):
        with pytest.raises((errors.ArgumentError, errors.SerializeError)):
            fxsplit.load(folder, model)
    for other in (None, 3, {"a": 3}, [model], Net):
        with pytest.raises(errors.ArgumentError, match="neither a module nor a state_dict"):
            fxsplit.load(tmp_path, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path, value",
    [
        (("graph", "example", 0, 0), [10**9, 10**9]),
        (("graph", "example", 0, 0), [-1, 4]),
        (("graph", "nodes"), [{}] * 1_000_000),
        (("graph", "stages"), [[]] * 1_000_000),
        (("graph", "rows", 0), ["cpu"] * 1_000_000),
        (("graph", "devices", 0), "meta"),
        (("graph", "devices", 0), "cuda:99"),
        (("graph", "regions", 0), [[0, 10**18]]),
        (("plan", "micro_batches"), 10**18),
        (("plan", "replicas"), 10**18),
        (("plan", "stages"), 10**18),
        (("plan", "schedule"), {"name": "x", "csv": "999999999F0"}),
        (("plan", "schedule"), {"name": [], "csv": 3}),
        (("plan", "schedule"), {"name": "x", "csv": "0F" + "9" * 5000}),
        (("plan", "checkpoint"), {"budget": []}),
        (("plan", "hardware"), {"flops": "fast"}),
        (("graph", "merges", 0, "weight"), 10**9),
        (("graph", "arguments", 0, 5), 10**9),
        (("graph", "spec"), "[1, " + '{"type": "builtins.list", "context": "null", "children_spec": [' * 5000),
        (("graph", "out_spec"), '[1, {"type": null, "context": "{\\"\\\\u005f_enum__\\": 1, \\"fqn\\": \\"this:s\\", \\"name\\": 1}", "children_spec": []}]'),
    ],
)  # fmt: skip
def test_numbers_and_sizes_that_no_program_has(path, value, tmp_path):
    model, data = saved(tmp_path)
    devices, modules = [p.device for p in model.parameters()], set(sys.modules)
    write(tmp_path, changed(data, path, lambda owner, key: owner.__setitem__(key, value)))
    try:
        fxsplit.load(tmp_path, model)
    except errors.FxsplitError:
        assert [p.device for p in model.parameters()] == devices
    else:
        assert path in ((("plan", "micro_batches")), ("plan", "stages"))
    assert set(sys.modules) == modules


@pytest.mark.slow
def test_every_value_of_a_file_may_be_anything(tmp_path):
    """Types, lengths, names and numbers, at every place of a program: an error of ours, or a pipeline that is proven."""
    model, data = saved(tmp_path)
    random_ = random.Random(0)
    values = [
        None,
        True,
        -1,
        0,
        7,
        2**70,
        1.5,
        "",
        "x",
        "os:system",
        "../../x",
        [],
        {},
        [[]],
        {"function": "os:system"},
    ]
    values += [
        {"named": ["os:system", ["true"]]},
        {"tensor": [[2], "float32", [10**15], "AAAA"]},
        {"node": "x"},
        "\ud800",
    ]
    WATCHED.on, modules, count = False, set(sys.modules), 0
    sys.addaudithook(WATCHED)
    every = [p for p in places(data) if p]
    for path in random_.sample(every, 700):
        value = random_.choice(values)
        kind = random_.choice(("set", "set", "delete", "twice"))

        def change(owner, key, kind=kind, value=value):
            if kind == "set":
                owner[key] = value
            elif kind == "delete":
                del owner[key]
            elif isinstance(owner, list):
                owner.append(owner[key])
            else:
                owner[f"{key}2"] = owner[key]

        write(tmp_path, changed(data, path, change))
        WATCHED.on = True
        try:
            pipe = fxsplit.load(tmp_path, model)
        except errors.FxsplitError:
            continue
        finally:
            WATCHED.on = False
        count += 1
        assert "same-graph: holds" in "\n".join(_rules(pipe)), path
        pipe.report(), pipe.schedule, repr(pipe)
    assert not WATCHED.seen and not done
    assert set(sys.modules) == modules
    assert count < 500  # most places are looked at


def _rules(pipe):
    from fxsplit.proof.structure import RULES, verify_structure

    verify_structure(pipe.model, pipe.traced, pipe.program)
    return [f"{rule.name}: holds" for rule in RULES]


@pytest.mark.slow
def test_a_state_dict_needs_trust_for_the_classes_of_the_user(tmp_path):
    """In a process that has not imported them: nothing is imported before the user has said so."""
    (tmp_path / "hers.py").write_text(
        "import torch\nfrom torch import nn\nprint('imported')\n"
        "class Gate(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.l = nn.Linear(4, 4)\n"
        "    def forward(self, x):\n        return self.l(x) if x.sum() > 0 else x\n"
    )
    script = textwrap.dedent("""
        import sys, torch, fxsplit
        from torch import nn
        folder, action = sys.argv[1:]
        if action == "save":
            import hers
            model = nn.Sequential(nn.Linear(4, 4), hers.Gate())
            fxsplit.compile(model, fxsplit.Plan(stages=2), example_args=(torch.ones(4, 4),)).save_code(folder)
            torch.save(model.state_dict(), folder + "/state.pt")
        else:
            try:
                fxsplit.load(folder, torch.load(folder + "/state.pt"))
            except fxsplit.errors.SerializeError as error:
                assert 'trust=["hers:Gate"]' in str(error), error
            assert "hers" not in sys.modules
            fxsplit.load(folder, torch.load(folder + "/state.pt"), trust=["hers:Gate"])(torch.ones(4, 4))
            assert "hers" in sys.modules
    """)
    for action in ("save", "load"):
        run_python(script, tmp_path / "program", action, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
