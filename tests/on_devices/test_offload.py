"""Weights that stay on the CPU: the same numbers, and on the device only what a stage needs and the next one."""

import copy
import gc
import itertools
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxsplit
from fxsplit import Plan, errors
from tests.weights.test_weights import Tied, X, on_meta

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


def blocks(drop=0.0):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(drop) for _ in range(4)), nn.Linear(4, 3))


INPUT, TARGET = torch.randn(8, 4), torch.randint(0, 3, (8,))
# Two workers that have every stage: one goes forward with it while the other goes backward.
WAY = [("F", s) for s in range(4)] + [("B", s) for s in (3, 2, 1, 0)]
OWN = fxsplit.Schedule.from_csv(
    "\n".join(",".join(f"{s}{kind}{i}" for i in mine for kind, s in WAY) for mine in ((0, 1), (2, 3))),
    name="two on every stage",
)
ONE = {"stages": 4, "devices": "sim:0", "offload": True}


def counterparts(pipe):
    trees = pipe._begun.common.company.trees.values()
    return [made for tree in trees for _, made, _ in tree._made.values()]


def steps(pipe, model, optimizer, count=3):
    losses = []
    for _ in range(count):
        losses.append(pipe.step(INPUT, target=TARGET, loss_fn=F.cross_entropy, reduction="mean").cpu())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    "fields",
    [
        {"micro_batches": 1},
        {"micro_batches": 4},
        {"micro_batches": 4, "schedule": "breadth_first", "workers": 1},
        {"micro_batches": 4, "schedule": "1f1b"},
        {"micro_batches": 4, "schedule": "zb_h1"},
        {"micro_batches": 4, "schedule": OWN},
        {"micro_batches": 4, "checkpoint": "always"},
        {"micro_batches": 4, "devices": ["sim:0", "cpu", "sim:1", "sim:0"]},
    ],
    ids=lambda fields: str({k: getattr(v, "name", v) for k, v in fields.items()}),
)
def test_the_same_numbers(fields):
    one, other = blocks(0.2), blocks(0.2)
    plan = Plan(**{**ONE, **fields})
    pipe = fxsplit.compile(one, plan, example_args=(INPUT,))
    same = fxsplit.compile(other, plan.replace(offload=False), example_args=(INPUT,))
    assert all(p.device == CPU for p in one.parameters())
    found = []
    for p, m in ((pipe, one), (same, other)):
        torch.manual_seed(3)
        optimizer = torch.optim.Adam(m.parameters(), lr=0.01)
        found.append(steps(p, m, optimizer))
        found[-1].append(p(INPUT).detach().cpu())
        found[-1] += [t.detach().cpu() for t in m.parameters()]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    assert all(p.device == CPU and p.grad is None for p in one.parameters())
    assert counterparts(pipe) and all(c.untyped_storage().nbytes() == 0 for c in counterparts(pipe))
    assert "numbers:" in pipe.verify()


def test_two_stages_at_a_time():
    model = blocks()
    plan = Plan(**ONE, micro_batches=3, schedule="breadth_first", workers=1)
    pipe = fxsplit.compile(model, plan, example_args=(INPUT,))
    held = []
    pipe.register_action_hook(
        lambda event: held.append(sum(c.untyped_storage().nbytes() for c in counterparts(pipe)))
    )
    sizes = [sum(p.numel() * 4 for _, p in stage.named_parameters()) for stage in pipe.stages]
    pipe.step(INPUT, target=TARGET, loss_fn=F.cross_entropy)
    assert len(held) == 24 and max(held) <= max(a + b for a, b in itertools.pairwise(sizes))
    assert "weights on cpu, fetched" in pipe[0].code
    assert not any(t.name.startswith("fxsplit") for t in threading.enumerate())


def test_a_tie_and_a_view_that_crosses():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lin = nn.Embedding(9, 4), nn.Linear(4, 4)

        def forward(self, ids):
            scale = self.embed.weight[1]  # a view of a weight
            return F.linear(self.lin(self.embed(ids)) * scale, self.embed.weight)

    torch.manual_seed(0)
    model, ids = Net(), torch.randint(0, 9, (6, 3))
    eager = copy.deepcopy(model)
    pipe = fxsplit.compile(
        model, Plan(cut=["lin"], devices="sim:0", offload=True, micro_batches=2), example_args=(ids,)
    )
    for m in (pipe, eager):
        m(ids).square().sum().backward()
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_weights_come_from_meta_and_go_to_the_cpu():
    model = Tied().eval()
    plan = Plan(stages=3, devices="sim:0", offload=True)
    empty = on_meta(Tied).eval()
    pipe = fxsplit.compile(empty, plan, example_args=(X,), weights=model.state_dict())
    assert all(p.device == CPU for p in empty.parameters())
    torch.testing.assert_close(pipe(X).cpu(), model(X))
    assert "numbers:" in pipe.verify()


def test_saved_and_copied(tmp_path):
    model = blocks().eval()
    pipe = fxsplit.compile(model, Plan(**ONE), example_args=(INPUT,))
    pipe.save_code(tmp_path / "code")
    for other in (
        fxsplit.load(tmp_path / "code", copy.deepcopy(model)),
        copy.deepcopy(pipe),
        pipe.recompile(),
    ):
        assert all(p.device == CPU for p in other.model.parameters())
        torch.testing.assert_close(other(INPUT).cpu(), model(INPUT))


def test_a_weight_that_is_changed_before_backward():
    model = blocks()
    pipe = fxsplit.compile(model, Plan(**ONE), example_args=(INPUT,))
    loss = F.cross_entropy(pipe(INPUT), TARGET.to("sim:0"))
    with torch.no_grad():
        model[2].up.weight.add_(1)
    with pytest.raises(errors.GradientError, match=r"2\.up\.weight was changed in place"):
        loss.backward()
    assert all(c.untyped_storage().nbytes() == 0 for c in counterparts(pipe))
    F.cross_entropy(pipe(INPUT), TARGET.to("sim:0")).backward()
    assert model[0].up.weight.grad.device == CPU


class NoRoomError(torch.OutOfMemoryError):
    pass


def test_an_error_in_the_middle_leaves_nothing_on_the_device(monkeypatch):
    model = blocks()
    pipe = fxsplit.compile(model, Plan(**ONE, micro_batches=2), example_args=(INPUT,))
    pipe(INPUT)
    from fxsplit.replicas.offload import Offload

    fetch, seen = Offload._fetch, []

    def fails(self, parameter):
        seen.append(parameter)
        fetch(self, parameter)
        if len(seen) == 9:
            raise NoRoomError("no room")

    monkeypatch.setattr(Offload, "_fetch", fails)
    gc.collect()
    gc.disable()
    try:
        try:
            pipe(INPUT)
        except NoRoomError as error:
            caught = weakref.ref(error)
        assert caught() is None  # nobody waits for the collector to have its memory
    finally:
        gc.enable()
    assert all(c.untyped_storage().nbytes() == 0 for c in counterparts(pipe))
    assert torch.isfinite(pipe(INPUT)).all()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"devices": "cpu"}, "every stage is on the CPU"),
        ({"replicas": 2}, "replicas=2 wants them"),
        ({"offload": "sim:1"}, "is not True or False"),
        ({"sync_batch_norm": True}, "sync_batch_norm=True wants them"),
    ],
)
def test_what_is_refused(fields, words):
    with pytest.raises(errors.PlanError, match=words):
        fxsplit.compile(blocks(), Plan(**{**ONE, **fields}), example_args=(INPUT,))
    pipe = fxsplit.compile(blocks(), Plan(**ONE), example_args=(INPUT,))
    with pytest.raises(errors.PlanError, match="weights are fetched"):
        pipe.compile_stages()


def test_generate():
    from tests.test_in_place import IDS, Decoder

    torch.manual_seed(0)
    model = Decoder().eval()
    wanted = model.generate(IDS)
    pipe = fxsplit.compile(model, Plan(stages=2, devices="sim:0", offload=True), example_args=(IDS,))
    with torch.no_grad():
        assert torch.equal(pipe.generate(IDS).cpu(), wanted)
    assert all(p.device == CPU for p in model.parameters())
