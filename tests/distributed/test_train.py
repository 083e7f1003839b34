"""docs/train.py under torchrun: to its end, and through a rank that is killed."""

import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parent.parent.parent
KILLED = """
import os, runpy, signal, sys
from fxsplit.distributed import RankPipeline
step, count = RankPipeline.step, iter(range(1000))
def stepped(self, *args, **kwargs):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "2" and next(count) == 12:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **kwargs)
RankPipeline.step = stepped
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def losses(*command):
    """(rank, step) → the losses that were said, with restarts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "4",
        "--master-port",
        str(port),
        "--max-restarts",
        "2",
    ]
    done = subprocess.run(
        [*run, *map(str, command)], capture_output=True, text=True, env=environment, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for rank, step, loss in re.findall(r"rank (\d) step (\d+) loss ([\d.]+)", done.stdout):
        found.setdefault((int(rank), int(step)), set()).add(loss)
    return found


def test_a_killed_rank_is_started_again_and_nothing_is_lost(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    whole = losses(ROOT / "docs" / "train.py", tmp_path / "a")
    assert len(whole) == 80 and all(len(said) == 1 for said in whole.values())
    assert float(*whole[0, 19]) < float(*whole[0, 0])
    broken = losses(tmp_path / "killed.py", ROOT / "docs" / "train.py", tmp_path / "b")
    assert broken == whole
