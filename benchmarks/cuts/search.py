"""The best cut that anything finds in some seconds: annealing of single units, and exact cuts of many orders."""

from __future__ import annotations

import math
import random
import time

import numpy as np


class Annealing:
    """Units that move between stages one at a time, whatever the order."""

    def __init__(self, work, values, before, link, stages, seed):
        self.work, self.values, self.before, self.stages = [float(w) for w in work], values, before, stages
        self.seconds = [nbytes / link for _, nbytes in values]
        self.after = [[] for _ in before]
        for unit, earlier in enumerate(before):
            for other in earlier:
                self.after[other].append(unit)
        self.touching = [[] for _ in before]
        for number, (units, _) in enumerate(values):
            for unit in units:
                self.touching[unit].append(number)
        self.random = random.Random(seed)

    def run(self, start, moves, heat):
        """The best unit → stage that is met."""
        stage_of, choose, last = [int(s) for s in start], self.random, self.stages - 1
        counts = [[0] * self.stages for _ in self.values]
        for number, (units, _) in enumerate(self.values):
            for unit in units:
                counts[number][stage_of[unit]] += 1
        loads = [0.0] * self.stages
        for unit, stage in enumerate(stage_of):
            loads[stage] += self.work[unit]
        for number, row in enumerate(counts):
            if sum(map(bool, row)) > 1:
                for stage, count in enumerate(row):
                    loads[stage] += self.seconds[number] * bool(count)
        scale = max(loads)
        members = [stage_of.count(stage) for stage in range(self.stages)]
        energy = sum((load / scale) ** 16 for load in loads)
        best, found = max(loads), list(stage_of)
        for move in range(moves):
            unit = choose.randrange(len(stage_of))
            here = stage_of[unit]
            low = max((stage_of[u] for u in self.before[unit]), default=0)
            high = min((stage_of[u] for u in self.after[unit]), default=last)
            if low == high or members[here] == 1:
                continue
            there = choose.randint(low, high)
            if there == here:
                continue
            changed = loads[:]
            changed[here] -= self.work[unit]
            changed[there] += self.work[unit]
            for number in self.touching[unit]:
                row, seconds = counts[number], self.seconds[number]
                size = len(self.values[number][0])
                if row[here] < size:  # it has left that stage's side of a cut before
                    for stage in range(self.stages):
                        changed[stage] -= seconds * bool(row[stage])
                row[here] -= 1
                row[there] += 1
                if row[there] < size:
                    for stage in range(self.stages):
                        changed[stage] += seconds * bool(row[stage])
            then = sum((load / scale) ** 16 for load in changed)
            warmth = heat * energy * (1 - move / moves) ** 2
            if then <= energy or (warmth and choose.random() < math.exp((energy - then) / warmth)):
                loads, energy = changed, then
                stage_of[unit] = there
                members[here] -= 1
                members[there] += 1
                if max(loads) < best * (1 - 1e-12):
                    best, found = max(loads), list(stage_of)
            else:
                for number in self.touching[unit]:
                    counts[number][here] += 1
                    counts[number][there] -= 1
        return np.array(found)


def random_order(before, after, choose):
    """An order that the program allows, often one branch after the other."""
    waiting = [len(earlier) for earlier in before]
    ready = [unit for unit, count in enumerate(waiting) if not count]
    stay, found = choose.choice((0.0, 0.5, 0.9, 1.0)), []
    while ready:
        at = len(ready) - 1 if choose.random() < stay else choose.randrange(len(ready))
        ready[at], ready[-1] = ready[-1], ready[at]
        unit = ready.pop()
        found.append(unit)
        following = after[unit][:]
        choose.shuffle(following)
        for other in following:
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    return np.array(found)


def long_search(captured, orders, problem, stages, link, starts, seconds):
    """The best unit → stage that annealing and exact cuts of many orders find in that time."""
    annealing = Annealing(captured.work, captured.values, problem.before, link, stages, seed=1)
    best = min(starts, key=lambda pair: pair[0])
    until, turn = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        start = best[1] if turn % 3 else starts[turn // 3 % len(starts)][1]
        if turn % 4 == 3:
            order = random_order(problem.before, annealing.after, annealing.random)
        else:
            stage_of = annealing.run(start, 40_000, heat=(0.2, 0.05, 0.01)[turn % 3])
            order = np.lexsort((np.arange(len(stage_of)), stage_of))
        found = orders.lightest(order, stages)
        best = min(best, found, key=lambda pair: pair[0])
        turn += 1
    return best
