"""The replicas of a pipeline's stages: what each of them runs, and what its modules want to be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from ..graph.binding import rebound, use_current
from ..graph.ir import Program, Stage
from ..graph.nodes import is_within, resolve
from ..graph.place import tensors_of
from ..modules.callbacks import ReplicationContext, callbacks_of
from .copies import Tree
from .meet import copied_modules, owners_of
from .offload import Offload, Offloaded


@dataclass(frozen=True, eq=False)
class Replica:
    """What one replica of a stage runs, for the time of a call.

    Attributes:
        leaves: FQN → what autograd sees here in place of a parameter, where that is a copy.
        buffers: FQN → the buffers that the stage writes, where its replicas do not share them.
        offloaded: its parameters, where they are on the CPU.
    """

    module: fx.GraphModule
    device: torch.device
    leaves: Mapping[str, torch.Tensor] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    offloaded: Offloaded | None = None


def plain_replicas(program: Program) -> dict[int, Sequence[Replica]]:
    """Every stage once, with the model's own modules."""
    return {stage.index: [Replica(stage.module, stage.device)] for stage in program.stages}


class Company:
    """What the pipelines of one model, that of train() and that of eval(), have in common: its copies.

    Attributes:
        trees: number, device, and whether that is another device than the parameters' → the modules of such a replica; of
            number -1 those of all stages there, whose parameters are on the CPU.
        generation: how often the copies have been given up.
    """

    def __init__(self) -> None:
        self.trees: dict[tuple[int, torch.device, bool], Tree] = {}
        self.contexts: dict[int, ReplicationContext] = {}
        self.told: set[tuple[int, int]] = set()
        self.generation = 0

    def give_up(self) -> None:
        """The next call makes copies anew, and they are told anew."""
        self.trees.clear()
        self.contexts.clear()
        self.told.clear()
        self.generation += 1

    def is_current(self) -> bool:
        """Whether the model has the modules that it had when the copies were made."""
        return all(tree.is_current() for tree in self.trees.values())


class Replicas:
    """What the replicas of a pipeline's stages run, made once for all its calls.

    Replicas on the device of the parameters share the model's modules, but for those that want to be told: of these each
    replica, the first too, has copies of its own, so that the model is left as it is.
    """

    def __init__(self, model: nn.Module, program: Program, company: Company) -> None:
        self._model, self._program, self._company = model, program, company
        self._made: dict[tuple[int, int], tuple[fx.GraphModule, Tree]] = {}
        self._owners = {s.index: owners_of(model, s) for s in program.stages}
        self._always: list[tuple[Tree, nn.Module, str]] = []
        self._inside = {id(m) for owned in self._owners.values() for o in owned.values() for m in o.modules()}
        for stage in program.stages:
            for number, device in enumerate(stage.row):
                if self._owners[stage.index] or device != stage.home:
                    self._make(stage, number, device)
        # Where no replica has anything of its own, they are the same in every call.
        self._same = {s.index: [Replica(s.module, device) for device in s.row] for s in program.stages}
        self.refresh()

    def _make(self, stage: Stage, number: int, device: torch.device) -> None:
        apart = device != stage.device
        tree = self._offload(device) if stage.offloaded else self._tree(number, device, apart)
        for holder, kind, key in tensors_of(self._model, stage):
            if stage.offloaded and kind == "_parameters":
                tree.put_apart(holder, kind, key)
                continue
            # Buffers of a module that wants to be told are the master's; another copy writes to buffers of its own.
            its_own = kind == "_buffers" and number > 0 and id(holder) in self._inside
            if apart or its_own:
                tree.put_apart(holder, kind, key)
                if kind == "_buffers":
                    self._always.append((tree, holder, key))
        moved = (stage.device, device) if apart else None
        self._made[stage.index, number] = rebound(stage.module, stage.paths, tree.root, moved), tree

    def _tree(self, number: int, device: torch.device, apart: bool) -> Tree:
        trees, key = self._company.trees, (number, device, apart)
        if key not in trees:
            among = None if apart else copied_modules(self._model)
            trees[key] = Tree(self._model, device, among)
        return trees[key]

    def _offload(self, device: torch.device) -> Tree:
        trees, key = self._company.trees, (-1, device, True)
        if key not in trees:
            trees[key] = Offload(self._model, device)
        return trees[key]

    def refresh(self) -> None:
        """Let copies be what the model is now."""
        if not self._made:
            return
        written = {id(resolve(self._model, name)) for stage in self._program.stages for name in stage.writes}
        for tree in dict.fromkeys(tree for _, tree in self._made.values()):
            always = [holder._buffers[key] for other, holder, key in self._always if other is tree]
            tree.refresh([t for t in always if t is not None and id(t) in written])
        for (index, _), (module, tree) in self._made.items():
            use_current(module, self._program.stages[index].paths, tree.root)

    def tell(self) -> None:
        """Call the callbacks of copies that have not been told yet, those of the master first.

        Raises:
            BaseException: what a callback raised, with a note that names its module and the copy.
        """
        if not self._made:
            return
        most = max((len(stage.row) for stage in self._program.stages), default=0)
        for number in range(most):
            for stage in self._program.stages:
                if (stage.index, number) in self._made:
                    _, tree = self._made[stage.index, number]
                    for path, module in self._owners[stage.index].items():
                        self._tell(path, module, tree.counterpart(module), number)

    def _tell(self, path: str, module: nn.Module, copy: nn.Module, number: int) -> None:
        if (id(copy), number) in self._company.told:
            return
        context = self._company.contexts.setdefault(id(module), ReplicationContext())
        for callback in callbacks_of(module):
            try:
                callback(copy, context, number)
            except BaseException as error:
                error.add_note(f"fxsplit: in the replication callback of {path}, copy {number}")
                self._company.give_up()  # some have been told, others not
                raise
        self._company.told.add((id(copy), number))

    def now(self, parameters: Mapping[str, nn.Parameter]) -> Mapping[int, Sequence[Replica]]:
        """The replicas of each stage, as the model is now.

        Args:
            parameters: FQN → those that get gradients.
        """
        if not self._made:
            return self._same
        self.refresh()
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
            self._offloaded(stage, tree),
        )

    def _offloaded(self, stage: Stage, tree: Tree | None) -> Offloaded | None:
        if not isinstance(tree, Offload) or not stage.parameters:
            return None
        return Offloaded(tree, {fqn: resolve(self._model, fqn) for fqn in stage.parameters})

    def _travelling(self, stage: Stage, tree: Tree | None) -> dict[str, torch.Tensor]:
        if not stage.is_apart:
            return {}
        names = [n for n in stage.writes if not any(is_within(n, o) for o in self._owners[stage.index])]
        written = {name: resolve(self._model, name) for name in names}
        return {name: tensor if tree is None else tree.copy_of(tensor) for name, tensor in written.items()}
