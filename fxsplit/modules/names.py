"""Names in generated code: ``h.0.attn`` is called ``self.h_0_attn``, not ``getattr(self.h, "0").attn``."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable

from torch import fx, nn

_TAKEN = frozenset(dir(nn.Module())) | frozenset(dir(fx.GraphModule)) | {"meta"}


def local_names(paths: Iterable[str]) -> dict[str, str]:
    """FQN → a free attribute name that reads like it; the same for the same paths in the same order."""
    names: dict[str, str] = {}
    used = set(_TAKEN)
    for path in paths:
        word = re.sub(r"\W", "_", path) or "value"
        if word.startswith("checkpoint_"):  # the regions' own
            word = f"the_{word}"
        if word[0].isdigit():
            word = f"layer_{word}"
        if keyword.iskeyword(word):
            word = f"{word}_"
        unique, n = word, 1
        while unique in used:
            unique, n = f"{word}__{n}", n + 1
        used.add(unique)
        names[path] = unique
    return names


def is_free(name: str) -> bool:
    """Whether `local_names` could have given it."""
    return (
        name.isidentifier()
        and not keyword.iskeyword(name)
        and name not in _TAKEN
        and not name.startswith("checkpoint_")
    )
