"""The schedules that fxsplit knows. p workers, v stages on each, m micro-batches; F, B = I + W: time of one action."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..errors import ScheduleError
from .schedule import Action, Kind, Schedule


def gpipe(stages: int, micro_batches: int, replicas: Sequence[int] | None = None) -> Schedule:
    """All forwards, then all backwards, each in micro-batch order (Huang et al., GPipe, 2019).

    Bubble of p equal stages with m micro-batches: (p - 1) / (m + p - 1) of the time of each worker.
    Memory: every stage keeps all m micro-batches. Micro-batch i of a stage with r replicas runs on worker
    i mod r.
    """
    everything = range(micro_batches)
    rows = [
        [*(Action("F", s, i) for i in everything), *(Action("B", s, i) for i in everything)]
        for s in range(stages)
    ]
    return _with_replicas("gpipe", rows, replicas, stages)


def forward_only(stages: int, micro_batches: int, replicas: Sequence[int] | None = None) -> Schedule:
    """All forwards, in micro-batch order; no backward, and nothing is kept.

    Bubble: (p - 1) / (m + p - 1).
    """
    rows = [[Action("F", s, i) for i in range(micro_batches)] for s in range(stages)]
    return _with_replicas("forward_only", rows, replicas, stages)


def one_f_one_b(stages: int, micro_batches: int, replicas: Sequence[int] | None = None) -> Schedule:
    """Each stage goes forward until the first gradient can be there, then forward and backward take turns.

    PipeDream-Flush (Narayanan et al., 2021). Bubble: (p - 1) / (m + p - 1), as GPipe's.
    Memory: stage s keeps min(p - s, m) micro-batches.
    """
    rows = []
    for s in range(stages):
        forward = [Action("F", s, i) for i in range(micro_batches)]
        backward = [Action("B", s, i) for i in range(micro_batches)]
        rows.append(_alternating(forward, backward, stages - s - 1))
    return _with_replicas("1f1b", rows, replicas, stages)


def interleaved_1f1b(stages: int, micro_batches: int, workers: int) -> Schedule:
    """1F1B with v = stages / workers stages on each worker: stage s is on worker s mod p (Narayanan et al., 2021).

    Bubble where p divides m: (p - 1) / (v m + p - 1). Memory: worker r keeps at most 2 (p - r - 1) + (v - 1) p + 1
    micro-batches of one stage. Where p does not divide the stages, the last workers have one stage less.
    """
    _check_workers(workers)
    chunks = -(-stages // workers)
    rows = []
    for r in range(workers):
        # Rounds of p micro-batches; the last one is filled up with some that are left out again, which keeps the order.
        turns = [
            (c, i)
            for begin in range(0, micro_batches, workers)
            for c in range(chunks)
            for i in range(begin, begin + workers)
        ]
        forward = [Action("F", c * workers + r, i) for c, i in turns]
        backward = [Action("B", (chunks - 1 - c) * workers + r, i) for c, i in turns]
        warm_up = 2 * (workers - r - 1) + (chunks - 1) * workers if chunks > 1 else workers - r - 1
        rows.append(_alternating(forward, backward, warm_up))
    return _on_workers("interleaved_1f1b", rows).only(stages=stages, micro_batches=micro_batches)


def breadth_first(stages: int, micro_batches: int, workers: int) -> Schedule:
    """All micro-batches through one stage, then through the worker's next one (Lamy-Poirier, 2023).

    Bubble where m is at least p: (p - 1) / (v m + p - 1). Memory: every worker keeps all m micro-batches of all its
    stages.
    """
    _check_workers(workers)
    everything = range(micro_batches)
    rows = []
    for r in range(workers):
        mine = range(r, stages, workers)
        forward = [Action("F", s, i) for s in mine for i in everything]
        rows.append([*forward, *(Action("B", s, i) for s in reversed(mine) for i in everything)])
    return _on_workers("breadth_first", rows)


def zb_h1(stages: int, micro_batches: int) -> Schedule:
    """1F1B with backward in two: gradients of inputs (I) at once, gradients of weights (W) where there is time.

    ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, 2023). Idle time of a worker where m is at least p:
    (p - 1)(F + I - W) if W takes no longer than F and I, which is (p - 1) F if all three take as long. Memory: as 1F1B's first stage, p micro-batches.
    """
    rows = []
    for s in range(stages):
        forward = iter([Action("F", s, i) for i in range(micro_batches)])
        weights = iter([Action("W", s, i) for i in range(micro_batches)])
        row = [a for _, a in zip(range(stages - s), forward, strict=False)]
        for i in range(micro_batches):
            row.append(Action("I", s, i))
            row += [next(weights)] if i >= s else []
            row += [a for _, a in zip(range(1), forward, strict=False)]
        rows.append([*row, *weights])
    return _on_workers("zb_h1", rows)


def interleaved_zero_bubble(stages: int, micro_batches: int, workers: int) -> Schedule:
    """Several stages on each worker and backward in two: each worker takes what is most urgent of what it can do.

    After Qi et al. (2023): gradients of inputs first, then forwards while at most v p + p - 1 micro-batches of one
    stage are kept, then gradients of weights; played on a clock on which all three take as long. Idle time where p
    divides m: (p - 1) F, F being the forward of one of its v stages.
    """
    _check_workers(workers)
    room = stages + workers - 1
    rows: list[list[Action]] = [[] for _ in range(workers)]
    kept = [0] * workers
    done: dict[Action, int] = {}
    following = {(kind, s): 0 for kind in ("F", "I", "W") for s in range(stages)}
    now = 0
    while len(done) < 3 * stages * micro_batches:
        chosen: list[tuple[int, Action]] = []
        for r in range(workers):
            able: list[tuple[tuple[int, int, int], Action]] = []
            for s in range(r, stages, workers):
                f, i, w = (following[kind, s] for kind in ("F", "I", "W"))
                went = f < micro_batches and (s == 0 or done.get(Action("F", s - 1, f), now + 1) <= now)
                if went and kept[r] < room:
                    able.append(((1, f // workers, s), Action("F", s, f)))
                behind = s == stages - 1 or done.get(Action("I", s + 1, i), now + 1) <= now
                if i < micro_batches and done.get(Action("F", s, i), now + 1) <= now and behind:
                    able.append(((0, i, -s), Action("I", s, i)))
                if w < i:
                    able.append(((2, w, -s), Action("W", s, w)))
            if able:
                chosen.append((r, min(able)[1]))
        for r, action in chosen:
            rows[r].append(action)
            done[action] = now + 1
            following[action.kind, action.stage] += 1
            kept[r] += {"F": 1, "I": 0, "W": -1}[action.kind]
        now += 1
    return _on_workers("interleaved_zero_bubble", rows)


def zb_v(stages: int, micro_batches: int, workers: int) -> Schedule:
    """Two stages on each worker, r and 2p - 1 - r, and backward in two: a V, down all workers and up again.

    ZB-V (Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 6; V-ZB in their Pipeline Parallelism with
    Controllable Memory, 2024). Idle time where F, I and W take as long:
    max(p - 1, 4p - 2m - 2) F; from m = 2p - 1 on a worker never waits between its first and its last action. Memory:
    every worker keeps at most 2p micro-batches of one stage, as the first one of 1F1B with as long a model. With fewer
    than 2p - 1 micro-batches the others are left out of the order of so many.
    """
    _check_in_v(stages, workers)
    p, m = workers, max(micro_batches, 2 * workers - 1)
    rows = []
    for r in range(p):
        warm_up = ["F" * (2 * (p - r) - 1), "fF" * r, "fiw" * (p - r)]
        steady = ["FIWfiw" * (m - 2 * p + r + 1), "IWfiw" * (p - r - 1)]
        rows.append(_in_v(r, p, [*warm_up, *steady, "Ii" * r, "IW" * (p - r), "w" * r, "W" * r]))
    return _on_workers("zb_v", rows).only(stages=stages, micro_batches=micro_batches)


def dual_pipe_v(stages: int, micro_batches: int, workers: int) -> Schedule:
    """The V of `zb_v` in another order: the forward of one of a worker's stages, then a backward of the other.

    DualPipeV, DeepSeek's DualPipe (DeepSeek-V3, 2024) cut in half by Sea AI Lab (2025). There such a pair is one action,
    in which one computes while the other communicates. Here it is two, one after the other, and every backward is in
    two: W right after I, but for the last ones, which wait for a time in which there is nothing else to do.
    Idle time where F, I and W take as long and m is at least 2p: (p - 1) F. Memory: every worker keeps at most 2p + 1
    micro-batches of one stage. With fewer than 2p micro-batches the others are left out of the order of 2p.
    """
    _check_in_v(stages, workers)
    p, m = workers, max(micro_batches, 2 * workers)
    rows = []
    for r in range(p):
        rest = p - r - 1
        warm_up = ["F" * (2 * rest), "Ff" * (r + 1), "iwf" * rest]
        steady = ["FiwfIW" * (m - 2 * p + r + 1), "iwfIW" * rest]
        ends = "iI" * (r + 1)
        whole, halved = ends[: r + 1], ends[r + 1 :]
        later = halved.translate(_WEIGHTS) + "W" * rest
        cool_down = [
            *(i + i.translate(_WEIGHTS) for i in whole),
            halved,
            *(w + "I" for w in later[:rest]),
            later[rest:],
        ]
        rows.append(_in_v(r, p, [*warm_up, *steady, *cool_down]))
    return _on_workers("dual_pipe_v", rows).only(stages=stages, micro_batches=micro_batches)


# name → stages, micro-batches → schedule with a worker for each stage
_ALONE: Mapping[str, Callable[[int, int], Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb_h1": zb_h1}
# name → stages, micro-batches, workers → schedule
_TOGETHER: Mapping[str, Callable[[int, int, int], Schedule]] = {
    "interleaved_1f1b": interleaved_1f1b,
    "breadth_first": breadth_first,
    "interleaved_zero_bubble": interleaved_zero_bubble,
}
# the same, with exactly two stages on each worker
_IN_V: Mapping[str, Callable[[int, int, int], Schedule]] = {"zb_v": zb_v, "dual_pipe_v": dual_pipe_v}


NAMES = (*_ALONE, *_TOGETHER, *_IN_V)
SHARED = (*_TOGETHER, *_IN_V)  # several stages on each worker
IN_V = tuple(_IN_V)


def usual_workers(name: str, stages: int) -> int:
    """How many workers may share so many stages under a schedule of `SHARED`, where nobody says."""
    return max(1, stages // 2) if name in _IN_V else min(2, stages)


def fits_a_v(stages: int, workers: int) -> str:
    """What to say instead of numbers that a schedule of `IN_V` cannot play."""
    if stages % 2 == 0:
        return f"workers={stages // 2}"
    return f"{2 * workers} stages, or schedule='interleaved_zero_bubble', which plays any number"


def schedule_of(
    chosen: str | Schedule,
    stages: int,
    micro_batches: int,
    workers: int | None = None,
    replicas: Sequence[int] | None = None,
) -> Schedule:
    """A schedule by its name, or one of the user's, for so many stages and micro-batches.

    Args:
        workers: how many share the stages of a schedule of `SHARED`; one for each by default.
        replicas: of each stage.

    Raises:
        ScheduleError: the user's is for other stages or fewer micro-batches; or stages that share a worker have other
            numbers of replicas; or those of a V are not twice as many as its workers.
    """
    if isinstance(chosen, str):
        return _by_name(chosen, stages, micro_batches, workers, tuple(replicas) if replicas else None)
    if chosen.stages != stages or chosen.micro_batches < micro_batches:
        raise ScheduleError(
            f"the plan's schedule {chosen.name!r} is for {chosen.stages} stages and {chosen.micro_batches} micro-batches, "
            f"not for {stages} and {micro_batches}",
            remedy=f"as many stages as it has, or schedule={'gpipe'!r}",
        )
    return chosen.only(stages=stages, micro_batches=micro_batches)


@functools.lru_cache(maxsize=256)
def _by_name(
    name: str, stages: int, micro_batches: int, workers: int | None, replicas: tuple[int, ...] | None
) -> Schedule:
    if name in _ALONE:
        schedule = _ALONE[name](stages, micro_batches)
    elif name in _IN_V:
        schedule = _IN_V[name](stages, micro_batches, workers or usual_workers(name, stages))
    else:
        schedule = _TOGETHER[name](stages, micro_batches, min(workers or stages, stages))
    return _with_replicas(schedule.name, schedule.workers, replicas, stages)


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per worker the most micro-batches of its stages that it has gone forward with and not yet finished backward."""
    return tuple(int(most_kept(actions, lambda _: 1)) for actions in schedule.workers)


def most_kept(
    actions: Iterable[Action],
    nbytes: Callable[[Action], float],
    halved: Callable[[Action], bool] = lambda _: True,
) -> float:
    """The most that one worker keeps at once.

    Args:
        nbytes: what a stage keeps of a micro-batch, from its forward to the end of its backward.
        halved: whether that end is the second half of a backward in two, and not the first.
    """
    most = now = 0.0
    for action in actions:
        if action.kind == "F":
            now += nbytes(action)
        elif action.kind == "B" or (action.kind == "W") == halved(action):
            now -= nbytes(action)
        most = max(most, now)
    return most


def kept_shares(
    schedule: Schedule, stages: int, micro_batches: int, of: Callable[[Iterable[int]], int] = sum
) -> list[float]:
    """Per stage the part of the micro-batches that is kept at once.

    Args:
        of: of the replicas of a stage, what they keep together (`sum`), or the busiest of them (`max`).
    """
    kept: list[list[int]] = [[] for _ in range(stages)]
    for actions in schedule.workers:
        for stage in sorted({a.stage for a in actions}):
            alone = Schedule(schedule.name, (tuple(a for a in actions if a.stage == stage),), ((stage, 0),))
            kept[stage] += in_flight(alone)
    return [min(of(row), micro_batches) / micro_batches for row in kept]


def _alternating(forward: Sequence[Action], backward: Sequence[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forward))
    row = list(forward[:warm_up])
    for ahead, behind in zip(forward[warm_up:], backward, strict=False):
        row += [ahead, behind]
    return row + list(backward[len(forward) - warm_up :])


def _check_workers(workers: int) -> None:
    if workers < 1:
        raise ScheduleError(f"{workers} workers play nothing", remedy="workers=1 or more")


def _check_in_v(stages: int, workers: int) -> None:
    _check_workers(workers)
    if stages != 2 * workers:
        raise ScheduleError(
            f"a schedule with two stages on each worker cannot play {stages} stages on {workers} workers",
            remedy=fits_a_v(stages, workers),
        )


_WEIGHTS = str.maketrans("iI", "wW")


def _in_v(r: int, p: int, phases: Iterable[str]) -> list[Action]:
    """The actions of worker r of p: a capital is one of stage r, a small letter of 2p - 1 - r, each with the next micro-batch."""
    following: dict[str, int] = collections.Counter()
    row = []
    for letter in "".join(phases):
        kind: Kind = letter.upper()  # type: ignore[assignment]
        row.append(Action(kind, r if letter.isupper() else 2 * p - 1 - r, following[letter]))
        following[letter] += 1
    return row


def _on_workers(name: str, rows: Sequence[Sequence[Action]]) -> Schedule:
    return Schedule(name, tuple(map(tuple, rows)), tuple((r, 0) for r in range(len(rows))))


def _with_replicas(
    name: str, rows: Sequence[Sequence[Action]], replicas: Sequence[int] | None, stages: int
) -> Schedule:
    """Micro-batch i of a stage with r replicas runs on its worker i mod r, in the order of the stage."""
    if replicas and len(replicas) != stages:
        raise ScheduleError(
            f"replicas lists {len(replicas)} numbers for {stages} stages", remedy="one for each stage"
        )
    workers, labels = [], []
    for first, row in enumerate(rows):
        mine = sorted({a.stage for a in row}) or [first]
        counts = sorted({replicas[s] for s in mine}) if replicas else [1]
        if len(counts) > 1:
            raise ScheduleError(
                f"stages {', '.join(map(str, mine))} share a worker, but have {counts} replicas",
                remedy="the same number of replicas for all of them",
            )
        for replica in range(counts[0]):
            alone = counts[0] == 1
            workers.append(tuple(row if alone else (a for a in row if a.micro_batch % counts[0] == replica)))
            labels.append((mine[0], replica))
    return Schedule(name, tuple(workers), tuple(labels))
