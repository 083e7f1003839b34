"""What ties generated code to a model: bind it to another one, and notice when the model is another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from .nodes import ModuleMode, bind, region_modules, resolve


def rebound(
    module: fx.GraphModule,
    paths: Mapping[str, str],
    model: nn.Module,
    moved: tuple[torch.device, torch.device] | None = None,
) -> fx.GraphModule:
    """The same graph over the objects of another model.

    Args:
        paths: name in the code → FQN in the model.
        moved: a device in the code, and the one that stands for it in the result.
    """
    attributes: dict[str, Any] = {}
    for node in module.graph.nodes:
        if node.op not in ("call_module", "get_attr"):
            continue
        name = str(node.target)
        child = getattr(module, name, None) if "." not in name else None
        if node.op == "get_attr" and isinstance(child, fx.GraphModule) and name not in paths:
            attributes[name] = rebound(child, paths, model, moved)
        else:
            try:
                attributes[name] = resolve(model, paths.get(name, name))
            except AttributeError:  # a constant that the tracer found
                attributes[name] = _constant(child, model, moved)
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    if moved is not None:
        _move(graph, *moved)
    result = bind(graph, attributes, type(module).__name__)
    result.meta.update(module.meta)
    return result


def _constant(value: Any, model: nn.Module, moved: tuple[torch.device, torch.device] | None) -> Any:
    if isinstance(value, ModuleMode):
        return ModuleMode(value.path, resolve(model, value.path))
    return value.to(moved[1]) if moved is not None and isinstance(value, torch.Tensor) else value


def _move(graph: fx.Graph, old: torch.device, new: torch.device) -> None:
    def follow(value: Any) -> Any:
        return new if isinstance(value, torch.device) and value == old else value

    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, follow)
        node.kwargs = fx.node.map_aggregate(node.kwargs, follow)


def use_current(module: fx.GraphModule, paths: Mapping[str, str], model: nn.Module) -> None:
    """Let generated code see what is in the model now: tensors and modules that have been replaced since."""
    holders = [module, *region_modules(module)]
    for name, fqn in paths.items():
        current = resolve(model, fqn)
        for holder in holders:
            for table in (holder._modules, holder._parameters, holder._buffers):
                if name in table and table[name] is not current:
                    table[name] = current
