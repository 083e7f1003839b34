"""The pages of the documentation as blocks, and a reader who types all of them, in order, in an empty folder.

- A `python` block runs in the page's one namespace. One that begins with ``# NAME.py`` is written to that file instead.
- An `output` block is what the block before it printed; ``...`` stands for anything. If it begins with the name of an error,
  the block before it ends in that error.
- A line of an `sh` block is typed: `fxsplit` in this process, `python`, `torchrun` and `pytest` in one of their own. Lines
  that begin with `pip` are not: what they install is here, or the page is left out.
- A block that begins with ``# not run:`` and a reason, or with ``# with`` and the name of another system, is only compiled.
- A section that imports a package that is not installed is left out.
"""

import doctest
import functools
import importlib
import linecache
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from fxsplit.__main__ import main

from ..helpers import ROOT

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# ([\w./]+\.(?:py|toml))\n")
_INCLUDE = re.compile(r"^```\{include\} (\S+)\n```$", re.MULTILINE)
_ERROR = re.compile(r"([A-Z]\w+Error): ")
_OPTIONAL = ("transformers", "accelerate", "lightning", "torchvision", "hypothesis", "safetensors")


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    section: str
    line: int

    @property
    def is_only_compiled(self) -> bool:
        return self.language == "python" and self.text.startswith(("# not run: ", "# with "))


@dataclass(frozen=True)
class Page:
    """A page and the file that has its text, which another one may include."""

    name: str
    file: Path

    @classmethod
    def of(cls, path: Path) -> "Page":
        included = _INCLUDE.search(path.read_text(encoding="utf-8"))
        return cls(path.stem, path.parent / included[1] if included else path)

    @property
    def text(self) -> str:
        return self.file.read_text(encoding="utf-8")

    def blocks(self) -> list[Block]:
        text, found = self.text, []
        for fence in _FENCE.finditer(text):
            before = text[: fence.start()]
            headings = re.findall(r"^## (.*)", before, re.MULTILINE)
            found.append(Block(fence[1], fence[2], headings[-1] if headings else "", before.count("\n") + 1))
        return found

    @property
    def has_optional(self) -> bool:
        return any(name in _OPTIONAL for b in self.blocks() for name in _imports(b))

    def needs(self, section: str) -> list[str]:
        """Packages that a section imports and that cannot be imported here."""
        names = {name for b in self.blocks() if b.section == section for name in _imports(b)}
        return sorted(name for name in names & set(_OPTIONAL) if not _is_there(name))


def _imports(block: Block) -> list[str]:
    runs = block.language == "python" and not block.is_only_compiled
    return re.findall(r"^\s*(?:import|from) (\w+)", block.text, re.MULTILINE) if runs else []


@functools.cache
def _is_there(name: str) -> bool:
    try:
        module = importlib.import_module(name)
        return name != "transformers" or bool(module.PreTrainedModel)  # which some builds of torchvision end
    except ImportError:
        return False


PAGES = [Page.of(path) for path in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])]


class Reader:
    """Types the blocks of a page in a folder."""

    def __init__(self, page: Page, folder: Path, capsys, *, update: bool = False) -> None:
        self.page, self.folder, self.capsys, self.update = page, folder, capsys, update
        self.module = ModuleType(page.name.lower())
        self.script = ""
        self.printed = ""
        self.changed: list[tuple[Block, str]] = []

    def reads(self) -> int:
        """Type them all; how many there were."""
        blocks, typed = self.page.blocks(), 0
        for block, following in zip(blocks, [*blocks, None][1:], strict=True):
            if self.page.needs(block.section):
                continue
            error = _ERROR.match(following.text) if following and following.language == "output" else None
            try:
                typed += self._types(block, error and error[1])
            except Exception as failed:
                failed.add_note(f"in the block at {self.page.file.name}:{block.line}")
                raise
        self._rewrites()
        return typed

    def _rewrites(self) -> None:
        lines = self.page.text.splitlines(keepends=True)
        for block, printed in reversed(self.changed):
            lines[block.line : block.line + block.text.count("\n")] = printed.splitlines(keepends=True)
        if self.changed:
            self.page.file.write_text("".join(lines), encoding="utf-8")

    def _types(self, block: Block, error: str | None) -> bool:
        if block.language == "python":
            self._python(block, error)
        elif block.language == "sh" and self.page.name != "README":  # its commands are those of .ci/run
            self.printed = ""
            for command in _commands(block.text):
                self._command(command)
        elif block.language == "output":
            self._compares(block)
        else:
            return False
        return True

    def _python(self, block: Block, error: str | None) -> None:
        named = _FILE.match(block.text)
        if block.is_only_compiled:
            compile(block.text, f"{self.page.name}.md", "exec")
        elif named:
            (self.folder / named[1]).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / named[1]).write_text(block.text, encoding="utf-8")
        else:
            self._executes(block.text, error)

    def _executes(self, text: str, error: str | None) -> None:
        """As the next lines of one file, in which models find their source."""
        before = self.script.count("\n")
        self.script += text
        file = self.folder / f"{self.page.name.lower()}.py"
        file.write_text(self.script, encoding="utf-8")
        linecache.checkcache(str(file))
        code = compile("\n" * before + text, str(file), "exec")
        try:
            exec(code, vars(self.module))
        except Exception as raised:
            if type(raised).__name__ != error:
                raise
            self.printed = f"{error}: {raised}\n".replace(f"{self.folder}{os.sep}", "")
            self.capsys.readouterr()
        else:
            self.printed = self.capsys.readouterr().out
            assert error is None, f"no {error} was raised"

    def _command(self, command: list[str]) -> None:
        name, *words = command
        if name == "fxsplit":
            status = main(words)
            out, err = self.capsys.readouterr()
            self.printed += out
            assert status == 0 and out, (command, err)
        elif name == "python" and words[0] != "-m":
            runpy.run_path(str(self.folder / words[0]), run_name="__main__")
            self.printed += self.capsys.readouterr().out
        elif name != "pip":
            modules = {"torchrun": ["-m", "torch.distributed.run"], "pytest": ["-m", "pytest"], "python": []}
            done = subprocess.run(
                [sys.executable, *modules[name], *words], cwd=self.folder, capture_output=True, text=True
            )
            assert done.returncode == 0, (command, done.stdout, done.stderr)
            self.printed += done.stdout

    def _compares(self, block: Block) -> None:
        wanted = block.text
        if wanted.strip() == self.printed.strip():
            return
        printed = re.sub(r"[ \t]+$", "", self.printed.strip("\n"), flags=re.MULTILINE) + "\n"
        if doctest.OutputChecker().check_output(wanted, printed, doctest.ELLIPSIS):
            return
        if self.update:
            self.changed.append((block, printed))
        else:
            assert printed == wanted, f"it printed:\n{printed}"


def _commands(text: str) -> Iterator[list[str]]:
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words
