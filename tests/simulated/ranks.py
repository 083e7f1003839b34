"""Ranks: the real hub, channel, packets and watch, over a network and a store that are simulated, in simulated time.

Every rank is a process of several threads (the player, those of the channel, and that of the watch), of which all run
under one order; instructions keep books, as in `numbers`. Two steps one after the other, and an end at which all are::

    rank 0   player, takes from 1, sends to 1, watch ──┐ network: what is sent comes after some time, in order
    rank 1   player, takes from 0, sends to 0, watch ──┤ store:   beats, and the cause of a failure
"""

import contextlib
import functools
import random
import re
from types import SimpleNamespace
from unittest import mock

import torch

from fxsplit.distributed import channel as channel_module
from fxsplit.distributed import hub as hub_module
from fxsplit.distributed import watch as watch_module
from fxsplit.distributed.channel import Channel
from fxsplit.distributed.hub import RankHub, ranks_of_stages
from fxsplit.distributed.pipeline import RankPipeline
from fxsplit.distributed.watch import Watch
from fxsplit.errors import RankError
from fxsplit.runtime import play
from fxsplit.runtime.instructions.message import message
from fxsplit.runtime.values import Values
from fxsplit.schedules.ranks import Routes, tapes_of_ranks

from .cases import COUNT, Faults, OnPurpose, case
from .numbers import NUMBERS, Numbers, expected
from .scheduler import (
    THREADING,
    TIME,
    Instead,
    Killed,
    SimpleQueue,
    Simulation,
    Thread,
    point,
    simulation,
    sleep,
)

STEPS = 2
LINES = frozenset(m.__file__ for m in (channel_module, hub_module, watch_module))
PATIENCE = 8.0  # simulated seconds that an instruction may take
KINDS = ("none", "late", "raises", "interrupt", "killed", "stopped", "hangs", "disagrees", "cut off")
AT_ANY_STEP = ("killed", "interrupt")


class Group:
    """A process group: the ranks, and which of those that each of them has made."""

    def __init__(self, ranks, number=0):
        self.ranks, self.number = ranks, number


class Link:
    """One way between two ranks in one group. What comes, comes in order, and whole."""

    def __init__(self):
        self.sent, self.arrives, self.taken, self.asked = [], [], [], 0


class Network:
    """What stands for `torch.distributed` in a run."""

    def __init__(self, rng, slow):
        self.rng, self.slow = rng, slow
        self.links, self.groups, self.gone = {}, {}, set()

    def get_process_group_ranks(self, group):
        return group.ranks

    def get_rank(self, group=None):
        return _me()

    def new_group(self, ranks, use_local_synchronization=False):
        made = self.groups[_me()] = self.groups.get(_me(), 0) + 1
        return Group(ranks, made)

    def isend(self, part, to, group):
        point()
        link = self._link(_me(), to, group)
        delay = self.rng.choice((0.0, 0.01, 0.3)) if self.rng.random() < self.slow else 0.0
        before = link.arrives[-1] if link.arrives else 0.0
        link.sent.append(part)
        link.arrives.append(max(before, simulation().now + delay))
        link.taken.append(0)
        number = len(link.sent) - 1
        return SimpleNamespace(wait=lambda: self._wait(lambda: link.taken[number], to, "a send"))

    def irecv(self, place, origin, group):
        point()
        link = self._link(origin, _me(), group)
        number, link.asked = link.asked, link.asked + 1

        def wait():
            self._wait(lambda: len(link.sent) > number, origin, "a message")
            left = link.arrives[number] - simulation().now
            if left > 0:
                sleep(left)
            sent = link.sent[number]
            assert sent.shape == place.shape and sent.dtype == place.dtype, "a message of another size"
            place.copy_(sent)
            link.taken[number] += 1

        return SimpleNamespace(wait=wait)

    def _link(self, source, target, group):
        return self.links.setdefault((source, target, group.number), Link())

    def _wait(self, there, other, what):
        simulation().wait(lambda: there() or other in self.gone, f"{what}, rank {other}")
        if not there():
            raise RuntimeError(f"connection closed by rank {other}")


class Store:
    """What stands for the store of torchrun."""

    def __init__(self, values):
        self._values = values
        self.cut_off = False

    def _asked(self):
        point()
        if self.cut_off:
            sleep(0.5)
            raise RuntimeError("the store does not answer")

    def set(self, key, value):
        self._asked()
        self._values[key] = value.encode()

    def get(self, key):
        self._asked()
        return self._values[key]

    def check(self, keys):
        self._asked()
        return all(key in self._values for key in keys)

    def compare_set(self, key, before, value):
        self._asked()
        if self._values.get(key, b"") == before.encode():
            self._values[key] = value.encode()
        return self._values[key]


def _me():
    return simulation().current.process


def end_process(rank, now=None):
    """All its threads are gone."""
    for thread in (now or simulation()).threads:
        if thread.process == rank:
            thread.killed, thread.stopped = True, False


class Part(Numbers):
    """A rank's part of a call."""

    def __init__(self, run, hub, tape, number):
        super().__init__(run.case, Faults("none", {}, [], {}))
        self.run, self.tape, self.rank, self.number = run, tape, hub.rank, number
        self.how.hub, self.how.rows = hub, lambda inputs: None
        rows = 1 + (run.kind == "disagrees" and (hub.rank, number) == (run.rank, run.step))
        self.chunks = [[torch.empty(rows, 1)]] * self.case.micro_batches
        readers = {v: list(stages[1:]) for v, stages in self.case.values.items()}
        program = SimpleNamespace(readers=lambda: readers)
        self.values = Values(hub.readers(SimpleNamespace(program=program, results=self.case.results), tape))

    def wants(self, x):
        """The fault of this instruction, if any."""
        run = self.run
        mine = (self.rank, self.number, x.number) == (run.rank, run.step, run.at)
        if mine and run.kind in ("raises", "interrupt"):
            run.raised = OnPurpose("this went wrong") if run.kind == "raises" else KeyboardInterrupt("now")
            raise run.raised
        if mine and run.kind == "killed":
            run.fell = True
            run.network.gone.add(self.rank)
            end_process(self.rank)
            point()
        if mine and run.kind == "stopped":
            run.fell = True
            for thread in simulation().threads:
                thread.stopped = thread.stopped or thread.process == self.rank
            point()
        if mine and run.kind == "cut off":  # of the store, and the others do not get what it sends
            run.fell = True
            run.stores[self.rank].cut_off = True
            sleep(60.0)
        if mine and run.kind in ("hangs", "late"):
            run.fell = run.kind == "hangs"
            sleep(60.0 if run.kind == "hangs" else PATIENCE / 2)

    @contextlib.contextmanager
    def around(self, x):
        with super().around(x):
            if x.packet is None:
                self.wants(x)
            yield

    def receive(self, i):
        if self.how.hub.has(self.case.flow.stages - 1):
            super().receive(i)

    def transfer(self, x):
        with self.around(x):
            message(self, x)

    def books(self):
        own = [s for s in range(self.case.flow.stages) if self.how.hub.has(s)]
        backward = self.case.name != "forward_only"
        return {
            "found": self.found,
            "buffers": {s: self.buffers[s] for s in own},
            "sums": {s: self.sums[s].total()[0].parts for s in own} if backward else {},
        }


PARTS = {**NUMBERS, "send": Part.transfer, "receive": Part.transfer}


@functools.cache
def tapes(number, ranks):
    """A case without replicas, where its stages are, and what each rank plays."""
    made = case(number, alone=True)
    stages = made.flow.stages
    rank_of = ranks_of_stages(made.tape, ranks)
    routes = Routes({**made.values}, stages - 1, {**made.shared}, {}, frozenset(made.results))
    return made, rank_of, tapes_of_ranks(made.tape, rank_of, routes)


class Run:
    """One interleaving of all ranks, by its seed."""

    def __init__(self, seed):
        rng = random.Random(f"ranks {seed}")
        self.seed = seed
        self.tapes = ()
        while len(self.tapes) < 2:
            self.case, self.rank_of, self.tapes = tapes(rng.randrange(COUNT), rng.randint(2, 4))
        self.kind, self.step = rng.choice(KINDS), rng.randrange(STEPS)
        self.size = len(self.tapes)
        self.rank = rng.randrange(self.size)
        self.at = rng.choice([x.number for x in self.tapes[self.rank].order if x.packet is None])
        self.network = Network(rng, rng.choice((0.0, 0.1, 0.9)))
        self.simulation = Simulation(rng.random(), LINES if rng.random() < 0.5 else ())
        self.faults = SimpleNamespace(kind=self.kind)
        self.any_step = rng.randrange(rng.choice((100, 500, 3000))) if rng.random() < 0.5 else None
        if self.kind in AT_ANY_STEP and self.any_step is not None:
            self.at = -1
            self.simulation.events[self.any_step] = self._from_outside
        self.raised, self.fell = None, False
        self.ends, self.parts, self.there, self.wrong = {}, {}, set(), []

    def __str__(self):
        x = f"step {self.any_step}" if self.at < 0 else self.tapes[self.rank].order[self.at]
        return (
            f"ranks, seed {self.seed}: {self.case.name}, stages on ranks {self.rank_of}, "
            f"{self.case.micro_batches} micro-batches; {self.kind} on rank {self.rank} at {x} of step {self.step}"
        )

    def run(self):
        """Raises: AssertionError: it is not as it has to be."""
        books = expected(self.case)
        with contextlib.ExitStack() as patches:
            for module in (channel_module, watch_module):
                patches.enter_context(mock.patch.object(module, "dist", self.network))
            self.simulation.run(self._everybody)
        assert not self.wrong, self.wrong
        self._check_ends()
        if self.raised is None and not self.fell and self.kind != "disagrees":
            for step in range(STEPS):
                self._check_books(books, [self.parts[rank, step].books() for rank in range(self.size)])
            for way, link in self.network.links.items():
                assert link.taken == [1] * len(link.sent), f"{way}: taken {link.taken}"

    def _everybody(self):
        store, now = {}, simulation()
        self.stores = [Store(store) for _ in range(self.size)]
        ranks = []
        for rank in range(self.size):
            thread = Thread(target=self._process, args=(rank, self.stores[rank]), name=f"rank {rank}")
            thread.process = rank
            ranks.append(thread)
            thread.start()
        now.wait(lambda: all(not t.is_alive() or t.stopped for t in ranks), "the ranks")
        for rank in range(self.size):
            end_process(rank)
        now.wait(lambda: len(now.threads) == 1, "the threads of the ranks")

    def _from_outside(self, now):
        """Whatever its threads do at this moment; while the script of the rank runs."""
        player = next((t for t in now.threads if t.name == f"rank {self.rank}" and t.plays), None)
        if player is None:
            return
        if self.kind == "killed":
            self.fell = True
            self.network.gone.add(self.rank)
            end_process(self.rank, now)
        else:
            self.raised = KeyboardInterrupt("now")
            player.struck.append(self.raised)

    def _process(self, rank, store):
        """As a script of its own, from its start to its exit."""
        watch = None
        try:
            watch = Watch(store, rank, self.size)
            watch.be_patient(PATIENCE)
            player = simulation().current
            player.plays = True
            try:
                self._script(rank, watch)
            finally:
                player.plays = False
                player.struck.clear()
            self.ends[rank] = None
        except Killed:
            raise
        except BaseException as error:
            self.ends[rank] = error
        if watch is not None:
            watch.end()
        self.network.gone.add(rank)
        end_process(rank)

    def _script(self, rank, watch):
        channel = Channel(Group([*range(self.size)]), torch.device("cpu"), watch)
        hub = RankHub(channel, watch, self.rank_of)
        for step in range(STEPS):
            with RankPipeline._told(SimpleNamespace(_watch=watch)):
                part = self.parts[rank, step] = Part(self, hub, self.tapes[rank], step)
                try:
                    part.play()
                finally:
                    self.wrong += [w for w in part.wrong if "RankError" not in w]
                value = torch.tensor([float(step)])
                pipe = SimpleNamespace(_hub=hub, _channel=channel)
                (shared,) = RankPipeline._from_last(pipe, [value] if rank == hub.last else None)
                assert torch.equal(shared, value)
        with RankPipeline._told(SimpleNamespace(_watch=watch)):
            channel.awaited(functools.partial(self._all_there, rank), "the end of all")
        channel.close()

    def _all_there(self, rank):
        self.there.add(rank)
        simulation().wait(lambda: len(self.there) == self.size, "the end of all")

    def _check_ends(self):
        others = {r: e for r, e in self.ends.items() if r != self.rank or self.kind in ("disagrees", "hangs")}
        if self.kind == "cut off" and self.fell:
            assert "the store of the ranks has not answered" in str(self.ends[self.rank]), self.ends
        if self.raised is None and not self.fell and self.kind != "disagrees":
            assert self.ends == dict.fromkeys(range(self.size)), self.ends
            return
        if self.at < 0 and len(self.there) == self.size:
            return  # nobody waits for it any more
        if self.raised is not None:
            assert self.ends[self.rank] is self.raised, self.ends
        assert all(isinstance(e, RankError) for e in others.values()), self.ends
        assert len(others) >= self.size - 1
        causes = {str(e).split("\n")[0] for e in others.values()}
        assert len(causes) == 1, causes
        (cause,) = causes
        if self.at < 0:
            assert re.match(rf"rank {self.rank} (failed|has not answered|has ended)", cause), cause
            return
        x = next(x for x in self.tapes[self.rank].order if x.number == self.at)
        if self.raised is not None:
            assert cause.startswith(f"rank {self.rank} failed: {type(self.raised).__name__}: "), cause
            assert f", action {x}" in cause and f"of stage {x.stage} (" in cause, cause
        elif self.kind == "hangs":
            assert cause.startswith(f"rank {self.rank} hangs: it has been in the "), cause
            assert f"of stage {x.stage} " in cause and f"micro-batch {x.micro_batches[0]} " in cause, cause
        elif self.kind == "disagrees":
            assert cause.startswith("the ranks do not do the same: rank "), cause
        else:
            assert cause.startswith(f"rank {self.rank} has not answered for "), cause

    def _check_books(self, books, parts):
        for kind in ("found", "buffers", "sums"):
            merged = {}
            for part in parts:
                assert not merged.keys() & part[kind].keys(), "two ranks have done the same"
                merged.update(part[kind])
            assert merged == books[kind], f"{kind}: {merged}, and in one process {books[kind]}"


@contextlib.contextmanager
def ranks():
    """Inside, channels and watches wait by what is simulated."""
    names = [
        (channel_module, "threading", THREADING),
        (channel_module, "SimpleQueue", SimpleQueue),
        (channel_module, "time", TIME),
        (watch_module, "threading", THREADING),
        (watch_module, "time", TIME),
        (watch_module, "atexit", SimpleNamespace(register=lambda end: None, _run_exitfuncs=lambda: None)),
        (watch_module, "os", Instead(watch_module.os, _exit=_exit)),
        (play, "PLAYS", PARTS),
    ]
    with contextlib.ExitStack() as patches:
        for module, name, value in names:
            patches.enter_context(mock.patch.object(module, name, value))
        yield


def _exit(status):
    end_process(_me())
    raise Killed
