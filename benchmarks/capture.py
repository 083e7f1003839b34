"""Which models can be captured and split, and is the split right? One row a model, beside torch.fx and torch.export.

Models of torchvision, timm, transformers and diffusers, those that are installed, with random weights and tiny sizes; or those
of a registry, ``--registry package.module:NAME``, a mapping from a name to ``(family, factory)`` where ``factory()``
returns ``(model, make_inputs)`` and ``make_inputs(batch)`` returns ``(args, kwargs)``. Each is tried in a process of its
own with one thread and a time limit, two at a time, in 1, 2 and 4 stages (fewer where the graph has no more), against
eager on deep copies.

Columns: outputs, gradients and buffers in train mode at batch 4 and 3; all of it at batch 9 and 1; all of it after
`eval()`; with a padded mask; at another length or image size (an error that says so is as good as the right numbers);
the largest share of the parameters in one module kept whole; nodes; seconds of the capture with its checks, the median of
3. For `torch.fx.symbolic_trace` and `torch.export.export`, with a free batch size where it can be, the outputs in train mode at
batch 4 and 3.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import fxsplit
from fxsplit.testing import compare
from fxsplit.trace.front import trace

from .children import ChildError, in_child
from .models import TINY, installed, load_torchvision
from .part import Options
from .report import LeftOutError, Report

QUESTION = "Which models can be captured, and is the split right?"
MINUTES = 2.0
CHECKED = ("outputs", "gradients", "buffers", "other batch", "eval", "padded", "other size")
HEADER = (
    "model",
    "front end",
    *CHECKED,
    "kept whole",
    "nodes",
    "s",
    *("outputs by torch.fx", "outputs by torch.export"),
)
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def registry(source: str | None) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Name → (family, factory): what ``package.module:NAME`` is, or what there is without it."""
    load_torchvision()
    if source is None:
        return TINY
    module, _, attribute = source.partition(":")
    return getattr(importlib.import_module(module), attribute)


class Trial:
    """One model; `marks` has a word for each column, and `said` the first thing that went wrong."""

    def __init__(self, model: nn.Module, inputs: Inputs):
        self.model, self.inputs = model, inputs
        self.marks: dict[str, str] = {}
        self.said = ""

    def pipelines(self) -> Iterator[fxsplit.Pipeline]:
        """In 1, 2 and 4 stages, or in as many as there can be."""
        args, kwargs = self.inputs
        for stages in (1, 2, 4):
            pipe = None
            while pipe is None:
                try:
                    plan, twin = fxsplit.Plan(stages=stages), copy.deepcopy(self.model)
                    pipe = fxsplit.compile(twin, plan, example_args=args, example_kwargs=kwargs)
                except fxsplit.errors.PartitionError:
                    stages -= 1
            yield pipe

    def compare(
        self, pipe: fxsplit.Pipeline, inputs: Inputs, column: str, model=None, *, may_refuse: bool = False
    ) -> None:
        """Mark outputs, gradients and buffers of one batch; all in `column` if it is given."""
        model, (args, kwargs) = model or self.model, inputs
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
            self._mark(column or "outputs", "refused" if may_refuse else "ERROR", text)
            return
        kinds = {"output": "outputs", "gradient": "gradients", "buffer": "buffers"}
        for kind in kinds.values():
            self._mark(column or kind, "right", "")
        for name, what in found.items():
            self._mark(column or kinds[name.split()[0]], "WRONG", f"{name} {what}")

    def _mark(self, column: str, mark: str, text: str) -> None:
        order = ("right", "refused", "ERROR", "WRONG")
        worst = max(self.marks.get(column, "right"), mark, key=lambda m: order.index(m) if m in order else 0)
        self.marks[column] = worst
        if text and not self.said:
            self.said = f"{column}: {text}"


def padded(inputs: Inputs) -> Inputs | None:
    """The masks with zeros at the end of every second row."""
    args, kwargs = inputs[0], dict(inputs[1])
    found = [n for n, v in kwargs.items() if "mask" in n and isinstance(v, torch.Tensor) and v.dim() == 2]
    for name in found:
        kwargs[name] = kwargs[name].clone()
        kwargs[name][::2, -3:] = 0
    return (args, kwargs) if found else None


def another_size(inputs: Inputs) -> Inputs:
    """Images half as large; sequences four shorter."""
    tensors = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor)]
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

    return tree_map(smaller, inputs)


def exported(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.export.ExportedProgram:
    """By torch.export with a free batch size, or with a fixed one where it has to be."""
    free = tree_map(
        lambda t: {0: torch.export.Dim.AUTO} if isinstance(t, torch.Tensor) else None, (args, kwargs)
    )
    try:
        names = list(inspect.signature(model.forward).parameters)
        shapes = {**dict(zip(names, free[0], strict=False)), **free[1]}
        return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception:
        return torch.export.export(model, args, kwargs, strict=False)


CAPTURES = {
    "torch.fx": lambda model, args, kwargs: torch.fx.symbolic_trace(model),
    "torch.export": lambda *given: exported(*given).module(),
}


def peer_mark(model: nn.Module, make_inputs: Callable[[int], Inputs], peer: str) -> str:
    """What a peer's graph gives at batch 4, by which it was captured, and 3."""
    args, kwargs = make_inputs(4)
    try:
        twin = copy.deepcopy(model)
        graph = CAPTURES[peer](twin, args, kwargs)
    except Exception:
        return "not captured"
    for batch in (4, 3):
        args, kwargs = make_inputs(batch)
        twin = copy.deepcopy(model)
        wanted, found = [], []
        try:
            for call, tensors in ((twin, wanted), (graph, found)):
                torch.manual_seed(batch)  # of dropout that is no module
                leaves = tree_leaves(call(*args, **kwargs))
                tensors += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        except Exception as error:
            wrong = isinstance(error, AssertionError) and "match" in str(error)
            return ("WRONG" if wrong else "an error") + (" at batch 3" if batch == 3 else "")
    return "right"


def row_of(source: str | None, name: str) -> tuple[list[str], str]:
    """One row, and what went wrong first."""
    torch.manual_seed(0)
    model, make_inputs = registry(source)[name][1]()
    model.train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0  # masks of two runs cannot be compared
    inputs, took = make_inputs(4), []
    for _ in range(3):
        start = time.perf_counter()
        traced = trace(model, *inputs)
        took.append(time.perf_counter() - start)
    total = sum(p.numel() for p in model.parameters()) or 1
    whole = [model.get_submodule(path) for path in traced.kept_whole]
    share = max((sum(p.numel() for p in m.parameters()) / total for m in whole), default=0.0)
    trial, evaluated = Trial(model, inputs), copy.deepcopy(model).eval()
    for number, pipe in enumerate(trial.pipelines()):
        for batch in (4, 3):
            trial.compare(pipe, make_inputs(batch), "")
        if number == 0:
            for batch in (9, 1):
                trial.compare(pipe, make_inputs(batch), "other batch", may_refuse=batch == 1)
            if (with_padding := padded(inputs)) is not None:
                trial.compare(pipe, with_padding, "padded", may_refuse=True)
            trial.compare(pipe, another_size(inputs), "other size", may_refuse=True)
        pipe.eval()
        for batch in (4, 3) if number else (4, 3, 9, 1):
            trial.compare(pipe, make_inputs(batch), "eval", evaluated, may_refuse=batch == 1)
        if number == 0:
            trial.compare(pipe, another_size(inputs), "other size", evaluated, may_refuse=True)
    row = [
        *(name, traced.front_end.removeprefix("the ")),
        *(trial.marks.get(column, "-") for column in CHECKED),
        *(f"{share:.0%}", str(len(traced.graph.nodes)), f"{statistics.median(took):.2f}"),
        *(peer_mark(model, make_inputs, peer) for peer in CAPTURES),
    ]
    return row, trial.said


def measure(options: Options) -> Report:
    """A row for each model; how many of them are right."""
    left_out: list[str] = []
    models = {
        name: family
        for name, (family, _) in registry(options.registry).items()
        if options.registry or installed(family, left_out)
    }
    if not models:
        raise LeftOutError(
            "none of torchvision, timm, transformers and diffusers is installed, and no --registry given"
        )

    def one(name):
        try:
            return in_child(row_of, options.registry, name, limit=300)
        except ChildError as error:
            return [name, "none", *["-"] * (len(HEADER) - 2)], str(error)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(one, list(models)[: 1 if options.quick else None]))
    rows = [row for row, _ in found]
    captured = [row for row in rows if row[1] != "none"]
    said = [f"{len(captured)} of {len(rows)} are captured."]
    for i, column in enumerate(CHECKED, start=2):
        right = sum(row[i] in ("right", "eager refuses", "-") for row in captured)
        refused = sum(row[i] == "refused" for row in captured)
        said.append(f"{column}: {right} right" + (f", {refused} refused with an error." if refused else "."))
    for i, peer in enumerate(CAPTURES, start=len(HEADER) - len(CAPTURES)):
        said.append(f"{peer}: {sum(row[i] == 'right' for row in captured)} with right outputs.")
    whole = [row for row in captured if int(row[9].rstrip("%")) <= 50 and "export" not in row[1]]
    said.append(f"{len(whole)} read as modules, with at most half of the parameters in one that stays whole.")
    wrong = [f"{row[0]} ({text[:160]})" for row, text in found if text and "refused" not in row]
    said += [f"Not right: {'; '.join(wrong)}."] if wrong else []
    return Report(HEADER, rows, [" ".join(said)], left_out)
