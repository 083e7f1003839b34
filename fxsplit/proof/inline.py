"""The stages of a program, put back into one graph."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from ..graph.ir import Program, Stage
from ..graph.nodes import enters, leaves
from ..inserted.ops import checkpoint, transfer


def inline(program: Program) -> fx.Graph:
    """Put the stages back into one graph, without transfer and checkpoint nodes, under the model's FQNs.

    ``node.meta["of"]`` is the stage and the name that a node has there.
    """
    graph = fx.Graph()
    stages = {f"stage_{s.index}": s for s in program.stages}
    contexts: list[fx.Node] = []  # that are open, outermost first

    def splice(module: fx.GraphModule, values: list[Any], stage: Stage | None) -> Any:
        env: dict[fx.Node, Any] = {}
        operands = iter(values)
        opened = iter(list(contexts))  # what this stage enters again
        for node in module.graph.nodes:
            arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
            args = arguments[0]
            if node.op == "placeholder":
                env[node] = next(operands)
            elif node.op == "output":
                return args[0]
            elif node.op == "call_module" and stage is None:
                called = stages[str(node.target)]
                env[node] = splice(called.module, list(args), called)
            elif node.meta.get("again") and node.op == "call_method":
                env[node] = None
            elif node.meta.get("again"):
                env[node] = next(opened, None)
            elif node.target is transfer:
                env[node] = args[0]
            elif node.op == "get_attr" and isinstance(
                getattr(module, str(node.target), None), fx.GraphModule
            ):
                env[node] = getattr(module, str(node.target))
            elif node.target is checkpoint:
                env[node] = splice(args[0], list(args[1:]), stage)
            elif node.target is operator.getitem and isinstance(args[0], tuple) and isinstance(args[1], int):
                env[node] = args[0][args[1]]
            else:
                copy = graph.node_copy(node, lambda n: env[n])
                if stage is not None and node.op in ("call_module", "get_attr"):
                    copy.target = stage.paths.get(str(node.target), str(node.target))
                if stage is not None:
                    copy.meta["of"] = stage.index, node.name
                env[node] = copy
                entered, left = enters(copy), leaves(copy)
                if entered is not None:
                    contexts.append(entered)
                elif left is not None and left in contexts:
                    contexts.remove(left)
        raise AssertionError("a graph without output")

    inputs = [graph.placeholder(name) for name in program.inputs]
    graph.output(splice(program.root, inputs, None))
    return graph
