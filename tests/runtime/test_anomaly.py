"""`detect_anomaly`: the first NaN or infinity is named."""

from pathlib import Path

import pytest
import torch
from torch import nn

import fxsplit


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        z = torch.sqrt(y[:, :1] * 0 + x[:, :1])  # the line that is named
        return self.b(y + z)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_the_first_nan_is_named(schedule, checkpoint):
    model, x = Root(), torch.rand(8, 4) + 1
    plan = fxsplit.Plan(
        cut=["b"], micro_batches=4, schedule=schedule, checkpoint=checkpoint, detect_anomaly="nan"
    )
    pipe = fxsplit.compile(model, plan, example_args=(x,))
    good = pipe.step(x, loss_fn=lambda y: y.square().mean(), reduction="mean")
    assert good.isfinite()
    x[5, 0] = -1.0
    with pytest.raises(fxsplit.errors.AnomalyError, match="a NaN first appears in z") as caught:
        pipe.step(x, loss_fn=lambda y: y.square().mean(), reduction="mean")
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    line = next(
        i
        for i, row in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "the line that is named" in row
    )
    assert f"test_anomaly.py:{line}" in text
    assert "stage 0" in text and "micro-batch 2 of 4" in text


def test_infinities_are_looked_for_where_that_is_asked():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.full((4, 4), 3e38)
    for kind, raises in (("nan", False), ("inf", True)):
        plan = fxsplit.Plan(stages=2, micro_batches=2, detect_anomaly=kind)
        pipe = fxsplit.compile(nn.Sequential(nn.ReLU(), _Large()), plan, example_args=(torch.ones(4, 4),))
        if raises:
            with pytest.raises(fxsplit.errors.AnomalyError, match="infinity"):
                pipe(x)
        else:
            assert pipe(x).isinf().all()
    del model


class _Large(nn.Module):
    def forward(self, x):
        return x * 10


def test_a_gradient_that_is_none_is_named():
    class Corner(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(4, 4)

        def forward(self, x):
            return (self.l(x) * 0).sum(1).sqrt()  # of zero: its gradient is infinite, times zero

    x = torch.zeros(4, 4)
    model = Corner()
    with torch.no_grad():
        model.l.bias.fill_(-1.0)
    plan = fxsplit.Plan(micro_batches=2, detect_anomaly="nan")
    pipe = fxsplit.compile(model, plan, example_args=(torch.ones(4, 4),), check=False)
    with pytest.raises(fxsplit.errors.AnomalyError, match=r"gradient of l\.weight"):
        pipe.step(x, loss_fn=lambda y: y.sum())


def test_after_an_anomaly_the_callers_autocast_is_as_before():
    class Low(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                h = torch.log(self.a(x).abs() * 0 + x)
            return h.float()

    pipe = fxsplit.compile(Low(), fxsplit.Plan(detect_anomaly="nan"), example_args=(torch.rand(4, 4),))
    with pytest.raises(fxsplit.errors.AnomalyError):
        pipe(-torch.ones(4, 4))
    assert nn.Linear(2, 2)(torch.rand(1, 2)).dtype == torch.float32


def test_a_mask_is_no_infinity_and_an_ordinary_error_names_the_line():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(5, 4)

        def forward(self, i):
            x = self.e(i)  # the line of the index
            scores = x @ x.transpose(1, 2)
            mask = torch.full((3, 3), float("-inf")).triu(1)
            return (scores + mask).softmax(-1) @ x

    ids = torch.randint(0, 5, (4, 3))
    pipe = fxsplit.compile(Masked(), fxsplit.Plan(micro_batches=2, detect_anomaly="inf"), example_args=(ids,))
    assert pipe(ids).isfinite().all()
    with pytest.raises(IndexError) as caught:
        pipe(ids + 5)
    line = next(
        i
        for i, row in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "the line of the index" in row
    )
    assert f"test_anomaly.py:{line}" in "\n".join(caught.value.__notes__)
