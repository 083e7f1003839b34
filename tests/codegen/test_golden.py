"""The generated code and tables, as files that a reviewer reads. Rewrite with ``pytest --update-golden``."""

import pytest

import fxsplit
from tests.helpers import run_python
from tests.models import MODELS, build
from tests.partition.test_placement import MAPS, stages_of


def text_of(name, plan):
    """All stages and the table."""
    model, batch = build(name)
    pipe = fxsplit.compile(model, plan, example_args=batch(4))
    return "\n\n".join([pipe.report(), *(stage.code for stage in pipe)])


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_stage_code(name, stages, golden):
    golden(f"{name}_{stages}.txt", text_of(name, fxsplit.Plan(stages=stages, micro_batches=2)))


@pytest.mark.parametrize("name", MODELS)
def test_stage_code_with_checkpoints(name, golden):
    golden(
        f"{name}_checkpoint.txt",
        text_of(name, fxsplit.Plan(stages=2, micro_batches=2, checkpoint="except_last")),
    )


@pytest.mark.parametrize("name", MAPS)
def test_stage_code_with_transfers(name, golden):
    _, _, _, program = stages_of(name, fxsplit.Plan(device_map=MAPS[name]))
    golden(f"{name}_device_map.txt", "\n\n".join(stage.code for stage in program.stages))


ALL_BYTES = """
import sys, torch, fxsplit
from tests.codegen.test_golden import text_of
from tests.models import MODELS, build

torch.set_num_threads(1)
for name in MODELS:
    for checkpoint in ("never", "always"):
        print(text_of(name, fxsplit.Plan(stages=3, micro_batches=2, checkpoint=checkpoint)))
for name in ("gpt", "resnet", "tied_head", "experts"):
    model, batch = build(name)
    whole = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    for word in ("auto", "balanced_low_0", "sequential"):
        limits = {f"cpu:{i}": whole * 6 // 10 for i in range(3)}
        kept = ["Linear", "LayerNorm", "Conv2d"]
        plan = fxsplit.Plan(device_map=word, max_memory=limits, no_split_module_classes=kept)
        pipe = fxsplit.compile(build(name)[0], plan, example_args=batch(4), check=False)
        print(word, pipe.hf_device_map, pipe.devices, *(stage.code for stage in pipe), sep="\\n")
model, batch = build("two_tower")
fxsplit.compile(model, fxsplit.Plan(stages=3), example_args=batch(4)).save_code(sys.argv[1])
"""


@pytest.mark.slow
def test_bytes_are_the_same_in_every_process(tmp_path):
    """Code, tables, device maps and saved files, whatever order sets and dicts of hashes have."""
    printed, saved = [], []
    for seed in ("0", "1", "4711"):
        printed.append(run_python(ALL_BYTES, tmp_path / seed, PYTHONHASHSEED=seed))
        saved.append({p.name: p.read_text() for p in (tmp_path / seed).iterdir()})
    assert printed[0].count("def forward") >= 12 * 3 + 12 * 2 and printed[0] == printed[1] == printed[2]
    assert saved[0] == saved[1] == saved[2] and len(saved[0]) == 5
