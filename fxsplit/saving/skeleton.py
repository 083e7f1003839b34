"""A model without its classes' constructors: modules described as plain attributes, to be filled from a state_dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..compare import equal
from ..compat import RNN_CACHES, restore_rnn, tree_leaves, tree_unflatten
from ..errors import SerializeError
from ..graph.ir import Traced
from ..graph.nodes import is_within
from ..modules.callables import name_of
from .trust import Names
from .values import CannotEncodeError, Decoder, encode

_OWN = frozenset(vars(nn.Module()))  # what every module has


def describe(model: nn.Module, traced: Sequence[Traced]) -> dict[str, Any]:
    """The modules, parameters and buffers of `model`, without the values that a state_dict has.

    Modules that the program calls have their class and plain attributes; of those that were inlined only the
    place in the tree is needed.
    """
    called = {str(n.target) for g in traced for n in g.graph.nodes if n.op in ("call_module", "get_attr")}
    persistent = set(model.state_dict(keep_vars=True))
    first: dict[int, str] = {}
    tensors = []
    for path, module in model.named_modules(remove_duplicate=False):
        for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
            for leaf, tensor in table.items():
                name = f"{path}.{leaf}" if path else leaf
                if tensor is None:
                    tensors.append([name, "none", kind])
                    continue
                known = first.setdefault(id(tensor), name)
                row: list[Any] = [name, kind, known if known != name else None, tensor.requires_grad]
                row.append(list(tensor.shape))
                elsewhere = name in persistent or known in persistent or tensor.is_meta
                row.append(None if elsewhere else encode(tensor))
                tensors.append(row)
    modules = []
    objects: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        known = objects.setdefault(id(module), path)
        whole = any(is_within(path, c) for c in called)
        modules.append(
            [path, known if known != path else None, module.training, _described(module) if whole else None]
        )
    plain = [
        [f"{path}.{key}" if path else key, encode(value)]
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    ]
    return {"name": type(model).__name__, "modules": modules, "tensors": tensors, "attributes": plain}


def _described(module: nn.Module) -> dict[str, Any]:
    name = name_of(type(module))
    if name is None:
        return {"why_not": f"{type(module).__qualname__} cannot be imported"}
    attributes = {}
    for key, value in vars(module).items():
        if (
            key in _OWN
            or isinstance(value, torch.Tensor)
            or (isinstance(module, nn.RNNBase) and key in RNN_CACHES)
        ):
            continue
        try:
            attributes[key] = encode(value)
        except CannotEncodeError as error:
            return {"why_not": f"its attribute {key!r}: {error.what}"}
    if module._forward_hooks or module._forward_pre_hooks:
        return {"why_not": "it has hooks"}
    return {"class": name, "attributes": attributes}


class _Slot:
    """Holds the graph of a skeleton; a copy of the model gets one of its own."""

    def __init__(self) -> None:
        self.traced: Traced | None = None

    def __deepcopy__(self, memo: Any) -> _Slot:
        return _Slot()


class Skeleton(nn.Module):
    """The tree of a model, without its forward: that of the program takes its place."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_slot"] = _Slot()

    def runs(self, traced: Traced) -> None:
        """From now on, calling this module runs that graph."""
        self.__dict__["_slot"].traced = traced

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the traced graph computes, in one piece."""
        traced: Traced = self.__dict__["_slot"].traced.for_mode(self.training)
        inputs = traced.signature.flatten(args, kwargs)
        flat = list(traced.module(*inputs))[: traced.out_spec.num_leaves]  # without weights of means
        return tree_unflatten(tree_leaves(flat), traced.out_spec)


def rebuild(
    data: Mapping[str, Any], state_dict: Mapping[str, torch.Tensor], decoder: Decoder, names: Names
) -> nn.Module:
    """The modules that `describe` described, with the values of a state_dict.

    Raises:
        SerializeError: a module can be had from the model only, or the state_dict does not fit.
    """
    root: Skeleton = type(str(data["name"]), (Skeleton,), {})()
    made: dict[str, nn.Module] = {"": root}
    for path, same_as, training, described in data["modules"]:
        if path:
            owner, _, leaf = path.rpartition(".")
            made[path] = made[same_as] if same_as is not None else _made(path, described, decoder, names)
            made[owner]._modules[leaf] = made[path]
        made[path].training = training
    values = _values(data["tensors"], state_dict, decoder)
    tensors: dict[str, torch.Tensor | None] = {}
    for name, kind, *row in data["tensors"]:
        owner, _, leaf = name.rpartition(".")
        table = made[owner]._parameters if "parameter" in (kind, *row) else made[owner]._buffers
        if kind == "none":
            table[leaf] = None
            continue
        same_as, requires_grad, _, stored = row
        if same_as is None:
            value = values[name]
            tensors[name] = nn.Parameter(value, requires_grad) if kind == "parameter" else value
        table[leaf] = tensors[name if same_as is None else same_as]  # type: ignore[assignment]
        if stored is not None and kind == "buffer":
            made[owner]._non_persistent_buffers_set.add(leaf)
    for name, value in data["attributes"]:
        owner, _, leaf = name.rpartition(".")
        made[owner].__dict__[leaf] = decoder(value)
    for module in root.modules():
        if isinstance(module, nn.RNNBase):
            restore_rnn(module)
    return root


def _values(
    rows: Sequence[Sequence[Any]], state_dict: Mapping[str, torch.Tensor], decoder: Decoder
) -> dict[str, torch.Tensor]:
    """Name → value, of the tensors that are not tied to an earlier one. One name of several for a tensor is enough.

    Raises:
        SerializeError: the state_dict lacks some, has others, or has them in other shapes.
    """
    tensors = {row[0]: row for row in rows if row[1] != "none"}
    ties: dict[str, list[str]] = {}
    for name, row in tensors.items():
        ties.setdefault(row[2] or name, []).append(name)
    values, missing, odd = {}, [], [n for n in state_dict if n not in tensors and "_extra_state" not in n]
    for first, tied in ties.items():
        stored = tensors[first][5]
        given = [state_dict[n] for n in tied if n in state_dict] if stored is None else [decoder(stored)]
        if not given:
            missing.append(first)
            continue
        if list(given[0].shape) != tensors[first][4]:
            odd.append(f"{first} of shape {list(given[0].shape)} for {tensors[first][4]}")
        if any(other is not given[0] and not equal(other, given[0]) for other in given[1:]):
            odd.append(f"{' and '.join(tied)}, which are one tensor, with two values")
        values[first] = given[0].detach().clone()
    if missing or odd:
        raise SerializeError(
            f"the state_dict does not fit: missing {missing[:3]}, unknown {odd[:3]}",
            remedy="give the state_dict of the model that was saved",
        )
    return values


def class_names(data: Mapping[str, Any]) -> list[Any]:
    """The names of the classes of the modules that `rebuild` makes."""
    return [row[3]["class"] for row in data["modules"] if row[3] is not None and "class" in row[3]]


def _made(path: str, described: Mapping[str, Any] | None, decoder: Decoder, names: Names) -> nn.Module:
    if described is None:
        return nn.Module()
    if "why_not" in described:
        raise SerializeError(
            f"{path!r} cannot be made from a state_dict: {described['why_not']}",
            remedy="fxsplit.load(folder, model) with the model itself",
        )
    kind: Any = names.find_class(described["class"], nn.Module)
    module: nn.Module = kind.__new__(kind)
    nn.Module.__init__(module)
    for key, value in described["attributes"].items():
        if key in _OWN:
            raise ValueError(f"{path}.{key} is an attribute of every module's")
        module.__dict__[key] = decoder(value)
    return module
