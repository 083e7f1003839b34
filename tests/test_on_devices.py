"""Tests on several simulated devices: each file of `tests/on_devices` in a process of its own, which they change."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import sim

FILES = sorted((Path(__file__).parent / "on_devices").glob("test_*.py"))


@pytest.mark.slow
@pytest.mark.skipif(sim.missing() is not None, reason=str(sim.missing()))
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_on_devices(path, request):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, cwd=request.config.rootpath, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
