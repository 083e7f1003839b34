"""What modules do that they were not known to do, where micro-batches or stages at the same time would make it count."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ..errors import EffectError
from ..graph.ir import Program, Stage
from ..graph.nodes import is_within, region_modules, resolve
from ..inserted.recompute import Surroundings, is_torchs, storages_of
from ..modules.attributes import Snapshot
from ..modules.callbacks import callbacks_of
from ..modules.reach import reach

_REMEDY = "compile with an example on which the model does this too, so that it is done in order"


@dataclass(frozen=True)
class Shared:
    """An object that modules of several stages can get hold of, and none of them is known to change."""

    value: Any
    paths: tuple[str, ...]


def shared_objects(program: Program) -> list[Shared]:
    """What modules that stay whole, in different stages, have in common."""
    found: dict[int, tuple[Any, dict[str, int]]] = {}
    for stage in program.stages:
        for path, module in whole_modules(stage):
            if any(map(callbacks_of, module.modules())):
                continue  # copies that talk to each other see to it themselves
            for key, value in reach(module).objects.items():
                found.setdefault(key, (value, {}))[1][path] = stage.index
    return [Shared(value, tuple(paths)) for value, paths in found.values() if len({*paths.values()}) > 1]


def has_whole(stage: Stage) -> bool:
    """Whether a module of the user's is called by it."""
    return any(True for _ in whole_modules(stage))


def whole_modules(stage: Stage) -> Iterator[tuple[str, nn.Module]]:
    """The modules that it calls of which not all is torch's own, by path."""
    for holder in (stage.module, *region_modules(stage.module)):
        for name, child in holder.named_children():
            if not isinstance(child, fx.GraphModule) and not all(map(is_torchs, child.modules())):
                yield stage.paths.get(name, name), child


@contextlib.contextmanager
def unchanged(shared: Sequence[Shared]) -> Iterator[None]:
    """While stages go forward at the same time, nobody changes what several of them can see.

    Raises:
        EffectError: somebody has.
    """
    before = [(s, Snapshot(s.value)) for s in shared]
    yield
    for known, snapshot in before:
        if snapshot.changed():
            raise EffectError(
                f"the {type(known.value).__name__} that {' and '.join(known.paths[:3])} share was changed, by stages that "
                "run at the same time",
                remedy=_REMEDY,
            )


@contextlib.contextmanager
def as_said(stage: Stage, module: fx.GraphModule) -> Iterator[None]:
    """While replicas of a stage go forward at the same time, it changes nothing but what it is known to change.

    Args:
        module: what this replica runs.

    Raises:
        EffectError: it does.
    """
    before = Surroundings(module, storages_of(_written(stage, module)), stage.paths)
    yield
    changed = before.difference()
    if changed is not None:
        raise EffectError(f"{changed} in forward, by micro-batches that run at the same time", remedy=_REMEDY)


def _written(stage: Stage, module: fx.GraphModule) -> Iterator[torch.Tensor]:
    for holder in (module, *region_modules(module)):
        for local, path in stage.paths.items():
            owner: Any = getattr(holder, local, None)
            for name in stage.writes if owner is not None else ():
                if is_within(name, path):
                    yield resolve(owner, name[len(path) :].lstrip("."))
