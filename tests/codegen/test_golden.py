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


def test_bytes_are_the_same_in_every_process(golden):
    script = (
        "from tests.codegen.test_golden import text_of\nfrom tests.models import MODELS\nimport fxsplit\n"
        "for name in MODELS:\n"
        "    for checkpoint in ('never', 'always'):\n"
        "        print(text_of(name, fxsplit.Plan(stages=3, micro_batches=2, checkpoint=checkpoint)))\n"
    )
    texts = []
    for seed in ("0", "1", "4711"):
        texts.append(run_python(script, PYTHONHASHSEED=seed))
    assert texts[0] and texts[0] == texts[1] == texts[2]
