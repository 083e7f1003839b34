"""Which models can be captured and split, and is the split right? One row a model.

    python benchmarks/capture.py package.module:REGISTRY [names ...]

REGISTRY maps a name to ``(family, factory)``; ``factory()`` returns ``(model, make_inputs)`` and
``make_inputs(batch)`` returns ``(args, kwargs)``. Each model is tried in a process of its own with one thread and a
time limit, in 1, 2 and 4 stages (fewer where the graph has no more), against eager on deep copies.

Columns: the front end; outputs, gradients and buffers in train mode at batch 4 and 3; outputs, gradients and buffers at
batch 9 and 1; all of it after ``eval()``; with a padded mask and at another length or image size (an error that says
so is as good as the right numbers); the largest share of the parameters in one module kept whole; nodes; seconds of
the capture with its checks, and what it may take: 3 x two eager forward passes + 0.2.
"""

from __future__ import annotations

import copy
import importlib
import statistics
import subprocess
import sys
import time
import warnings

HEADER = (
    *("model", "front end", "outputs", "gradients", "buffers", "other batch", "eval", "padded", "other size"),
    *("kept whole", "nodes", "seconds", "allowed", "said"),
)
SECONDS = 300


def registry(name):
    """The mapping that ``package.module:REGISTRY`` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


class Trial:
    """One model; `marks` has a word for each column, and `said` the first thing that went wrong."""

    def __init__(self, model, args, kwargs):
        self.model, self.args, self.kwargs = model, args, kwargs
        self.marks, self.said = {}, ""

    def pipelines(self):
        """In 1, 2 and 4 stages, or in as many as there can be."""
        import fxsplit

        for stages in (1, 2, 4):
            pipe = None
            while pipe is None:
                try:
                    plan = fxsplit.Plan(stages=stages)
                    twin = copy.deepcopy(self.model)
                    pipe = fxsplit.compile(twin, plan, example_args=self.args, example_kwargs=self.kwargs)
                except fxsplit.errors.PartitionError:
                    stages -= 1
            yield pipe

    def compare(self, pipe, inputs, column, model=None, *, may_refuse=False):
        """Mark outputs, gradients and buffers of one batch; all in `column` if it is given."""
        from fxsplit.testing import compare

        model = model or self.model
        args, kwargs = inputs
        try:
            copy.deepcopy(model)(*args, **kwargs)
        except Exception:
            self.marks.setdefault(column, "eager refuses")
            return
        try:
            # a library may take another kernel when it is captured (a causal flag, a mask)
            found = compare(model, pipe, *args, rtol=1e-4, atol=1e-4, **kwargs).differences
        except Exception as error:
            text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            mark = "refused" if may_refuse else "ERROR"
            self._mark(column or "outputs", mark, text)
            return
        kinds = {"output": "outputs", "gradient": "gradients", "buffer": "buffers"}
        for kind in kinds.values():
            self._mark(column or kind, "right", "")
        for name, what in found.items():
            self._mark(column or kinds[name.split()[0]], "WRONG", f"{name} {what}")

    def _mark(self, column, mark, text):
        order = ("right", "refused", "ERROR", "WRONG")
        worst = max(self.marks.get(column, "right"), mark, key=lambda m: order.index(m) if m in order else 0)
        self.marks[column] = worst
        if text and not self.said:
            self.said = f"{column}: {text}"


def padded(args, kwargs):
    """The masks with zeros at the end of every second row."""
    import torch

    kwargs, found = dict(kwargs), False
    for name, value in kwargs.items():
        if "mask" in name and isinstance(value, torch.Tensor) and value.dim() == 2:
            kwargs[name] = value.clone()
            kwargs[name][::2, -3:] = 0
            found = True
    return (args, kwargs) if found else None


def another_size(args, kwargs):
    """Images half as large; sequences four shorter."""
    import torch
    from torch.utils._pytree import tree_leaves, tree_map

    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    lengths = [t.shape[1] for t in tensors if t.dim() == 2 and not t.is_floating_point()]

    def smaller(t):
        if not isinstance(t, torch.Tensor):
            return t
        if t.dim() >= 4 and t.shape[-1] == t.shape[-2]:
            return t[..., : t.shape[-2] // 2, : t.shape[-1] // 2].contiguous()
        for dim in range(1, t.dim()):
            if lengths and t.shape[dim] == max(lengths):
                t = t.narrow(dim, 0, t.shape[dim] - 4).contiguous()
        return t

    return tree_map(smaller, (args, kwargs))


def try_model(source: str, name: str) -> None:
    """One row, printed as fields."""
    warnings.filterwarnings("ignore")
    import torch

    from fxsplit.trace.front import trace

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, make_inputs = registry(source)[name][1]()
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0  # masks of two runs cannot be compared
    args, kwargs = make_inputs(4)
    eager, took = [], []
    for _ in range(5):
        start = time.perf_counter()
        model(*args, **kwargs)
        eager.append(time.perf_counter() - start)
    for _ in range(3):
        start = time.perf_counter()
        traced = trace(model, args, kwargs)
        took.append(time.perf_counter() - start)
    total = sum(p.numel() for p in model.parameters()) or 1
    whole = [model.get_submodule(path) for path in traced.kept_whole]
    share = max((sum(p.numel() for p in m.parameters()) / total for m in whole), default=0.0)
    trial = Trial(model, args, kwargs)
    evaluated = copy.deepcopy(model).eval()
    for number, pipe in enumerate(trial.pipelines()):
        for batch in (4, 3):
            trial.compare(pipe, make_inputs(batch), "")
        if number == 0:
            for batch in (9, 1):
                trial.compare(pipe, make_inputs(batch), "other batch", may_refuse=batch == 1)
            if padded(args, kwargs):
                trial.compare(pipe, padded(args, kwargs), "padded", may_refuse=True)
            trial.compare(pipe, another_size(args, kwargs), "other size", may_refuse=True)
        pipe.eval()
        for batch in (4, 3) if number else (4, 3, 9, 1):
            trial.compare(pipe, make_inputs(batch), "eval", evaluated, may_refuse=batch == 1)
        if number == 0:
            trial.compare(pipe, another_size(args, kwargs), "other size", evaluated, may_refuse=True)
    row = (
        name,
        traced.front_end.removeprefix("the "),
        *(trial.marks.get(column, "-") for column in HEADER[2:9]),
        f"{share:.0%}",
        len(traced.graph.nodes),
        f"{statistics.median(took):.2f}",
        f"{6 * statistics.median(eager) + 0.2:.2f}",
        trial.said[:160] or "-",
    )
    print("ROW", *row, sep="|")


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
            missing = (name, "none", *["-"] * 11, (errors or ["crashed"])[-1][:160])
            rows.append(found[0].split("|")[1:] if found else missing)
        except subprocess.TimeoutExpired:
            rows.append((name, "none", *["-"] * 11, f"longer than {SECONDS} s"))
        print(*rows[-1], sep="|", file=sys.stderr, flush=True)
    print(tabulate(rows, headers=HEADER, disable_numparse=True))
    captured = [row for row in rows if row[1] != "none"]
    print(f"{len(captured)} of {len(rows)} captured")
    for i, column in list(enumerate(HEADER))[2:9]:
        right = sum(row[i] in ("right", "eager refuses", "-") for row in captured)
        print(
            f"{right} right in {column}, {sum(row[i] == 'refused' for row in captured)} refused with an error"
        )
    low = [row for row in captured if int(row[9].rstrip("%")) <= 50 and "export" not in row[1]]
    print(f"{len(low)} with modules as nodes and at most half of the parameters in one that is kept whole")
    if captured:
        times = [float(row[11]) for row in captured]
        within = sum(float(row[11]) <= float(row[12]) for row in captured)
        print(
            f"capture takes {statistics.median(times):.2f} s in the median; {within} are within what is allowed"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        try_model(*sys.argv[2:])
    else:
        main()
