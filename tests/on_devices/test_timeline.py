"""A timeline of stages on several devices, with replicas apart: the events say where, and the page is written."""

import torch
import torch.nn.functional as F
from torch import nn

import fxsplit
from fxsplit import Plan

ROWS = [["sim:0", "sim:1"], ["sim:2"]]


def test_events_say_where(tmp_path):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(8, 4)
    plan = Plan(stages=2, devices=ROWS, replicas=[2, 1], micro_batches=4, schedule="1f1b")
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    with pipe.timeline() as timeline:
        pipe.step(x, target=x, loss_fn=F.mse_loss)
    for event in timeline.events:
        assert str(event.device) == (ROWS[0][event.micro_batches[0] % 2] if event.stage == 0 else "sim:2")
    rows = timeline[0].kept(pipe._measure_kept(pipe.active))
    assert all(abs(row[-1][1]) < 1e-6 and max(row)[1] >= 0 for row in rows.values())
    timeline.save(tmp_path / "page.html")
    assert "times of the host" in (tmp_path / "page.html").read_text()
