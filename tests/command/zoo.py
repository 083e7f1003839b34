"""Models that the command line is tried on."""

import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

from ..models import build


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 4))


def small():
    torch.manual_seed(0)
    return mlp(), (torch.randn(8, 8),)


def gpt():
    model, batch = build("gpt")
    return model, batch(8)


def by_name():
    return mlp(), (), {"input": torch.randn(8, 8)}


class _Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else x


def cannot_be_traced():
    return _Reads(), (torch.randn(4, 8),)


def fails():
    raise RuntimeError("no such weights")


def needs(argument):
    return mlp(), (argument,)


def says_nothing():
    return "a model"


class _Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(F.dropout(self.a(x), 0.5, training=True))


def draws():
    return _Draws(), (torch.randn(4, 8),)


def normed():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)), (torch.randn(8, 8),)


def slow():
    print("in the factory", file=sys.stderr, flush=True)
    time.sleep(60)
    return mlp(), (torch.randn(8, 8),)


def loss(y, target):
    return F.cross_entropy(y, target)
