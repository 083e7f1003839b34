"""The demo: split the GPT, print what came out, train it beside its unsplit twin on the same batches."""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from importlib import resources

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from ..compiler import compile
from ..pipeline import Pipeline
from ..plan.plan import Plan
from .gpt import GPT

CONTEXT, WIDTH = 64, 192
Say = Callable[[str], None]


def run_demo(
    plan: Plan,
    *,
    batch: int = 32,
    seconds: float = 8.0,
    layers: int = 6,
    timeline: str | None = None,
    say: Say = print,
) -> float:
    """Split, print, train. Returns the largest difference between the weights of the two models at the end.

    Args:
        plan: how the GPT is split and run.
        batch: rows of 64 characters in a step.
        seconds: how long to train, both models together.
        layers: blocks of the GPT.
        timeline: where to write the page (``.html``) or trace (``.json``) of a step.
        say: where the lines go.
    """
    text = resources.files(__package__).joinpath("sonnets.txt").read_text(encoding="utf-8")
    letters = sorted(set(text))
    codes = torch.tensor([letters.index(c) for c in text])
    torch.manual_seed(0)
    eager = GPT(len(letters), width=WIDTH, layers=layers, context=CONTEXT)
    split_model = copy.deepcopy(eager)
    characters, following = _batch(codes, batch)

    start = time.perf_counter()
    pipe = compile(split_model, plan, example_args=(characters,))
    took = time.perf_counter() - start
    _headline(
        say, f"A GPT of {sum(p.numel() for p in eager.parameters()):,} parameters in {len(pipe)} stages"
    )
    say(f"compiled in {took:.2f} s\n\n{pipe.report()}")
    shown = len(pipe) - 1
    _headline(say, f"The code of stage {shown}: pipe.stages[{shown}].code")
    say(pipe.stages[shown].code.rstrip())
    _headline(say, f"The schedule: {plan.schedule_name}, one column for each unit of time")
    say(pipe.staircase())
    _headline(say, "pipe.verify()")
    say(pipe.verify())
    if timeline is not None:
        _headline(say, f"pipe.timeline(), the second step of two, in {timeline}")
        with pipe.timeline() as recorded:
            for _ in range(2):
                pipe.step(characters, target=following, loss_fn=_loss, reduction="mean")
        recorded.save(timeline)
        say(f"{recorded}\n\nopen {timeline} in a browser: who computed what when, and who waited")
    _headline(
        say, f"Training for {seconds:g} s: eager and split on the same micro-batches of the same batches"
    )
    return _train(eager, pipe, codes, batch, seconds, say)


def _train(eager: nn.Module, pipe: Pipeline, codes: Tensor, batch: int, seconds: float, say: Say) -> float:
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (eager, pipe)]
    spent: dict[str, list[float]] = {"eager": [], "threads": [], "split": []}
    losses: list[tuple[Tensor, Tensor]] = []
    deadline, total = time.perf_counter() + seconds, seconds
    before = torch.get_num_threads()
    try:
        while not losses or time.perf_counter() < deadline:
            characters, following = _batch(codes, batch)
            spent["threads"].append(_whole_step(eager, characters, following))
            torch.set_num_threads(1)  # from here on the same kernels on both sides
            for optimizer in optimizers:
                optimizer.zero_grad()
            began = time.perf_counter()
            expected = _eager_step(eager, pipe, characters, following)
            between = time.perf_counter()
            loss = pipe.step(characters, target=following, loss_fn=_loss, reduction="mean")
            spent["eager"].append(between - began)
            spent["split"].append(time.perf_counter() - between)
            for optimizer in optimizers:
                optimizer.step()
            torch.set_num_threads(before)
            losses.append((expected, loss))
            _progress(1 - (deadline - time.perf_counter()) / total, len(losses), expected, loss)
    finally:
        torch.set_num_threads(before)
    if sys.stdout.isatty():
        print()
    steps = len(losses)
    apart = max(abs(a.item() - b.item()) for a, b in losses)
    weights = max(
        (p - q).abs().max().item() for p, q in zip(eager.parameters(), pipe.parameters(), strict=True)
    )
    say(f"{steps} steps; loss {losses[0][0].item():.4f} → {losses[-1][0].item():.4f}")
    say(f"losses at most {apart:.3g} apart, weights at most {weights:.3g} apart after {steps} steps\n")
    say(_times(spent, pipe, batch, before))
    if len(set(pipe.devices)) == 1:
        say(
            "\nCores of one device can share every matrix product, and with all threads torch does that by itself. "
            "Devices cannot: there stages are what keeps them busy."
        )
    return weights


def _times(spent: dict[str, list[float]], pipe: Pipeline, batch: int, threads: int) -> str:
    """Medians of a step. The first step starts threads, and is left out where there are others."""
    medians = {name: statistics.median(times[1:] or times) for name, times in spent.items()}
    workers = len(pipe.tape.workers)
    micro_batches = min(pipe.plan.micro_batches, batch)
    least = (micro_batches + workers - 1) / (micro_batches * workers)
    rows = [
        ("eager, one thread, micro-batch after micro-batch", medians["eager"], ""),
        (f"eager, {threads} threads, the whole batch at once", medians["threads"], ""),
        (
            f"split, {workers} workers with a thread each",
            medians["split"],
            f"{workers} equal stages and {micro_batches} micro-batches: {least:.2f} at best",
        ),
    ]
    ratios = [(name, f"{s * 1e3:.0f} ms", f"{s / medians['eager']:.2f}", note) for name, s, note in rows]
    return tabulate(ratios, headers=["a step, in the same rounds", "median", "of eager", ""])


def _whole_step(model: nn.Module, characters: Tensor, following: Tensor) -> float:
    """Seconds of a step as one writes it first. Its gradients are thrown away."""
    began = time.perf_counter()
    torch.autograd.backward(_loss(model(characters), following))
    return time.perf_counter() - began


def _eager_step(model: nn.Module, pipe: Pipeline, characters: Tensor, following: Tensor) -> Tensor:
    """Gradient accumulation over the micro-batches of the pipeline, as one writes it without a pipeline."""
    chunks, rows = pipe.micro_batches([characters])
    outputs = [model(*chunk) for chunk in chunks]
    leaves = [output.detach().requires_grad_() for output in outputs]
    loss = _loss(torch.cat(leaves) if len(rows) > 1 else leaves[0], following)
    torch.autograd.backward(loss)
    for output, leaf in zip(outputs, leaves, strict=True):
        torch.autograd.backward(output, leaf.grad)
    return loss.detach()


def _loss(logits: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def _batch(codes: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(codes) - CONTEXT - 1, (rows, 1))
    window = codes[starts + torch.arange(CONTEXT + 1)]
    return window[:, :-1], window[:, 1:]


def _progress(done: float, step: int, eager: Tensor, split: Tensor) -> None:
    if not sys.stdout.isatty():
        return
    filled = round(30 * min(max(done, 0.0), 1.0))
    bar = "█" * filled + "░" * (30 - filled)
    print(
        f"\r{bar} step {step:4d}  loss eager {eager.item():.4f}  split {split.item():.4f}", end="", flush=True
    )


def _headline(say: Say, text: str) -> None:
    say(f"\n── {text} {'─' * max(3, 96 - len(text))}\n")
