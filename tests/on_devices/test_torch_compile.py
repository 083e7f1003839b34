"""Stages on several devices under torch.compile: transfers stay between compiled graphs, and none is in one."""

import copy

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn

import fxsplit
from fxsplit import Plan, errors

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
X, Y = torch.randn(8, 4), torch.randint(0, 4, (8,))


def test_transfers_are_in_no_graph():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    eager, graphs = copy.deepcopy(model), []

    def backend(graph, example):
        graphs.append([str(n.target) for n in graph.graph.nodes if n.op.startswith("call")])
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    plan = Plan(stages=2, devices=["sim:0", "sim:1"], micro_batches=2, schedule="1f1b")
    pipe = fxsplit.compile(model, plan, example_args=(X,))
    with pytest.raises(errors.PlanError, match="begin with a transfer"):
        pipe.compile_stages(backend=backend, fullgraph=True)
    pipe.compile_stages(backend=backend)
    for _ in range(2):
        loss = pipe.step(X, target=Y, loss_fn=F.cross_entropy)
        wanted = F.cross_entropy(eager(X), Y)
        wanted.backward()
        torch.testing.assert_close(loss.cpu(), wanted.detach())
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad)
    assert len(graphs) == 2 and all(len(graph) == 4 for graph in graphs)
