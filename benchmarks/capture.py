"""Which models can be captured and split, and is the split right? One row a model.

    python benchmarks/capture.py package.module:REGISTRY [names ...]

REGISTRY maps a name to ``(family, factory)``; ``factory()`` returns ``(model, make_inputs)`` and
``make_inputs(batch)`` returns ``(args, kwargs)``. Each model is tried in a process of its own with one thread.

Columns: nodes; the largest share of the parameters in one module kept whole; the guards; seconds of the capture and of
one eager forward; and for 1, 2 and 4 stages at batch 4 and 3 (1 stage also at 1 and 9), in train mode, and in
eval mode at batch 4, whether outputs, gradients and buffers are the model's.
"""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
import time
import warnings

HEADER = ("model", "nodes", "kept whole", "guards", "capture s", "eager s", "right", "said")
SECONDS = 180


def registry(name):
    """The mapping that ``package.module:REGISTRY`` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def try_model(source: str, name: str) -> None:
    """One row, printed as ``key=value`` fields."""
    warnings.filterwarnings("ignore")
    import torch

    import fxsplit
    from fxsplit.testing import assert_equivalent
    from fxsplit.trace.front import trace

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, make_inputs = registry(source)[name][1]()
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0  # masks of two runs cannot be compared
    args, kwargs = make_inputs(4)
    eager = []
    for _ in range(3):
        start = time.perf_counter()
        with torch.no_grad():
            model(*args, **kwargs)
        eager.append(time.perf_counter() - start)
    start = time.perf_counter()
    traced = trace(model, args, kwargs)
    took = time.perf_counter() - start
    total = sum(p.numel() for p in model.parameters()) or 1
    shares = [
        sum(p.numel() for p in model.get_submodule(path).parameters()) / total for path in traced.kept_whole
    ]
    guards = sum(node.target is torch._assert for node in traced.graph.nodes)
    right, wrong = 0, []
    for stages in (1, 2, 4):
        pipe = None
        while pipe is None:
            try:
                plan = fxsplit.Plan(stages=stages)
                pipe = fxsplit.compile(copy.deepcopy(model), plan, example_args=args, example_kwargs=kwargs)
            except fxsplit.errors.PartitionError:
                stages -= 1
        for batch in (4, 3, 9, 1) if stages == 1 else (4, 3):
            right += _compare(
                model, pipe, make_inputs(batch), f"{stages} stages, batch {batch}", wrong, assert_equivalent
            )
        pipe.eval()
        twin = copy.deepcopy(model).eval()
        right += _compare(twin, pipe, (args, kwargs), f"{stages} stages, eval", wrong, assert_equivalent)
    verdict = "all" if not wrong else f"{right} of {right + len(wrong)}"
    row = (
        name,
        len(traced.graph.nodes),
        f"{max(shares, default=0.0):.0%}",
        guards,
        f"{took:.2f}",
        f"{sorted(eager)[1]:.3f}",
    )
    print("ROW", *row, verdict, "; ".join(wrong)[:160] or "-", sep="|")


def _compare(model, pipe, inputs, label, wrong, assert_equivalent) -> int:
    args, kwargs = inputs
    try:
        copy.deepcopy(model)(*args, **kwargs)
    except Exception:
        return 0  # eager does not take this batch either
    try:
        # a library may take another kernel when it is captured (a causal flag, a mask)
        assert_equivalent(model, pipe, *args, rtol=1e-4, atol=1e-4, **kwargs)
    except Exception as error:
        wrong.append(f"{label}: {type(error).__name__} {str(error).splitlines()[0]}")
        return 0
    return 1


def main() -> None:
    """Try every model, each in a process of its own, and print the table."""
    from tabulate import tabulate

    source, *names = sys.argv[1:]
    rows = []
    for name in names or list(registry(source)):
        try:
            command = [sys.executable, __file__, "--one", source, name]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            found = [line for line in done.stdout.splitlines() if line.startswith("ROW|")]
            errors = [line for line in done.stderr.splitlines() if "errors." in line or "Error:" in line]
            rows.append(
                found[0].split("|")[1:]
                if found
                else (name, *[""] * 5, "no", (errors or ["crashed"])[-1][:160])
            )
        except subprocess.TimeoutExpired:
            rows.append((name, *[""] * 5, "no", f"longer than {SECONDS} s"))
        print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    print(tabulate(rows, headers=HEADER, disable_numparse=True))
    print(f"{sum(row[6] == 'all' for row in rows)} of {len(rows)} captured and right throughout")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        try_model(*sys.argv[2:])
    else:
        main()
