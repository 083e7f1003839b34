"""Variants in turns, round by round: seconds, ratios to a named one in the same round, and which is faster."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence

import torch

from .variants import Variant

CLOSE = 1e-4  # of a parameter's largest gradient
HEADER = ("variant", "ms", "against", "ratio", "quartiles")
Seconds = Mapping[str, Sequence[float]]


def seconds_of(variant: Variant) -> float:
    """Seconds of one step; gradients are dropped outside of them."""
    torch.set_num_threads(variant.threads)
    start = time.perf_counter()
    variant.step()
    taken = time.perf_counter() - start
    variant.clear()
    torch.set_num_threads(1)
    return taken


def check_gradients(variants: Iterable[Variant]) -> str:
    """Compare every variant's gradients with those of the first; a sentence that says how close they are.

    Raises:
        ValueError: one is further away than rounding explains.
    """
    wanted, worst, count = [], 0.0, 0
    for variant in variants:
        torch.set_num_threads(variant.threads)
        variant.step()
        torch.set_num_threads(1)
        found = [gradient.clone() for gradient in variant.gradients()]
        variant.clear()
        wanted, count = wanted or found, count + 1
        for a, b in zip(found, wanted, strict=True):
            difference = ((a - b).abs().max() / b.abs().max()).item()
            if difference > CLOSE:
                raise ValueError(f"{variant.name}: a gradient is {difference:.1e} off")
            worst = max(worst, difference)
    return f"Gradients of all {count} variants agree to within {worst:.0e} of the largest."


def measure_steps(variants: Sequence[Variant], rounds: int) -> tuple[dict[str, list[float]], str]:
    """Variant → seconds by round, and what `check_gradients` says. They take turns, another one first each time."""
    agreed = check_gradients(variants)  # after which memory, caches and threads are there
    found: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for turn in range(rounds):
        first = turn % len(variants)
        for variant in (*variants[first:], *variants[:first]):
            found[variant.name].append(seconds_of(variant))
        print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
    return found, agreed


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; of a single value three times itself."""
    if len(values) == 1:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratio(found: Seconds, name: str, base: str) -> tuple[float, float, float]:
    """Quartiles of the ratio to `base` in the same round."""
    return quartiles([a / b for a, b in zip(found[name], found[base], strict=True)])


def ratio_rows(variants: Sequence[Variant], found: Seconds) -> list[tuple[str, ...]]:
    """For `HEADER`: each variant against the one that it is compared with. fxsplit's names are bold."""
    rows = []
    for variant in variants:
        low, middle, high = ratio(found, variant.name, variant.base)
        name = f"**{variant.name}**" if variant.ours else variant.name
        milliseconds = f"{statistics.median(found[variant.name]) * 1e3:.1f}"
        rows.append((name, milliseconds, variant.base, f"{middle:.3f}", f"{low:.3f} to {high:.3f}"))
    return rows


def verdict(found: Seconds, name: str, peer: str) -> str:
    """Whether `name` is faster than a peer: only if three quarters of the rounds say so."""
    low, middle, high = ratio(found, name, peer)
    figures = f"({middle:.2f}, quartiles {low:.2f} to {high:.2f})"
    if low <= 1 <= high:
        return f"as fast as {peer} within the spread {figures}"
    word = "slower" if middle > 1 else "faster"
    return f"{word} than {peer} {figures}"


def verdicts(found: Seconds, names: Iterable[str], peers: Sequence[str]) -> list[str]:
    """A sentence for each of `names`."""
    return [
        f"{name} is {'; '.join(verdict(found, name, peer) for peer in peers)}." for name in names if peers
    ]
