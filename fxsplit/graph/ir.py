"""The frozen values between the passes: Traced → Assignment → Program (of Stages)."""

from __future__ import annotations

import itertools
import linecache
import operator
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

import torch
from torch import fx, nn

from ..compat import TreeSpec, tree_leaves
from ..inserted.ops import guard
from .assumptions import Assumptions
from .code import StageModule, printed
from .signature import Signature


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and device of a tensor seen in the example run."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Source:
    """A place in the user's code.

    Attributes:
        span: of the expression, as Python's compiler has it: line, end line, column, end column.
    """

    path: str
    line: int
    span: tuple[int | None, ...] | None = field(default=None, compare=False, repr=False)

    @property
    def short(self) -> str:
        """``model.py:41``: without the folder, so that generated code is the same on every machine."""
        return f"{os.path.basename(self.path)}:{self.line}"

    def with_text(self) -> str:
        """``/home/me/model.py:41: if x.sum() > 0:``, where the file can be read."""
        text = linecache.getline(self.path, self.line).strip()
        return f"{self}: {text}" if text else str(self)

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class NodeFacts:
    """What is known of one node of the traced graph.

    Attributes:
        module_path: FQN of the innermost module whose `forward` ran it (of the called module itself for
            ``call_module``); ``""`` is the model.
        source: the user's line that made it.
        child_call: how many calls of the model's own children had begun.
        value: the example value as a pytree with a `TensorSpec` for each tensor.
        storages: numbers of the storages that it reads, writes or returns; two nodes that share a number
            may see each other's in-place writes. What is no tensor and changes all the same (a dict that two modules
            have, Python's random numbers) has a number too.
        writes: those of them whose contents it may change, by its class or operation, or has changed on the example.
        lasting: those of them that outlive the call: parameters, buffers, the caller's arguments.
        parameters: FQNs of the parameters that it reads (``call_module`` and ``get_attr``).
        buffers: FQNs of the buffers that it may write.
        stateful: whether it changes anything else that outlives the call: parameters, or what is not a tensor.
        returns: the name of the operand whose tensor it returns, object for object, as in-place operations do.
        alias: the same if it does so in one of the modes, as dropout does.
        random: whether it may draw from the random number generator.
        rng_state: whether it asks for the state of that generator, to put it back later (a checkpoint of the user's), or
            sets it.
    """

    module_path: str
    source: Source | None
    child_call: int = 0
    value: Any = None
    storages: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    lasting: frozenset[int] = frozenset()
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    stateful: bool = False
    returns: str | None = None
    alias: str | None = None
    random: bool = False
    rng_state: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors in the value."""
        return sum(leaf.nbytes for leaf in tree_leaves(self.value) if isinstance(leaf, TensorSpec))


@dataclass(frozen=True, eq=False)
class Traced:
    """The model as a graph: flat tensor inputs, a flat tuple of outputs, the model's own modules.

    Attributes:
        graph: over the user's own modules and parameters, under their FQNs.
        names: FQN → the name under which generated code has it.
        module: runs the graph.
        signature: how the arguments become the graph's inputs.
        out_spec: the structure that the outputs are put back into.
        facts: per node name.
        constants: tensors that forward made from plain numbers, and readers of modules' modes, by the name that
            the graph reads them under.
        front_end: which front end captured it.
        kept_whole: module path → why the module is one node and not inlined (torch.nn's own excepted).
        modes: the values of ``training`` that the graph is known to hold for.
        other_mode: the graph for the other mode, where the model takes another path in it.
        refused: front ends that were tried before, and why their graphs were not taken.
        assumptions: what of the model and its caller the graph is right for.
        valued: whether the model had values when it was captured, and numbers could be compared.
    """

    graph: fx.Graph
    names: Mapping[str, str]
    module: fx.GraphModule
    signature: Signature
    out_spec: TreeSpec
    facts: Mapping[str, NodeFacts]
    constants: Mapping[str, Any]
    front_end: str
    kept_whole: Mapping[str, str]
    modes: tuple[bool, ...] = (True, False)
    other_mode: Traced | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    assumptions: Assumptions = field(default_factory=Assumptions)
    valued: bool = True

    @property
    def devices(self) -> frozenset[torch.device]:
        """The devices of the example: what is written in the graph as one of them follows the stage."""
        return frozenset(a.device for a in self.signature.arguments)

    @property
    def eps(self) -> float:
        """Machine epsilon of the least precise type that anything is computed in, such as bfloat16 under autocast."""
        specs = (leaf for fact in self.facts.values() for leaf in tree_leaves(fact.value))
        kinds = {spec.dtype for spec in specs if isinstance(spec, TensorSpec)}
        return max((torch.finfo(kind).eps for kind in kinds if kind.is_floating_point), default=0.0)

    def report(self) -> str:
        """How the model was captured, in a few lines."""
        words = " and ".join("train()" if mode else "eval()" for mode in self.modes)
        lines = [f"captured by {self.front_end}: {len(self.graph.nodes)} nodes, right in {words}"]
        if not self.valued:
            lines.append(
                "  captured without values: no number was compared; pipe.verify() does it, with weights"
            )
        lines += [f"  not used: {name}: {why}" for name, why in self.refused.items()]
        lines += [f"  kept whole: {path} ({why})" for path, why in self.kept_whole.items()]
        lines += [f"  baked in: {text}" for text in self.baked_in()]
        lines += [f"  taken for granted: {text}" for text in self.assumptions.lines()]
        if self.other_mode is not None:
            lines += ["in the other mode the model takes another path:", self.other_mode.report()]
        return "\n".join(lines)

    def baked_in(self) -> list[str]:
        """What is the same in every call: decisions by sizes, arguments that are no tensors, tensors made of numbers."""
        found = []
        for node in self.graph.nodes:
            if node.target is guard:
                found.append(f"{_written_out(node.args[0])} {self._at(node)}")
        for i, value in self.signature.constants.items():
            if value is not None:
                found.append(f"argument {self.signature.names[i]} = {value!r}")
        for name, value in self.constants.items():
            if isinstance(value, torch.Tensor):
                reader = next(n for n in self.graph.nodes if n.op == "get_attr" and n.target == name)
                spec = TensorSpec(tuple(value.shape), value.dtype, value.device)
                found.append(f"tensor {name} = {spec} {self._at(reader)}")
        return found

    def _at(self, node: fx.Node) -> str:
        source = self.facts[node.name].source
        return f"({source.short})" if source else ""

    def for_mode(self, training: bool) -> Traced:
        """The graph that is right in this mode: this one, or that of the other mode."""
        return self if training in self.modes or self.other_mode is None else self.other_mode

    def all_modes(self) -> tuple[bool, ...]:
        """The modes that this graph or the other one is right for."""
        return self.modes if self.other_mode is None else (*self.modes, *self.other_mode.modes)

    def __repr__(self) -> str:
        return f"Traced({len(self.graph.nodes)} nodes, {len(self.kept_whole)} modules kept whole)"


def _lines_of(module: fx.GraphModule) -> list[tuple[str, tuple[str, ...]]]:
    made = printed(module).text.made if isinstance(module, StageModule) else {}
    return [(text, made.get(n, ())) for n, text in enumerate(module.code.rstrip().splitlines())]


@dataclass(frozen=True)
class StageForecast:
    """What one stage comes to, for a batch like the example.

    Attributes:
        bytes_in, bytes_out: of the distinct values that enter from other stages and leave to them.
        flops: of its forward; None where they were not counted.
        state: bytes of parameters, gradients and optimizer states; None where memory was not counted.
        memory: the same and what is kept for backward.
        limit: how much memory there is; None without a limit.
    """

    bytes_in: int
    bytes_out: int
    flops: int | None = None
    state: int | None = None
    memory: int | None = None
    limit: int | None = None


@dataclass(frozen=True)
class Forecast:
    """What a plan comes to, and how far from the best it can be.

    Attributes:
        unit: of the loads: ``"bytes"``, ``"FLOPs"``, ``"s"``, or ``"nodes"`` where the cost is nothing for all of them.
        bound: no partition into as many stages on these devices has a lighter heaviest stage.
        stages: per stage.
        cut_bytes: of the values that travel between stages, once for each stage that reads them.
        bubble: simulated idle share of the workers.
        how: how the cut was found, or who said it.
        advice: what would be better; empty if nothing is known.
    """

    unit: str
    bound: float
    stages: tuple[StageForecast, ...]
    cut_bytes: int
    bubble: float
    how: str
    advice: str = ""


@dataclass(frozen=True)
class Assignment:
    """Node → stage and stage → device. Stages are contiguous in program order, so edges only go forward.

    Attributes:
        stages: per stage, the names of its nodes in program order.
        devices: per stage.
        loads: per stage, the cost that the plan weighed, in `Forecast.unit`.
        cost: the name of that cost.
        costs: node name → what the node adds to the load of its stage, on the first kind of device. To read a
            parameter or buffer is left out where it costs nothing.
        rows: per stage the devices of its replicas; `devices` are their first ones.
        forecast: what the plan comes to, by the figures it was made of.
        device_map: module path → device (or device and output device), where that says this placement; else why not.
        homes: output of the model that the map sends to another device than that of its stage → that device.
        offload: whether parameters stay on the CPU, as `Plan.offload` says.
    """

    stages: tuple[tuple[str, ...], ...]
    devices: tuple[torch.device, ...]
    loads: tuple[float, ...]
    cost: str
    costs: Mapping[str, float]
    rows: tuple[tuple[torch.device, ...], ...]
    forecast: Forecast
    device_map: Mapping[str, Any] | str = "it has not been written down"
    homes: Mapping[str, torch.device] = field(default_factory=dict)
    offload: bool = False

    @property
    def replicas(self) -> tuple[int, ...]:
        """How many workers run each stage."""
        return tuple(len(row) for row in self.rows)

    def stage_of(self) -> dict[str, int]:
        """Node name → stage index."""
        return {name: i for i, names in enumerate(self.stages) for name in names}

    def __repr__(self) -> str:
        parts = [
            f"{i}: {len(names)} nodes on {d}"
            for i, (names, d) in enumerate(zip(self.stages, self.devices, strict=True))
        ]
        return f"Assignment({'; '.join(parts)})"


@dataclass(frozen=True, eq=False)
class Stage:
    """One generated module, its device, and what it reads and gives.

    Attributes:
        index: position in execution order.
        row: the devices of its replicas; `device` is the first. A replica on another one runs the same code, with
            its own device in place of this one.
        module: the generated `GraphModule`; its submodules and parameters are the model's own objects.
        inputs: names of the values that it reads, in the order of its arguments.
        outputs: names of the values that it gives, in the order of its results.
        paths: name of each submodule or tensor in the generated code → FQN in the model.
        nodes: names of the traced nodes that it computes, in program order.
        parameters: FQNs of the parameters that it reads.
        writes: FQNs of the buffers that it may write.
        changes: module paths of its nodes that change anything else that outlives a call.
        random: whether it may draw from the random number generator.
        rates: paths of the layers that draw by a rate of theirs and in train mode, if nothing else in it draws.
        rng_state: whether it asks for the state of that generator, to put it back later: a checkpoint of the user's.
        modules: first and last module path of its nodes, for people.
        header: the comment above its code.
        offloaded: whether its parameters are on the CPU, and on `device` only while it computes.
    """

    index: int
    module: fx.GraphModule
    device: torch.device
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    paths: Mapping[str, str]
    nodes: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    random: bool = False
    rates: tuple[str, ...] = ()
    rng_state: bool = False
    modules: tuple[str, str] = ("", "")
    header: str = ""
    row: tuple[torch.device, ...] = ()
    offloaded: bool = False

    @property
    def home(self) -> torch.device:
        """Where its parameters are between calls."""
        return torch.device("cpu") if self.offloaded else self.device

    @property
    def stateful(self) -> bool:
        """Whether it changes anything that outlives a call, beside buffers."""
        return bool(self.changes)

    @property
    def is_apart(self) -> bool:
        """Whether its replicas are on different devices."""
        return len(set(self.row)) > 1

    def device_of(self, micro_batch: int) -> torch.device:
        """Where it computes a micro-batch."""
        return self.row[micro_batch % len(self.row)] if self.row else self.device

    @property
    def code(self) -> str:
        """The Python source that runs, with a header that says where it stands."""
        return "\n".join(text for text, _ in self.lines()) + "\n"

    def lines(self) -> list[tuple[str, tuple[str, ...]]]:
        """The lines of the code, and the nodes that each computes."""
        found: list[tuple[str, tuple[str, ...]]] = [(text, ()) for text in self.header.splitlines()]
        found += _lines_of(self.module)
        for name, region in self.module.named_children():
            if isinstance(region, fx.GraphModule):
                found += [("", ()), (f"# {name}: recomputed in backward", ()), *_lines_of(region)]
        return found

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this stage reads, under the model's FQNs, each once."""
        for local, parameter in self.module.named_parameters():
            parts = local.split(".")
            if parts[0] not in self.paths:  # inside a checkpoint region
                parts = parts[1:]
            yield ".".join([self.paths[parts[0]], *parts[1:]]), parameter

    def _repr_html_(self) -> str:
        """In a notebook: what it reads and gives, and below, folded, its code."""
        return f"<details><summary>{escape(repr(self))}</summary><pre>{escape(self.code)}</pre></details>"

    def __repr__(self) -> str:
        return f"Stage({self.index}, {self.device}, reads {list(self.inputs)}, gives {list(self.outputs)})"


@dataclass(frozen=True, eq=False)
class Program:
    """The stages in execution order, and the root module that calls them one after the other.

    Attributes:
        stages: in execution order.
        root: ``root(*inputs)`` runs the whole program in the calling thread: the oracle of every runtime.
        inputs: names of the graph's inputs.
        outputs: the flat outputs: a value's name, or a constant wrapped in a 1-tuple.
        aliases: value that crosses a cut → the first one that does and may be the very same tensor, as the result of an
            identity is, and of a dropout in eval mode. Their gradients are added as those of one.
        homes: as of the `Assignment`.
    """

    stages: tuple[Stage, ...]
    root: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str | tuple[Any], ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    homes: Mapping[str, torch.device] = field(default_factory=dict)

    def written(self) -> tuple[str, ...]:
        """FQNs of the buffers that any stage may write."""
        return tuple(dict.fromkeys(itertools.chain.from_iterable(stage.writes for stage in self.stages)))

    def producers(self) -> dict[str, int]:
        """Value → the stage that gives it; graph inputs are -1."""
        made = dict.fromkeys(self.inputs, -1)
        made.update((name, stage.index) for stage in self.stages for name in stage.outputs)
        return made

    def readers(self) -> dict[str, tuple[int, ...]]:
        """Value → the stages that read it, in execution order."""
        read: dict[str, list[int]] = {name: [] for name in self.producers()}
        for stage in self.stages:
            for name in stage.inputs:
                read[name].append(stage.index)
        return {name: tuple(stages) for name, stages in read.items()}

    def __repr__(self) -> str:
        return f"Program({len(self.stages)} stages)"


_SYMBOLS = {
    operator.eq: "==",
    operator.ne: "!=",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.floordiv: "//",
    operator.mod: "%",
}


def _written_out(value: Any) -> str:
    """A condition as the user might have written it: ``x.size(1) <= 512``."""
    if not isinstance(value, fx.Node):
        return repr(value)
    if value.target in _SYMBOLS and len(value.args) == 2:
        return f"{_written_out(value.args[0])} {_SYMBOLS[value.target]} {_written_out(value.args[1])}"
    if value.op == "call_method" and value.target == "size":
        owner, *rest = value.args
        return f"{owner}.size({', '.join(map(str, rest))})"
    if value.target is len:
        return f"len({value.args[0]})"
    return value.name
