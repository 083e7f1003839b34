"""No interleaving of workers hangs, loses or doubles a micro-batch, or says something wrong; and one that does is found."""

import contextlib

import pytest

from fxsplit.distributed import hub, watch
from fxsplit.replicas import meeting, sums
from fxsplit.runtime import call, fetching, values, worker
from fxsplit.schedules.tape import Tape
from tests.helpers import run_python
from tests.simulated import cases, ranks, tensors
from tests.simulated.__main__ import WORLDS
from tests.simulated.installed import installed
from tests.simulated.scheduler import THREADING, Instead, Lock, Simulation, Thread

# Interleavings in the short test, and in the long one. A pipeline takes seconds to compile, and there are 30 of them.
FEW = {"numbers": 40, "tensors": 4, "ranks": 10}
MANY = {"numbers": 1500, "tensors": 60, "ranks": 150}


@pytest.fixture(params=["numbers", "ranks", pytest.param("tensors", marks=pytest.mark.slow)])
def world(request):
    with installed(), WORLDS[request.param][1]():
        yield request.param


def play(world, seeds):
    return [_played(world, seed) for seed in seeds]


def _played(world, seed):
    run = WORLDS[world][0](seed)
    try:
        run.run()
    except AssertionError as error:
        raise AssertionError(f"{run}\n{error}") from error
    return run


def test_few_interleavings(world):
    play(world, range(FEW[world]))


@pytest.mark.slow
def test_many_interleavings(world):
    runs = play(world, range(1000, 1000 + MANY[world]))
    kinds = {"numbers": cases.ALL_FAULTS, "ranks": ranks.KINDS, "tensors": tensors.KINDS}
    assert {run.faults.kind for run in runs} == {*kinds[world]}


def test_a_seed_is_an_order(world):
    first, again = (play(world, range(FEW[world] // 2)) for _ in range(2))
    orders = [run.simulation.order for run in first]
    assert orders == [run.simulation.order for run in again]
    assert len({tuple(order) for order in orders}) > 0.8 * len(orders)


ORDERS = """
import zlib
from tests.simulated.__main__ import WORLDS
from tests.simulated.installed import installed
with installed():
    for world, (make, around) in WORLDS.items():
        with around():
            for seed in range(1 if world == "tensors" else 10):
                run = make(seed)
                run.run()
                print(zlib.crc32(bytes(run.simulation.order)))
"""


@pytest.mark.slow
def test_a_seed_is_the_same_order_in_another_process():
    assert len({run_python(ORDERS, PYTHONHASHSEED=str(n)) for n in range(2)}) == 1


# -- what it finds --------------------------------------------------------------------------------------------------------


class NoLock(Lock):
    """Lets everybody in."""

    def acquire(self, blocking=True, timeout=-1):
        self.depth += 1
        return True

    def release(self):
        self.depth -= 1


NO_LOCKS = Instead(THREADING, Lock=NoLock)


def without_locks(module):
    return lambda patch: patch.setattr(module, "threading", NO_LOCKS)


def deaf_to(kind):
    """Instructions of a kind begin without having heard of what comes before them."""

    def do(patch):
        waits = Tape.waits.func

        def fewer(tape):
            kinds = {x.number: x.kind for x in tape.instructions}
            return {n: after for n, after in waits(tape).items() if kinds[n] != kind}

        patch.setattr(Tape, "waits", property(fewer))

    return do


def nobody_is_woken(patch):
    def stop(self):
        self.stopping = True

    patch.setattr(worker._Players, "_stop", stop)


def nobody_is_let_out(patch):
    def close(self):
        with self._changed:
            self._closed = True

    patch.setattr(meeting.Door, "close", close)


def interrupted_once(patch):
    """The end of a call waits for workers, until it is interrupted."""

    def end(self):
        self._stop()
        self._wait()
        for thread in self.threads:
            thread.join()

    patch.setattr(worker._Players, "_end", end)


def the_last_error(patch):
    when = worker._when
    patch.setattr(worker, "_when", lambda failure: tuple(-part for part in when(failure)[:4]))


def weights_go_early(patch):
    """Who plays the last instruction of a kind gives the weights back, whoever else is in the stage."""
    before = fetching.Fetching.around

    @contextlib.contextmanager
    def around(self, instruction):
        with before(self, instruction):
            yield
            self._using[instruction.stage] = 1

    patch.setattr(fetching.Fetching, "around", around)


def nobody_hears_why(patch):
    patch.setattr(watch.Watch, "failed", lambda self, error: None)


def everybody_has_a_cause(patch):
    patch.setattr(watch.Watch, "_declare", watch.Watch._hear)


def packets_are_not_kept(patch):
    def readers(self, wiring, tape):
        found = {name: sum(map(self.has, stages)) for name, stages in wiring.program.readers().items()}
        return {name: count + 1 for name, count in found.items() if count or name in wiring.results}

    patch.setattr(hub.RankHub, "readers", readers)


BROKEN = {
    "a forward does not wait": ("numbers", deaf_to("forward")),
    "a backward does not wait": ("numbers", deaf_to("backward")),
    "no turns in a stage": ("numbers", without_locks(call)),
    "nobody is woken after an error": ("numbers", nobody_is_woken),
    "nobody is let out of a meeting after an error": ("numbers", nobody_is_let_out),
    "one interrupt too many": ("numbers", interrupted_once),
    "of two errors the other one": ("numbers", the_last_error),
    "weights go while somebody uses them": ("numbers", weights_go_early),
    "nobody hears why a rank failed": ("ranks", nobody_hears_why),
    "every rank has a cause of its own": ("ranks", everybody_has_a_cause),
    "packets are not kept for other ranks": ("ranks", packets_are_not_kept),
}
RARE = {"no lock around values": values, "no lock around sums": sums}  # between two lines of these


SLOW = ("of two errors the other one", "weights go while somebody uses them")


@pytest.mark.parametrize(
    ("world", "broken"),
    [pytest.param(*row, id=k, marks=[pytest.mark.slow] * (k in SLOW)) for k, row in BROKEN.items()],
)
def test_what_is_broken_is_found(world, broken, monkeypatch):
    check_is_found(monkeypatch, world, broken)


@pytest.mark.slow
@pytest.mark.parametrize("module", RARE.values(), ids=RARE)
def test_a_lock_that_is_missing_is_found(module, monkeypatch):
    check_is_found(monkeypatch, "numbers", without_locks(module), frozenset([module.__file__]))


def check_is_found(monkeypatch, world, broken, lines=None):
    make, around = WORLDS[world]
    with installed(), around(), monkeypatch.context() as patch:
        broken(patch)
        found = next(filter(None, (_failure(make, seed, lines) for seed in range(5000))), None)
    assert found is not None
    print(*found, sep="\n")
    with installed(), around():  # as it was before
        _run(make, found[0], lines)


def _failure(make, seed, lines):
    try:
        _run(make, seed, lines)
    except Exception as error:
        return seed, error
    return None


def _run(make, seed, lines):
    run = make(seed)
    if lines is not None:  # it may stop in these, and as often as not
        run.simulation.lines, run.simulation.per_line, run.simulation.ranked = lines, 0.5, False
    run.run()


def test_a_hang_says_who_waits_for_what():
    def main():
        first, second = Lock(), Lock()

        def other():
            with second, first:
                pass

        thread = Thread(target=other, name="other")
        with first:
            thread.start()
            with second:
                pass
        thread.join()

    texts = []
    for seed in range(20):
        try:
            Simulation(seed).run(main)
        except AssertionError as error:
            texts.append(str(error))
    assert 0 < len(texts) < 20
    assert (
        "caller waits for a lock of other, at " in texts[0] and "other waits for a lock of caller" in texts[0]
    )
