"""Every page does what it says: its Python runs, prints what it shows, and its commands work."""

import os
import re
import sys
import warnings

import pytest

from fxsplit.__main__ import main

from ..helpers import ROOT
from .pages import PAGES, Reader

NAMES = [page.name for page in PAGES]
NOT_RUN = {"benchmarks"}  # its commands take hours; the README's are what .ci/run types


@pytest.fixture
def reader(request, tmp_path, monkeypatch, capsys):
    """Makes a reader in an empty folder, from which modules can be imported meanwhile."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    modules = set(sys.modules)
    update = request.config.getoption("--update-golden")

    def make(page):
        made = Reader(page, tmp_path, capsys, update=update)
        monkeypatch.setitem(
            sys.modules, made.module.__name__, made.module
        )  # what its classes say that they are from
        return made

    yield make
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in NOT_RUN], ids=lambda page: page.name)
def test_a_reader_who_types_all_of_the_page(page, reader):
    missing = {name for block in page.blocks() for name in page.needs(block.section)}
    if missing and page.needs(page.blocks()[0].section):
        pytest.skip(f"needs {', '.join(sorted(missing))}")
    with warnings.catch_warnings():
        if page.has_optional:
            warnings.simplefilter("ignore")  # theirs
        assert reader(page).reads() or not page.blocks()


def test_few_blocks_are_not_run():
    """Each says why in its first line, and is counted here."""
    found = {
        page.name: count
        for page in PAGES
        if (count := sum(block.text.startswith("# not run: ") for block in page.blocks()))
    }
    assert found == {"distributed": 1, "errors": 1, "replicas": 2, "start": 1, "too_big": 1}


def test_languages_of_blocks():
    """Python that is called text is not run."""
    for page in PAGES:
        for block in page.blocks():
            assert block.language in {"python", "output", "sh", "text", "yaml", "toml"}, (page.name, block)
            if block.language == "text":
                assert not re.search(
                    r"^(import|from|class|pipe) |^def \w+\((?!self)", block.text, re.MULTILINE
                ), block


def anchors(path):
    """Of the headings of a page, as GitHub and Sphinx write them."""
    titles = re.findall(r"^#+ (.*)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    origin = next(p for p in (ROOT / "README.md", ROOT / "docs" / f"{page.name}.md") if p.stem == page.name)
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.text):
        path, _, anchor = target.partition("#")
        file = origin.parent / path if path else page.file
        assert file.exists(), target
        if anchor:
            included = next(p.file for p in PAGES if p.name == file.stem)
            assert anchor in anchors(included), target


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = [
        row for tree in re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL) for row in tree.splitlines()
    ]
    assert sorted(row for row in listed if row and not row.startswith(":")) == sorted(
        path.stem for path in (ROOT / "docs").glob("*.md") if path.stem != "index"
    )


def test_the_page_of_the_command_line_names_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.search(r"\{(.*?)\}", capsys.readouterr().out).group(1).split(",")
    page = next(page for page in PAGES if page.name == "command")
    lines = [line for block in page.blocks() if block.language == "sh" for line in block.text.splitlines()]
    assert {line.split()[1] for line in lines} | {"demo"} == set(commands)


def test_the_script_of_the_page_is_the_file():
    """`docs/train.py` is run by tests/distributed, under torchrun, with ranks that are killed."""
    page = next(page for page in PAGES if page.name == "distributed")
    script = (ROOT / "docs" / "train.py").read_text(encoding="utf-8").partition("\n\n")[2]
    assert any(block.text.partition("\n")[2].strip() == script.strip() for block in page.blocks())


def test_those_who_come_from_another_system_find_what_to_type():
    """In each section a block of theirs, which says whose it is, a table, and then blocks of ours."""
    page = next(page for page in PAGES if page.name == "coming_from")
    sections = page.text.split("\n## ")[1:]
    for section in sections:
        blocks = [b for b in page.blocks() if b.section == section.partition("\n")[0]]
        python = [block for block in blocks if block.language == "python"]
        assert python[0].text.startswith("# with ") and "\n| " in section, section[:40]
        assert not all(block.is_only_compiled for block in python), section[:40]
