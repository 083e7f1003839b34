"""`docs/command.md`: what it says to type works."""

import re
import shlex
import sys

import pytest

from fxsplit.__main__ import main

from ..helpers import ROOT

PAGE = (ROOT / "docs" / "command.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


@pytest.mark.slow
def test_the_commands_of_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "model.py").write_text(source)
    for line in COMMANDS:
        name, *words = shlex.split(line)
        assert name == "fxsplit"
        assert main(words) == 0, (line, capsys.readouterr().err)
        assert capsys.readouterr().out
    assert (tmp_path / "step.html").exists() and (tmp_path / "graph.dot").exists()
    sys.modules.pop("model")


def test_the_page_names_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.search(r"\{(.*?)\}", capsys.readouterr().out).group(1).split(",")
    assert {line.split()[1] for line in COMMANDS} | {"demo"} == set(commands)
