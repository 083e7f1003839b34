"""What each call takes to see that the model is still what was compiled.

501 modules: 125 blocks of four, whose forward reads two numbers, a dict and a type. The peer is a walk over the modules
as anybody would write it, which compares nothing.
"""

from __future__ import annotations

import timeit

import torch
from torch import nn

import fxsplit

from .measuring import quartiles
from .part import Options
from .report import Report

QUESTION = "What does it cost to see that the model has not changed?"
MINUTES = 0.2


class Flagged(nn.Module):
    """A block whose forward reads plain attributes."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale, self.gated, self.options = 0.5, True, {"shift": 0.0}

    def forward(self, x):
        """A gated feed-forward layer."""
        h = self.up(self.norm(x))
        h = h * h.sigmoid() if self.gated else h
        return x + self.down(h).to(x.dtype) * self.scale + self.options["shift"]


def measure(options: Options) -> Report:
    """A row for each thing that is looked at, and for eager's forward."""
    blocks, rounds = (4, 2) if options.quick else (125, 21)
    model, x = nn.Sequential(*(Flagged() for _ in range(blocks))), torch.randn(4, 8)
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=2), example_args=(x,))
    pipe(x)
    watch = pipe._now.watch
    looks = {
        "**attributes of modules**": watch.use_current_modules,
        "**types of the arguments, and the circumstances**": lambda: watch.circumstances([x]),
        "`list(model.modules())`": lambda: list(model.modules()),
        "eager's forward": lambda: model(x),
    }
    times = 2 if options.quick else 20
    found = {name: [] for name in looks}
    for _ in range(rounds):
        for name, look in looks.items():
            found[name].append(timeit.timeit(look, number=times) / times * 1e6)
    rows = []
    for name, values in found.items():
        low, middle, high = quartiles(values)
        rows.append((name, f"{middle:.0f}", f"{low:.0f} to {high:.0f}"))
    modules = len(list(model.modules()))
    return Report((f"of {modules} modules, 4 rows", "µs a call", "quartiles"), rows)
