"""What four ranks save, two load, and one process, and the plain model; whoever shards, too."""

import pathlib
import shutil

import pytest
import torch

import fxsplit
import fxsplit.distributed as fd
from fxsplit import Plan, errors
from tests.distributed import tasks

pytestmark = pytest.mark.slow
X = torch.zeros(6, 6, dtype=torch.long)


def plan(stages, **more):
    return Plan(stages=stages, micro_batches=3, schedule="1f1b", **more)


@pytest.fixture(scope="module")
def saved(four, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "ckpt"
    answers = four.run(tasks.saves, str(folder), 4, 1, plan(4))
    weights = {name: p for _, found in answers for name, p in found.items()}
    return folder, answers[0][0], weights


def same(losses, weights, saved):
    assert all(map(torch.equal, losses, saved[1]))
    assert all(torch.equal(p, saved[2][name]) for name, p in weights.items())


def test_two_ranks_go_on_where_four_were(two, saved):
    for losses, weights in two.run(tasks.goes_on, str(saved[0]), 2, 1, plan(2)):
        same(losses, weights, saved)


def test_one_process_goes_on_where_four_ranks_were(saved):
    pipe = fxsplit.compile(tasks.Net(), plan(3), example_args=(X,))
    opt = torch.optim.AdamW(pipe.parameters(), 1.0)
    assert fd.load(saved[0], pipe, opt) == 3
    losses = tasks.trained(pipe, opt, seed=5)
    same(losses, dict(pipe.named_parameters()), saved)


def test_the_plain_model_loads_it_and_saves_for_ranks(two, saved, tmp_path):
    model = tasks.Net()
    opt = torch.optim.AdamW(model.parameters(), 1.0)
    assert fd.load(saved[0], model, opt) == 3 and opt.param_groups[0]["lr"] == 1e-2
    fd.save(tmp_path, model, opt, step=3)
    for losses, weights in two.run(tasks.goes_on, str(tmp_path), 2, 1, plan(2)):
        same(losses, weights, saved)


@pytest.mark.parametrize("blocks", [False, True], ids=["stages", "blocks"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_sharded_over_replicas(four, tmp_path, checkpoint, blocks):
    four.run(tasks.is_sharded, plan(2, checkpoint=checkpoint), str(tmp_path / "ckpt"), blocks)


def test_only_whole_checkpoints_are_loaded(tmp_path, saved):
    model = tasks.Net()
    assert fd.load(tmp_path / "none", model) == 0
    for step in (1, 2, 3):
        fd.save(tmp_path, model, step=step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-2", "step-3"]
    shutil.copytree(tmp_path / "step-3", tmp_path / "step-4")
    pathlib.Path(tmp_path / "step-4" / ".metadata").unlink()  # a save that was cut off
    assert fd.load(tmp_path, model) == 3
    (tmp_path / "latest").write_text("4\n")
    before = {n: v.clone() for n, v in model.state_dict().items()}
    with pytest.raises(errors.WeightsError, match="cannot be read"):
        fd.load(tmp_path, model)
    with pytest.raises(errors.WeightsError, match=r"has no 0\.weight"):
        fd.load(saved[0], torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
