"""The replicas of a pipeline's stages: what each of them runs, and what its modules want to be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from ..graph import is_within, resolve
from ..ir import Program, Stage
from ..place import tensors_of
from ..rebind import rebound, use_current
from ..replication import ReplicationContext, callbacks_of
from .copies import Tree
from .meet import owners_of


@dataclass(frozen=True, eq=False)
class Replica:
    """What one replica of a stage runs, for the time of a call.

    Attributes:
        leaves: FQN → what autograd sees here in place of a parameter, where that is a copy.
        buffers: FQN → the buffers that the stage writes, where its replicas do not share them.
    """

    module: fx.GraphModule
    device: torch.device
    leaves: Mapping[str, torch.Tensor] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)


def plain_replicas(program: Program) -> dict[int, Sequence[Replica]]:
    """Every stage once, with the model's own modules."""
    return {stage.index: [Replica(stage.module, stage.device)] for stage in program.stages}


class Replicas:
    """Made once, for all calls of a pipeline; callbacks are called then, the master's first.

    Replicas on the device of the parameters share the model's modules, unless those want to be told: then each replica,
    the first too, has modules of its own, so that the model is left as it is.

    Raises:
        BaseException: what a callback raised, with a note that names its module and the copy.
    """

    def __init__(self, model: nn.Module, program: Program) -> None:
        self._model, self._program = model, program
        self._trees: dict[tuple[int, torch.device], Tree] = {}
        self._made: dict[tuple[int, int], tuple[fx.GraphModule, Tree]] = {}
        self._owners = {s.index: owners_of(model, s) for s in program.stages}
        self._always: list[tuple[Tree, nn.Module, str]] = []
        for stage in program.stages:
            for number, device in enumerate(stage.row):
                if self._owners[stage.index] or device != stage.device:
                    self._make(stage, number, device)
        self._refresh()
        self._tell()

    @property
    def own_modules(self) -> bool:
        """Whether any replica has modules of its own."""
        return bool(self._made)

    def _make(self, stage: Stage, number: int, device: torch.device) -> None:
        tree = self._trees.get((number, device)) or Tree(self._model, device)
        self._trees[number, device] = tree
        inside = [id(m) for owner in self._owners[stage.index].values() for m in owner.modules()]
        for holder, kind, key in tensors_of(self._model, stage):
            elsewhere = device != stage.device
            # Buffers of such a module are the master's; another copy writes to buffers of its own.
            its_own = kind == "_buffers" and number > 0 and id(holder) in inside
            if elsewhere or its_own:
                tree.put_apart(holder, kind, key)
            if kind == "_buffers" and (its_own or elsewhere):
                self._always.append((tree, holder, key))
        moved = (stage.device, device) if device != stage.device else None
        self._made[stage.index, number] = rebound(stage.module, stage.paths, tree.root, moved), tree

    def _refresh(self) -> None:
        if not self._trees:
            return
        written = {id(resolve(self._model, name)) for stage in self._program.stages for name in stage.writes}
        for tree in self._trees.values():
            always = [holder._buffers[key] for other, holder, key in self._always if other is tree]
            tree.refresh([t for t in always if t is not None and id(t) in written])
        for (index, _), (module, tree) in self._made.items():
            use_current(module, self._program.stages[index].paths, tree.root)

    def _tell(self) -> None:
        contexts: dict[int, ReplicationContext] = {}
        told: set[tuple[int, int]] = set()
        most = max((len(stage.row) for stage in self._program.stages), default=0)
        for number in range(most):
            for stage in self._program.stages:
                if (stage.index, number) not in self._made:
                    continue
                _, tree = self._made[stage.index, number]
                for path, module in self._owners[stage.index].items():
                    copy = tree.counterpart(module)
                    if (id(copy), number) in told:
                        continue
                    told.add((id(copy), number))
                    context = contexts.setdefault(id(module), ReplicationContext())
                    for callback in callbacks_of(module):
                        try:
                            callback(copy, context, number)
                        except BaseException as error:
                            error.add_note(f"fxsplit: in the replication callback of {path}, copy {number}")
                            raise

    def now(self, parameters: Mapping[str, nn.Parameter]) -> dict[int, Sequence[Replica]]:
        """The replicas of each stage, as the model is now.

        Args:
            parameters: FQN → those that get gradients.
        """
        self._refresh()
        stages = self._program.stages
        return {s.index: [self._replica(s, n, parameters) for n in range(len(s.row))] for s in stages}

    def _replica(self, stage: Stage, number: int, parameters: Mapping[str, nn.Parameter]) -> Replica:
        if (stage.index, number) not in self._made:
            module, tree = stage.module, None
        else:
            module, tree = self._made[stage.index, number]
        return Replica(
            module,
            stage.row[number],
            {
                fqn: tree.copy_of(parameters[fqn])
                for fqn in stage.parameters
                if tree is not None
                and fqn in parameters
                and tree.copy_of(parameters[fqn]) is not parameters[fqn]
            },
            self._travelling(stage, tree),
        )

    def _travelling(self, stage: Stage, tree: Tree | None) -> dict[str, torch.Tensor]:
        if not stage.is_apart:
            return {}
        names = [n for n in stage.writes if not any(is_within(n, o) for o in self._owners[stage.index])]
        written = {name: resolve(self._model, name) for name in names}
        return {name: tensor if tree is None else tree.copy_of(tensor) for name, tensor in written.items()}
