"""Automatic balance: the contiguous cut of the program order whose heaviest stage is lightest."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

# Among cuts whose heaviest stage is within this factor of the lightest possible, fewest bytes across wins.
SLACK = 1.005

Penalty = tuple[float, ...]


def lightest_bottleneck(weights: Sequence[float], stages: int) -> float:
    """The smallest possible weight of the heaviest of `stages` non-empty contiguous parts.

    Dynamic programming over prefixes; each row is monotone, so the best cut is found by bisection:
    O(stages · n · log n).
    """
    sums = _prefix_sums(weights)
    n = len(weights)
    best = sums[:]  # best[i]: the first i units in the parts so far
    for part in range(2, stages + 1):
        row = [float("inf")] * (n + 1)
        for i in range(part, n + 1):
            # The last part is (p, i]: its weight falls with p, while best[p] rises. Find where they cross.
            low, high = part - 1, i - 1
            while low < high:
                p = (low + high) // 2
                low, high = (low, p) if best[p] >= sums[i] - sums[p] else (p + 1, high)
            row[i] = min(max(best[q], sums[i] - sums[q]) for q in {low, max(low - 1, part - 1)})
        best = row
    return best[n]


def balanced_cut(weights: Sequence[float], penalties: Sequence[Penalty], stages: int) -> list[int]:
    """Positions at which stages 1, 2, … begin.

    Args:
        weights: cost of each unit.
        penalties: entry i is what a cut before unit i costs; added up, compared lexicographically.
        stages: number of non-empty stages, at most ``len(weights)``.

    Returns:
        ``stages - 1`` increasing positions: the heaviest stage is the lightest possible (within `SLACK`),
        and among those cuts the sum of the penalties is smallest, the earliest cut on a tie.
    """
    limit = lightest_bottleneck(weights, stages) * SLACK
    sums = _prefix_sums(weights)
    n = len(weights)
    zero = tuple(0.0 for _ in (penalties[0] if penalties else ()))
    best: list[Penalty | None] = [zero if sums[i] <= limit else None for i in range(n + 1)]
    best[0] = None
    origins: list[list[int]] = []
    for part in range(2, stages + 1):
        row: list[Penalty | None] = [None] * (n + 1)
        origin = [0] * (n + 1)
        window: deque[tuple[Penalty, int]] = deque()  # candidates for the cut, penalties increasing
        for i in range(part, n + 1):
            before = best[i - 1]
            if before is not None:
                total = tuple(a + b for a, b in zip(before, penalties[i - 1], strict=True))
                while window and window[-1][0] > total:
                    window.pop()
                window.append((total, i - 1))
            while window and sums[i] - sums[window[0][1]] > limit:
                window.popleft()
            if window:
                row[i], origin[i] = window[0]
        best = row
        origins.append(origin)
    cuts, end = [], n
    for origin in reversed(origins):
        end = origin[end]
        cuts.append(end)
    return cuts[::-1]


def _prefix_sums(weights: Sequence[float]) -> list[float]:
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    return sums
