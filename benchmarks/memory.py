"""Bytes that are alive at their highest during one step: 16 encoders in 4 equal stages with 8 micro-batches.

A process for each variant and policy, and the most of two steps in it. Every allocation in every thread is seen
(`live_bytes`). Alive is more than what is kept for backward (`kept`): it is what is being used too, by as many workers as
compute their regions again at the same time; torchgpipe and fairscale have one thread for it. Tensors that are shaped
like a parameter are no activations: gradients of a step are summed beside `.grad` until it has succeeded.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from .children import ChildError, in_child
from .live_bytes import LiveBytes
from .part import Options
from .peers import THREADED, installed, threaded_peer
from .report import Report
from .tasks import transformer
from .variants import eager, split

QUESTION = "How much is alive during a step?"
MINUTES = 2.5
MIB = 2**20
OURS = {"fxsplit GPipe": "gpipe", "fxsplit 1F1B": "1f1b"}
POLICIES = ("never", "except_last", "always")


def bytes_of(name: str, checkpoint: str, quick: bool) -> tuple[float, float, float]:
    """MiB of activations, MiB with gradients, and MiB that are kept as fxsplit predicts them."""
    counter, task = LiveBytes(), transformer(4 if quick else 16, quick, length=32)
    quarter, kept = len(task.model) // 4, float("nan")
    if name == "eager":
        variant = eager(task)
    elif name in OURS:
        plan = {"cut": [str(quarter * i) for i in (1, 2, 3)], "schedule": OURS[name]}
        variant = split(task, name, micro_batches=8, checkpoint=checkpoint, **plan)
        kept = sum(live.kept for live in variant.pipe.memory().values()) / MIB
    else:
        variant = threaded_peer(task, name, stages=4, checkpoint=checkpoint)
    variant.step()  # gradients are there before
    for _ in range(2):
        counter.count(variant.step, variant.model, task.x, task.target)
    return counter.activations / MIB, counter.all / MIB, kept


def measure(options: Options) -> Report:
    """A row for each policy and variant; a sentence for each policy."""
    left_out: list[str] = []
    peers = [name for name in THREADED if installed(name, left_out)]
    cases = [("eager", "-"), *((name, policy) for policy in POLICIES for name in (*OURS, *peers))]
    if options.quick:
        cases = cases[1:2]

    def one(case):
        try:
            return in_child(bytes_of, *case, options.quick)
        except ChildError as error:
            left_out.append(f"{' '.join(case)}: {error}")
            return None

    with ThreadPoolExecutor(2) as pool:  # bytes are the same on cores that are shared
        found = {case: row for case, row in zip(cases, pool.map(one, cases), strict=True) if row}
    rows = [
        (
            f"**{name}**" if name in OURS else name,
            *(policy, f"{activations:.1f}", f"{everything:.1f}", f"{kept:.1f}" if name in OURS else "-"),
        )
        for (name, policy), (activations, everything, kept) in found.items()
    ]
    said = [
        _least(policy, {n: row[0] for (n, p), row in found.items() if p == policy}) for policy in POLICIES
    ]
    header = ("variant", "checkpoint", "activations, MiB", "with gradients, MiB", "kept, as predicted, MiB")
    return Report(header, rows, [" ".join(filter(None, said))], left_out)


def _least(policy: str, activations: dict[str, float]) -> str:
    """Who has least, and how much more the others have."""
    order = sorted(activations, key=activations.__getitem__)
    more = [f"{name} {activations[name] / activations[order[0]]:.2f} times that" for name in order[1:]]
    return f"With `{policy}` {order[0]} has least alive, {', '.join(more)}." if more else ""
