"""Who runs next: one thread at a time, drawn from a seed. And what stands for threads, locks, queues and time meanwhile.

Two ways of drawing, by the seed: any of those that can go on (with more or less patience for the one that runs), or the
one of the highest priority, where a few times in a run the one that runs falls to the lowest: Burckhardt, Kothari,
Musuvathi and Nagarakatte, "A randomized scheduler with probabilistic guarantees of finding bugs" (2010).
"""

import gc
import itertools
import queue
import random
import sys
import threading
import time
from collections import deque
from pathlib import Path

HERE = str(Path(__file__).parent)
PATIENCE = 300.0  # real seconds: a thread waits for something that is not simulated
COLLECT = 500  # runs, between which the collector runs: not in one, where what it ends would come at any step
_now = None  # the simulation that runs, if any
_runs = itertools.count(1)


class SimulationError(AssertionError):
    """A run did not end as it has to."""


class Killed(BaseException):
    """The process that a thread is of is gone; nothing that it does is seen any more."""


def simulation():
    """The one that the calling thread is of, if any."""
    return _now if _now is not None and _now.current.real is threading.current_thread() else None


class Simulation:
    """One run.

    Args:
        seed: of who runs next.
        lines: files in which a thread may also be interrupted before a line.
        most: steps after which a run is endless.
        latest: simulated seconds, the same.

    Attributes:
        now: simulated seconds.
        order: numbers of the threads that the baton went to.
        events: step → what happens then, from outside.
        struck: errors that came from outside and were raised: in a thread's wait, or its next step.
    """

    def __init__(self, seed, lines=frozenset(), most=1_000_000, latest=600.0):
        self.rng = rng = random.Random(seed)
        self.lines, self.most, self.latest = lines, most, latest
        self.now, self.steps, self.order = 0.0, 0, []
        self.threads, self.count, self.every = [], 0, []
        self.events, self.struck = {}, []
        self.failure = None
        self.per_line = rng.choice((0.03, 0.15, 0.5))
        self.stays = rng.choice((0.0, 0.3, 0.8, 0.95))
        self.ranked = rng.random() < 0.4
        self.falls = {rng.randrange(rng.choice((100, 400, 1500))) for _ in range(rng.randint(0, 5))}
        self.lowest = 0.0
        self._over = threading.Lock()
        self._over.acquire()

    # -- from outside ----------------------------------------------------------------------------------------------

    def run(self, main):
        """What a function gives, in a thread of its own, that ends as the last one.

        Raises:
            SimulationError: nobody can go on, or it goes on for ever, or threads are left.
        """
        global _now
        found = []

        def caller():
            try:
                found.append((main(), None))
            except BaseException as error:
                found.append((None, error))

        if next(_runs) % COLLECT == 0:
            gc.collect()
        first = Thread(target=caller, name="caller")
        assert _now is None
        _now = self
        try:
            first.enter(self)
            self.current = first
            first.baton.release()
            if not self._over.acquire(timeout=PATIENCE):
                self.failure = f"a thread waits for what is not simulated:\n{self.report()}"
        finally:
            _now = None
        if self.failure is not None:
            raise SimulationError(self.failure)
        for thread in self.every:
            thread.real.join()
        result, error = found[0]
        if error is not None:
            try:
                raise error
            finally:
                del error, found
        return result

    def report(self):
        """Who is where, and waits for what."""
        frames, rows = sys._current_frames(), []
        for thread in self.threads:
            frame = frames.get(thread.real.ident)
            while frame is not None and frame.f_code.co_filename.startswith(HERE):
                frame = frame.f_back
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "nowhere"
            rows.append(f"    {thread.name} waits for {thread.why or 'its turn'}, at {where}")
        return "\n".join(rows)

    # -- who goes on -----------------------------------------------------------------------------------------------

    def point(self):
        """Somebody else may go on."""
        me = self.current
        if me.killed:
            raise Killed
        following = self._following()
        if following is not me:
            self._hand(following, me)
        self._strike(me)

    def wait(self, ready, why, seconds=None):
        """Until something is so. Whether it came to be, before so many seconds."""
        me = self.current
        if me.killed:
            raise Killed
        me.ready, me.why, me.late = ready, why, False
        me.until = None if seconds is None else self.now + seconds
        try:
            following = self._following()
            if following is not me:
                self._hand(following, me)
            self._strike(me)
        finally:
            me.ready = me.until = None
            me.why = ""
        return not me.late

    def _strike(self, me):
        if me.killed:
            raise Killed
        if me.struck:
            self.struck.append(me.struck[0])
            raise me.struck.pop(0)

    def _hand(self, following, me):
        self.current = following
        following.baton.release()
        me.baton.acquire()

    def _following(self):
        """Who goes on, where the one that runs stops."""
        self.steps += 1
        if self.steps in self.events:
            self.events[self.steps](self)
        if self.steps > self.most:
            self._fail(f"it goes on after {self.steps} steps")
        able = [
            t
            for t in self.threads
            if not t.stopped and (t.ready is None or t.struck or t.killed or t.ready())
        ]
        if not able:
            timed = [t for t in self.threads if t.until is not None and not t.stopped]
            if not timed:
                self._fail("nobody can go on")
            thread = min(timed, key=lambda t: t.until)
            self.now, thread.late = thread.until, True
            if self.now > self.latest:
                self._fail(f"it goes on after {self.now:.0f} s")
            able = [thread]
        chosen = self._chosen(able)
        self.order.append(chosen.number)
        return chosen

    def _chosen(self, able):
        me, rng = self.current, self.rng
        if self.ranked:
            if self.steps in self.falls:
                self.lowest -= 1.0
                me.rank = self.lowest
            return max(able, key=lambda t: t.rank)
        if len(able) == 1 or (me in able and rng.random() < self.stays):
            return able[0] if len(able) == 1 else me
        return able[int(rng.random() * len(able))]

    def _fail(self, what):
        """For good: the threads stay where they are, as nobody can end them."""
        if self.failure is None:
            self.failure = f"{what}, at step {self.steps}:\n{self.report()}"
            self._over.release()
        self.current.baton.acquire()  # it has it, and nobody gives it back

    def vanish(self):
        """The thread is gone, for all that others can see; it ends when it is killed."""
        self.current.stopped, self.current.state = True, "ended"
        self.wait(_never, "nothing")

    def ended(self, thread):
        """Hand the baton on for the last time."""
        self.threads.remove(thread)
        thread.over = True
        if thread is self.every[0]:
            if self.threads:
                left = [t.name for t in self.threads]
                self.failure = f"threads are left: {left}\n{self.report()}"
            self._over.release()
            return
        following = self._following()
        self.current = following
        following.baton.release()

    def traced(self, frame, event, arg):
        """For `sys.settrace`: the files in which lines count."""
        return self._line if frame.f_code.co_filename in self.lines else None

    def _line(self, frame, event, arg):
        if event == "line" and not self.current.killed and self.rng.random() < self.per_line:
            following = self._following()
            if following is not self.current:
                self._hand(following, self.current)
        return self._line


def point():
    """Somebody else may go on, where there is a simulation."""
    if _now is not None:
        now = simulation()
        if now is not None:
            now.point()


def pass_time(seconds):
    """An operation takes so long."""
    me = simulation().current
    me.computes = True
    try:
        sleep(seconds)
    finally:
        me.computes = False


def sleep(seconds):
    """`time.sleep`."""
    simulation().wait(_never, f"{seconds} s", seconds)


def _never():
    return False


# -- what stands for what threads have ------------------------------------------------------------------------------------


class Thread:
    """`threading.Thread`.

    Attributes:
        process: of which it is, where processes are simulated, too: that of the thread that made it.
        plays: whether it plays a tape, and waits for workers.
        computes: whether it is in an operation that takes long.
        killed, stopped: whether its process is gone, or does not go on.
    """

    def __init__(self, group=None, target=None, name=None, args=(), kwargs=None, *, daemon=None):
        self.name, self.daemon = name or "thread", daemon
        self._what = target, args, kwargs or {}
        self.state = "new"
        self.ready = self.until = None
        self.why, self.late, self.killed, self.struck = "", False, False, []
        self.plays = self.computes = self.stopped = self.over = False
        now = simulation()
        self.process = now.current.process if now is not None else None

    def enter(self, now):
        """It is one of those that can go on."""
        self.now, self.number, self.rank = now, now.count, now.rng.random()
        now.count += 1
        self.state = "alive"
        self.baton = threading.Lock()
        self.baton.acquire()
        now.threads.append(self)
        now.every.append(self)
        self.real = threading.Thread(target=self._run, name=f"simulated {self.name}", daemon=True)
        self.real.start()

    def start(self):
        now = simulation()
        now.point()
        self.enter(now)
        now.point()

    def _run(self):
        self.baton.acquire()
        target, args, kwargs = self._what
        self._what = None
        if self.now.lines:
            sys.settrace(self.now.traced)
        try:
            target(*args, **kwargs)
        except Killed:
            pass
        finally:
            sys.settrace(None)
            del target, args, kwargs
            self.state = "ended"
            self.now.ended(self)

    def join(self, timeout=None):
        simulation().wait(lambda: self.state == "ended", f"the end of {self.name}", timeout)

    def is_alive(self):
        return self.state == "alive"

    @property
    def ident(self):
        return None if self.state == "new" else self.real.ident

    @property
    def native_id(self):
        return None if self.state == "new" else self.real.native_id


class Lock:
    """`threading.Lock`, and `threading.RLock` with `again`."""

    again = False

    def __init__(self):
        self.owner, self.depth = None, 0

    def acquire(self, blocking=True, timeout=-1):
        now = simulation()
        if now is None:
            return self._outside()
        me = now.current
        now.point()
        if self.owner is not None and not (self.again and self.owner is me):
            if not blocking:
                return False
            there = now.wait(
                lambda: self.owner is None, f"a lock of {self.owner.name}", None if timeout < 0 else timeout
            )
            if not there:
                return False
        self.owner = me
        self.depth += 1
        return True

    def _outside(self):
        assert self.owner is None or self.again, "it would wait for ever"
        self.depth += 1
        return True

    def release(self):
        now = simulation()
        if now is not None and now.current.killed:
            return
        assert self.depth, "nobody has it"
        self.depth -= 1
        if not self.depth:
            self.owner = None
        point()

    def locked(self):
        return bool(self.depth)

    def __enter__(self):
        self.acquire()
        return True

    def __exit__(self, *exc):
        self.release()


class RLock(Lock):
    """`threading.RLock`."""

    again = True


class Condition:
    """`threading.Condition`."""

    def __init__(self, lock=None):
        self._lock = lock or RLock()
        self._waiting = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self):
        return self._lock.__enter__()

    def __exit__(self, *exc):
        return self._lock.__exit__(*exc)

    def wait(self, timeout=None):
        now, lock, told = simulation(), self._lock, []
        assert now is not None and lock.owner is now.current, "only who has the lock may wait"
        self._waiting.append(told)
        depth, lock.owner, lock.depth = lock.depth, None, 0
        try:
            return now.wait(lambda: bool(told), "a condition", timeout)
        finally:
            self._waiting = [w for w in self._waiting if w is not told]
            if not now.current.killed:
                if lock.owner is not None:
                    _uninterrupted(now, lambda: lock.owner is None, "a condition's lock")
                lock.owner, lock.depth = now.current, depth

    def wait_for(self, predicate, timeout=None):
        until = None if timeout is None else simulation().now + timeout
        while not (found := predicate()):
            left = None if until is None else until - simulation().now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify(self, n=1):
        assert simulation() is None or self._lock.owner is simulation().current, "only who has the lock may"
        for told in self._waiting[:n]:
            told.append(True)
        del self._waiting[:n]

    def notify_all(self):
        self.notify(len(self._waiting))


def _uninterrupted(now, ready, why):
    """As `Condition.wait` gets its lock back: what comes from outside meanwhile is raised later."""
    me = now.current
    later, me.struck = me.struck, []
    try:
        now.wait(ready, why)
    finally:
        me.struck = later + me.struck


class SimpleQueue:
    """`queue.SimpleQueue`."""

    def __class_getitem__(cls, item):
        return cls

    def __init__(self):
        self._items = deque()

    def put(self, item):
        point()
        self._items.append(item)
        point()

    def get(self, block=True, timeout=None):
        now = simulation()
        if not now.wait(self._items.__len__, "a queue", timeout):
            raise queue.Empty
        item = self._items.popleft()
        now.point()
        return item

    def empty(self):
        return not self._items


class Instead:
    """A module, with some of its names replaced."""

    def __init__(self, module, **names):
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name):
        return getattr(self._module, name)


def _current_thread():
    now = simulation()
    return threading.current_thread() if now is None else now.current


def _monotonic():
    now = simulation()
    return time.monotonic() if now is None else now.now


def _enumerate():
    now = simulation()
    return (
        threading.enumerate() if now is None else [t for t in now.threads if t.process == now.current.process]
    )


THREADING = Instead(
    threading,
    enumerate=_enumerate,
    Thread=Thread,
    Lock=Lock,
    RLock=RLock,
    Condition=Condition,
    current_thread=_current_thread,
)
TIME = Instead(time, monotonic=_monotonic, sleep=sleep)
