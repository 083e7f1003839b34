"""What travels between the stages of a program: values forward, and gradients back along their readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..plan.checkpoint import Checkpoint
from ..schedules.lower import Flow
from ..schedules.ranks import Routes
from .effects import statistics
from .ir import Program, Stage
from .nodes import region_modules


def flow_of(program: Program, checkpoint: Checkpoint) -> Flow:
    """What travels between the stages of a program.

    Args:
        checkpoint: the plan's policy: what writes to buffers writes again where it is computed again.
    """
    made_by, readers = program.producers(), program.readers()
    writing = frozenset(s.index for s in program.stages if s.writes)
    return Flow(
        len(program.stages),
        [(made_by[v], *readers[v]) for v in made_by if made_by[v] >= 0],
        [
            *(readers[v] for v in made_by if made_by[v] < 0),
            *parameter_chains(program).values(),
            *_chains_of_aliases(program, made_by, readers),
        ],
        outputs=frozenset(made_by[v] for v in program.outputs if isinstance(v, str)) - {-1},
        in_turn=writing | {s.index for s in program.stages if s.stateful},
        again_in_turn=writing if checkpoint.anything else frozenset(),
        read_back=frozenset(s.index for s in program.stages if _may_read_back(s)),
    )


def routes_of(program: Program) -> Routes:
    """The ways of values and gradients between the stages of a program, by name."""
    made_by, readers = program.producers(), program.readers()
    aliases = {first: first for first in program.aliases.values()}
    groups = zip(aliases, _chains_of_aliases(program, made_by, readers), strict=True)
    return Routes(
        {v: (made_by[v], *readers[v]) for v in made_by},
        len(program.stages) - 1,
        {fqn: chain for fqn, chain in parameter_chains(program).items() if len(chain) > 1},
        dict(groups),
        frozenset(v for v in program.outputs if isinstance(v, str)),
    )


def _may_read_back(stage: Stage) -> bool:
    """Whether its backward may read what its forward writes; it never reads running statistics that forward wrote."""
    written = {
        ".".join([stage.paths[name], *rest])
        for graph_module in (stage.module, *region_modules(stage.module))
        for name, *rest in statistics(graph_module)
    }
    return stage.stateful or not written.issuperset(stage.writes)


def parameter_chains(program: Program) -> dict[str, list[int]]:
    """Parameter FQN → the stages that read it, in execution order; the first one owns its gradient."""
    chains: dict[str, list[int]] = {}
    for stage in program.stages:
        for fqn in stage.parameters:
            chains.setdefault(fqn, []).append(stage.index)
    return chains


def _chains_of_aliases(
    program: Program, made_by: Mapping[str, int], readers: Mapping[str, Sequence[int]]
) -> list[list[int]]:
    """Where one tensor crosses cuts under several names, the stages that read any of them."""
    groups: dict[str, set[int]] = {}
    for name, first in program.aliases.items():
        groups.setdefault(first, {*readers.get(first, ())}).update(readers.get(name, ()))
    return [[s for s in (made_by[first], *sorted(group)) if s >= 0] for first, group in groups.items()]
