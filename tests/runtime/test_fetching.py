"""Weights that are fetched for a stage are there as long as anybody computes with it."""

from fxsplit.runtime.device import lanes_of
from fxsplit.runtime.fetching import Fetching
from fxsplit.schedules.lower import Flow, lower
from fxsplit.schedules.schedule import Schedule


class Away:
    """What `Fetching` asks of `replicas.offload.Offloaded`."""

    def __init__(self):
        self.users = self.fetched = 0

    def fetch(self):
        self.users += 1
        self.fetched += 1

    def leave(self):
        self.users -= 1

    def versions(self):
        return []

    def check(self, versions):
        pass


def test_weights_stay_while_another_worker_goes_the_other_way():
    tape = lower(Schedule.from_csv("0F0,0B0\n0F1,0B1\n", name="own"), Flow(1, []))
    at, away = {str(x): x for x in tape.order}, Away()
    fetching = Fetching({0: away}, lanes_of([]))
    with fetching.playing(tape):
        with fetching.around(at["0F0"]):
            assert away.users == 1
        with fetching.around(at["0B0"]):
            with fetching.around(at["0F1"]):  # the last forward, by the other worker meanwhile
                assert away.users == 1
            assert away.users == 1
        assert away.users == 0
        with fetching.around(at["0B1"]):
            assert away.users == 1
        assert away.users == 0
    assert away.fetched == 2
