"""All claims, or some: python -m benchmarks [names] [--list] [--quick] [--write].

Each is a process of its own, so that one that fails does not end the rest. ``--write`` puts every table between its
markers in the pages, and touches nothing else.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import time
from pathlib import Path

from .part import UNABLE, add_options, options_of
from .report import put

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs"
LIMIT = 1800  # seconds of a part
NAMES = (  # in the order of the page
    *("capture", "compile", "huge"),
    *("step", "allocator", "micro_batches", "overhead", "small", "fingerprint"),
    *("replicas", "unbalanced", "ranks"),
    *("memory", "kept", "loading"),
    *("cut", "towers", "planning", "balance"),
    *("prediction", "simulation", "bubbles"),
    "gpu",
)


def write(pages: list[Path], name: str, block: str) -> list[Path]:
    """Put a block into every page that has a place for it; those pages."""
    found = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        try:
            page.write_text(put(text, name, block), encoding="utf-8")
            found.append(page)
        except KeyError:
            continue
    return found


def show_parts() -> None:
    """Name, minutes and question of each."""
    for name in NAMES:
        part = importlib.import_module(f".{name}", __package__)
        print(f"{name:14} {part.MINUTES:4.1f} min  {part.QUESTION}")


def main() -> int:
    """Run the parts; 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument(
        "--list", action="store_true", help="names, minutes and questions, and nothing is run"
    )
    parser.add_argument("--write", action="store_true", help="put the tables into the pages")
    parser.add_argument("--pages", type=Path, default=PAGES, help="the folder of the pages")
    add_options(parser)
    given = parser.parse_args()
    if unknown := set(given.names) - set(NAMES):
        parser.error(f"there is no {', '.join(sorted(unknown))}: the parts are {', '.join(NAMES)}")
    if given.quick and given.write and given.pages == PAGES:
        parser.error(
            "--quick gives no figures that are worth writing: leave out one of the two, or say --pages"
        )
    if given.list:
        show_parts()
        return 0
    pages, failed, started = sorted(given.pages.glob("*.md")), [], time.monotonic()
    for name in given.names or NAMES:
        print(f"# {name}", flush=True)
        words = [sys.executable, "-m", "benchmarks.part", name, *str(options_of(given)).split()]
        try:
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            print(f"took longer than {LIMIT} s", end="\n\n", flush=True)
            failed.append(name)
            continue
        if done.returncode == UNABLE:
            print(f"left out: {done.stdout.strip()}", end="\n\n", flush=True)
            continue
        print(done.stdout.strip(), end="\n\n", flush=True)
        if done.returncode:
            failed.append(name)
        elif given.write and not write(pages, name, done.stdout.strip()):
            print(f"no page has a place for {name}: <!-- table: {name} --> … <!-- end -->", flush=True)
    print(f"{(time.monotonic() - started) / 60:.1f} minutes", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
