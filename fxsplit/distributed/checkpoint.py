"""Checkpoints under the model's FQNs, written by torch.distributed.checkpoint: for any number of stages and ranks.

What was saved by four ranks is loaded by two, by a pipeline in one process, or by the plain model. A folder holds a folder
for each step, and ``latest``, which names the last one that is whole::

    ckpt/step-500/.metadata, __0_0.distcp, …      model.<FQN>, optimizer.state.<FQN>.<name>, random.<replica>
    ckpt/latest                                   500
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as write_checkpoint

from ..errors import ArgumentError, WeightsError
from ..files import read_text
from ..graph.place import has_no_values
from ..pipeline import Pipeline
from .pipeline import RankPipeline
from .sharding import is_sharded

_LATEST = "latest"


def save(
    folder: str | os.PathLike[str],
    pipe: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int = 0,
    keep: int = 2,
) -> None:
    """Write weights, buffers, states of the optimizer and the state of the random numbers; every rank calls it.

    Args:
        folder: the same for all ranks, on a file system that all hosts see.
        pipe: a pipeline over ranks or in one process, or a plain module.
        optimizer: of its parameters.
        step: how many steps have been taken; `load` returns it.
        keep: how many checkpoints stay, this one with them; older ones are removed when this one is whole.

    Raises:
        ArgumentError: `step` or `keep` is no such number.
        WeightsError: it cannot be written; what was there before is whole.
    """
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ArgumentError(
                f"{name}={value!r} is no number of {least} or more", remedy=f"save(..., {name}={least})"
            )
    base, state = Path(folder), _state_of(pipe, optimizer)
    target = base / f"step-{step}"

    def write() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of a process without other ranks
            write_checkpoint(state, checkpoint_id=target, no_dist=not isinstance(pipe, RankPipeline))

    try:
        _together(pipe, write, "the checkpoint")
        if _is_first(pipe):
            marked = base / f"{_LATEST}.new"
            marked.write_text(f"{step}\n")
            os.replace(marked, base / _LATEST)
            for old in sorted(_steps(base) - {step})[: -(keep - 1) or None]:
                shutil.rmtree(base / f"step-{old}", ignore_errors=True)
    except OSError as error:
        raise WeightsError(
            f"the checkpoint of step {step} cannot be written to {base}: {error}",
            remedy="a folder that can be written to",
        ) from error


def load(
    folder: str | os.PathLike[str], pipe: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> int:
    """Read the last checkpoint into what there is: every rank calls it, and reads what it has.

    Args:
        pipe, optimizer: as of `save`, in another number of stages or ranks, too. The pipeline has its weights already.

    Returns:
        The step after which it was saved; 0 where the folder has none, and nothing has changed.

    Raises:
        WeightsError: the checkpoint is damaged, or is another model's: nothing has changed.
    """
    base = Path(folder)
    if not (base / _LATEST).exists():
        return 0
    text = read_text(base / _LATEST).strip()
    target = base / f"step-{text}"
    if not text.isdigit() or not target.is_dir():
        raise WeightsError(
            f"{base / _LATEST} names step {text!r}, which is not there", remedy="a whole folder"
        )
    model = _model_of(pipe)
    if has_no_values(model) and not isinstance(pipe, RankPipeline):
        raise ArgumentError(
            "the model has no weights yet to load into", remedy="model.to_empty(device='cpu') before"
        )
    try:
        state = _wanted(target, pipe, optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read_checkpoint(
                state, checkpoint_id=target, no_dist=True
            )  # each reads its own: nobody waits for others
    except WeightsError:
        raise
    except (OSError, RuntimeError, ValueError, CheckpointException) as error:
        raise WeightsError(
            f"the checkpoint {target} cannot be read: {error}", remedy="another checkpoint"
        ) from error
    _put(state, pipe, optimizer)
    return int(text)


def _state_of(pipe: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {f"model.{n}": v for n, v in pipe.state_dict().items()}
    state[f"random.{_replica(pipe)}"] = torch.get_rng_state()
    if optimizer is None:
        return state
    names = _names(pipe)
    for group, place in enumerate(optimizer.param_groups):
        state.update({f"optimizer.group.{group}.{k}": v for k, v in place.items() if k != "params"})
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            state[f"optimizer.state.{names[id(parameter)]}.{key}"] = value
    return state


def _names(pipe: nn.Module) -> dict[int, str]:
    return {id(p): n for n, p in reversed([*pipe.named_parameters(remove_duplicate=False)])}


def _wanted(target: Path, pipe: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """What is to be read: of the model, what it has; of the optimizer, what was saved of its parameters.

    Raises:
        WeightsError: the checkpoint lacks something, or has it in another shape.
    """
    saved = FileSystemReader(target).read_metadata().state_dict_metadata
    parameters = dict(pipe.named_parameters())
    state: dict[str, Any] = {}
    for name, value in pipe.state_dict().items():
        found = saved.get(f"model.{name}")
        if found is None:
            raise WeightsError(
                f"the checkpoint {target} has no {name}", remedy="the checkpoint of this model"
            )
        if (
            isinstance(value, torch.Tensor)
            and isinstance(found, TensorStorageMetadata)
            and found.size != value.shape
        ):
            raise WeightsError(
                f"the checkpoint {target} has {name} of {list(found.size)}, and the model of {list(value.shape)}",
                remedy="the checkpoint of this model",
            )
        state[f"model.{name}"] = torch.empty_like(value) if isinstance(value, torch.Tensor) else value
    for key, found in saved.items():
        kind, _, rest = key.partition(".")
        like = parameters.get(rest.removeprefix("state.").rpartition(".")[0])
        if key == f"random.{_replica(pipe)}" or (
            kind == "optimizer" and optimizer is not None and (like is not None or rest.startswith("group."))
        ):
            state[key] = None
            if isinstance(found, TensorStorageMetadata):
                sharded = like is not None and is_sharded(like) and found.size == like.shape
                state[key] = (
                    torch.empty_like(like.detach(), dtype=found.properties.dtype)  # type: ignore[union-attr]
                    if sharded
                    else torch.empty(found.size, dtype=found.properties.dtype)
                )
    return state


def _put(state: dict[str, Any], pipe: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    model = {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}
    pipe.load_state_dict(model)
    if (numbers := state.get(f"random.{_replica(pipe)}")) is not None:
        torch.set_rng_state(numbers)
    if optimizer is None:
        return
    names = _names(pipe)
    ids = {p: n for n, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    groups = []
    for k, group in enumerate(optimizer.param_groups):
        start = f"optimizer.group.{k}."
        options = {n.removeprefix(start): v for n, v in state.items() if n.startswith(start)}
        groups.append({**group, **options, "params": [ids[p] for p in group["params"]]})
    entries: dict[int, dict[str, Any]] = {}
    for parameter, number in ids.items():
        start = f"optimizer.state.{names[id(parameter)]}."
        found = {
            k.removeprefix(start): v
            for k, v in state.items()
            if k.startswith(start) and "." not in k.removeprefix(start)
        }
        if found:
            entries[number] = found
    optimizer.load_state_dict({"state": entries, "param_groups": groups})


def _model_of(pipe: nn.Module) -> nn.Module:
    return pipe.model if isinstance(pipe, Pipeline) else pipe


def _replica(pipe: nn.Module) -> int:
    return pipe.replica if isinstance(pipe, RankPipeline) else 0


def _is_first(pipe: nn.Module) -> bool:
    return torch.distributed.get_rank() == 0 if isinstance(pipe, RankPipeline) else True


def _together(pipe: nn.Module, collective: Callable[[], None], what: str) -> None:
    if isinstance(pipe, RankPipeline):
        pipe.together(collective, what)
    else:
        collective()


def _steps(base: Path) -> set[int]:
    def numbers() -> Iterator[int]:
        for path in base.glob("step-*"):
            number = path.name.removeprefix("step-")
            if number.isdigit():
                yield int(number)

    return {*numbers()}
