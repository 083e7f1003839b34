"""A pipeline in a LightningModule, with Lightning's own loop and with `pipe.step` in it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxsplit
from fxsplit import Plan

X, Y = torch.randn(32, 8), torch.randint(0, 3, (32,))


def losses_of(lightning, net, *, manual):
    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.seen, self.automatic_optimization = net, [], not manual

        def to(self, *args, **kwargs):  # stages are where the plan says
            return self

        def cpu(self):
            return self

        def training_step(self, batch, index):
            x, y = batch
            if not manual:
                output = self.net(x)
                loss = F.cross_entropy(output, y.to(output.device))
            else:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                loss = self.net.step(x, target=y, loss_fn=F.cross_entropy)
                optimizer.step()
            self.seen.append(float(loss))
            return None if manual else loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    module = Lit()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.utils.data.TensorDataset(X, Y)
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=8))
    return module.seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("manual", [False, True])
def test_the_losses_are_the_model_s(manual):
    lightning = pytest.importorskip("lightning")
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 3))
    wanted = losses_of(lightning, copy.deepcopy(net), manual=False)
    plan = Plan(stages=2, micro_batches=2, schedule="1f1b")
    pipe = fxsplit.compile(net, plan, example_args=(X[:8],))
    assert losses_of(lightning, pipe, manual=manual) == pytest.approx(wanted, abs=1e-5)
