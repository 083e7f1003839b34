"""`simulate`: many ways to run a step, from costs alone, and which of them is the fastest that fits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate

from ..arguments import PLAN_WORDS, explained
from ..compiler import Preview
from ..errors import ArgumentError, PlanError, did_you_mean
from ..pipeline import Pipeline
from ..plan.checkpoint import WORDS, Checkpoint
from ..plan.sizes import in_units, nbytes_of
from ..report.tables import in_seconds
from ..schedules.catalog import IN_V, NAMES, SHARED
from .chain import Chain, chain_of, without_collections
from .costs import StageCosts
from .steady import AFFINE, enough, steady

MOST_RANKS = 4096
_EXAMPLE = 'fxsplit.simulate(costs, micro_batches=(8, 16), schedules=("gpipe", "1f1b"))'


@dataclass(frozen=True)
class Row:
    """One way to run a step, and what it comes to.

    Attributes:
        schedule: its name.
        stages: of each replica.
        workers: that they are on, in each replica.
        micro_batches: of the whole batch; each replica has its share.
        replicas: of the whole pipeline, which add up their gradients at the end of a step.
        checkpoint: the policy.
        seconds: a step.
        bubble: share of the step in which a worker does not compute, on average.
        nbytes: of memory that the worst worker needs: parameters, gradients and optimizer, what it keeps for backward, and
            one micro-batch of a stage that is computed again.
        fits: whether that is within `memory`.
    """

    schedule: str
    stages: int
    workers: int
    micro_batches: int
    replicas: int
    checkpoint: str
    seconds: float
    bubble: float
    nbytes: float
    fits: bool

    @property
    def ranks(self) -> int:
        """Workers of all replicas."""
        return self.workers * self.replicas


@dataclass(frozen=True)
class Simulation:
    """What was simulated.

    Attributes:
        rows: the fastest first.
        memory: bytes that each worker has; None without a limit.
    """

    rows: tuple[Row, ...]
    memory: int | None = None

    @property
    def best(self) -> Row:
        """The fastest that fits.

        Raises:
            PlanError: none does.
        """
        for row in self.rows:
            if row.fits:
                return row
        least = min(self.rows, key=lambda row: row.nbytes)
        raise PlanError(
            f"none of {len(self.rows)} ways fits {in_units(self.memory or 0)}; the smallest needs {in_units(least.nbytes)}: "
            f"{least.schedule}, {least.stages} stages, checkpoint={least.checkpoint!r}",
            remedy=f'memory={int(least.nbytes) + 1}, or checkpoint=("never", "always"), more micro_batches= or stages=',
        )

    def __str__(self) -> str:
        best = next((row for row in self.rows if row.fits), None)
        heads: tuple[str, ...] = (
            "",
            "schedule",
            "stages",
            "workers",
            "micro-batches",
            "replicas",
            "checkpoint",
        )
        heads += ("step", "bubble", "memory", *(["fits"] if self.memory is not None else []))
        table = [
            (
                "*" if row is best else "",
                *(row.schedule, row.stages, row.workers, row.micro_batches, row.replicas, row.checkpoint),
                *(in_seconds(row.seconds), f"{row.bubble:.1%}", in_units(row.nbytes)),
                *(["yes" if row.fits else "no"] if self.memory is not None else []),
            )
            for row in self.rows
        ]
        return tabulate(table, heads, disable_numparse=True)


@explained(ArgumentError, _EXAMPLE, {w: f"simulate({n}=...)" for w, n in PLAN_WORDS.items() if n != w})
def simulate(
    costs: StageCosts | Pipeline | Preview,
    *,
    micro_batches: int | Sequence[int],
    schedules: str | Sequence[str] = ("gpipe", "1f1b", "zb_h1"),
    stages: int | Sequence[int] | None = None,
    each: int = 2,
    replicas: int | Sequence[int] | None = None,
    checkpoint: str | Sequence[str] = "never",
    memory: int | str | None = None,
    ranks: int | None = None,
) -> Simulation:
    """What a training step would take: every schedule with every number of micro-batches, stages and replicas.

    Nothing is run. Each instruction begins as soon as its worker is free and what it reads has arrived, which takes bytes
    / link seconds between workers; with m micro-batches it takes 1 / m of what the whole batch does, and the overhead.
    What a worker keeps is counted action by action, and with ``checkpoint="always"`` is the inputs of its stages, whose
    forwards are then computed again. r replicas each have 1 / r of the micro-batches; then the gradients are added up,
    which takes 2 (r - 1) / r of their bytes / link seconds, as a ring does (Patarasuk and Yuan, 2009). No schedule waits
    for the loss. Stages are taken to be a chain: what skips a stage goes through it.

    Args:
        costs: `StageCosts`, or a pipeline or preview whose plan weighed seconds.
        micro_batches: numbers of them, of the whole batch.
        schedules: names.
        stages: numbers of stages, of which each has several neighbours of `costs`; by default as many as those.
        each: how many stages are on a worker, under schedules that share workers; under those in a V it is 2.
        replicas: numbers of replicas of the pipeline; 1 by default, or as many as make `ranks`.
        checkpoint: ``"never"``, ``"always"`` or ``"except_last"``.
        memory: that each worker has: bytes, or a string such as ``"80GB"``.
        ranks: how many workers there are, at most 4,096: others than stages × replicas on so many are left out.

    Returns:
        A row for each; ``print`` shows them.

    Raises:
        ArgumentError: a cost or argument is not what it should be.
        PlanError: a schedule, policy or number is not known, or they do not go together.
    """
    found = StageCosts.of(costs)
    limit = None if memory is None else nbytes_of(memory)
    if memory is not None and not limit:
        raise PlanError(f"memory={memory!r} is not a size", remedy='memory="80GB"')
    ways = _ways(found, micro_batches, schedules, stages, each, replicas, checkpoint, ranks)
    with without_collections():
        rows = [row for group in ways.values() for row in _simulated(group, limit)]
    return Simulation(tuple(sorted(rows, key=lambda r: (r.seconds, r.nbytes))), limit)


@dataclass(frozen=True)
class _Way:
    """A row before it is simulated; `micro_batches` are those of one replica."""

    costs: StageCosts
    schedule: str
    workers: int
    micro_batches: int
    replicas: int
    checkpoint: Checkpoint


# -- what is asked -------------------------------------------------------------------------------------------------

_Key = tuple[str, int, int, int]  # schedule, stages, workers, micro-batches of a replica: what plays one tape


def _ways(
    costs: StageCosts,
    micro_batches: Any,
    schedules: Any,
    stages: Any,
    each: Any,
    replicas: Any,
    checkpoint: Any,
    ranks: Any,
) -> dict[_Key, list[_Way]]:
    counts = _numbers("micro_batches", micro_batches, 8)
    grouped = {n: costs.grouped(n) for n in _numbers("stages", len(costs) if stages is None else stages, 2)}
    names = _words("schedules", schedules, NAMES)
    policies = [Checkpoint.of(word) for word in _words("checkpoint", checkpoint, tuple(WORDS))]
    copies = None if replicas is None else _numbers("replicas", replicas, 1)
    (each,) = _numbers("each", each, 2)
    if ranks is not None:
        (ranks,) = _numbers("ranks", ranks, 8)
        if ranks > MOST_RANKS:
            raise PlanError(f"ranks={ranks} are more than {MOST_RANKS}", remedy=f"ranks={MOST_RANKS}")
    found: dict[_Key, list[_Way]] = {}
    for name, (count, here) in itertools.product(names, grouped.items()):
        workers = _workers(name, count, each)
        if copies is not None:
            fitting = [r for r in copies if ranks in (None, workers * r)]
        elif ranks is None:
            fitting = [1]
        else:
            fitting = [ranks // workers] if ranks % workers == 0 else []
        for r, m, policy in itertools.product(fitting, counts, policies):
            if m % r:
                if copies is None:
                    continue
                raise PlanError(
                    f"micro_batches={m} cannot be shared out evenly to replicas={r}",
                    remedy=f"micro_batches={-(-m // r) * r}",
                )
            if workers * r > MOST_RANKS:
                raise PlanError(
                    f"{count} stages on {workers} workers with replicas={r} are {workers * r} ranks, more than {MOST_RANKS}",
                    remedy=f"replicas={max(1, MOST_RANKS // workers)}",
                )
            way = _Way(here, name, workers, m // r, r, policy)
            found.setdefault((name, count, workers, m // r), []).append(way)
    if not found:
        most = max(_workers(name, n, each) for name in names for n in grouped)
        raise PlanError(
            f"no number of stages and replicas makes ranks={ranks} that share the micro-batches evenly",
            remedy=f"ranks={most} with micro_batches={counts[0]}, or other stages=, replicas= and micro_batches=",
        )
    return found


def _workers(name: str, stages: int, each: int) -> int:
    if name not in SHARED:
        return stages
    each = 2 if name in IN_V else each
    if stages % each:
        raise PlanError(
            f"schedule {name!r} has {each} stages on each worker, and stages={stages} do not go into that",
            remedy=f"stages={stages - stages % each or each}",
        )
    return stages // each


def _numbers(name: str, value: Any, such: int) -> tuple[int, ...]:
    """Positive whole numbers, each once."""
    values = value if isinstance(value, list | tuple | range) else (value,)
    if not values:
        raise ArgumentError(f"simulate({name}=) lists no numbers", remedy=f"{name}=({such},)")
    for one in values:
        if not isinstance(one, int) or isinstance(one, bool) or one < 1:
            raise ArgumentError(
                f"simulate({name}={one!r}) is not a positive whole number", remedy=f"{name}={such}"
            )
    return tuple(dict.fromkeys(values))


def _words(name: str, value: Any, known: Sequence[str]) -> tuple[str, ...]:
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not values:
        raise ArgumentError(f"simulate({name}={value!r}) is no list of names", remedy=f"{name}={known[0]!r}")
    for word in values:
        if word not in known:
            raise PlanError(
                f"{name}={word!r} is not known", remedy=did_you_mean(str(word), known, label="choices")
            )
    return tuple(dict.fromkeys(values))


# -- what it comes to ----------------------------------------------------------------------------------------------


def _simulated(group: Sequence[_Way], memory: int | None) -> Iterator[Row]:
    """All that is played by one tape, together."""
    name, count = group[0].schedule, group[0].micro_batches
    stages, workers = len(group[0].costs), group[0].workers
    seconds, travel, reduce = _seconds(group), _travel(group), _reduce(group)

    def per_worker(chain: Chain, figures: torch.Tensor) -> torch.Tensor:
        return figures.new_zeros(len(group), workers).index_add_(1, chain.home, figures)

    ends, kept, chain = played(name, stages, count, workers, seconds, travel, _changes(group))
    step = (ends + per_worker(chain, reduce)).amax(1)
    kept += per_worker(chain, _table(group, lambda c: c.state))
    home = chain.home.expand(len(group), stages)
    again = kept.new_zeros(kept.shape).scatter_reduce_(1, home, _again(group), "amax")
    nbytes = (kept + again).amax(1)
    one = seconds[:, chain.kinds].sum((1, 2))
    busy = one[:, 1] + one[:, 0] * (count - 1)
    for i, way in enumerate(group):
        whole = float(step[i])
        need = float(nbytes[i])
        yield Row(
            name,
            stages,
            workers,
            count * way.replicas,
            way.replicas,
            str(way.checkpoint),
            whole,
            max(0.0, 1 - float(busy[i]) / (workers * whole)) if whole else 0.0,
            need,
            memory is None or need <= memory,
        )


def played(
    name: str,
    stages: int,
    micro_batches: int,
    workers: int,
    seconds: torch.Tensor,
    travel: torch.Tensor,
    changes: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, Chain]:
    """Per variant and worker when it ends and the most that it keeps; and a chain of as many stages on the same workers.

    Args:
        seconds, travel: as of `Chain.ends`.
        changes: as of `Chain.most_kept`.
    """
    if name in AFFINE and micro_batches > 3:
        chains = [chain_of(name, stages, m, workers) for m in (2, 3)]
        two, three = ((c.workers_end(c.ends(seconds, travel)), c.most_kept(changes)) for c in chains)
        found = [a + (micro_batches - 2) * (b - a) for a, b in zip(two, three, strict=True)]
        return found[0], found[1], chains[0]
    ends = seconds.new_zeros(len(seconds), workers)
    left, base, chain = torch.arange(len(seconds)), enough(name, micro_batches, workers), None
    known = steady(name, stages, base, workers) if base is not None and 3 * base <= micro_batches else None
    if known is not None and base is not None:
        chain = known.chain
        times = chain.ends(seconds, travel)
        period, same = known.growth(times)
        more = (micro_batches - base) // known.period * period
        ends, left = chain.workers_end(times) + more[:, None], left[~same]
    if chain is None or len(left):
        chain = chain_of(name, stages, micro_batches, workers)
        ends[left] = chain.workers_end(chain.ends(seconds[left], travel[left]))
    return ends, chain.most_kept(changes), chain  # in a steady state no more is kept at once


def _table(group: Sequence[_Way], of: Callable[[StageCosts], Sequence[float]]) -> torch.Tensor:
    """(variants, stages) of a figure."""
    return torch.tensor([of(way.costs) for way in group], dtype=torch.float64)


def _each(group: Sequence[_Way]) -> torch.Tensor:
    """(variants, 1) part of the batch that a micro-batch is."""
    return torch.tensor([[1 / (w.micro_batches * w.replicas)] for w in group], dtype=torch.float64)


def _recomputes(group: Sequence[_Way]) -> torch.Tensor:
    """(variants, 1, 2) whether anything is computed again, of other micro-batches and of micro-batch 0."""
    return torch.tensor([[[float(w.checkpoint.recomputes(i)) for i in (1, 0)]] for w in group]).double()


def _seconds(group: Sequence[_Way]) -> torch.Tensor:
    """(variants, 4, stages, 2) of F, B, I and W."""
    share = _each(group)
    f = _table(group, lambda c: c.forward) * share
    b = _table(group, lambda c: c.backward) * share
    w = _table(group, lambda c: c.weights) * share
    again = f[..., None] * _recomputes(group)
    found = torch.stack([f, b, b - w, w], dim=1)[..., None].repeat(1, 1, 1, 2)
    found[:, 1:3] += again[:, None]
    overhead = torch.tensor([way.costs.overhead for way in group], dtype=torch.float64)
    return found + overhead[:, None, None, None]


def _rate(group: Sequence[_Way]) -> torch.Tensor:
    """(variants, 1) seconds a byte between workers."""
    return torch.tensor([[0.0 if w.costs.link is None else 1 / w.costs.link] for w in group]).double()


def _travel(group: Sequence[_Way]) -> torch.Tensor:
    """(variants, cuts) seconds."""
    return _table(group, lambda c: c.sent) * _each(group) * _rate(group)


def _reduce(group: Sequence[_Way]) -> torch.Tensor:
    """(variants, stages) seconds in which replicas add up their gradients."""
    ring = torch.tensor([[2 * (w.replicas - 1) / w.replicas] for w in group], dtype=torch.float64)
    return _table(group, lambda c: c.parameters) * ring * _rate(group)


def _changes(group: Sequence[_Way]) -> torch.Tensor:
    """(variants, 4, stages, 2) bytes that an action begins or ends to keep."""
    share = _each(group)
    whole = (_table(group, lambda c: c.kept) * share)[..., None]
    inputs = (_table(group, lambda c: (c.inputs, *c.sent)) * share)[..., None]
    again = _recomputes(group)
    kept = torch.where(again > 0, torch.minimum(inputs, whole), whole)
    # What is computed again is not kept between the halves of a backward.
    return torch.stack([kept, -kept, -kept * again, -kept * (1 - again)], dim=1)


def _again(group: Sequence[_Way]) -> torch.Tensor:
    """(variants, stages) bytes of a micro-batch that is computed again."""
    used = [[float(w.checkpoint.share(w.micro_batches) > 0)] for w in group]
    return _table(group, lambda c: c.kept) * _each(group) * torch.tensor(used).double()
