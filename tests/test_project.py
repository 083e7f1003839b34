"""The project itself: import layers, public names, the command line, the README."""

import ast
import re
import subprocess
import sys
import tomllib

import pytest

import fxsplit
from fxsplit.__main__ import main
from tests.helpers import ROOT

SOURCES = sorted((ROOT / "fxsplit").rglob("*.py"))


def layers():
    """name of a part of the package → its layer, 0 at the top, from the contract that import-linter checks too."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    return {part: i for i, row in enumerate(contract["layers"]) for part in re.split(r"\s*\|\s*", row)}


def imported(path):
    """The parts of fxsplit that a file imports."""
    package = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level], *(node.module or "").split(".")]
            yield from [base[1]] if len(base) > 1 and base[1] else [alias.name for alias in node.names]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_the_layers(path):
    order = layers()
    own = path.relative_to(ROOT / "fxsplit").parts[0].removesuffix(".py")
    if own == "__init__":
        return
    for part in imported(path):
        assert part == own or order[part] > order[own], f"{own} imports {part}, which is not below it"


def test_every_part_has_a_layer():
    parts = {p.relative_to(ROOT / "fxsplit").parts[0].removesuffix(".py") for p in SOURCES}
    assert parts - {"__init__"} == set(layers())


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_says_what_it_is_for(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_public_names_exist_and_are_documented():
    for name in fxsplit.__all__:
        assert getattr(fxsplit, name).__doc__, name


def test_private_names_of_torch_live_in_one_module():
    for path in SOURCES:
        if path.name == "compat.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            assert not re.match(r"torch\..*\._(?!_)|.*\._cdata$", name), (path, name)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                assert "._" not in node.module, (path, node.module)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--checkpoint", "except_last", "--replicas", "2", "--micro-batches", "3"],
        ["--schedule", "gpipe", "--stages", "3"],
    ],
)
def test_demo(capsys, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--seconds", "0.2", "--layers", "2", "--batch", "6", *options]) == 0
    shown = capsys.readouterr().out
    assert (tmp_path / "fxsplit-demo.html").exists()
    for part in (
        "stage 2 of 3" if "3" in options and "gpipe" in options else "stage 1 of 2",
        "of eager",
        "predicted bubble",
        "stage 1.0 │",
        "same-graph: holds",
        "weights at most 0 apart",
    ):
        assert part in shown


def test_the_command_line_says_what_is_wrong(capsys):
    assert main(["demo", "--stages", "0"]) == 2
    assert "stages=0" in capsys.readouterr().err
    assert main(["demo", "--stages", "2", "--devices", "cpu,cpu,cpu"]) == 2
    assert "devices= lists 3" in capsys.readouterr().err


@pytest.mark.slow
def test_python_dash_m():
    done = subprocess.run(
        [sys.executable, "-m", "fxsplit", "--help"], capture_output=True, text=True, check=True
    )
    assert "demo" in done.stdout


def readme_blocks():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)


def test_readme_commands_are_those_of_ci():
    commands = [block.strip() for language, block in readme_blocks() if language == "sh"]
    ci = (ROOT / ".ci" / "run").read_text()
    assert len(commands) >= 2
    assert "README.md" in ci
