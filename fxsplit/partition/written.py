"""A device for every node → the shortest ``{module path: device}`` map that says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx, nn

from ..errors import PartitionError
from ..graph.ir import Assignment, Traced
from ..graph.nodes import compute_nodes, is_within
from ..inserted.ops import call_with
from .device_map import place_nodes
from .weights import tensors_of


def fewest_keys(placed: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The shortest map that sends each of these paths to its device.

    Args:
        placed: (path, device); a path may come several times. What lies at a module whose inside is on several
            devices gets no key.
    """
    rows = list(placed)
    found: dict[str, str] = {}

    def name(prefix: str, inside: list[tuple[str, str]]) -> None:
        if len({device for _, device in inside}) == 1:
            found[prefix] = inside[0][1]
            return
        children: dict[str, list[tuple[str, str]]] = {}
        for path, device in inside:
            rest = path[len(prefix) :].lstrip(".")
            if rest:
                child = f"{prefix}.{rest.partition('.')[0]}" if prefix else rest.partition(".")[0]
                children.setdefault(child, []).append((path, device))
        for child, below in children.items():
            name(child, below)

    if rows:
        name("", rows)
    return found


def written_as_map(model: nn.Module, traced: Traced, assignment: Assignment) -> dict[str, str] | str:
    """The device map that gives every node the device that it has, or why there is none."""
    stage_of = assignment.stage_of()
    devices = {name: assignment.devices[stage] for name, stage in stage_of.items()}
    if len(set(devices.values())) <= 1:
        return {"": str(assignment.devices[0])}
    nodes = compute_nodes(traced.graph)
    whole = [
        traced.facts[n.name].module_path for n in nodes if n.op == "call_module" or n.target is call_with
    ]
    named = [(_named_path(traced, node, whole), str(devices[node.name])) for node in nodes]
    every = fewest_keys((path, device) for path, device in named if path is not None)
    tensors = tensors_of(model)
    holding = {key: every[key] for key in every if any(is_within(name, key) for name in tensors)}
    # Modules without weights follow their operands or readers in most programs.
    found, odd = _completed(model, traced, holding, devices)
    if odd is None:
        return found
    path = traced.facts[odd.name].module_path or type(model).__name__
    source = traced.facts[odd.name].source
    return (
        f"{path!r} itself runs on several devices, at {odd.name} ({source.short if source else 'of no line'})"
    )


def _completed(
    model: nn.Module, traced: Traced, start: Mapping[str, str], devices: Mapping[str, torch.device]
) -> tuple[dict[str, str], fx.Node | None]:
    """The map with the keys that it lacks, and a node that is on another device all the same."""
    nodes = compute_nodes(traced.graph)
    known = {*tensors_of(model), *(path for path, _ in model.named_modules())}
    found = dict(start)
    while True:
        try:
            placed = place_nodes(model, traced, found)
        except PartitionError:
            placed = {}
        wrong = [node for node in nodes if placed.get(node.name) != devices[node.name]]
        named = ((key, node) for node in wrong for key in _own_keys(traced, node, devices))
        missing = next(((key, node) for key, node in named if key in known and key not in found), None)
        if missing is None:
            return found, wrong[0] if wrong else None
        found[missing[0]] = str(devices[missing[1].name])


def _own_keys(traced: Traced, node: fx.Node, devices: Mapping[str, torch.device]) -> list[str]:
    """Its module, where all that this runs itself is on one device, or else the tensors that it reads."""
    path = traced.facts[node.name].module_path
    if len({device for name, device in devices.items() if traced.facts[name].module_path == path}) == 1:
        return [path]
    return [str(n.target) for n in (node, *node.all_input_nodes) if n.op == "get_attr"]


def _named_path(traced: Traced, node: fx.Node, whole: Sequence[str]) -> str | None:
    """The path under which a map can name the node; None for a tensor that a module which runs itself owns."""
    if node.op != "get_attr":
        return traced.facts[node.name].module_path
    target = str(node.target)
    return None if any(is_within(target, path) for path in whole) else target
