"""``{module path: device}`` → a device for every node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from ..errors import PartitionError, did_you_mean
from ..graph.ir import Traced
from ..graph.nodes import compute_nodes, is_within, output_values
from ..inserted.ops import call_with
from .weights import tensors_of

Pair = tuple[torch.device, torch.device]


def check_device_map(model: nn.Module, device_map: Mapping[str, str | tuple[str, str]]) -> dict[str, Pair]:
    """The map with every key checked against the model and every value as (device, output device).

    A key may be any alias of a shared module; the first name of the module is used.

    Raises:
        PartitionError: a key is not a module, parameter or buffer of the model, or two aliases of one module
            are sent to different devices.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors = tensors_of(model)
    first_name = {id(module): name for name, module in model.named_modules()}
    resolved: dict[str, Pair] = {}
    spelled: dict[str, str] = {}
    for key, value in device_map.items():
        if key not in modules and key not in tensors:
            raise PartitionError(
                f"device_map names {key!r}, which {type(model).__name__} does not have",
                remedy=_remedy(key, [*modules, *tensors]),
            )
        device, output = (value, value) if isinstance(value, str) else value
        pair = (torch.device(device), torch.device(output))
        if key in modules:
            name = first_name[id(modules[key])]
        else:
            owner, _, leaf = key.rpartition(".")
            name = ".".join(filter(None, [first_name[id(modules[owner])], leaf]))
        if name in resolved and resolved[name] != pair:
            raise PartitionError(
                f"device_map sends one {'module' if key in modules else 'tensor'} to two devices: "
                f"{spelled[name]!r} to {_shown(resolved[name])}, its alias {key!r} to {_shown(pair)}",
                remedy=f"name only one of {spelled[name]!r} and {key!r}",
            )
        resolved[name], spelled[name] = pair, key
    return resolved


def output_homes(
    model: nn.Module, traced: Traced, device_map: Mapping[str, Any] | str
) -> dict[str, torch.device]:
    """The outputs of the model that a pair sends to another device: value → that device.

    A value that leaves the model leaves every module that made it, and goes where the outermost pair says.
    """
    if isinstance(device_map, str) or not any(isinstance(value, tuple) for value in device_map.values()):
        return {}
    modules = dict(model.named_modules(remove_duplicate=False))
    first_name = {id(module): name for name, module in model.named_modules()}
    pairs = {
        first_name[id(modules[key])] if key in modules else key: (
            torch.device(value[0]),
            torch.device(value[1]),
        )
        for key, value in device_map.items()
        if isinstance(value, tuple)
    }
    found = {}
    for value in output_values(traced.graph):
        if isinstance(value, fx.Node) and value.op != "placeholder":
            read = [str(n.target) for n in (value, *value.all_input_nodes) if n.op == "get_attr"]
            keys = [k for k in pairs if k in read or is_within(traced.facts[value.name].module_path, k)]
            if keys:
                found[value.name] = pairs[min(keys, key=len)][1]
    return found


def said_homes(model: nn.Module, device_map: object) -> dict[str, torch.device]:
    """The parameters that keys of a map name themselves, under any of their names, where these agree: → device."""
    if not isinstance(device_map, Mapping):
        return {}
    named = dict(model.named_parameters(remove_duplicate=False))
    first = {id(p): name for name, p in model.named_parameters()}
    said: dict[str, set[str]] = {}
    for key, value in device_map.items():
        if key in named:
            said.setdefault(first[id(named[key])], set()).add(value[0] if isinstance(value, tuple) else value)
    return {name: torch.device(*devices) for name, devices in said.items() if len(devices) == 1}


def _shown(pair: Pair) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"({pair[0]}, {pair[1]})"


def _remedy(key: str, known: list[str]) -> str:
    bare = key.strip(".").removeprefix("module.")
    if bare != key and bare in known:
        why = (
            "DataParallel's prefix is no part of it"
            if key.startswith("module.")
            else "without dots at its ends"
        )
        return f"{bare!r}: the path as model.named_modules() gives it, {why}"
    return did_you_mean(key, known)


def place_nodes(
    model: nn.Module, traced: Traced, device_map: Mapping[str, str | tuple[str, str]]
) -> dict[str, torch.device]:
    """A device for every node of the graph.

    The deepest key that holds the node's module decides; a key that names a parameter or buffer decides for what
    reads it. A node that no key holds follows the operand that was computed last (on the output device of the
    outermost pair that holds that one), without operands its first reader, and without readers the node before it.

    Raises:
        PartitionError: see `check_device_map`; or a parameter has no device, or tensors that one node reads have
            different ones.
    """
    pairs = check_device_map(model, device_map)
    facts = traced.facts
    placed: dict[str, torch.device] = {}
    leaves: dict[str, torch.device] = {}  # device of the value, as seen outside of the module that made it
    nodes = compute_nodes(traced.graph)
    order = {node: i for i, node in enumerate(nodes)}
    for node in nodes:
        if "home" in node.meta:
            placed[node.name] = leaves[node.name] = node.meta["home"]
            continue
        key = _key_of(model, traced, node, pairs)
        if key is None and node.op != "get_attr":
            operands = [n for n in node.all_input_nodes if n.name in leaves]
            if operands:
                placed[node.name] = leaves[node.name] = leaves[max(operands, key=order.__getitem__).name]
        elif key is not None:
            held = [k for k in pairs if k == key or is_within(facts[node.name].module_path, k)]
            sent = [pairs[k][1] for k in sorted(held, key=len) if pairs[k][0] != pairs[k][1]]
            placed[node.name] = pairs[key][0]
            leaves[node.name] = sent[0] if sent else pairs[key][0]
    for node in reversed(nodes):
        if node.name not in placed and not (node.op == "call_module" and facts[node.name].parameters):
            readers = [placed[user.name] for user in node.users if user.name in placed]
            placed.update((node.name, device) for device in readers[:1])
    left = [node for node in nodes if node.name not in placed]
    homeless = next((node for node in left if facts[node.name].parameters or not placed), None)
    if homeless is not None:
        path = facts[homeless.name].module_path
        name = (
            path
            if homeless.op == "call_module"
            else homeless.target
            if homeless.op == "get_attr"
            else homeless
        )
        raise PartitionError(
            f"device_map gives no device to {str(name)!r}",
            where=str(facts[homeless.name].source or "") or None,
            remedy='add its path, or "" for everything that is not named',
        )
    for node in left:
        before = [placed[n.name] for n in nodes[: order[node]] if n.name in placed]
        placed[node.name] = before[-1] if before else next(iter(placed.values()))
    for node in nodes:
        if node.op == "get_attr" and "home" not in node.meta:  # a parameter goes where it is read
            readers = [placed[user.name] for user in node.users if user.name in placed]
            placed.update((node.name, device) for device in readers[:1])
    return placed


def _key_of(model: nn.Module, traced: Traced, node: fx.Node, pairs: Mapping[str, Pair]) -> str | None:
    """The key that decides where `node` runs."""
    if node.op == "get_attr":
        return _deepest_key(str(node.target), pairs)
    path = traced.facts[node.name].module_path
    key = _deepest_key(path, pairs)
    if node.op == "call_module" or node.target is call_with:
        inside = any(k != path and is_within(k, path) for k in pairs)
        read = [f"{path}.{name}" for name in tensors_of(model.get_submodule(path))] if inside else []
        found = {name: _deepest_key(name, pairs) for name in read}
    else:
        operands = [n for n in node.all_input_nodes if n.op == "get_attr" and not n.meta.get("shared")]
        read = [str(n.target) for n in operands]
        found = {name: name for name in read if name in pairs and len(name) > len(key or "")}
    named = [(name, k) for name, k in found.items() if k is not None]
    for name, k in named[1:]:
        if pairs[k] != pairs[named[0][1]]:
            raise PartitionError(
                f"device_map sends {named[0][0]!r} to {_shown(pairs[named[0][1]])} and {name!r} to "
                f"{_shown(pairs[k])}, but {node.name!r} reads both and runs as one",
                where=str(traced.facts[node.name].source or "") or None,
                remedy=f"send both to one device{f', or name {path!r}' if path else ''}",
            )
    return named[0][1] if named else key


def _deepest_key(path: str, pairs: Mapping[str, Pair]) -> str | None:
    return max((key for key in pairs if is_within(path, key)), key=len, default=None)
