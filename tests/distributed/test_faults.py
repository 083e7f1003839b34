"""Whatever happens to one rank, the others end soon, with one error that names it."""

import os
import pathlib
import random
import re
import signal

import pytest

from tests.distributed import tasks
from tests.distributed.ranks import GONE, Failed, Ranks

pytestmark = pytest.mark.slow


def meet(tmp_path, kind, stage, micro_batch, phase, schedule="1f1b", pp=3):
    ranks, file = Ranks(pp, tmp_path), tmp_path / "when"
    try:
        ranks.begin(tasks.meets_a_fault, kind, stage, micro_batch, phase, schedule, str(file), pp)
        if kind == "stopped":
            found = ranks.end_of([r for r in range(pp) if r != stage])
            os.kill(ranks.processes[stage].pid, signal.SIGKILL)
        else:
            found = ranks.end_of([r for r in range(pp) if r != stage or kind == "raises"])
        if kind == "hangs":
            os.kill(ranks.processes[stage].pid, signal.SIGKILL)
        when = float(pathlib.Path(file).read_text())
        codes = ranks.close()
        assert all(code in (0, 1) for rank, code in enumerate(codes) if rank != stage), (
            codes
        )  # nobody is aborted
        return found, when
    finally:
        ranks.kill()


@pytest.mark.parametrize(
    ("kind", "stage", "micro_batch", "phase", "schedule"),
    [
        ("raises", 1, 1, "F", "1f1b"),
        ("raises", 2, 0, "BI", "gpipe"),
        ("raises", 0, 2, "BI", "zb_h1"),
        ("exits", 0, 0, "F", "gpipe"),
        ("killed", 1, 2, "BI", "1f1b"),
        ("killed", 2, 0, "F", "1f1b"),
        ("stopped", 0, 1, "F", "1f1b"),
        ("hangs", 2, 1, "BI", "1f1b"),
    ],
)
def test_the_others_end_with_one_error_that_names_it(tmp_path, kind, stage, micro_batch, phase, schedule):
    check(tmp_path, kind, stage, micro_batch, phase, schedule, 3)


EVERYWHERE = [
    (kind, stage, micro_batch, phase, schedule, ranks)
    for kind in ("raises", "exits", "killed", "stopped", "hangs")
    for ranks in (2, 3, 4)
    for stage in range(ranks)
    for micro_batch in range(3)
    for phase in ("F", "BI")
    for schedule in ("gpipe", "1f1b", "zb_h1")
]


@pytest.mark.parametrize("number", range(int(os.environ.get("FXSPLIT_FAULTS", "3"))))
def test_anywhere(tmp_path, number):
    check(tmp_path, *random.Random(number).choice(EVERYWHERE))


def check(tmp_path, kind, stage, micro_batch, phase, schedule, count):
    found, when = meet(tmp_path, kind, stage, micro_batch, phase, schedule, count)
    others = [answer for rank, answer in found.items() if rank != stage]
    assert all(isinstance(answer, tuple) for answer in others), found
    assert {name for name, _, _ in others} == {"RankError"}
    causes = {text.split("\n")[0] for _, text, _ in others}
    assert len(causes) == 1, causes
    (cause,) = causes
    assert f"rank {stage}" in cause
    print(kind, [round(at - when, 1) for _, _, at in others], cause)
    if kind == "raises":
        assert "ZeroDivisionError: this went wrong" in cause and f"stage {stage}" in cause
        assert re.search(rf"micro-batch {micro_batch} of 3", cause)
        assert found[stage][0] == "ZeroDivisionError"
    elif kind == "hangs":
        what = "forward" if phase == "F" else r"backward( \(inputs\))?"
        assert re.search(
            rf"hangs: it has been in the {what} of stage {stage} \({stage}\), micro-batch {micro_batch}",
            cause,
        )
    elif kind != "exits":  # what others wait for: the last beat may be older
        assert re.search(
            rf"what {stage}[FBI]\d gives \(stage {stage}, micro-batch \d\), from rank {stage}", cause
        )
    # seen: 0.3 to 5 s; who hangs goes on after 30 s, and a connection waits for half an hour
    assert all(at - when < 25 for _, _, at in others)


def test_failures_are_not_gone():
    assert not isinstance(GONE, Failed)
