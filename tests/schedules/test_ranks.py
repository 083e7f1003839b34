"""The tapes of ranks: played by simulated ranks, every stage finds what it finds in one process, in the same order."""

import random
from collections import defaultdict, deque

import pytest

from fxsplit.graph.flow import flow_of, routes_of
from fxsplit.plan.checkpoint import Checkpoint
from fxsplit.schedules.lower import lower
from fxsplit.schedules.ranks import tapes_of_ranks
from tests.schedules.test_tape import drawn


class Rank:
    """Plays instructions with names in place of numbers, and notes what each of them found."""

    def __init__(self, routes, same):
        self.routes, self.same = routes, same
        self.values, self.gradients, self.tied, self.found = set(), {}, {}, {}
        self.order = {}

    def key(self, name, i):
        return (self.routes.aliases and self.same.get((name, i), name)) or name, i

    def play(self, x):
        if x.kind == "forward":
            (i,) = x.micro_batches
            for name, (made, *readers) in self.routes.values.items():
                if x.stage in readers:
                    assert made < 0 or (name, i) in self.values, (x, name)
            self.values |= {(n, i) for n, (made, *_) in self.routes.values.items() if made == x.stage}
        elif x.kind == "loss":
            self.lose(x.micro_batches[0])
        elif x.kind in ("backward", "inputs"):
            for i in x.micro_batches:
                self.back(x.stage, i)

    def lose(self, i):
        for name in self.routes.results:
            assert self.routes.values[name][0] < 0 or (name, i) in self.values, name
            key = self.key(name, i)
            self.gradients[key] = (*self.gradients.get(key, ()), "loss")

    def back(self, stage, i):
        seen = {}
        for name, (made, *_) in self.routes.values.items():
            if made == stage and (name, i) not in self.same:
                seen[name] = self.gradients.pop((name, i), ())
        read = {self.key(n, i) for n, (_, *readers) in self.routes.values.items() if stage in readers}
        for key in sorted(read):
            seen[key] = self.gradients.get(key, ())
            self.gradients[key] = (*seen[key], f"{stage}B{i}")
        for fqn, chain in self.routes.parameters.items():
            if stage in chain:
                seen[fqn] = self.tied.pop((fqn, i), ())
                if stage != chain[0]:
                    self.tied[fqn, i] = (*seen[fqn], f"{stage}B{i}")
        self.found[stage, i] = seen

    def send(self, x):
        packet, sent = x.packet, {}
        for i in x.micro_batches:
            if packet.forward:
                assert all((n, i) in self.values for n in packet.values), x
                sent[i] = ({(n, i) for n in packet.values}, {})
                continue
            gradients = {self.key(n, i): self.gradients.get(self.key(n, i)) for n in packet.values}
            tied = {n: self.tied.pop((n, i), None) for n in packet.parameters}
            sent[i] = (gradients, tied)
            for n in packet.dropped:
                if self.key(n, i)[0] in packet.dropped:
                    self.gradients.pop(self.key(n, i), None)
        return packet, sent

    def receive(self, x, packet, sent):
        assert packet == x.packet
        for i, (first, tied) in sent.items():
            if packet.forward:
                self.values |= first
                continue
            for k, g in first.items():
                if g is not None and self.order.get(k, -1) < packet.order:
                    self.gradients[k], self.order[k] = g, packet.order
            self.tied.update({(n, i): g for n, g in tied.items() if g is not None})


def play_ranks(tapes, routes, same, micro_batches):
    """All ranks, one instruction after the other in a drawn order; the loss is outside where no tape has it."""
    ranks, wire = [Rank(routes, same) for _ in tapes], defaultdict(deque)
    inside = any(x.kind == "loss" for tape in tapes for x in tape.order)
    halves = ["all"] if inside else ["forward", "backward"]
    rng = random.Random(0)
    for half in halves:
        rows = [list(getattr(tape, half).order if half != "all" else tape.order) for tape in tapes]
        if half == "backward" and any(rows):
            last = next(
                r
                for r, tape in enumerate(tapes)
                if any((x.kind, x.stage) == ("forward", routes.last) for x in tape.order)
            )
            for i in range(micro_batches):
                ranks[last].lose(i)
        while any(rows):
            able = [
                r
                for r, row in enumerate(rows)
                if row and (row[0].kind != "receive" or wire[row[0].packet.source, r])
            ]
            assert able, [str(row[0]) for row in rows if row]
            r = rng.choice(able)
            x = rows[r].pop(0)
            if x.kind == "send":
                wire[r, x.packet.target].append(ranks[r].send(x))
            elif x.kind == "receive":
                ranks[r].receive(x, *wire[x.packet.source, r].popleft())
            else:
                ranks[r].play(x)
    assert not any(wire.values())
    return ranks


def routes_and_same(program, rng, micro_batches):
    routes = routes_of(program)
    same = {
        (name, i): first
        for i in range(micro_batches)
        if rng.random() < 0.5
        for name, first in program.aliases.items()
    }
    return routes, same


def check(seed, loss):
    rng = random.Random(seed)
    program, schedule, _, checkpoint = drawn(rng)
    schedule = schedule.only(stages=len(program.stages), micro_batches=schedule.micro_batches)
    count = schedule.micro_batches
    loss = loss and any(a.kind in "BI" for row in schedule.workers for a in row)
    tape = lower(schedule, flow_of(program, Checkpoint.of(checkpoint)), loss=loss)
    routes, same = routes_and_same(program, rng, count)
    ranks = rng.randint(1, 4)
    rank_of = [rng.randrange(ranks) for _ in program.stages]
    rank_of = [sorted({*rank_of}).index(r) for r in rank_of]
    tapes = tapes_of_ranks(tape, rank_of, routes)
    found = {}
    for rank in play_ranks(tapes, routes, same, count):
        assert not found.keys() & rank.found.keys()
        found.update(rank.found)
    (alone,) = play_ranks(tapes_of_ranks(tape, [0] * len(rank_of), routes), routes, same, count)
    assert found == alone.found
    kinds = [x for tape in tapes for x in tape.order if x.packet is None]
    assert sorted(map(str, kinds)) == sorted(map(str, tape.order))
    return sum(x.kind == "send" for tape in tapes for x in tape.order)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [False, True])
def test_ranks_find_what_one_process_finds(loss):
    assert sum(check(seed, loss) for seed in range(1000)) > 1000
