"""Whether the model is still the one that was compiled, and its current tensors for the generated code."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import ArgumentError
from ..graph import is_within
from ..ir import Program, Traced
from ..rebind import layout, use_current
from ..replication import on_replicate_of


class Watch:
    """Notices what is not what it was."""

    def __init__(self, model: nn.Module, traced: Traced, program: Program) -> None:
        self._model, self._program = model, program
        # The modules whose forward is not called: it was written into the graph.
        whole = {str(n.target) for n in traced.graph.nodes if n.op == "call_module"}
        modules = list(model.named_modules())
        self._inlined = [(path, m) for path, m in modules if not any(is_within(path, w) for w in whole)]
        self._told = [(path, m, len(on_replicate_of(m))) for path, m in modules]
        self._names = layout(model)
        self._seen: list[tuple[dict[str, Any], str, Any]] = []

    def use_current_modules(self) -> None:
        """Stages see what is in the model now: ``.to(dtype)`` and ``load_state_dict(assign=True)`` replace tensors.

        Raises:
            ArgumentError: modules or ties are others than when the pipeline was compiled, a module that was inlined
                has got a hook, or any a replication callback.
        """
        for path, module in self._inlined:
            if path and (module._forward_hooks or module._forward_pre_hooks):
                raise ArgumentError(f"{path} got a hook after compile", remedy="compile again")
        for path, module, count in self._told:
            if len(on_replicate_of(module)) > count:
                name = path or type(module).__name__
                raise ArgumentError(
                    f"{name} got a replication callback after compile", remedy="compile again"
                )
        if self._seen and all(table.get(key) is value for table, key, value in self._seen):
            return
        now = layout(self._model)
        if now != self._names:
            before, after = [[*names[0], *names[1]] for names in (self._names, now)]
            odd = [n for n in before if n not in after] + [n for n in after if n not in before]
            raise ArgumentError(
                f"the model's modules or shared parameters are others than when it was compiled, first at {odd[:1]}",
                remedy="compile again",
            )
        for stage in self._program.stages:
            use_current(stage.module, stage.paths, self._model)
        self._seen = [
            (table, key, value)
            for module in self._model.modules()
            for table in (module._modules, module._parameters, module._buffers)
            for key, value in table.items()
        ]
