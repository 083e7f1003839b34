"""Two hosts, as network namespaces with a cable between them: docs/train.py over both, and with the cable cut."""

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parent.parent.parent
STEPS_BEFORE_THE_CUT = 8  # the checkpoint is after 5
RUNS = """
import os, pathlib, runpy, sys, time
from fxsplit.distributed import RankPipeline, watch
# A busy machine may look like a cable that is cut, and nobody is cut off in the other run.
watch.SILENT = 10.0 if os.environ.get("SLOWLY") else 30.0
folder, step = pathlib.Path(sys.argv.pop(1)), RankPipeline.step
done = 0
def stepped(self, *args, **kwargs):
    global done
    if os.environ.get("SLOWLY") and done > 5:
        time.sleep(0.3)
    try:
        found = step(self, *args, **kwargs)
    except Exception as error:
        rank, first = os.environ["RANK"], str(error).splitlines()[0]
        (folder / f"error-{rank}").write_text(f"{time.time()} {type(error).__name__}: {first}")
        raise
    done += 1
    if os.environ["RANK"] == "0":
        (folder / "steps").write_text(str(done))
    return found
RankPipeline.step = stepped
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts():
    """Names of two namespaces, each with its end of the cable."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip")
    ends = [(f"fxsplit{k}-{os.getpid()}", f"fx{k}-{os.getpid()}", f"10.77.0.{k}") for k in (1, 2)]
    try:
        for space, _, _ in ends:
            ip("netns", "add", space)
        (_, first, _), (_, second, _) = ends
        ip("link", "add", first, "type", "veth", "peer", "name", second)
        for space, end, address in ends:
            ip("link", "set", end, "netns", space)
            ip("-n", space, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", space, "link", "set", end, "up")
            ip("-n", space, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        _remove(ends)
        pytest.skip(f"no network namespaces here: {error.stderr}")
    yield ends
    _remove(ends)


def _remove(ends):
    for space, _, _ in ends:
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("netns", "del", space)


def started(hosts, folder, checkpoints, port, **environment):
    """torchrun on each host, two ranks each."""
    (folder / "runs.py").write_text(RUNS)
    found = []
    for node, (space, end, _) in enumerate(hosts):
        command = ["ip", "netns", "exec", space, sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2"]
        command += ["--master-addr", hosts[0][2], "--master-port", str(port)]
        command += [folder / "runs.py", folder, ROOT / "docs" / "train.py", checkpoints]
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": end, **environment}
        log = (folder / f"log-{node}-{port}").open("w+")
        found.append(
            (
                subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env={**os.environ, **own}),
                log,
            )
        )
    return found


def ended(runs, seconds):
    """Statuses, and all that was said."""
    until, text, codes = time.monotonic() + seconds, "", []
    for process, log in runs:
        try:
            codes.append(process.wait(max(1, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.append(None)
        log.seek(0)
        text += log.read()
        log.close()
    return codes, text


def losses(text):
    found = {}
    for rank, step, loss in re.findall(r"rank (\d) step (\d+) loss ([\d.]+)", text):
        found.setdefault((int(rank), int(step)), set()).add(loss)
    return found


def test_a_cable_that_is_cut(hosts, tmp_path):
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    codes, text = ended(started(hosts, tmp_path / "whole", tmp_path / "a", 29700), 150)
    assert codes == [0, 0], text[-3000:]
    whole = losses(text)
    assert len(whole) == 80

    folder = tmp_path / "broken"
    runs = started(hosts, folder, tmp_path / "b", 29701, SLOWLY="yes")
    until = time.monotonic() + 120
    while not (folder / "steps").exists() or int((folder / "steps").read_text() or 0) < STEPS_BEFORE_THE_CUT:
        if time.monotonic() > until or any(process.poll() is not None for process, _ in runs):
            pytest.fail(f"never came to be cut: {ended(runs, 1)}")
        time.sleep(0.05)
    (space, end, _), _ = hosts
    ip("-n", space, "link", "set", end, "down")
    cut = time.time()
    codes, before = ended(runs, 90)
    assert 0 not in codes
    for ranks in ((0, 1), (2, 3)):  # torchrun may end the second rank of a host before it could say so
        found = [path for r in ranks if (path := folder / f"error-{r}").exists()]
        assert found, before[-3000:]
        for path in found:
            when, said = path.read_text().split(" ", 1)
            assert float(when) - cut < 60, said  # without a watch it is half an hour
            assert said.startswith("RankError") and ("cut off" in said or "lost" in said), said
    ip("-n", space, "link", "set", end, "up")
    codes, after = ended(started(hosts, folder, tmp_path / "b", 29702), 150)
    assert codes == [0, 0], after[-3000:]
    assert min(step for _, step in losses(after)) == 5  # from the checkpoint
    assert losses(before + after) == whole
