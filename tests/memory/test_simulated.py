"""What is kept for backward: as simulated, and in which micro-batches."""

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import Plan
from fxsplit.runtime import play
from fxsplit.schedules.catalog import NAMES as SCHEDULES
from tests.helpers import Wide, plan_for


class _Packed:
    """A tensor that autograd has saved, for as long as it is."""

    def __init__(self, alive, stage, tensor):
        self.alive, self.tensor = alive, tensor.detach()  # with its graph it would hold itself
        self.alive[id(self)] = stage, self.tensor

    def __del__(self):
        del self.alive[id(self)]


def _kept_by_workers(pipe, step, monkeypatch):
    """The most bytes that each worker keeps for backward at once: what autograd has saved, and what stages hold."""
    monkeypatch.setattr(pipe._begun.common, "serial", True)
    worker_of = {a.stage: w for w, actions in enumerate(pipe.schedule.workers) for a in actions}
    most, alive, now = [0] * len(pipe.schedule.workers), {}, []
    known = [*pipe.parameters(), *pipe.example]
    known = {t.untyped_storage().data_ptr() for t in known}
    act = play.act

    def watched(call, instruction):
        now[:] = [instruction.stage]
        act(call, instruction)
        held = list(alive.values())
        for (stage, _), record in call.records.items():
            for row in (*record.inputs.values(), *record.outputs.values()):
                held += [(stage, leaf) for leaf in row]
        owners = {}
        for stage, tensor in held:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                owners.setdefault(storage.data_ptr(), (storage.nbytes(), set()))[1].add(stage)
        kept = [0] * len(most)
        for nbytes, stages in owners.values():
            kept[worker_of[min(stages)]] += nbytes
        most[:] = map(max, most, kept)

    monkeypatch.setattr(play, "act", watched)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: _Packed(alive, now[0], t) if now else t, lambda p: p.tensor if isinstance(p, _Packed) else p
    ):
        step()
    assert not alive
    return most


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_kept_is_what_was_simulated(schedule, checkpoint, monkeypatch):
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=bool(i % 2))
        for i in range(8)
    ]
    model, x = nn.Sequential(*layers), torch.randn(32, 64, 16)
    plan = plan_for(schedule, micro_batches=8, checkpoint=checkpoint)
    pipe = fxsplit.compile(model, plan, example_args=(x,))

    def step():
        pipe.step(pipe.example[0], loss_fn=lambda y: y.square().mean(), reduction="mean")

    (live,) = pipe.memory().values()
    measured = sum(_kept_by_workers(pipe, step, monkeypatch))
    assert abs(measured - live.kept) <= 0.05 * live.kept, (measured, live)


@pytest.mark.parametrize(
    ("checkpoint", "again"),
    [("except_last", [0, 1, 1, 1]), ("always", [1, 1, 1, 1]), ("never", [0, 0, 0, 0])],
)
def test_except_last_keeps_the_micro_batch_that_goes_backward_first(checkpoint, again, monkeypatch):
    plan = Plan(cut=["b"], micro_batches=4, checkpoint=checkpoint)
    pipe = fxsplit.compile(Wide(), plan, example_args=(torch.randn(8, 4),))
    x = torch.arange(4.0).repeat_interleave(2).unsqueeze(1).expand(8, 4).contiguous()
    linear, calls = nn.functional.linear, []  # of the first layer, by the number that fills its rows

    def counted(x, *args):
        calls.extend([int(x[0, 0])] if x.shape[-1] == 4 else [])
        return linear(x, *args)

    monkeypatch.setattr(nn.functional, "linear", counted)
    loss = pipe(x).sum()
    assert sorted(calls) == [0, 1, 2, 3]
    loss.backward()
    assert [calls.count(i) - 1 for i in range(4)] == again
