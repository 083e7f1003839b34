"""Optimizers with states from before compile: they go on as if nothing had been moved."""

import copy

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import Plan, errors
from tests.weights.test_weights import Tied, X, on_meta

INPUT = torch.randn(8, 4)
KINDS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))


def loss_of(output):
    return output.square().mean()


def train(run, optimizer, count=2):
    for _ in range(count):
        optimizer.zero_grad()
        run()
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offload", [False, True])
def test_states_follow(kind, offload):
    model = blocks()
    eager = copy.deepcopy(model)
    optimizer, wanted = (KINDS[kind](m.parameters()) for m in (model, eager))

    def in_eager(m=eager):
        loss_of(m(INPUT)).backward()

    train(lambda: in_eager(model), optimizer)
    train(in_eager, wanted, 8)
    for plan in (
        Plan(stages=2, devices=["sim:0", "sim:1"]),
        Plan(stages=3, devices="sim:1", offload=offload),  # again, under another plan
    ):
        pipe = fxsplit.compile(model, plan, example_args=(INPUT,))
        train(lambda p=pipe: p.step(INPUT, loss_fn=loss_of, reduction="mean"), optimizer)
    pipe.recompile()
    train(lambda: pipe.step(INPUT, loss_fn=loss_of, reduction="mean"), optimizer)
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.cpu(), b)


def test_states_in_lists_follow():
    model = blocks()
    eager = copy.deepcopy(model)
    losses = []
    for m in (model, eager):
        optimizer = torch.optim.LBFGS(m.parameters(), max_iter=3)

        def closure(run, optimizer=optimizer):
            optimizer.zero_grad()
            loss = loss_of(run(INPUT))
            loss.backward()
            return loss

        optimizer.step(lambda m=m, closure=closure: closure(m))
        run = fxsplit.compile(m, Plan(stages=2, devices="sim:0"), example_args=(INPUT,)) if m is model else m
        losses.append(optimizer.step(lambda run=run, closure=closure: closure(run)).detach().cpu())
    torch.testing.assert_close(*losses)


def test_an_optimizer_of_parameters_without_values_says_so():
    empty = on_meta(Tied).eval()
    optimizer = torch.optim.SGD(empty.parameters(), lr=0.1)
    pipe = fxsplit.compile(empty, Plan(stages=2, devices="sim:0"), example_args=(X,))
    pipe.load_weights(Tied().state_dict())
    pipe(X).square().mean().backward()
    with pytest.raises(errors.ArgumentError, match="make the optimizer after"):
        optimizer.step()
    torch.optim.SGD(pipe.parameters(), lr=0.1).step()
