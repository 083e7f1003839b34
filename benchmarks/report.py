"""A claim's figures as one table in Markdown, and its place between two markers of a page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

if TYPE_CHECKING:
    from .machine import Machine


class LeftOutError(Exception):
    """A part cannot be run here; the text says why."""


@dataclass
class Report:
    """What a part has found.

    Attributes:
        header, rows: the table; entries are shown as they are.
        summary: sentences with figures, which are shown below the table.
        left_out: what was not compared, and why.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    summary: Sequence[str] = ()
    left_out: list[str] = field(default_factory=list)

    def markdown(self, command: str, machine: Machine) -> str:
        """Date, command and machine; the table; what is said of it."""
        parts = [f"`{command}`, {machine}."]
        parts.append(tabulate(self.rows, headers=self.header, tablefmt="github", disable_numparse=True))
        parts += self.summary
        if self.left_out:
            parts.append(f"Left out: {'; '.join(dict.fromkeys(self.left_out))}.")
        return "\n\n".join(parts)


def put(page: str, name: str, block: str) -> str:
    """The page with `block` between the markers of `name`, and nothing else changed.

    Raises:
        KeyError: the page has no such markers.
    """
    place = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not place.search(page):
        raise KeyError(name)
    return place.sub(lambda found: f"{found[1]}\n{block}\n\n{found[2]}", page, count=1)
