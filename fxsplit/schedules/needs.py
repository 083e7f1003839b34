"""What has to be done before an action may start."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..actions import Action, Needs
from ..ir import Program


def dependencies(
    program: Program, *, in_turn: frozenset[int], again_in_turn: frozenset[int] = frozenset()
) -> Needs:
    """What has to be done before an action may start.

    A forward needs the stages that give its inputs. Gradients of a value travel from its last reader to the
    one before and so on to the stage that gave it, so that they are added in the order in which autograd adds
    them in the unsplit model; the same holds for a parameter that several stages read. A backward therefore
    needs its own forward and, for every value and shared parameter, the next stage in that chain.

    Args:
        in_turn: stages that have to go forward with their micro-batches one after the other, in order.
        again_in_turn: and backward, because they go forward again then.
    """
    made_by, readers = program.producers(), program.readers()
    chains = [(made_by[v], *readers[v]) for v in made_by if made_by[v] >= 0]
    one_way: list[Sequence[int]] = [readers[v] for v in made_by if made_by[v] < 0]
    one_way += list(parameter_chains(program).values())
    one_way += _chains_of_aliases(program, made_by, readers)
    return needs_of(len(program.stages), chains, one_way, in_turn=in_turn, again_in_turn=again_in_turn)


def _chains_of_aliases(
    program: Program, made_by: Mapping[str, int], readers: Mapping[str, Sequence[int]]
) -> list[list[int]]:
    """Where one tensor crosses cuts under several names, the stages that read any of them."""
    groups: dict[str, set[int]] = {}
    for name, first in program.aliases.items():
        groups.setdefault(first, {*readers.get(first, ())}).update(readers.get(name, ()))
    return [[s for s in (made_by[first], *sorted(group)) if s >= 0] for first, group in groups.items()]


def turns_of(
    program: Program, checkpoint: Any, rounds: Mapping[int, int]
) -> tuple[frozenset[int], frozenset[int]]:
    """The stages that go forward in the order of micro-batches, and those that go backward in it, by their state.

    Args:
        rounds: stage → how many of its micro-batches meet: they take no turns.
    """
    writing = frozenset(s.index for s in program.stages if s.writes and s.index not in rounds)
    stateful = frozenset(s.index for s in program.stages if s.stateful and s.index not in rounds)
    return writing | stateful, writing if checkpoint != "never" else frozenset()


def members(action: Action, rounds: Mapping[int, int]) -> list[Action]:
    """The same action of all micro-batches that meet with this one, itself among them.

    Args:
        rounds: stage → how many micro-batches meet there, one after the other.
    """
    size = rounds.get(action.stage, 1)
    first = action.micro_batch // size * size
    return [action._replace(micro_batch=i) for i in range(first, first + size)]


def together(needs: Needs, rounds: Mapping[int, int]) -> Needs:
    """Where micro-batches meet, each needs what any of them needs."""
    if not rounds:
        return needs

    def joint(action: Action) -> list[Action]:
        everybody = members(action, rounds)
        before = dict.fromkeys(n for member in everybody for n in needs(member))
        return [n for n in before if n not in everybody]

    return joint


def step_needs(program: Program, checkpoint: Any, rounds: Mapping[int, int] | None = None) -> Needs:
    """The same with the loss inside: it is computed before the last stage goes backward, and needs all outputs."""
    rounds = rounds or {}
    in_turn, again_in_turn = turns_of(program, checkpoint, rounds)
    base = dependencies(program, in_turn=in_turn, again_in_turn=again_in_turn)
    made_by, last = program.producers(), program.stages[-1].index
    makers = sorted({made_by[v] for v in program.outputs if isinstance(v, str)} - {-1, last})

    def needs(action: Action) -> list[Action]:
        kind, stage, i = action
        before = list(base(action))
        if kind in ("B", "I"):
            before += (
                [Action(kind, last, i)] if stage != last else [Action("F", maker, i) for maker in makers]
            )
        return before

    return together(needs, rounds)


def needs_of(
    stages: int,
    values: Iterable[Sequence[int]],
    gradients: Iterable[Sequence[int]] = (),
    *,
    in_turn: frozenset[int] = frozenset(),
    again_in_turn: frozenset[int] = frozenset(),
) -> Needs:
    """The same for stages of which no more is known than what travels between them.

    Args:
        stages: how many there are.
        values: for each value that travels, the stage that makes it and those that read it, in order.
        gradients: for each argument and parameter, the stages that read it, in order.
    """
    forward: list[set[int]] = [set() for _ in range(stages)]
    backward: list[set[int]] = [set() for _ in range(stages)]
    values = list(values)
    for maker, *reading in values:
        for reader in reading:
            forward[reader].add(maker)
    for chain in [*values, *gradients]:
        for earlier, later in itertools.pairwise(chain):
            backward[earlier].add(later)

    def needs(action: Action) -> list[Action]:
        kind, stage, i = action
        if kind == "W":
            return [Action("I", stage, i)]
        before = [Action("F", stage, i)] if kind != "F" else []
        before += [Action(kind, s, i) for s in sorted(forward[stage] if kind == "F" else backward[stage])]
        if i > 0 and stage in (in_turn if kind == "F" else again_in_turn):
            before.append(Action(kind, stage, i - 1))
        return before

    return needs


def parameter_chains(program: Program) -> dict[str, list[int]]:
    """Parameter FQN → the stages that read it, in execution order; the first one owns its gradient."""
    chains: dict[str, list[int]] = {}
    for stage in program.stages:
        for fqn in stage.parameters:
            chains.setdefault(fqn, []).append(stage.index)
    return chains
