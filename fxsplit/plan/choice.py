"""`Choice`: a field of a plan that answers what follows from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Choice:
    """Equal to its spelling in a plan; prints, and is pickled, as it.

    Attributes:
        spelling: what it is written as in a plan: a word, or a list, mapping or function of the user's.
    """

    spelling: Any
    of: Callable[[Any], Any]  # the choice that a spelling spells

    def __eq__(self, other: object) -> bool:
        spelling = other.spelling if isinstance(other, Choice) else other
        return bool(self.spelling == (tuple(spelling) if isinstance(spelling, list) else spelling))

    def __hash__(self) -> int:
        return hash(self.spelling)

    def __repr__(self) -> str:
        return repr(self.spelling)

    def __reduce__(self) -> Any:
        return type(self).of, (self.spelling,)
