"""What the calls of a program have in common: who makes and reads each value, and what is known of each stage."""

from __future__ import annotations

from dataclasses import dataclass

from ..graph.flow import parameter_chains
from ..graph.ir import Program, Stage
from ..graph.nodes import region_modules
from ..inserted.ops import checkpoint, transfer


@dataclass(frozen=True, eq=False)
class Role:
    """A stage, and what its actions need to know of the others.

    Attributes:
        alone: the parameters that no other stage reads.
        shared: those that others read too, and whether this stage is the first to: it owns the gradient.
        regions: whether it has any that may be computed again.
        asks: whether its code calls what fxsplit has to be told the circumstances of: `transfer` and `checkpoint`.
    """

    stage: Stage
    alone: tuple[str, ...]
    shared: tuple[tuple[str, bool], ...]
    regions: bool
    asks: bool


class Wiring:
    """Of one program.

    Attributes:
        made_by: value → the stage that gives it; arguments are -1.
        readers: value → how often it is read, by stages and by whoever gets the outputs, where it is at all.
        results: the values that are outputs.
        owners: parameter → the stage that owns its gradient.
        roles: per stage.
        writing: the stages that change buffers, or anything else that outlives a call.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.made_by = program.producers()
        self.results = frozenset(v for v in program.outputs if isinstance(v, str))
        counts = {v: len(stages) + (v in self.results) for v, stages in program.readers().items()}
        self.readers = {v: count for v, count in counts.items() if count}
        chains = parameter_chains(program)
        self.owners = {fqn: chain[0] for fqn, chain in chains.items()}
        self.writing = [s.index for s in program.stages if s.writes or s.stateful]
        self.roles = [
            Role(
                stage,
                tuple(fqn for fqn in stage.parameters if len(chains[fqn]) == 1),
                tuple(
                    (fqn, chains[fqn][0] == stage.index) for fqn in stage.parameters if len(chains[fqn]) > 1
                ),
                any(True for _ in region_modules(stage.module)),
                _asks(stage),
            )
            for stage in program.stages
        ]


def _asks(stage: Stage) -> bool:
    graphs = [stage.module.graph, *(region.graph for region in region_modules(stage.module))]
    return any(node.target in (checkpoint, transfer) for graph in graphs for node in graph.nodes)
