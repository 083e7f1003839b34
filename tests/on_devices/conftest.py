"""The tests of this folder have four devices, ``sim:0`` … ``sim:3``. They make torch another one for the whole process,
so each file runs in a process of its own: `tests/test_on_devices.py` sees to that."""

import pytest
import torch

from tests import sim

if sim.missing() is None:
    torch.set_num_threads(1)  # before autograd starts the threads of the devices
    sim.load()


def pytest_collection_modifyitems(items):
    reason = sim.missing()
    for item in items if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason))
