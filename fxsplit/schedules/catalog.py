"""The schedules that fxsplit knows. p workers, v stages on each, m micro-batches; F, B = I + W: time of one action."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ..errors import ScheduleError
from .actions import Action, Schedule


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
    return _with_replicas("gpipe", rows, replicas)


def forward_only(stages: int, micro_batches: int, replicas: Sequence[int] | None = None) -> Schedule:
    """All forwards, in micro-batch order; no backward, and nothing is kept.

    Bubble: (p - 1) / (m + p - 1).
    """
    rows = [[Action("F", s, i) for i in range(micro_batches)] for s in range(stages)]
    return _with_replicas("forward_only", rows, replicas)


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
    return _with_replicas("1f1b", rows, replicas)


def interleaved_1f1b(stages: int, micro_batches: int, workers: int) -> Schedule:
    """1F1B with v = stages / workers stages on each worker: stage s is on worker s mod p (Narayanan et al., 2021).

    Bubble where p divides m: (p - 1) / (v m + p - 1). Memory: worker r keeps at most 2 (p - r - 1) + (v - 1) p + 1
    micro-batches of one stage.
    """
    chunks = _chunks(stages, workers)
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
        rows.append([a for a in _alternating(forward, backward, warm_up) if a.micro_batch < micro_batches])
    return Schedule("interleaved_1f1b", tuple(map(tuple, rows)), tuple((r, 0) for r in range(workers)))


def breadth_first(stages: int, micro_batches: int, workers: int) -> Schedule:
    """All micro-batches through one stage, then through the worker's next one (Lamy-Poirier, 2023).

    Bubble where m is at least p: (p - 1) / (v m + p - 1). Memory: every worker keeps all m micro-batches of all its
    stages.
    """
    _chunks(stages, workers)
    everything = range(micro_batches)
    rows = []
    for r in range(workers):
        mine = range(r, stages, workers)
        forward = [Action("F", s, i) for s in mine for i in everything]
        rows.append((*forward, *(Action("B", s, i) for s in reversed(mine) for i in everything)))
    return Schedule("breadth_first", tuple(rows), tuple((r, 0) for r in range(workers)))


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
        rows.append((*row, *weights))
    return Schedule("zb_h1", tuple(rows), tuple((s, 0) for s in range(stages)))


def interleaved_zero_bubble(stages: int, micro_batches: int, workers: int) -> Schedule:
    """Several stages on each worker and backward in two: each worker takes what is most urgent of what it can do.

    After Qi et al. (2023): gradients of inputs first, then forwards while at most v p + p - 1 micro-batches of one
    stage are kept, then gradients of weights; played on a clock on which all three take as long. Idle time where p
    divides m: (p - 1) F, F being the forward of one of its v stages.
    """
    _chunks(stages, workers)
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
    return Schedule("interleaved_zero_bubble", tuple(map(tuple, rows)), tuple((r, 0) for r in range(workers)))


# name → stages, micro-batches, replicas of each stage → schedule
SCHEDULES: Mapping[str, Callable[[int, int, Sequence[int] | None], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
}


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per worker the most micro-batches of its stages that it has gone forward with and not yet finished backward."""
    change = {"F": 1, "I": 0, "W": -1, "B": -1}
    found = []
    for actions in schedule.workers:
        most = now = 0
        for action in actions:
            now += change[action.kind]
            most = max(most, now)
        found.append(most)
    return tuple(found)


def kept_shares(
    schedule: Schedule, stages: int, micro_batches: int, of: Callable[[Iterable[int]], int] = sum
) -> list[float]:
    """Per stage the part of the micro-batches that is kept at once, for schedules with one stage on each worker.

    Args:
        of: of the replicas of a stage, what they keep together (`sum`), or the busiest of them (`max`).
    """
    kept: list[list[int]] = [[] for _ in range(stages)]
    for (stage, _), most in zip(schedule.labels, in_flight(schedule), strict=True):
        kept[stage].append(most)
    return [min(of(row), micro_batches) / micro_batches for row in kept]


def _chunks(stages: int, workers: int) -> int:
    if workers < 1 or stages % workers:
        raise ScheduleError(
            f"{stages} stages are not shared out evenly to {workers} workers",
            remedy="a multiple of the workers",
        )
    return stages // workers


def _alternating(forward: Sequence[Action], backward: Sequence[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forward))
    row = list(forward[:warm_up])
    for ahead, behind in zip(forward[warm_up:], backward, strict=False):
        row += [ahead, behind]
    return row + list(backward[len(forward) - warm_up :])


def _with_replicas(name: str, rows: Iterable[Sequence[Action]], replicas: Sequence[int] | None) -> Schedule:
    """Micro-batch i of a stage with r replicas runs on its worker i mod r, in the order of the stage."""
    workers, labels = [], []
    rows = list(rows)
    if replicas and len(replicas) != len(rows):
        raise ScheduleError(
            f"replicas lists {len(replicas)} numbers for {len(rows)} stages", remedy="one for each stage"
        )
    for stage, row in enumerate(rows):
        count = replicas[stage] if replicas else 1
        for replica in range(count):
            workers.append(tuple(a for a in row if a.micro_batch % count == replica))
            labels.append((stage, replica))
    return Schedule(name, tuple(workers), tuple(labels))
