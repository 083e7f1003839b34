"""Move parameters and buffers to the devices of their stages, in place.

A tensor that is an attribute of a module that stays whole goes with it; those that the program itself reads stay where
they are, and are transferred.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..errors import PlanError
from .ir import Assignment, Program, Stage, Traced
from .nodes import plain_tensors, region_modules, resolve
from .optimizers import moved


def has_no_values(model: object) -> bool:
    """Whether some of a model is on the ``meta`` device."""
    if not isinstance(model, nn.Module):
        return False
    return any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def place(model: nn.Module, program: Program) -> None:
    """Move every parameter and buffer to the device of its stage; the Parameter objects stay the same.

    What is on ``meta`` has nothing to move. All copies are made before the first one is put in place: out of memory,
    nothing has changed.
    """
    puts: list[Callable[[], None]] = []
    for stage in program.stages:
        for module in (stage.module, *region_modules(stage.module)):
            for name, constant in module._buffers.items():
                if name not in stage.paths and constant is not None and constant.device != stage.device:
                    puts.append(
                        functools.partial(module._buffers.__setitem__, name, constant.to(stage.device))
                    )
        for holder, kind, key in tensors_of(model, stage):
            table, home = getattr(holder, kind), home_of(stage, kind)
            if _is_elsewhere(table[key], home):
                puts.append(_mover(table, key, home))
        for attributes, key, tensor in _attributes_of(model, stage):
            if _is_elsewhere(tensor, stage.device):
                puts.append(functools.partial(attributes.__setitem__, key, tensor.to(stage.device)))
    for put in puts:
        put()


def check_devices(assignment: Assignment) -> None:
    """Refuse devices that this machine does not have, and ``meta``, where nothing can be computed.

    Raises:
        PlanError: names the first stage on one.
    """
    placed = [(f"stage {s}", d) for s, row in enumerate(assignment.rows) for d in dict.fromkeys(row)]
    placed += [(f"output {name}", d) for name, d in assignment.homes.items()]
    for what, device in placed:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise PlanError(
                f"{what} is placed on {device}, which is not there: {str(error).splitlines()[0]}",
                remedy="name devices that this machine has, such as devices='cpu'; fxsplit.preview(model, plan, ...) "
                "needs none",
            ) from None
    for what, device in placed:
        if device.type == "meta":
            raise PlanError(
                f"{what} is placed on meta, where nothing has a value",
                remedy="leave out devices=, or name those where the weights are to be; fxsplit.preview(model, plan, ...) "
                "makes a plan only",
            )


def check_attributes(model: nn.Module, traced: Traced, program: Program) -> None:
    """Refuse that a stage writes to a tensor on another device: the program would write to a copy.

    Raises:
        PlanError: a tensor that is neither parameter nor buffer is written, and is not where its stage computes.
    """
    plain = plain_tensors(model, traced)
    for stage in program.stages:
        for name in (n for n in stage.writes if n in plain):
            if any(_is_elsewhere(resolve(model, name), device) for device in stage.row):
                leaf = name.rpartition(".")[2]
                raise PlanError(
                    f"forward writes to {name}, a tensor that is no buffer and so is not moved to stage {stage.index}, "
                    f"on {', '.join(map(str, dict.fromkeys(stage.row)))}",
                    remedy=f"self.register_buffer({leaf!r}, ..., persistent=False) in place of self.{leaf} = ...",
                )


@contextlib.contextmanager
def gathered_attributes(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Tensors that are plain attributes on one device, as the graph takes them to be; after an error as before."""
    tables = [vars(m) for m in model.modules()]
    before = [
        (table, key, value)
        for table in tables
        for key, value in table.items()
        if isinstance(value, torch.Tensor) and _is_elsewhere(value, device)
    ]
    copies = [value.to(device) for _, _, value in before]
    for (table, key, _), copy in zip(before, copies, strict=True):
        table[key] = copy
    try:
        yield
    except BaseException:
        for table, key, value in before:
            table[key] = value
        raise


@contextlib.contextmanager
def gathered(model: nn.Module, device: torch.device) -> Iterator[None]:
    """All parameters, buffers and tensor attributes on one device, where a model that was spread can be run.

    After an error they are where they were. The Parameter objects stay the same.
    """
    tables: list[dict[str, Any]] = [t for m in model.modules() for t in (m._parameters, m._buffers, vars(m))]
    items = ((table, key, value) for table in tables for key, value in table.items())
    before = [(table, key, value) for table, key, value in items if isinstance(value, torch.Tensor)]
    found = {id(tensor): tensor for _, _, tensor in before if _is_elsewhere(tensor, device)}
    values = {
        key: (t.data, t.grad, t.data.to(device), None if t.grad is None else t.grad.to(device))
        for key, t in found.items()
    }
    for number, tensor in found.items():
        if isinstance(tensor, nn.Parameter):
            _, _, tensor.data, tensor.grad = values[number]
            moved(tensor)
    for table, key, tensor in before:
        if id(tensor) in found and not isinstance(tensor, nn.Parameter):
            table[key] = values[id(tensor)][2]
    try:
        yield
    except BaseException:
        for table, key, tensor in before:
            if id(tensor) in found:
                table[key] = tensor
                if isinstance(tensor, nn.Parameter):
                    tensor.data, tensor.grad, _, _ = values[id(tensor)]
        raise


def tensors_of(model: nn.Module, stage: Stage) -> Iterator[tuple[nn.Module, str, str]]:
    """The parameters and buffers that have to be where a stage computes: module, table, and name in it.

    A parameter that is read on several devices is handed to the others as a value.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    for fqn in stage.paths.values():
        owner_path, _, leaf = fqn.rpartition(".")
        owner = model.get_submodule(owner_path)
        value = getattr(owner, leaf)
        for holder in value.modules() if isinstance(value, nn.Module) else (owner,):
            for kind in ("_parameters", "_buffers"):
                table = dict(getattr(holder, kind).items())  # a ScriptModule's has little else
                for key in table if isinstance(value, nn.Module) else [leaf]:
                    tensor = table.get(key)
                    if tensor is not None and names.get(id(tensor), "") in ("", *stage.parameters):
                        yield holder, kind, key


def home_of(stage: Stage, kind: str) -> torch.device:
    """Where the tensors of a table are between calls."""
    return stage.home if kind == "_parameters" else stage.device


def _attributes_of(model: nn.Module, stage: Stage) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """The tensors that modules of a stage which stay whole have as plain attributes; numbers may be anywhere."""
    for fqn in stage.paths.values():
        whole = resolve(model, fqn)
        for module in whole.modules() if isinstance(whole, nn.Module) else ():
            for key, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.dim():
                    yield vars(module), key, value


def _is_elsewhere(tensor: torch.Tensor | None, device: torch.device) -> bool:
    return tensor is not None and not tensor.is_meta and tensor.device != torch.empty(0, device=device).device


def _mover(table: dict[str, Any], key: str, device: torch.device) -> Callable[[], None]:
    tensor = table[key]
    copy, grad = tensor.data.to(device), None if tensor.grad is None else tensor.grad.to(device)

    def put() -> None:
        if isinstance(tensor, nn.Parameter):
            tensor.data = copy
            tensor.grad = grad
            moved(tensor)
        else:
            table[key] = copy

    return put
