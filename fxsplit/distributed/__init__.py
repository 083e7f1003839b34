"""A pipeline over the ranks of torch.distributed: each has its own stages, and plays its own part of the tape.

torchrun, process groups, DeviceMesh and distributed checkpoints are torch's own; what is new is who plays which stage.

    mesh      the ranks                        init
    packets   what one rank hands another      values and gradients, with what one has to know of them
    channel   how packets travel               sends at once; a thread for each rank that it hears from
    watch     who is still there               beats, and the first cause of a failure, known to all ranks
    hub       what a rank plays of a tape      the other side of the seam in `fxsplit.runtime.hub`
    pipeline  what `compile` returns           the same face as in one process
    checkpoint  save, load                     under the model's FQNs, for any number of stages and ranks
    bridge    torch_pipelining                 the same stages for torch.distributed.pipelining's training loop
"""

from .bridge import torch_pipelining
from .checkpoint import load, save
from .compile import compile
from .mesh import init
from .pipeline import RankPipeline

__all__ = ["RankPipeline", "compile", "init", "load", "save", "torch_pipelining"]
