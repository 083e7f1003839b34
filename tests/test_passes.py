"""The passes of a compile, as values and in the log."""

import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit.errors import PartitionError
from fxsplit.graph.ir import Program, Traced
from fxsplit.merging.decide import Merging

X = torch.randn(8, 4)


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def compiled(**plan):
    return fxsplit.compile(
        model(), fxsplit.Plan(**{"stages": 2, "micro_batches": 2} | plan), example_args=(X,)
    )


def test_what_each_pass_made_can_be_fetched():
    pipe = compiled()
    made = {p.name: p.made for p in pipe.passes}
    assert list(made) == [
        "capture",
        "simplify",
        "compare the graph",
        "trace",
        "merge",
        "partition",
        "generate",
        "prove",
        "compare the split",
    ]
    assert isinstance(made["simplify"], Traced) and isinstance(made["merge"], Merging)
    assert made["generate"] is pipe.program and isinstance(made["generate"], Program)
    assert made["partition"][1] is pipe.assignment
    assert all(p.seconds >= 0 for p in pipe.passes) and str(pipe.passes[-1]).endswith(" s")
    assert sum(
        p.seconds for p in pipe.passes if p.name in ("capture", "simplify", "compare the graph")
    ) <= next(p.seconds for p in pipe.passes if p.name == "trace")


def test_a_compile_within_a_compile_keeps_its_own():
    outer = compiled()
    assert len(compiled(micro_batches=1).passes) < len(outer.passes)  # nothing is to be merged
    assert len(outer.passes) == 9


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
def test_the_log(caplog, level):
    with caplog.at_level(level, logger="fxsplit"):
        pipe = compiled()
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert said == [str(p) for p in pipe.passes]
    shown = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert [text.split(":")[0] for text in shown] == (
        []
        if level == "INFO"
        else ["after capture", "after simplify", "after merge", "after partition", "after generate"]
    )
    if shown:
        assert shown[-1] == "after generate:\n" + "\n\n".join(stage.code for stage in pipe)


def test_a_pass_that_fails_is_in_the_log(caplog):
    with caplog.at_level("INFO", logger="fxsplit"), pytest.raises(PartitionError):
        compiled(stages=9)
    assert caplog.records[-1].getMessage().startswith("partition: PartitionError after ")


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "lines"), [("fxsplit", 0), ("+fxsplit", 1)])
def test_torch_logs(setting, lines):
    """The environment variable that torch has for the logs of its own parts."""
    script = "from tests.test_passes import compiled; compiled()"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, "TORCH_LOGS": setting},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "generate: 0." in done.stderr
    assert bool(done.stderr.count("after generate:")) == bool(lines)
