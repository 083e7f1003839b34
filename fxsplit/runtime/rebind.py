"""What ties generated code to a model: bind it to another one, and notice when the model is another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from ..graph import ModuleMode, bind, resolve


def rebound(
    module: fx.GraphModule, paths: Mapping[str, str], model: nn.Module, constants: nn.Module
) -> fx.GraphModule:
    """The same graph over the objects of another model."""
    attributes: dict[str, Any] = {}
    for node in module.graph.nodes:
        if node.op not in ("call_module", "get_attr"):
            continue
        name = str(node.target)
        child = getattr(module, name, None) if "." not in name else None
        if node.op == "get_attr" and isinstance(child, fx.GraphModule) and name not in paths:
            attributes[name] = rebound(child, paths, model, constants)
        else:
            fqn = paths.get(name, name)
            try:
                attributes[name] = resolve(model, fqn)
            except AttributeError:  # a constant that the tracer found
                constant = getattr(constants, fqn)
                is_mode = isinstance(constant, ModuleMode)
                attributes[name] = (
                    ModuleMode(constant.path, resolve(model, constant.path)) if is_mode else constant
                )
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    result = bind(graph, attributes, type(module).__name__)
    result.meta.update(module.meta)
    return result


def layout(model: nn.Module) -> tuple[list[str], list[str]]:
    """Module paths with their classes, and parameter names without ties: what a compiled graph relies on."""
    modules = [f"{path} ({type(module).__qualname__})" for path, module in model.named_modules()]
    return modules, [name for name, _ in model.named_parameters()]
