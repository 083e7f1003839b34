"""The part of the benchmarks that needs a GPU, on devices that stand for two."""

import pytest

from benchmarks import gpu
from benchmarks.part import Options


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_gpu_part_gives_a_table():
    report = gpu.measure(Options(quick=True, devices=("sim:0", "sim:1")))
    subjects = {row[0] for row in report.rows}
    assert subjects == {"the split", "recomputation", "copies of weights", "CPU and GPU"}
    assert "**fxsplit, `offload=True`**" in {row[1] for row in report.rows}
