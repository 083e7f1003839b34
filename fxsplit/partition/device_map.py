"""``{module path: device}`` → a device for every node."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..errors import PartitionError, did_you_mean
from ..graph import compute_nodes, is_within
from ..ir import Traced

Pair = tuple[torch.device, torch.device]


def check_device_map(model: nn.Module, device_map: Mapping[str, str | tuple[str, str]]) -> dict[str, Pair]:
    """The map with every key checked against the model and every value as (device, output device).

    A key may be any alias of a shared module; the first name of the module is used.

    Raises:
        PartitionError: a key is not a module, parameter or buffer of the model, or two aliases of one module
            are sent to different devices.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    first_name = {id(module): name for name, module in model.named_modules()}
    resolved: dict[str, Pair] = {}
    spelled: dict[str, str] = {}
    for key, value in device_map.items():
        if key not in modules and key not in tensors:
            raise PartitionError(
                f"device_map names {key!r}, which {type(model).__name__} does not have",
                remedy=did_you_mean(key, [*modules, *tensors]),
            )
        device, output = (value, value) if isinstance(value, str) else value
        pair = (torch.device(device), torch.device(output))
        name = first_name[id(modules[key])] if key in modules else key
        if name in resolved and resolved[name] != pair:
            raise PartitionError(
                f"device_map sends one module to two devices: {spelled[name]!r} to {resolved[name][0]}, "
                f"its alias {key!r} to {pair[0]}",
                remedy=f"name only one of {spelled[name]!r} and {key!r}",
            )
        resolved[name], spelled[name] = pair, key
    return resolved


def place_nodes(
    model: nn.Module, traced: Traced, device_map: Mapping[str, str | tuple[str, str]]
) -> dict[str, torch.device]:
    """A device for every node of the graph.

    The deepest key that holds the node's module decides. A node that no key holds follows the last of its
    operands (on its output device, where a pair was given), and, without operands, its first reader.

    Raises:
        PartitionError: see `check_device_map`; or a parameter has no device.
    """
    pairs = check_device_map(model, device_map)
    facts = traced.facts
    placed: dict[str, torch.device] = {}
    leaves: dict[str, torch.device] = {}  # device of the value, as seen outside of the module that made it
    nodes = compute_nodes(traced.graph)
    for node in nodes:
        path = str(node.target) if node.op == "get_attr" else facts[node.name].module_path
        key = _deepest_key(path, pairs)
        if key is None and node.op != "get_attr":
            operands = [n.name for n in node.all_input_nodes if n.name in leaves]
            if operands:
                placed[node.name] = leaves[node.name] = leaves[operands[-1]]
        elif key is not None:
            placed[node.name], leaves[node.name] = pairs[key]
    for node in reversed(nodes):
        if node.name not in placed and not (node.op == "call_module" and facts[node.name].parameters):
            readers = [placed[user.name] for user in node.users if user.name in placed]
            placed.update((node.name, device) for device in readers[:1])
    left = [node for node in nodes if node.name not in placed]
    if left:
        homeless = next((node for node in left if facts[node.name].parameters), left[0])
        path = facts[homeless.name].module_path
        raise PartitionError(
            f"device_map gives no device to {(path if homeless.op == 'call_module' else homeless.name)!r}",
            where=str(facts[homeless.name].source or "") or None,
            remedy='add its path, or "" for everything that is not named',
        )
    for node in nodes:
        if node.op == "get_attr":  # a parameter goes where it is read
            readers = [placed[user.name] for user in node.users if user.name in placed]
            placed.update((node.name, device) for device in readers[:1])
    return placed


def _deepest_key(path: str, pairs: Mapping[str, Pair]) -> str | None:
    return max((key for key in pairs if is_within(path, key)), key=len, default=None)
