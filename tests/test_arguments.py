"""Wrong, missing and surplus arguments of every public function: an error of ours that says what to type."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxsplit
from fxsplit import Plan, errors
from fxsplit.__main__ import main
from fxsplit.errors import FxsplitError, StageIndexError
from fxsplit.runtime.crew import Crew


@pytest.fixture(scope="module")
def made():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(4, 4)
    return model, x, fxsplit.compile(model, Plan(stages=2, micro_batches=2), example_args=(x,))


CALLS = [
    (lambda m, x, p: Plan(chunks=2), "Plan(micro_batches=8)"),
    (lambda m, x, p: Plan(n_microbatches=2), "Plan(micro_batches=8)"),
    (lambda m, x, p: Plan(num_stages=2), "Plan(stages=2)"),
    (lambda m, x, p: Plan(split_spec={}), 'Plan(cut=["h.4", "h.8"])'),
    (lambda m, x, p: Plan(stagse=2), "'stages'"),
    (lambda m, x, p: Plan(2), "fxsplit.Plan(stages=2"),
    (lambda m, x, p: Plan(cut={"b"}), "cut=["),
    (lambda m, x, p: Plan(cut=3), "cut=["),
    (lambda m, x, p: Plan.from_dict(3), "plan.to_dict()"),
    (lambda m, x, p: fxsplit.compile(m, stages=2), "fxsplit.Plan(stages=2)"),
    (lambda m, x, p: fxsplit.compile(m, chunks=2), "fxsplit.Plan(micro_batches=8)"),
    (lambda m, x, p: fxsplit.compile(m, Plan(), (x,)), "example_args=(x,)"),
    (lambda m, x, p: fxsplit.compile(m, Plan(), example_inputs=(x,)), "example_args=(x,)"),
    (lambda m, x, p: fxsplit.compile(), "fxsplit.compile(model, plan"),
    (lambda m, x, p: fxsplit.preview(m, Plan(), (x,)), "example_args=(x,)"),
    (lambda m, x, p: fxsplit.compile(m, Plan(), example_args=(x,), leaf_modules=[3]), "leaf_modules=["),
    (lambda m, x, p: fxsplit.compile(m, Plan(), example_args=(x,), leaf_modules="0"), "leaf_modules=['0']"),
    (lambda m, x, p: fxsplit.compile(m, Plan(), example_args=(x,), leaf_modules=3), "leaf_modules=["),
    (lambda m, x, p: p.step(x, x, F.mse_loss), "target=y, loss_fn="),
    (lambda m, x, p: p.step(input=x), "target=y, loss_fn="),
    (lambda m, x, p: p.step(x, target=x, loss=F.mse_loss), "loss_fn="),
    (lambda m, x, p: p.step_with_output(x, target=x), "loss_fn="),
    (lambda m, x, p: p.step(x, target=x, loss_fn=None), "loss_fn="),
    (lambda m, x, p: p.step(x, target=x, loss_fn="mse"), "loss_fn="),
    (lambda m, x, p: p.step(x, target=x, loss_fn=F.mse_loss, reduction=3), "reduction="),
    (lambda m, x, p: p.criterion(F.cross_entropy)(x, x, weight=x), "nn.CrossEntropyLoss(weight=w)"),
    (lambda m, x, p: p.criterion(F.cross_entropy)(x, x, x), "criterion(output, target)"),
    (lambda m, x, p: fxsplit.Criterion(), "fxsplit.Criterion("),
    (lambda m, x, p: fxsplit.Budget(), "fxsplit.Budget("),
    (lambda m, x, p: fxsplit.Device(foo=1), "fxsplit.Device("),
    (lambda m, x, p: fxsplit.Schedule.from_csv(3), "from_csv("),
    (lambda m, x, p: fxsplit.verify(), "fxsplit.verify(pipe)"),
    (lambda m, x, p: fxsplit.load(), "fxsplit.load("),
    (lambda m, x, p: fxsplit.load("x", m, ["y"]), "trust="),
    (lambda m, x, p: p.register_action_hook(3), "register_action_hook("),
    (lambda m, x, p: p.save_code(None), "save_code("),
]


@pytest.mark.parametrize("call, remedy", CALLS)
def test_what_to_type_instead(call, remedy, made):
    with pytest.raises(errors.FxsplitError) as caught:
        call(*made)
    assert remedy in caught.value.remedy


def test_nothing_has_run_when_a_loss_cannot_be_called(made):
    _, x, pipe = made
    calls = []
    handle = pipe.register_action_hook(calls.append)
    with pytest.raises(errors.ArgumentError):
        pipe.step(x, target=x, loss_fn=None)
    handle.remove()
    assert not calls


def test_a_type_error_of_the_users_own_stays(made):
    _, x, pipe = made

    def loss(output, target):
        return output + "a"

    with pytest.raises(TypeError) as caught:
        pipe.step(x, target=x, loss_fn=loss)
    assert not isinstance(caught.value, errors.FxsplitError)


def test_nothing_is_placed_where_nothing_has_a_value():
    for device in ("cpu", "meta"):
        model = nn.Linear(4, 4, device=device)
        with pytest.raises(errors.PlanError, match="placed on meta"):
            fxsplit.compile(model, Plan(devices="meta"), example_args=(torch.randn(2, 4),))
        assert model.weight.device.type == device


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_a_demo_of_no_time(seconds, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--seconds", seconds])
    assert caught.value.code == 2 and "seconds" in capsys.readouterr().err


def test_what_follows_from_a_plan_follows_anew():
    assert Plan(stages=2, micro_batches=2, replicas=2).replace(replicas=4).micro_batches == 2
    assert Plan(stages=2, replicas=2).replace(replicas=4).micro_batches == 4
    assert Plan.from_dict(Plan(stages=2, replicas=2).to_dict()).replace(replicas=4).micro_batches == 4
    plan = Plan(stages=4, schedule="interleaved_1f1b", workers=2, devices=["cpu:0", "cpu:1"], micro_batches=4)
    assert plan.replace(stages=6).devices == ("cpu:0", "cpu:1") * 3
    assert Plan().replace(cut=["a"]).stage_count() == 2
    rows = Plan(stages=2, devices=[["cpu", "cpu"], ["cpu"]])
    assert rows.replace(devices=["cpu", "cpu"]).replicas == 1
    devices = ["cpu:0", "cpu:1"]
    plan = Plan(stages=2, devices=devices)
    devices.append("cpu:2")
    assert plan.replace(micro_batches=2).devices == ("cpu:0", "cpu:1")


def test_more_micro_batches_than_rows_cost_nothing(monkeypatch):
    counts = []
    tape_for = Crew.tape_for
    monkeypatch.setattr(Crew, "tape_for", lambda self, n, meets: counts.append(n) or tape_for(self, n, meets))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    for schedule in ("gpipe", "1f1b"):
        plan = Plan(stages=2, micro_batches=10**6, schedule=schedule)
        fxsplit.compile(model, plan, example_args=(torch.randn(4, 4),))
    assert counts and max(counts) <= 4


NOTHING_USEFUL = [None, 3.5, -7, 10**12, [], {}, object(), b"x"]


@pytest.fixture(scope="module")
def two_layers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return fxsplit.compile(model, Plan(stages=2, micro_batches=2), example_args=(torch.randn(4, 4),))


ANY_ARGUMENT = {
    "schedule_for": lambda pipe, bad: pipe.schedule_for(bad),
    "pipe[...]": lambda pipe, bad: pipe[bad],
    "Plan.load": lambda pipe, bad: Plan.load(bad),
    "Plan.save": lambda pipe, bad: Plan().save(bad),
    "measure_link": lambda pipe, bad: fxsplit.measure_link(bad),
    "measure_link from": lambda pipe, bad: fxsplit.measure_link(bad, "cpu"),
    "measure_link to": lambda pipe, bad: fxsplit.measure_link("cpu", bad),
    "measure_link bytes": lambda pipe, bad: fxsplit.measure_link(
        "cpu", "cpu", nbytes=bad if bad != 10**12 else None
    ),
    "micro_batches": lambda pipe, bad: pipe.micro_batches(bad),
    "run_whole": lambda pipe, bad: pipe.run_whole(bad),
    "verify_micro_batches": lambda pipe, bad: pipe.verify_micro_batches(bad),
    "register_action_hook": lambda pipe, bad: pipe.register_action_hook(bad),
    "verify": lambda pipe, bad: fxsplit.verify(bad),
    "criterion": lambda pipe, bad: pipe.criterion(bad),
    "from_csv": lambda pipe, bad: fxsplit.Schedule.from_csv(bad),
    "Schedule": lambda pipe, bad: fxsplit.Schedule(bad),
    "recompile": lambda pipe, bad: pipe.recompile(bad),
    "step": lambda pipe, bad: pipe.step(bad, loss_fn=nn.MSELoss()),
    "preview": lambda pipe, bad: fxsplit.preview(bad),
    "assert_equivalent": lambda pipe, bad: fxsplit.testing.assert_equivalent(bad, pipe, torch.randn(4, 4)),
    "assert_equivalent to": lambda pipe, bad: fxsplit.testing.assert_equivalent(
        pipe.model, bad, torch.randn(4, 4)
    ),
}


@pytest.mark.parametrize("bad", NOTHING_USEFUL, ids=lambda bad: type(bad).__name__)
@pytest.mark.parametrize("call", ANY_ARGUMENT.values(), ids=ANY_ARGUMENT)
def test_an_argument_of_another_kind_says_what_to_type(two_layers, call, bad):
    with pytest.raises(FxsplitError, match="instead: "):
        call(two_layers, bad)


def test_a_stage_that_is_not_there(two_layers):
    for index in (2, -3, "0"):
        with pytest.raises(StageIndexError, match=r"the pipeline has 2 stages(?s:.*)pipe\[0\] … pipe\[1\]"):
            two_layers[index]
    with pytest.raises(IndexError):
        two_layers[7]
    assert (
        two_layers[-1] is two_layers.stages[1]
        and list(reversed(two_layers)) == [two_layers[1], two_layers[0]]
        and two_layers[:1] == (two_layers[0],)
    )


def test_files_of_plans_that_are_not_there(tmp_path):
    with pytest.raises(fxsplit.errors.PlanError, match=r"No such file(?s:.*)plan.save"):
        Plan.load(tmp_path / "nothing.json")
    with pytest.raises(fxsplit.errors.PlanError, match="written"):
        Plan().save(tmp_path / "no" / "folder.json")
    Plan(stages=2).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == Plan(stages=2)
