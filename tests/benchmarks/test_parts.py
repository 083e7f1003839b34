"""Every part of the benchmarks runs at a size of seconds and gives a table; no figure is looked at.

A part whose libraries are not installed is skipped, as it is left out there.
"""

import importlib
import shutil
import subprocess
import sys
import warnings

import pytest

from benchmarks.__main__ import NAMES, ROOT
from benchmarks.part import Options
from benchmarks.report import LeftOutError

OPTIONS = {"gpu": Options(quick=True, devices=("cpu",))}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_a_part_gives_a_table(name):
    if name in ("cut", "towers", "loading", "planning"):
        pytest.importorskip("numpy" if name != "loading" else "safetensors")
    part = importlib.import_module(f"benchmarks.{name}")
    try:
        with warnings.catch_warnings():
            report = part.measure(OPTIONS.get(name, Options(quick=True)))
    except LeftOutError as reason:
        pytest.skip(str(reason))
    assert report.rows
    assert {len(row) for row in report.rows} == {len(report.header)}


@pytest.mark.slow
def test_one_that_fails_does_not_end_the_rest_and_writing_changes_only_a_place(tmp_path):
    for page in (ROOT / "docs").glob("*.md"):
        shutil.copy(page, tmp_path)
    before = {page.name: page.read_text() for page in tmp_path.glob("*.md")}
    words = [
        sys.executable,
        "-m",
        "benchmarks",
        "capture",
        "bubbles",
        "--quick",
        "--registry",
        "no.such:THING",
    ]
    words += ["--write", "--pages", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "| ranks" in done.stdout and "failed: capture" in done.stdout
    after = {page.name: page.read_text() for page in tmp_path.glob("*.md")}
    assert {name for name in before if before[name] != after[name]} == {"distributed.md"}
    begin, end = "<!-- table: bubbles -->", "<!-- end -->"
    for text in (before, after):
        head, _, rest = text["distributed.md"].partition(begin)
        text["distributed.md"] = head, rest.partition(end)[2]
    assert before == after


def test_without_a_gpu_its_part_is_left_out(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(LeftOutError, match="no CUDA device"):
        importlib.import_module("benchmarks.gpu").measure(Options(quick=True))


def test_a_part_that_is_not_there_is_named():
    words = [sys.executable, "-m", "benchmarks", "stpe"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no stpe: the parts are" in done.stderr
