"""torchrun --nproc-per-node 4 --max-restarts 3 train.py CHECKPOINTS"""

import sys

import torch

import fxsplit
import fxsplit.distributed
from fxsplit.demo.gpt import GPT

mesh = fxsplit.distributed.init(pp=2, dp=2)
plan = fxsplit.Plan(stages=2, micro_batches=4, schedule="1f1b")
torch.manual_seed(0)
tokens = torch.randint(50, (64, 17))
first, last = tokens[:, :-1], tokens[:, 1:]
pipe = fxsplit.distributed.compile(
    lambda: GPT(50, width=32, layers=4, heads=2, context=16), plan, mesh, example_args=(first[:8],)
)
optimizer = torch.optim.AdamW(pipe.parameters(), 3e-3)
start = fxsplit.distributed.load(sys.argv[1], pipe, optimizer)  # 0 where there is none
for step in range(start, 20):
    rows = slice(8 * ((2 * step + pipe.replica) % 8), 8 * ((2 * step + pipe.replica) % 8) + 8)
    loss = pipe.step(
        first[rows],
        target=last[rows],
        loss_fn=lambda y, t: torch.nn.functional.cross_entropy(y.flatten(0, 1), t.flatten()),
        reduction="mean",
    )
    pipe.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {torch.distributed.get_rank()} step {step} loss {loss.item()!r}", flush=True)
    if step % 5 == 4:
        fxsplit.distributed.save(sys.argv[1], pipe, optimizer, step=step + 1)
