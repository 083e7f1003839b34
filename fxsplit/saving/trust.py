"""The one place that decides whether a name in a file may be looked up.

Torch's and Python's functions of tensors and numbers may, and what the forwards of the model that is passed name
themselves. For anything else the user has to say so: to look it up may import a module, and so run it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ArgumentError, SerializeError
from ..modules.callables import name_of
from ..modules.reach import named_by
from .harmless import harmless, operation

_SHOWN = 20


class Names:
    """Looks up the names in a file.

    Args:
        model: its forwards may be run anyway, and so may what they name.
        trust: modules (``"my.package"``, with all that is in them) and things in them (``"my.module:function"``) that the
            user trusts.

    Raises:
        ArgumentError: `trust` is no list of names.
    """

    def __init__(self, model: nn.Module | None, trust: Sequence[str] = ()) -> None:
        if isinstance(trust, str) or not isinstance(trust, list | tuple | set | frozenset):
            raise ArgumentError(
                f"trust={trust!r} is no list of names", remedy='trust=["my.package", "my.module:function"]'
            )
        for name in trust:
            if not isinstance(name, str) or not name.strip():
                raise ArgumentError(
                    f"trust= has {name!r}, which is no name",
                    remedy=f'trust=["{name_of(name) or "my.module:function"}"]',
                )
        self._trust = tuple(trust)
        self._of_model = (
            {} if model is None else {n: v for v in named_by(model) if (n := name_of(v)) is not None}
        )

    def refused(self, names: Iterable[Any]) -> list[str]:
        """Those that may not be looked up."""
        return sorted({str(name) for name in names if not self._may(name)})

    def check(self, names: Iterable[Any]) -> None:
        """Refuse a file with names that may not be looked up; nothing has been imported or called then.

        Raises:
            SerializeError: lists them.
        """
        refused = self.refused(names)
        if refused:
            shown = ", ".join(refused[:_SHOWN]) + (", …" if len(refused) > _SHOWN else "")
            raise SerializeError(
                f"the file names {shown}: neither torch's nor named by the forward of the model that was passed. "
                "To load it would import and run code that the file chooses",
                remedy="if you trust these, fxsplit.load(folder, model, trust=["
                + ", ".join(f'"{name}"' for name in refused[:_SHOWN])
                + "])",
            )

    def find(self, name: Any) -> Any:
        """The function or class.

        Raises:
            SerializeError: it may not be looked up, or there is none.
        """
        self.check([name])
        known = harmless().get(name, self._of_model.get(name))
        if known is not None:
            return known
        return operation(name) or _imported(name)

    def find_class(self, name: Any, base: type) -> Any:
        """The class, which is one of this kind.

        Raises:
            SerializeError: as `find`, or it is no such class.
        """
        found = self.find(name)
        if not isinstance(found, type) or not issubclass(found, base):
            raise SerializeError(f"{name} is no {base.__name__}", remedy="save the pipeline again")
        return found

    def _may(self, name: Any) -> bool:
        if not isinstance(name, str):
            return False
        if name in harmless() or name in self._of_model or operation(name) is not None:
            return True
        return any(name == t or name.startswith((f"{t}:", f"{t}.")) for t in self._trust)


def _imported(name: str) -> Any:
    """What has this very name: not something that another module has, by way of this one."""
    module, _, qualified = name.partition(":")
    try:
        value: Any = torch if module == "torch" else importlib.import_module(module)
        for part in qualified.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise SerializeError(
            f"the pipeline needs {name!r}, which cannot be imported: {error}",
            remedy="install it, or make it importable",
        ) from None
    if not callable(value) or name_of(value) != name:
        raise SerializeError(
            f"{name!r} is not the name of a function or class, but {name_of(value) or 'something else'!r}",
            remedy="save the pipeline again",
        )
    return value
