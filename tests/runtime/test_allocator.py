"""What workers free they take again, and do not fault in from the kernel in each step."""

import json
import os
import platform
import subprocess
import sys

import pytest

from fxsplit.runtime import allocator

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")

STEPS = """
import gc, json, resource, torch, fxsplit
from torch import nn

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

torch.set_num_threads(1)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(12)])
x = torch.randn(32768, 64)
pipe = fxsplit.compile(model, fxsplit.Plan(stages=2, micro_batches=4), example_args=(torch.randn(8, 64),))
faults = []
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pipe.step(x, target=x, loss_fn=nn.functional.mse_loss)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
kept = resident()
del pipe
gc.collect()
print(json.dumps([faults, kept - resident()]))
"""


def steps(**environment):
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_", "LD_PRELOAD"))}
    command = [sys.executable, "-c", STEPS]
    done = subprocess.run(
        command, env={**plain, **environment}, capture_output=True, text=True, check=True, timeout=300
    )
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_step_takes_the_pages_of_the_step_before():
    faults, given_back = steps()
    assert given_back > 50 * 2**20  # when the pipeline is gone
    left_alone, _ = steps(MALLOC_TOP_PAD_="131072")
    # 400 MiB are 100,000 pages, the same in each step. How many micro-batches are alive at once differs from step to
    # step, and so what a step takes that no step before it has had: 0 to 30,000 of them.
    assert min(left_alone) > 10000
    assert 5 * min(faults) < min(left_alone)


def test_who_has_set_the_allocator_is_left_alone():
    assert allocator._is_chosen_by_nobody({"PATH": "/bin"})
    for variable in (
        {"MALLOC_ARENA_MAX": "1"},
        {"GLIBC_TUNABLES": "glibc.malloc.top_pad=0"},
        {"LD_PRELOAD": "libjemalloc.so"},
    ):
        assert not allocator._is_chosen_by_nobody(variable)
