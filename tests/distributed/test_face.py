"""What people ask of a pipeline over ranks beside steps."""

import inspect

import pytest

from fxsplit import Pipeline, Plan
from fxsplit.distributed import RankPipeline
from tests.distributed import tasks

pytestmark = pytest.mark.slow
# Of `Pipeline`, and the same on a rank: they look at the program, which every rank has whole, or at what it has of the model.
AS_IN_ONE_PROCESS = {
    *("active", "assignment", "devices", "dims", "engines", "example", "hf_device_map", "merges", "program"),
    *("schedule", "schedule_for", "stages", "staircase", "tape", "tape_for", "traced", "unsplit", "report"),
    *("print_readable", "save_code", "memory", "micro_batches", "takes", "is_like", "prove_schedules"),
    *("compile", "compile_stages", "compiled_by", "criterion", "register_action_hook", "step"),
    *(
        "step_with_output",
        "timeline",
        "simulated_timeline",
        "train",
        "training",
        "settle",
        "went_through",
        "make_replicas",
        "refresh_replicas",
    ),
}


def test_every_name_of_a_pipeline_was_thought_of():
    public = {n for n, _ in inspect.getmembers(Pipeline) if n in vars(Pipeline) and not n.startswith("_")}
    own = {n for n in vars(RankPipeline) if n in public}
    assert public - own == AS_IN_ONE_PROCESS


def test_what_is_asked_is_answered_or_refused_with_a_way_out(two, tmp_path):
    for refused, said in two.run(tasks.has_the_face_of_a_pipeline, str(tmp_path)):
        assert refused.keys() == {
            *(
                "recompile",
                "in_place",
                "deepcopy",
                "verify_micro_batches",
                "run_whole",
                "load_weights",
                "call",
            )
        }
        assert all("instead: " in text for text in refused.values())
        assert "stage" in said[0] and "over 2 ranks" in said[1]
    codes = [
        {p.name: p.read_bytes() for p in (tmp_path / str(rank)).iterdir() if p.is_file()} for rank in (0, 1)
    ]
    assert codes[0] == codes[1] and len(codes[0]) > 2


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_autocast(two, schedule):
    two.run(tasks.autocasts, Plan(stages=4, micro_batches=3, schedule=schedule))


@pytest.mark.parametrize(
    "schedule",
    [{"schedule": "gpipe"}, {"schedule": "1f1b"}, {"schedule": "dual_pipe_v", "workers": 2}],
    ids=str,
)
def test_replicas_reduce_what_is_there(four, schedule):
    four.run(tasks.reduces_what_is_there, Plan(stages=4, micro_batches=4, **schedule))


def test_pipelines_over_the_same_ranks_share_their_connections(two):
    for first, *more in two.run(tasks.threads_of_many):
        assert max(more) <= first + 1, (first, more)


def test_memory_is_flat_over_many_steps(two):
    for before, after in two.run(tasks.many_steps, 1000):
        assert after - before < 3 * 2**20, (before, after)
