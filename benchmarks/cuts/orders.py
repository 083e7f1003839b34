"""Exact cuts of one order of a program's units, and torchgpipe's and DeepSpeed's of the same."""

from __future__ import annotations

import numpy as np


class Orders:
    """Exact cuts of any order of one problem: all intervals at once, with numpy."""

    def __init__(self, work, values, link):
        self.work, self.count = np.asarray(work), len(work)
        self.number = np.repeat(np.arange(len(values)), [len(units) for units, _ in values])
        self.units = np.array([u for units, _ in values for u in units], dtype=int)
        self.seconds = np.array([nbytes / link for _, nbytes in values])

    def loads(self, order):
        """Entry [a, b]: the load of the units at positions a to b; infinite where there are none."""
        n = self.count
        sums = np.concatenate([[0.0], np.cumsum(self.work[order])])
        found = sums[None, :] - sums[:, None]
        if len(self.seconds):
            where = np.empty(n, dtype=int)
            where[order] = np.arange(n)
            places = where[self.units]
            by_place = np.lexsort((places, self.number))
            places, number = places[by_place], self.number[by_place]
            first = np.r_[True, number[1:] != number[:-1]]
            previous = np.where(first, -1, np.r_[-1, places[:-1]])
            begin, end = places[first], places[np.r_[first[1:], True]]
            each = self.seconds[number]
            # An interval touches a value whose first place in it is p: previous < a <= p < b. It does not count
            # where all places are inside.
            rows = np.concatenate([previous + 1, places + 1, np.zeros_like(begin), begin + 1])
            columns = np.concatenate([places + 1, places + 1, end + 1, end + 1])
            weights = np.concatenate([each, -each, -self.seconds, self.seconds])
            change = np.bincount(rows * (n + 1) + columns, weights, minlength=(n + 1) ** 2)
            found += change.reshape(n + 1, n + 1).cumsum(0).cumsum(1)
        found[np.tri(n + 1, dtype=bool)] = np.inf
        return found

    def lightest(self, order, stages):
        """The lightest heaviest load of this order, and unit → stage."""
        loads = self.loads(order)
        rows = [loads[0]]
        for _ in range(stages - 1):
            rows.append(np.maximum(rows[-1][:, None], loads).min(0))
        starts, at = [], self.count
        for row in reversed(rows[:-1]):
            at = int(np.maximum(row, loads[:, at]).argmin())
            starts.append(at)
        return rows[-1][-1], spread(order, [0, *reversed(starts)])


def spread(order, starts):
    """Unit → stage, for stages that begin at these places of an order."""
    found = np.zeros(len(order), dtype=int)
    for stage, start in enumerate(starts):
        found[order[start:]] = stage
    return found
