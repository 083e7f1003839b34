"""Whether there is any better cut: a mixed-integer program over all orders, for HiGHS."""

from __future__ import annotations

import numpy as np

CLOSE = 1e-4  # what "certified" allows


def certify(captured, problem, stages, link, best, seconds):
    """Is there an assignment of units to stages that is better by `CLOSE`? HiGHS, over all orders.

    y[u, s] says that unit u is in stage s or before; it grows with s and shrinks along every edge. t[v, s] is 1 if value v
    enters or leaves stage s: at least |x[reader, s] - x[home, s]| with x[u, s] = y[u, s] - y[u, s - 1].

    Returns the words for the table, a lower bound, and a better unit → stage or None.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError:
        return "no scipy", 0.0, None
    n, k, values = len(captured.work), stages, captured.values
    y, t, z = n * (k - 1), len(values) * k, n * (k - 1) + len(values) * k
    rows, columns, entries, upper = [], [], [], []

    def at_most(terms, limit):
        for column, factor in terms:
            rows.append(len(upper))
            columns.append(column)
            entries.append(factor)
        upper.append(limit)

    def inside(unit, stage, factor):
        """Terms of x[unit, stage], and its constant part."""
        terms = [(unit * (k - 1) + stage, factor)] if stage < k - 1 else []
        if stage:
            terms.append((unit * (k - 1) + stage - 1, -factor))
        return terms, factor * (stage == k - 1)

    for unit, earlier in enumerate(problem.before):
        for stage in range(k - 1):
            if stage:
                at_most([(unit * (k - 1) + stage - 1, 1), (unit * (k - 1) + stage, -1)], 0)
            for other in earlier:
                at_most([(unit * (k - 1) + stage, 1), (other * (k - 1) + stage, -1)], 0)
    for number, (units, _) in enumerate(values):
        for reader in units[1:]:
            for stage in range(k):
                for sign in (1, -1):
                    terms, constant = inside(reader, stage, sign)
                    more, other = inside(units[0], stage, -sign)
                    at_most([*terms, *more, (y + number * k + stage, -1)], -constant - other)
    for stage in range(k):  # in parts of the best load
        terms, limit = [(z, -1)], 0.0
        for unit, work in enumerate(captured.work):
            if work:
                more, constant = inside(unit, stage, work / best)
                terms += more
                limit -= constant
        terms += [(y + i * k + stage, nbytes / link / best) for i, (_, nbytes) in enumerate(values) if nbytes]
        at_most(terms, limit)
        more = [inside(unit, stage, -1.0) for unit in range(n)]  # no stage is empty
        at_most([term for terms, _ in more for term in terms], -1 - sum(c for _, c in more))
    below, above = np.zeros(z + 1), np.ones(z + 1)
    above[z] = 1 - CLOSE
    # What has to run before a unit, and after it, bounds its stage.
    for unit, (early, late) in enumerate(zip(*closures(problem.before, captured.work), strict=True)):
        for stage in range(k - 1):
            if early > (stage + 1) * best:
                above[unit * (k - 1) + stage] = 0
            if late > (k - 1 - stage) * best:
                below[unit * (k - 1) + stage] = 1
    cost = np.zeros(z + 1)
    cost[z] = 1
    matrix = csr_array((entries, (rows, columns)), shape=(len(upper), z + 1))
    result = milp(
        cost,
        integrality=np.r_[np.ones(y), np.zeros(t + 1)],
        bounds=Bounds(below, above),
        constraints=LinearConstraint(matrix, ub=np.array(upper)),
        options={"time_limit": seconds, "mip_rel_gap": CLOSE},
    )
    if result.status == 2:
        return "certified", best * (1 - CLOSE), None
    found = None
    if result.x is not None:
        found = (k - 1) - np.round(result.x[:y]).astype(int).reshape(n, k - 1).sum(1)
    bound = best * min(result.mip_dual_bound, 1 - CLOSE) if result.mip_dual_bound is not None else 0.0
    return ("certified" if result.status == 0 else "-"), bound, found


def closures(before, work):
    """Per unit the work of all that has to come before it, and after it, with its own."""
    after = [[] for _ in before]
    for unit, earlier in enumerate(before):
        for other in earlier:
            after[other].append(unit)
    found = []
    for edges, units in ((before, range(len(before))), (after, reversed(range(len(before))))):
        masks, totals = np.zeros((len(before), len(before)), dtype=bool), np.zeros(len(before))
        for unit in units:
            for other in edges[unit]:
                masks[unit] |= masks[other]
            masks[unit, unit] = True
            totals[unit] = masks[unit] @ work
        found.append(totals)
    return found
