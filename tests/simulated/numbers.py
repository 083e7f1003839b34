"""A call without tensors: the real tape, workers, turns, meetings, values, sums and notes; instructions only keep books.

The books are compared with those of one thread that plays the tape in its order: what each stage found, and in which
order gradients and the contents of buffers came about.
"""

import contextlib
import random
from types import SimpleNamespace
from unittest import mock

from fxsplit.errors import WorkerError
from fxsplit.replicas.meeting import Meetings, StoppedError
from fxsplit.replicas.sums import OrderedSum
from fxsplit.runtime import call as call_module
from fxsplit.runtime import play
from fxsplit.runtime.call import Call
from fxsplit.runtime.device import lanes_of
from fxsplit.runtime.fetching import Fetching
from fxsplit.runtime.hub import Here
from fxsplit.runtime.values import Values
from fxsplit.runtime.worker import play_serially

from .cases import COUNT, Faults, OnPurpose, case, comes_first
from .installed import LINES
from .scheduler import Simulation, SimulationError, pass_time, point, simulation


class Term:
    """A gradient: the list of what was added to it."""

    is_sparse = False

    def __init__(self, *parts):
        self.parts = list(parts)

    def __add__(self, other):
        return Term(*self.parts, *other.parts)

    def __iadd__(self, other):
        self.parts += other.parts
        return self


class Away:
    """Weights of a stage, that are where they are needed only while they are (`replicas.offload.Offloaded`)."""

    def __init__(self, stage, faults):
        self.stage, self.faults, self.users = stage, faults, 0

    def fetch(self):
        point()
        if self.stage in self.faults.fetches:
            self.faults.fetched = True
            raise self.faults.fetches[self.stage]
        self.users += 1
        point()

    def leave(self):
        assert self.users > 0
        self.users -= 1
        point()

    def versions(self):
        return []

    def check(self, versions):
        pass


class Numbers(Call):
    """What the instructions of a case leave for each other."""

    def __init__(self, made, faults):
        stages = range(made.flow.stages)
        self.case, self.faults, self.tape = made, faults, made.tape
        self.program = SimpleNamespace(
            stages=[SimpleNamespace(index=s, modules=(f"blocks.{s}", f"blocks.{s}")) for s in stages]
        )
        self.chunks, self.parameters = [()] * made.micro_batches, {}
        self.replicas = {s: [SimpleNamespace(device="cpu")] * made.replicas[s] for s in stages}
        self.how = SimpleNamespace(
            hub=Here(), listeners=(), intra_op=1, compiled=False, inside=contextlib.nullcontext, rows=len
        )
        self.serial, self.norms, self.seed, self.loss = False, None, None, None
        readers = {v: len(chain) - 1 + (v in made.results) for v, chain in made.values.items()}
        self.values = Values({v: count for v, count in readers.items() if count})
        self.records, self.left = {}, []
        self.meetings, self.talks = Meetings(), Meetings()
        self.lanes = lanes_of([])
        self.turns = {}
        if made.recomputes:
            self.turns = {
                s: call_module.threading.Lock() for s in made.flow.in_turn if s not in made.tape.meets
            }
        self.away = {s: Away(s, faults) for s in made.away}
        self.fetching = Fetching(self.away, self.lanes) if self.away and simulation() is not None else None
        self.sums = {s: OrderedSum(made.micro_batches, 1) for s in stages}
        self.begun, self.done, self.found = [], set(), {}
        self.raised, self.wrong, self.gone = [], [], None
        self.buffers = {s: [] for s in stages}
        self.within = dict.fromkeys(stages)

    def close(self):
        super().close()
        self.talks.close()

    # -- what every instruction does -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def around(self, x):
        try:
            point()
            assert x.number not in self.begun, f"{x} is played twice"
            self.begun.append(x.number)
            missing = [n for n in x.after if n in self.now - self.done]
            assert not missing, f"{x} begins before {missing}"
            self.maybe_gone(x)
            when, error = self.faults.errors.get(x.number, ("", None))
            if when == "before":
                self.fail(x, error)
            if x.number in self.faults.delays and simulation() is not None:
                pass_time(self.faults.delays[x.number])
            self.check_weights(x)
            with self.alone(x):
                yield
                self.check_weights(x)
                if when == "within":
                    self.fail(x, error)
            point()
            if when == "after":
                self.fail(x, error)
            self.done.add(x.number)
        except Exception as error:
            if not isinstance(error, (OnPurpose, StoppedError)):
                self.wrong.append(f"{x}: {error!r}")
            raise

    def maybe_gone(self, x):
        """Its worker ends; but not one that has a lock, for which others would wait for ever."""
        now, faults = simulation(), self.faults
        if now is None or (faults.kind, faults.silent) != ("gone", x.number):
            return
        if now.current is not now.every[0] and not (self.turns or self.away):
            self.gone = now.current
            now.vanish()

    def check_weights(self, x):
        if self.fetching is not None and x.stage in self.away and x.kind != "loss":
            assert self.away[x.stage].users, f"{x} without its weights"

    def fail(self, x, error):
        if simulation() is not None:
            self.raised.append((x, error))
            raise error

    @contextlib.contextmanager
    def alone(self, x):
        """Who writes to what a stage has, or computes again what wrote it, is alone in it."""
        s, writes = x.stage, x.stage in self.case.flow.in_turn and x.stage not in self.tape.meets
        if (
            not writes
            or x.kind in ("loss", "weights", "send", "receive")
            or not (x.is_forward or self.case.recomputes)
        ):
            yield
            return
        assert self.within[s] is None, f"{x} while stage {s} is in {self.within[s]}"
        self.within[s] = x
        point()
        try:
            yield
        finally:
            self.within[s] = None

    # -- the instructions ------------------------------------------------------------------------------------------------

    def forward(self, x):
        (i,), s = x.micro_batches, x.stage
        if x.beside and simulation() is not None:
            self.meetings.enter(x.beside)
        with self.around(x):
            for name in self.reads(s):
                assert self.values.take(name, i) == f"{name} of {i}"
            if x.beside and simulation() is not None:
                self.talk(x)
            if s in self.case.flow.in_turn and s not in self.tape.meets:
                count = len(self.buffers[s])
                point()
                self.buffers[s][count:] = [i]
            self.records[s, i] = x.number
            for name, (maker, *_) in self.case.values.items():
                if maker == s:
                    self.values.give(name, i, f"{name} of {i}")

    def talk(self, x):
        """Copies that wait for each other, in a module; where that is the fault, for one that does not come."""
        if self.faults.kind == "stuck":
            simulation().wait(lambda: {*x.beside} <= {*self.begun}, "copies", None)
            simulation().wait(lambda: not self.raised or x.beside != self.raised[0][0].beside, "a copy")
        elif self.faults.kind == "unequal":
            silent = self.faults.silent
            simulation().wait(lambda: silent not in x.beside or x.number == silent, "a copy")
        else:
            self.talks.enter(x.beside)
        assert {*x.beside} <= {*self.begun} or self.faults.kind == "unequal"

    def lose(self, x):
        (i,) = x.micro_batches
        with self.around(x):
            self.receive(i)

    def receive(self, i):
        for name in self.case.results:
            assert self.values.take(name, i) == f"{name} of {i}"
            self.values.receive(name, i, [Term("loss")])

    def backward(self, x):
        with self.around(x):
            for i in x.micro_batches:
                self.back(x.stage, i)
                if x.kind == "backward":
                    self.add(x.stage, i, [Term(i)])

    def back(self, s, i):
        del self.records[s, i]
        seen, here = {}, Term(f"{s}B{i}")
        for name, (maker, *_) in self.case.values.items():
            if maker == s:
                seen[name] = _said(self.values.take_gradient(name, i))
        for name in self.reads(s):
            before = self.values.gradient(name, i)
            seen[name] = _said(before)
            point()
            self.values.give_gradient(name, i, [here] if before is None else [before[0] + here])
        for fqn, chain in self.case.shared.items():
            if s in chain:
                behind = self.values.take_of_parameter(fqn, i)
                seen[fqn] = _said(behind and [behind])
                if s != chain[0]:
                    self.values.give_of_parameter(fqn, i, here if behind is None else behind + here)
        assert (s, i) not in self.found, f"backward of {i} in stage {s} twice"
        self.found[s, i] = seen

    def weights(self, x):
        with self.around(x):
            self.add(x.stage, *x.micro_batches, [Term(*x.micro_batches)])

    def add(self, s, i, terms):
        self.sums[s].add(i, terms)

    def reads(self, s):
        return [name for name, (_, *readers) in self.case.values.items() if s in readers]

    # -- the whole ---------------------------------------------------------------------------------------------------------

    def play(self):
        """As a step does, or a call and then its backward."""
        tape = self.tape
        if self.case.loss or self.case.name == "forward_only":
            self.half(tape)
            return
        self.half(tape.forward)
        for i in range(self.case.micro_batches):
            self.receive(i)
        self.half(tape.backward)

    def half(self, tape):
        self.now = {x.number for x in tape.order} | self.done
        try:
            play._play(self, tape)
        finally:
            assert not any(one.users for one in self.away.values()), "weights are left"
            if simulation() is not None:
                self.end_those_left()
        assert self.done >= {x.number for x in tape.order}, "something is left out"

    def end_those_left(self):
        """Modules that wait for a copy that has failed are left where they are; here their wait is over."""
        for thread in (*self.left, *filter(None, [self.gone])):
            thread.killed, thread.stopped = True, False
            simulation().wait(lambda thread=thread: thread.over, f"the end of {thread.name}")
        self.gone = self.gone and "over"

    def books(self):
        """What is the same in every order."""
        backward = self.case.name != "forward_only"
        return {
            "found": self.found,
            "buffers": self.buffers,
            "sums": {s: total.total()[0].parts for s, total in self.sums.items()} if backward else {},
            "begun": sorted(self.begun),
        }


def _said(row):
    return None if row is None else tuple(row[0].parts)


NUMBERS = {
    "forward": Numbers.forward,
    "loss": Numbers.lose,
    "backward": Numbers.backward,
    "inputs": Numbers.backward,
    "weights": Numbers.weights,
}


@contextlib.contextmanager
def numbers():
    """Inside, instructions keep books."""
    with mock.patch.object(play, "PLAYS", NUMBERS):
        yield


def expected(made):
    """The books of one thread."""
    if not made.serial:
        call = Numbers(made, Faults("none", {}, [], {}))
        with mock.patch.object(play, "play", lambda tape, act, *_: play_serially(tape, act)):
            call.play()
        made.serial.update(call.books())
    return made.serial


class Run:
    """One interleaving, by its seed."""

    def __init__(self, seed):
        rng = random.Random(f"numbers {seed}")
        self.seed, self.case = seed, case(rng.randrange(COUNT))
        self.faults = Faults.drawn(rng, self.case.tape, self.case.away, copies_wait=True)
        self.simulation = Simulation(rng.random(), LINES if rng.random() < 0.5 else ())
        self.faults.aim(self.simulation)
        self.call = None

    def __str__(self):
        return f"numbers, seed {self.seed}: {self.case}; faults: {self.faults}"

    def run(self):
        """Raises: AssertionError: it is not as it has to be."""
        books = expected(self.case)

        def main():
            self.call = Numbers(self.case, self.faults)
            self.call.play()

        error = None
        try:
            self.simulation.run(main)
        except SimulationError:
            raise
        except BaseException as raised:
            error = raised
        call, struck, faults = self.call, self.simulation.struck, self.faults
        assert not call.wrong, call.wrong
        if faults.kind == "unequal":
            x = next(x for x in call.tape.order if x.number == faults.silent)
            assert isinstance(error, WorkerError), repr(error)
            assert "waits for others that have finished" in str(error), str(error)
            assert f"where: stage {x.stage}." in str(error), str(error)
            assert 0 < len(call.left) < len(x.beside)
            return
        if call.gone:
            x = next(x for x in call.tape.order if x.number == faults.silent)
            assert isinstance(error, WorkerError), repr(error)
            assert "ended before its actions were done" in str(error), str(error)
            assert f"at action {x}" in str(error), str(error)
            return
        if faults.fetched and not struck:
            first = faults.fetches.values()
            assert error is None or error in first, repr(error)
            assert error is not None or call.done == {x.number for x in call.tape.order}
            return
        if not struck and not call.raised:
            assert error is None, repr(error)
            assert call.books() == books
            return
        if struck:
            assert any(error is one for one in struck), f"{error!r} instead of one of {struck}"
        else:
            x, first = min(call.raised, key=comes_first)
            assert error is first, f"{error!r} instead of {first!r}, of {x}"
        assert not call.left or faults.kind == "stuck"
        for x, one in call.raised:
            said = {
                "forward": "forward",
                "loss": "loss, before the backward",
                "weights": "backward (weights)",
            }
            start = f"fxsplit: in the {said.get(x.kind, 'backward')} of stage {x.stage} (blocks.{x.stage}, on cpu), "
            note, *more = one.__notes__
            assert len(more) == len(call.left), more
            assert all(" waits for a copy that has failed, " in text for text in more), more
            assert note.startswith(start), note
            i, m = x.micro_batches[0], self.case.micro_batches
            assert f"micro-batch {i} of {m}, action {x}" in note, note
        for s, written in call.buffers.items():  # nothing is left out before what failed
            assert written == books["buffers"][s][: len(written)]
