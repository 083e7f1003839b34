"""What a program does to the tensors of one run, operation by operation."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..compat import Interpreter, OpOverload, TorchDispatchMode, storage_key, tree_leaves, tree_map


@dataclass(frozen=True)
class Ref:
    """A tensor of a run.

    Attributes:
        value: its number in the run.
        storage: that of its memory; tensors that share it may be views of each other.
        place: where in it the tensor lies: offset, shape, strides.
    """

    value: int
    storage: int
    place: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Step:
    """One operation: its arguments with tensors as `Ref`, and the flat tensors that it gave."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Ref, ...]
    node: str


def argument_of(step: Step, name: str, default: Any = None) -> Any:
    """The argument of this name, as given or by the schema's default."""
    for place, known in enumerate(step.func._schema.arguments):
        if known.name == name:
            return step.args[place] if place < len(step.args) else step.kwargs.get(name, known.default_value)
    return default


@dataclass
class Record:
    """One run of a graph.

    Attributes:
        steps: in order.
        nodes: of each traced node its value, with tensors as `Ref`, and how many steps were done then.
        tensors: of the graph's modules, by name.
        writes: whether it wrote to what was there before: parameters, buffers, tensors that a module holds in a list.
        normalises: whether a layer took the statistics of the batch that it was given.
    """

    steps: list[Step] = field(default_factory=list)
    nodes: dict[str, tuple[Any, int]] = field(default_factory=dict)
    tensors: dict[str, Ref] = field(default_factory=dict)
    writes: bool = False
    normalises: bool = False


class Recorder(Interpreter):
    """Runs a graph and writes down its operations, below autograd: what composes others shows as those.

    Every tensor of the run is kept until the end of it, so that none takes another's place.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.record = Record()
        self._kept: list[torch.Tensor] = []
        self._by_object: dict[int, Ref] = {}
        self._by_place: dict[tuple[Any, ...], int] = {}
        self._made: set[int] = set()
        self._current = ""

    def observe(self, inputs: Sequence[torch.Tensor]) -> Record:
        """Run the graph on `inputs`, without gradients."""
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            self.record.tensors[name] = self._ref(tensor)
        with torch.no_grad(), _Observer(self):
            self.run(*inputs)
        self._kept.clear()
        self.env.clear()
        return self.record

    def run_node(self, n: fx.Node) -> Any:
        self._current = n.name
        value = super().run_node(n)
        if n.op == "placeholder":
            self._made.add(self._ref(value).storage)
        self.record.nodes[n.name] = self._refs(value), len(self.record.steps)
        return value

    def refs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of an operation, before it is done: some change the shape of what they are given."""
        return self._refs(args), self._refs(kwargs)

    def add(self, func: OpOverload, given: tuple[Any, Any], args: Any, result: Any) -> None:
        """Write down one operation."""
        outputs = tuple(self._ref(t) for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        if "lift_fresh" in func._schema.name and args[0].numel() == 1 and not args[0].is_meta:
            given[1]["number"] = args[0].item()  # a tensor made of a number of Python's
        if func._schema.is_mutable and any(o.storage not in self._made for o in outputs):
            self.record.writes = True
        self._made |= {o.storage for o in outputs}
        step = Step(func, *given, outputs, self._current)
        if "batch_norm" in func._schema.name and argument_of(step, "training", True):
            by_rows = given[0][0].shape[:1] != (
                1,
            )  # instance normalisation has one row, and channels for all
            self.record.normalises = self.record.normalises or by_rows
        self.record.steps.append(step)

    def _refs(self, value: Any) -> Any:
        return tree_map(lambda v: self._ref(v) if isinstance(v, torch.Tensor) else v, value)

    def _ref(self, tensor: torch.Tensor) -> Ref:
        known, shape = self._by_object.get(id(tensor)), () if tensor.is_nested else tuple(tensor.shape)
        if known is not None and known.shape == shape:
            return known
        strided = tensor.layout is torch.strided and not tensor.is_nested
        storage = storage_key(tensor) if strided else id(tensor)
        stride = (tensor.storage_offset(), *tensor.stride()) if strided else ()
        place = (*stride, shape, tensor.dtype)
        # Autograd may hand on a view as another object: the same place in the same memory is the same value.
        value = self._by_place.setdefault((storage, place), len(self._by_place))
        self._kept.append(tensor)
        found = Ref(value, storage, place, shape, tensor.dtype)
        self._by_object[id(tensor)] = found
        return found


def values_of(
    module: fx.GraphModule, nodes: Container[str], inputs: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """What these nodes compute."""
    found: dict[str, Any] = {}

    class Reader(Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if n.name in nodes:
                found[n.name] = tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, value)
            return value

    with torch.no_grad():
        Reader(module).run(*inputs)
    return found


class _Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = self.recorder.refs(args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        self.recorder.add(func, given, args, result)
        return result
