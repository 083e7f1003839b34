"""Which modules of fxsplit wait by what is simulated, and in which of them lines count."""

import contextlib
import gc

from fxsplit.batchnorm import deferred, synchronised
from fxsplit.inserted import random as random_numbers
from fxsplit.inserted import recompute
from fxsplit.loss import inside
from fxsplit.replicas import meeting, offload, sums
from fxsplit.runtime import call, crew, engine, fetching, in_place, stuck, travel, values, worker

from .scheduler import HERE, THREADING, Lock, RLock, SimpleQueue, simulation

WAITING = (
    call,
    crew,
    deferred,
    engine,
    fetching,
    in_place,
    inside,
    meeting,
    offload,
    recompute,
    sums,
    values,
    worker,
)
# What threads share; in the others a thread goes on until it waits.
LINES = frozenset(
    m.__file__ for m in (call, deferred, inside, meeting, sums, synchronised, travel, values, worker)
)


_BEFORE = stuck._stands_at, worker._Players.run


def _stands_at(thread, action):
    return None if thread.computes else _BEFORE[0](thread, action)


def _run(self):
    """The caller can be interrupted while it waits for workers."""
    me = simulation().current
    me.plays = True
    try:
        _BEFORE[1](self)
    finally:
        me.plays = False
        me.struck.clear()


_NAMES = [
    *((module, "threading", THREADING) for module in (*WAITING, random_numbers)),
    (worker, "SimpleQueue", SimpleQueue),
    (random_numbers, "_EVERYBODY", RLock()),
    (recompute, "_MAKING", Lock()),
    (in_place, "_lock", Lock()),
    (stuck, "_WAITING", (*stuck._WAITING, f"{HERE}/scheduler.py")),
    (stuck, "_stands_at", _stands_at),
    (worker._Players, "run", _run),
]
_PLAIN = [(module, name, getattr(module, name)) for module, name, _ in _NAMES]


@contextlib.contextmanager
def installed(names=_NAMES):
    """Inside, what fxsplit makes to wait by is simulated; it waits nowhere while there is no simulation."""
    before = [(module, name, getattr(module, name)) for module, name, _ in names]
    collects = gc.isenabled()
    gc.disable()  # what it ends would come at other steps in another process
    try:
        for module, name, value in names:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        if collects:
            gc.enable()


def plain():
    """Inside, in the middle of `installed`, threads are threads."""
    return installed(_PLAIN)
