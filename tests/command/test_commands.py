"""The command line: what each command prints, how it is piped, stopped and told what is wrong."""

import argparse
import dataclasses
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys

import pytest

import fxsplit
from fxsplit.__main__ import main
from fxsplit.command import options
from fxsplit.command.compiling import _mean_of_squares
from fxsplit.plan.plan import Plan

from ..helpers import ROOT
from . import zoo

ZOO = "tests.command.zoo"
FXSPLIT = [sys.executable, "-W", "ignore", "-m", "fxsplit"]


@pytest.fixture
def run(capsys):
    def run(*words):
        status = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def said(run, *words):
    status, out, err = run(*words)
    assert (status, err) == (0, ""), (status, err)
    return out


# -- options ----------------------------------------------------------------------------------------------------------


def test_every_field_of_a_plan_is_an_option():
    assert list(options.OPTIONS) == [field.name for field in dataclasses.fields(Plan)]


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (["--stages", "3", "--effort", "search"], {"stages": 3, "effort": "search"}),
        (["--balance", "2,1"], {"balance": (2, 1)}),
        (["--cut", "h.1, h.2"], {"cut": ("h.1", "h.2")}),
        (["--device-map", "auto"], {"device_map": "auto"}),
        (["--device-map", '{"": "cpu"}'], {"device_map": {"": "cpu"}}),
        (["--device-map", "auto", "--max-memory", '{"cpu": "1GiB"}'], {"max_memory": {"cpu": 1 << 30}}),
        (["--device-map", "auto", "--no-split-module-classes", "Block,Head"], {"no_split_module_classes": ("Block", "Head")}),
        (["--stages", "2", "--cost", "flops"], {}),
        (["--hardware", "T4"], {"hardware": fxsplit.ACCELERATORS["T4"]}),
        (["--stages", "2", "--hardware", "T4,L4"], {"hardware": tuple(fxsplit.ACCELERATORS[n] for n in ("T4", "L4"))}),
        (["--optimizer-states", "inference"], {"optimizer_states": None}),
        (["--optimizer-states", "0"], {"optimizer_states": 0}),
        (["--devices", "cuda:1"], {"devices": "cuda:1"}),
        (["--stages", "2", "--devices", "cuda:0,cuda:1"], {"devices": ("cuda:0", "cuda:1")}),
        (["--offload", "--devices", "cuda"], {"offload": True}),
        (["--micro-batches", "4", "--schedule", "1f1b"], {"micro_batches": 4, "schedule": "1f1b"}),
        (["--stages", "4", "--schedule", "interleaved_1f1b", "--workers", "2"], {"workers": 2}),
        (["--checkpoint", "always"], {}),
        (["--checkpoint", "h.0,h.1"], {}),
        (["--replicas", "2"], {"replicas": 2}),
        (["--stages", "2", "--replicas", "2,1"], {"replicas": (2, 1)}),
        (["--devices", "cpu:0,cpu:1", "--replicas", "auto"], {"replicas": "auto"}),
        (["--no-gather", "--threads", "2"], {"gather": False, "threads": 2}),
        (["--deferred-batch-norm"], {"deferred_batch_norm": True}),
        (["--sync-batch-norm"], {"sync_batch_norm": True}),
        (["--detect-anomaly", "inf"], {"detect_anomaly": "inf"}),
        (["--batch-dims", '{"mask": null}'], {"batch_dims": {"mask": None}}),
    ],
)  # fmt: skip
def test_options_are_fields(words, fields):
    plan = _plan_of(words)
    assert {name: getattr(plan, name) for name in fields} == fields


def _plan_of(words):
    parser = argparse.ArgumentParser()
    options.add_to(parser)
    return options.plan_of(parser.parse_args(words))


def test_options_change_a_saved_plan(tmp_path):
    Plan(stages=2, micro_batches=4).save(tmp_path / "plan.json")
    assert _plan_of(["--plan", str(tmp_path / "plan.json"), "--schedule", "1f1b"]) == Plan(
        stages=2, micro_batches=4, schedule="1f1b"
    )


def test_a_schedule_of_ones_own(tmp_path):
    file = tmp_path / "own.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
    plan = _plan_of(["--stages", "2", "--micro-batches", "2", "--schedule", str(file)])
    assert plan.schedule == fxsplit.Schedule.from_csv(file.read_text())


# -- what each prints -------------------------------------------------------------------------------------------------


def test_show(run, tmp_path):
    out = said(run, "show", f"{ZOO}:gpt", "--stages", "2", "--graph", tmp_path / "graph.dot")
    assert "stage    device" in out and "# stage 1 of 2" in out and "def forward(self" in out
    graph = (tmp_path / "graph.dot").read_text()
    assert "cluster_1" in graph and re.search(r'label="\w+, [\d.]+ KiB", penwidth=2', graph)
    one = said(run, "show", f"{ZOO}:gpt", "--stages", "2", "--stage", "1")
    assert one.startswith("# stage 1 of 2") and one.rstrip() in out
    facts = json.loads(said(run, "show", f"{ZOO}:gpt", "--stages", "2", "--json"))
    assert [stage["index"] for stage in facts["stages"]] == [0, 1] and facts["plan"]["stages"] == 2
    assert facts["stages"][1]["code"].rstrip() == one.rstrip()


@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz draws it")
def test_show_draws(run, tmp_path):
    said(run, "show", f"{ZOO}:gpt", "--stages", "3", "--graph", tmp_path / "graph.svg")
    assert (tmp_path / "graph.svg").read_text().count('class="cluster"') == 3


def test_a_graph_that_cannot_be_drawn(run, tmp_path, monkeypatch):
    assert run("show", f"{ZOO}:small", "--graph", "graph.png")[0] == 2
    monkeypatch.setenv("PATH", "")
    status, _, err = run("show", f"{ZOO}:small", "--graph", tmp_path / "graph.svg")
    assert status == 2 and "graphviz" in err and "graph.dot" in err


def test_a_model_from_a_file_with_inputs_by_shape(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "beside.py").write_text("width = 8\n")
    (folder / "net.py").write_text(
        "from dataclasses import dataclass\nfrom torch import nn\nfrom beside import width\n"
        "@dataclass\nclass Config:\n    layers: int = 3\n"
        "def factory():\n    return nn.Sequential(*(nn.Linear(width, width) for _ in range(Config().layers)))\n"
        "def embed():\n    return nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8))\n"
    )
    where = f"{folder}/net.py"
    assert "stage 1 of 2" in said(run, "show", f"{where}:factory", "--input", "float32[4,8]", "--stages", "2")
    assert "stage 1 of 2" in said(
        run, "show", f"{where}:factory", "--input", "input=float32[4, 8]", "--stages", "2"
    )
    assert "bit for bit" in said(run, "check", f"{where}:embed", "--input", "int64[4,8]<50", "--stages", "2")
    assert "structure" not in said(run, "plan", f"{where}:factory", "--input", "float32[4,8]", "--meta")
    sys.modules.pop("net"), sys.modules.pop("beside")


def test_keyword_arguments(run):
    assert "bit for bit" in said(run, "check", f"{ZOO}:by_name", "--stages", "2")


def test_check(run):
    out = said(run, "check", f"{ZOO}:gpt", "--stages", "2", "--micro-batches", "2", "--schedule", "1f1b")
    assert "same-graph: holds" in out
    assert "compared on 2 micro-batches, bit for bit: 1 output" in out.splitlines()[-1]
    shown = json.loads(said(run, "check", f"{ZOO}:small", "--stages", "2", "--json", "--rtol", "1e-5"))
    assert shown["equivalent"] and "within atol=0, rtol=1e-05" in shown["shown"][-1]


def test_check_says_what_it_did_not_compare(run):
    assert "numbers: not compared" in said(run, "check", f"{ZOO}:small", "--stages", "2", "--meta")
    batch_norm = ["--stages", "2", "--micro-batches", "2", "--deferred-batch-norm"]
    assert "not compared: running statistics" in said(run, "check", f"{ZOO}:normed", *batch_norm)


def test_check_compares_masks(run):
    assert "bit for bit" in said(run, "check", f"{ZOO}:draws", "--stages", "2", "--micro-batches", "2")


def test_check_refuses(run):
    for words, what in (
        ([f"{ZOO}:cannot_be_traced"], "zoo.py"),
        ([f"{ZOO}:small", "--stages", "9"], "units that can be cut apart"),
        ([f"{ZOO}:small", "--cut", "nowhere"], "nowhere"),
    ):
        status, out, err = run("check", *words)
        assert (status, out) == (1, "") and what in err
    status, out, err = run("check", f"{ZOO}:cannot_be_traced", "--json")
    assert status == 1 and json.loads(out)["error"] == "TraceError" and "TraceError" in err


def test_check_finds_what_differs(run, monkeypatch):
    """A model that counts its calls in Python is another one every time."""
    monkeypatch.setattr("fxsplit.testing.equivalence.agree", lambda *args, **kwargs: False)
    status, _, err = run("check", f"{ZOO}:small", "--stages", "2")
    assert status == 1 and "differs" in err


def test_simulate(run):
    words = ["simulate", f"{ZOO}:gpt", "--stages", "2,3", "--micro-batches", "2,4", "--hardware", "T4"]
    words += ["--schedules", "gpipe,1f1b", "--checkpoint", "never,always"]
    out = said(run, *words)
    assert len(out.splitlines()) == 2 + 2 * 2 * 2 * 2 and out.count("\n*") == 1
    found = json.loads(said(run, *words, "--json", "--top", "3"))
    assert len(found["rows"]) == 3 and found["best"] == found["rows"][0]
    ranks = json.loads(said(run, *words, "--ranks", "4", "--replicas", "1,2", "--json"))
    assert {row["workers"] * row["replicas"] for row in ranks["rows"]} == {4}
    tight = json.loads(said(run, *words, "--memory", "1KB", "--json"))
    assert tight["best"] is None and not any(row["fits"] for row in tight["rows"])


def test_profile(run, tmp_path):
    words = ["profile", f"{ZOO}:small", "--stages", "2", "--micro-batches", "2", "--rounds", "2"]
    assert "step: predicted" in said(run, *words)
    own = ["--loss", f"{ZOO}:loss", "--target", "int64[8]<4", "--schedule", "1f1b"]
    found = json.loads(said(run, *words, *own, "--json", "--timeline", tmp_path / "step.html"))
    assert set(found["instructions"]) == {"F0", "F1", "B0", "B1"} and found["measured"] > 0
    assert "<html" in (tmp_path / "step.html").read_text()
    torchs = ["--loss", "torch.nn.functional:mse_loss", "--target", "float32[8,4]", "--schedule", "1f1b"]
    assert "step: predicted" in said(run, *words, *torchs)


def test_the_loss_without_one_is_of_all_outputs():
    import torch

    x = torch.ones(2, 3)
    assert _mean_of_squares({"a": x, "b": [2 * x, torch.arange(3)]}) == 5.0


def test_explain(run, tmp_path):
    Plan(stages=2, micro_batches=2, schedule="1f1b").save(tmp_path / "plan.json")
    out = said(run, "explain", tmp_path / "plan.json")
    assert "micro_batches = 2: how many" in out and "stage 1.0 │ ·  F0 B0 F1 B1" in out
    assert json.loads(said(run, "explain", tmp_path / "plan.json", "--json"))["plan"]["stages"] == 2


@pytest.mark.parametrize("name", ["GuardError", "fxsplit.errors.GuardError"])
def test_explain_an_error(run, name):
    out = said(run, "explain", name)
    assert out.startswith("GuardError\n") and "What to do" in out
    assert json.loads(said(run, "explain", name, "--json"))["error"] == "GuardError"


def test_version(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0 and capsys.readouterr().out.startswith(
        f"fxsplit {fxsplit.__version__}, torch "
    )


# -- the best plan ----------------------------------------------------------------------------------------------------


def best(run, tmp_path, *words):
    file = tmp_path / "best.json"
    out = said(
        run, "plan", f"{ZOO}:gpt", "--stages", "2", "--hardware", "T4", "--best", "--save", file, *words
    )
    return Plan.load(file), out


def test_the_best_plan(run, tmp_path):
    plan, out = best(run, tmp_path)
    assert out.startswith("    schedule") and "predicted bubble" in out
    first = next(line.split() for line in out.splitlines() if line.startswith("*"))
    assert first[1:5] == [plan.schedule, "2", "2", str(plan.micro_batches)]
    assert plan.cost.name == "roofline"


def test_the_best_plan_keeps_what_is_given(run, tmp_path):
    plan, out = best(run, tmp_path, "--schedule", "1f1b", "--micro-batches", "4", "--overhead", "0")
    assert (plan.schedule, plan.micro_batches) == ("1f1b", 4)
    assert not re.search("gpipe|zb_h1", out.split("stage ")[0])
    assert best(run, tmp_path, "--checkpoint", "always")[0].checkpoint == Plan(checkpoint="always").checkpoint


def needed(plan):
    model, args = zoo.gpt()
    forecast = fxsplit.preview(model, plan, example_args=args).assignment.forecast
    return max(stage.memory for stage in forecast.stages)


def test_the_best_plan_fits(run, tmp_path):
    wide, _ = best(run, tmp_path, "--overhead", "1")  # as few micro-batches as can be
    least = 0.9 * needed(wide)
    tight, _ = best(run, tmp_path, "--overhead", "1", "--memory", str(int(least)))
    assert wide.micro_batches == 1 and needed(tight) <= least
    status, _, err = run(
        "plan", f"{ZOO}:gpt", "--best", "--stages", "2", "--hardware", "T4", "--memory", "1KB"
    )
    assert status == 2 and "the smallest needs" in err


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["check", f"{ZOO}:nothing"], ["names no function", "package.module:factory"]),
        (["show", "nowhere.py:factory"], ["there is no file nowhere.py"]),
        (["show", "no.such.module:factory"], ["No module named"]),
        (["show", f"{ZOO}:FXSPLIT"], ["names no function"]),
        (["show", f"{ZOO}:fails"], ["RuntimeError: no such weights", "zoo.py:", "--debug"]),
        (["show", f"{ZOO}:needs"], ["missing a required argument"]),
        (["show", f"{ZOO}:says_nothing"], ["did not return a model"]),
        (["show", f"{ZOO}:mlp"], ["gives no example arguments", "--input x=float32[8,3,224,224]"]),
        (["show", f"{ZOO}:mlp", "--input", "float33[8,8]"], ["--input 'float33[8,8]'", "--input x=float32"]),
        (["show", f"{ZOO}:mlp", "--input", "y=float32[8,8]"], ["known: 'input'"]),
        (["show", f"{ZOO}:small", "--balance", "1,x"], ["--balance '1,x'"]),
        (["show", f"{ZOO}:small", "--device-map", "{oops"], ["--device-map"]),
        (["show", f"{ZOO}:small", "--schedule", "nope"], ["nope", "gpipe"]),
        (["show", f"{ZOO}:small", "--stage", "7"], ["pipe[7]"]),
        (["show", f"{ZOO}:small", "--plan", "none.json"], ["No such file"]),
        (["explain", "none.json"], ["No such file"]),
        (["explain", "GardError"], ["no error 'GardError'", "did you mean 'GuardError'"]),
        (["simulate", f"{ZOO}:small", "--stages", "9"], ["units that can be cut apart"]),
        (["simulate", f"{ZOO}:small", "--stages", ","], ["--stages"]),
        (["simulate", f"{ZOO}:small", "--memory", "lots"], ["lots"]),
        (["profile", f"{ZOO}:small", "--rounds", "1"], ["rounds"]),
        (["profile", f"{ZOO}:small", "--loss", f"{ZOO}:nothing"], ["names no function"]),
        (["profile", f"{ZOO}:small", "--target", "int64"], ["--target"]),
    ],
)
def test_mistakes(run, words, parts):
    status, out, err = run(*words)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) <= 4 and "Traceback" not in err
    for part in parts:
        assert part in err


def test_debug_shows_the_traceback(run):
    status, _, err = run("--debug", "show", f"{ZOO}:fails")
    assert status == 2 and "Traceback" in err and 'raise RuntimeError("no such weights")' in err


# -- as a process -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pipe_that_is_closed():
    command = f"{' '.join(FXSPLIT)} show {ZOO}:gpt --stages 2 | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "141" and done.stderr == ""


@pytest.mark.slow
def test_what_is_piped_is_only_the_result(tmp_path):
    with open(tmp_path / "out.json", "w") as file:
        done = subprocess.run(
            [*FXSPLIT, "plan", f"{ZOO}:gpt", "--json"],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.PIPE,
            timeout=120,
        )
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(json.loads((tmp_path / "out.json").read_text())["stages"]) == 2


@pytest.mark.slow
def test_ctrl_c():
    child = subprocess.Popen(
        [*FXSPLIT, "check", f"{ZOO}:slow"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr.readline() == "in the factory\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (130, "", "interrupted\n")


@pytest.mark.slow
def test_a_terminal_sees_what_is_going_on():
    ours, theirs = pty.openpty()
    words = ["profile", f"{ZOO}:small", "--rounds", "1500"]
    child = subprocess.Popen([*FXSPLIT, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            more = os.read(ours, 1024)
        except OSError:
            break
        if not more:
            break
        shown += more
    os.close(ours)
    out, _ = child.communicate(timeout=60)
    assert child.returncode == 0 and b"step: predicted" in out
    assert re.search(rb"timing 3000 steps: \d+ s", shown) and shown.endswith(b"\r\x1b[K")
