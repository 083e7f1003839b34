"""Small faults put into fxsplit one at a time: does any test notice?

    python -m tests.mutants                        # all of them
    python -m tests.mutants --package trace        # those of one folder, or of a module beside the folders
    python -m tests.mutants --only 12-20,take      # by number, or by a part of file, old or new text
    python -m tests.mutants --list

A fault is a row of `mutants.toml`: a file of the package, a text in it that is there once, what stands there instead,
and the tests that notice, as arguments of pytest. One that changes nothing that anybody could see has a reason in place of
tests. Rows are tried in copies of the checkout, as it is now; a fault that ends in a time limit has been noticed, too.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 180.0  # seconds of the tests of one fault
# Loaded once, for all: what tests import takes longer than most of them. Nothing of fxsplit is among it.
_LOADED = (
    *(
        "torch",
        "torch.fx",
        "torch.export",
        "torch.utils.checkpoint",
        "torch.utils.flop_counter",
        "torch._dynamo",
    ),
    *("tabulate", "numpy", "jinja2", "hypothesis", "hypothesis.strategies", "pytest"),
)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        number: from 1, in the order of the rows.
        file: below ``fxsplit/``.
        old, new: the text that is there once, and what stands there instead.
        tests: arguments of pytest, as in a shell; slow tests are left out unless it has an ``-m`` of its own.
        equivalent: why nobody can see a difference; empty where somebody can.
    """

    number: int
    file: str
    old: str
    new: str
    tests: str = ""
    equivalent: str = ""

    @property
    def package(self) -> str:
        """The folder that it is in, or the module."""
        return self.file.partition("/")[0].removesuffix(".py")

    @property
    def arguments(self) -> list[str]:
        """Of pytest."""
        given = shlex.split(self.tests)
        return given if "-m" in given else [*given, "-m", "not slow"]

    def applied(self, text: str) -> str:
        """The text of its file with the fault in it.

        Raises:
            ValueError: what it replaces is not there, or several times.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"{self}: its old text is in the file {text.count(self.old)} times")
        return text.replace(self.old, self.new)

    def __str__(self) -> str:
        before, after = self.old.strip().splitlines() or [""], self.new.strip().splitlines() or ["(nothing)"]
        shown = next(((a, b) for a, b in zip(before, after, strict=False) if a != b), (before[-1], after[-1]))
        return f"{self.number} {self.file}: {shown[0].strip()} → {shown[1].strip()}"


def mutants() -> list[Mutant]:
    """All rows."""
    rows = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text(encoding="utf-8"))["mutant"]
    return [Mutant(number, **row) for number, row in enumerate(rows, start=1)]


def chosen(rows: Sequence[Mutant], only: str | None, package: str | None) -> list[Mutant]:
    """Those that are asked for."""
    found = [m for m in rows if package in (None, m.package)]
    return found if only is None else [m for m in found if any(_is(m, word) for word in only.split(","))]


def _is(mutant: Mutant, word: str) -> bool:
    first, dash, last = word.partition("-")
    if first.isdigit() and (last.isdigit() or not dash):
        return int(first) <= mutant.number <= int(last or first)
    return any(word in text for text in (mutant.file, mutant.old, mutant.new))


@contextlib.contextmanager
def _copies(count: int) -> Iterator[list[Path]]:
    """The files of the checkout, as they are now, in folders of their own."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    names = [name for name in dict.fromkeys(listed.split("\0")) if name and (ROOT / name).is_file()]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        found = [Path(folder, f"copy{i}") for i in range(count)]
        for copy in found:
            for name in names:
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        yield found


def _write(path: Path, text: str) -> None:
    """Write a module. What was compiled of it is known by time and size, and a fault may be as long, and as soon."""
    path.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _begun(mutant: Mutant, folder: Path) -> int:
    """Begin the tests of a fault in a copy. Returns the process, which leads a group of its own."""
    process = os.fork()
    if process:
        return process
    os.setsid()
    os.chdir(folder)
    out = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.environ.update(PYTHONPATH=str(folder), CI="1")  # what draws examples draws the same ones
    sys.path[:] = [str(folder), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
    for name in [n for n in sys.modules if n.partition(".")[0] in ("tests", "fxsplit")]:
        del sys.modules[name]
    status = 70
    try:
        import pytest

        warned = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
        status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-W", warned, *mutant.arguments]))
    finally:
        sys.stdout.flush()
        os._exit(status)


def _outcome(status: int, log: Path) -> str:
    """What became of a fault, by the exit status of its tests."""
    said = log.read_text(encoding="utf-8", errors="replace")
    if status == 0:
        return "survived"
    if status in (4, 5) or (status == 2 and "no tests ran" not in said and "error" not in said):
        return f"error: pytest ended with {status}: {(said.strip().splitlines() or [''])[-1]}"
    return "killed"


def run(rows: Sequence[Mutant], jobs: int = 1, limit: float = LIMIT) -> dict[Mutant, str]:
    """Try faults. Returns what became of each: ``killed``, ``survived``, or an ``error: …``."""
    for name in _LOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    waiting, found = collections.deque(rows), dict[Mutant, str]()
    running: dict[int, tuple[Mutant, Path, str, float]] = {}
    with _copies(max(1, min(jobs, len(rows)))) as free:
        try:
            while waiting or running:
                while waiting and free:
                    mutant = waiting.popleft()
                    folder = free.pop()
                    true = (folder / "fxsplit" / mutant.file).read_text(encoding="utf-8")
                    _write(folder / "fxsplit" / mutant.file, mutant.applied(true))
                    running[_begun(mutant, folder)] = mutant, folder, true, time.monotonic()
                time.sleep(0.02)
                for process, (mutant, folder, true, begin) in list(running.items()):
                    ended, status = os.waitpid(process, os.WNOHANG)
                    took = time.monotonic() - begin
                    if not ended and took < limit:
                        continue
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process, signal.SIGKILL)  # and what its tests have started
                    if ended:
                        code = os.waitstatus_to_exitcode(status)
                        found[mutant] = _outcome(code, folder.with_suffix(".log"))
                    else:
                        os.waitpid(process, 0)
                        found[mutant] = "killed: by the time limit"
                    del running[process]
                    _write(folder / "fxsplit" / mutant.file, true)
                    free.append(folder)
                    print(f"{found[mutant]:<8} {took:5.1f} s  {mutant}", flush=True)
        finally:
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
    return found


def table(rows: Sequence[Mutant], found: dict[Mutant, str]) -> str:
    """A line for each package, and below what is to be looked at."""
    packages = list(dict.fromkeys(m.package for m in rows))
    heads = ("killed", "survived", "equivalent", "error")
    lines = [f"{'':<12}" + "".join(f"{head:>12}" for head in heads)]
    counts = {p: collections.Counter[str]() for p in packages}
    for mutant in rows:
        counts[mutant.package]["equivalent" if mutant.equivalent else found[mutant].partition(":")[0]] += 1
    total = sum(counts.values(), collections.Counter[str]())
    for name, row in (*sorted(counts.items()), ("all", total)):
        lines.append(f"{name:<12}" + "".join(f"{row[head] or '·':>12}" for head in heads))
    lines += [f"{m}: equivalent, {m.equivalent}" for m in rows if m.equivalent]
    lines += [f"{m}: {outcome}, by {m.tests}" for m, outcome in found.items() if outcome != "killed"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a fault has survived, or could not be tried."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description="Does any test notice a fault?"
    )
    parser.add_argument("--only", help="numbers and ranges of them, or parts of texts, separated by commas")
    parser.add_argument("--package", help="a folder of fxsplit, or a module beside the folders")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default: 1)")
    parser.add_argument("--list", action="store_true", help="only show them")
    given = parser.parse_args(arguments)
    rows = chosen(mutants(), given.only, given.package)
    if given.list:
        print("\n".join(map(str, rows)))
        return 0
    wrong = list(_not_there(rows))
    if wrong:
        print("\n".join(wrong))
        return 1
    begin = time.monotonic()
    found = run([m for m in rows if not m.equivalent], given.jobs)
    print(f"\n{table(rows, found)}\n{len(rows)} faults in {(time.monotonic() - begin) / 60:.1f} minutes")
    return int(not all(outcome.startswith("killed") for outcome in found.values()))


def _not_there(rows: Sequence[Mutant]) -> Iterator[str]:
    for mutant in rows:
        try:
            mutant.applied((ROOT / "fxsplit" / mutant.file).read_text(encoding="utf-8"))
        except ValueError as error:
            yield str(error)


if __name__ == "__main__":
    sys.exit(main())
