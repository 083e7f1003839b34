"""An event for every action, and hooks that hear of them."""

import itertools
import threading
import time

import pytest
import torch

import fxsplit
from fxsplit.schedules.catalog import NAMES as SCHEDULES
from tests.helpers import LOSS, TiedBlocks, plan_for


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_event_for_every_action(schedule):
    x, target = torch.randn(8, 4), torch.randint(0, 3, (8,))
    pipe = fxsplit.compile(TiedBlocks(), plan_for(schedule, micro_batches=4), example_args=(x,))
    events, lock = [], threading.Lock()

    def log(event):
        with lock:
            events.append(event)

    handle = pipe.register_action_hook(log)
    pipe.step(x, target=target, **LOSS)
    assert sorted(e.action for e in events) == sorted(a for row in pipe.schedule.workers for a in row)
    for actions in pipe.schedule.workers:
        mine = [e for e in sorted(events, key=lambda e: e.begin) if e.action in actions]
        assert [e.action for e in mine] == list(actions)
        assert all(a.end <= b.begin for a, b in itertools.pairwise(mine))
    handle.remove()
    events.clear()
    pipe.step(x, target=target, **LOSS)
    assert not events


def test_an_event_is_around_its_action():
    model, seen, events = torch.nn.Sequential(torch.nn.Linear(4, 4)), [], []
    model[0].register_forward_hook(lambda *_: seen.append(time.perf_counter()))
    pipe = fxsplit.compile(model, fxsplit.Plan(micro_batches=2), example_args=(torch.randn(4, 4),))
    seen.clear()
    pipe.register_action_hook(events.append)
    with torch.no_grad():
        pipe(torch.randn(4, 4))
    assert [str(e.action) for e in events] == ["0F0", "0F1"]
    assert all(e.begin <= now <= e.end for e, now in zip(events, seen, strict=True))


def test_an_error_of_a_hook_is_that_of_its_action():
    x = torch.randn(8, 4)
    pipe = fxsplit.compile(TiedBlocks(), plan_for("1f1b", micro_batches=4), example_args=(x,))

    def fail(event):
        raise LookupError(str(event.action))

    with pipe.register_action_hook(fail), pytest.raises(LookupError):
        pipe(x)
    pipe(x)


def test_a_hook_that_calls_the_pipeline_does_not_wait_for_itself():
    x = torch.randn(8, 4)
    pipe = fxsplit.compile(TiedBlocks(), plan_for("1f1b", micro_batches=4), example_args=(x,))
    with (
        pipe.register_action_hook(lambda event: pipe(x)),
        pytest.raises(fxsplit.errors.ArgumentError, match="from inside of its own call"),
    ):
        pipe(x)
    pipe(x)
