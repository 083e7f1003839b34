"""Where a table is put, and what is not touched; names, questions and pages agree."""

import importlib
import re

import pytest

from benchmarks.__main__ import NAMES, ROOT, write
from benchmarks.machine import Machine
from benchmarks.report import Report, put

MACHINE = Machine("2026-01-02", "2 cores of a kind", "torch 9", 0.25)


def test_a_report_is_date_command_machine_table_and_what_is_said():
    report = Report(
        ("a", "b"), [("x|y", "1.0")], ["One sentence."], ["p is not installed", "p is not installed"]
    )
    shown = report.markdown("python -m benchmarks step", MACHINE)
    head, table, said, left_out = shown.split("\n\n")
    assert head == (
        "`python -m benchmarks step`, 2026-01-02; 2 cores of a kind; torch 9; load average 0.2 at the start."
    )
    assert table.splitlines()[0].split() == ["|", "a", "|", "b", "|"]
    assert said == "One sentence."
    assert left_out == "Left out: p is not installed."


def test_only_what_is_between_the_markers_changes():
    page = "a\n<!-- table: x -->\n\nold\n\n<!-- end -->\nb\n<!-- table: y -->\n<!-- end -->\nc\n"
    once = put(page, "x", r"new \1 figures")
    assert once == page.replace("old", r"new \1 figures")
    assert put(once, "x", "old") == page
    assert put(page, "y", "z") == page.replace("y -->\n", "y -->\n\nz\n\n")
    with pytest.raises(KeyError):
        put(page, "z", "")


def test_pages_without_a_place_are_left_alone(tmp_path):
    (tmp_path / "a.md").write_text("<!-- table: x -->\n<!-- end -->\n")
    (tmp_path / "b.md").write_text("x\n")
    pages = sorted(tmp_path.glob("*.md"))
    assert write(pages, "x", "new") == pages[:1]
    assert pages[1].read_text() == "x\n"


def test_each_part_has_one_place_in_the_pages_below_its_question():
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
    places = re.findall(r"<!-- table: (\w+) -->.*?<!-- end -->", text, re.DOTALL)
    assert sorted(places) == sorted(NAMES)
    for name in NAMES:
        part = importlib.import_module(f"benchmarks.{name}")
        above = text[: text.index(f"<!-- table: {name} -->")]
        assert re.findall(r"^## (.*)$", above, re.MULTILINE)[-1] == part.QUESTION
        assert part.__doc__ and part.measure.__doc__


def test_all_parts_together_take_under_40_minutes():
    assert sum(importlib.import_module(f"benchmarks.{name}").MINUTES for name in NAMES) < 45  # with a GPU
    assert sum(importlib.import_module(f"benchmarks.{name}").MINUTES for name in NAMES if name != "gpu") < 40
