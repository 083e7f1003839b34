"""What the stage table says."""

import torch
from torch import nn

import fxsplit
from fxsplit.report.tables import in_seconds, sizes_of, stage_rows


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.c.weight = self.a.weight

    def forward(self, x):
        return self.c(self.b(self.a(x)))


def test_what_is_shared_is_counted_where_it_is_read_first():
    model = Tied()
    pipe = fxsplit.compile(model, fxsplit.Plan(cut=["b", "c"]), example_args=(torch.randn(2, 4),))
    rows = stage_rows(pipe.traced, pipe.assignment, sizes_of(model))
    assert [row["parameters"] for row in rows] == ["64 B", "64 B", "0 B + 1 shared"]


def test_seconds_are_in_the_largest_unit_of_which_there_is_one():
    assert [in_seconds(t) for t in (2.0, 1.0, 0.0031, 1e-3, 5e-6)] == [
        "2.000 s",
        "1.000 s",
        "3.100 ms",
        "1.000 ms",
        "5.000 µs",
    ]
