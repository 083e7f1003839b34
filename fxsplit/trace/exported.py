"""The second and third front end: `torch.export`, without and with its bytecode interpreter (non-strict, strict).

Its graphs are flat (operators of aten and parameters), but it captures what the first front end cannot: numbers
that are read from tensors, such as ``int(index.max())``, stay symbolic. The graph is taken over as it is, with
the model's own Parameter objects; it is not unflattened, which would copy them.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from ..compat import (
    METADATA_CHECKS,
    REGIONS,
    SCALAR_CHECK,
    quiet_export,
    size_range,
    transforms_left,
    tree_flatten,
    tree_map,
    unflatten_outputs,
)
from ..errors import TraceError, pass_on_if_full
from ..graph.ir import Source
from ..graph.nodes import resolve
from ..inserted.ops import guard
from ..modules.attributes import attributes_of, changed_attributes
from ..modules.state import preserved, python_random_state, same_python_random
from .capture import Capture, Request, Taken
from .reads import reads_of_a_run
from .source import is_the_users


def exported(request: Request) -> Capture:
    """``torch.export.export(strict=False)`` with every dimension dynamic."""
    return _export(request, strict=False)


def exported_strictly(request: Request) -> Capture:
    """``torch.export.export(strict=True)`` with every dimension dynamic."""
    return _export(request, strict=True)


def _export(request: Request, *, strict: bool) -> Capture:
    taken = _refuse_side_effects(request)
    args, kwargs = request.arguments()
    bound = request.signature.signature.bind(*args, **kwargs)
    shapes = {name: tree_map(_dynamic, value) for name, value in bound.arguments.items()}
    try:
        with transforms_left(), quiet_export():
            program = torch.export.export(
                request.model,
                args,
                kwargs,
                dynamic_shapes=shapes,
                strict=strict,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
            module = program.module(check_guards=True)
        return replace(_Adopter(request, module, program.range_constraints).capture(), taken=taken)
    except TraceError:
        raise
    except Exception as error:
        pass_on_if_full(error)
        text = next((line for line in str(error).splitlines() if line.strip()), "")
        raise TraceError(
            f"torch.export.export(strict={strict}) cannot capture {type(request.model).__name__}: "
            f"{type(error).__name__}: {text}"
        ) from error


def _refuse_side_effects(request: Request) -> Taken:
    """What forward leaves behind in Python is not in an exported graph; buffers are. Returns what it reads."""
    model = request.model
    with preserved(model, parameters=True):
        before = [(path, module, attributes_of(module)) for path, module in model.named_modules()]
        drawn = python_random_state()
        try:
            taken = reads_of_a_run(request)
        except RuntimeError as error:  # on meta, where no value can be asked for
            raise TraceError(
                f"{type(model).__name__} does not run: {(str(error).splitlines() or [''])[0]}"
            ) from error
        for path, module, attributes in before:
            for name in changed_attributes(module, attributes):
                if name not in module._buffers:
                    raise TraceError(f"torch.export would lose that {path or 'the model'} writes self.{name}")
        if not same_python_random(drawn, python_random_state()):
            raise TraceError("torch.export would bake in a random number of Python or NumPy")
    return taken


def _decision(message: str) -> str:
    """What stands for the user's line, which export does not keep for its decisions."""
    text = (
        message.split(": ", 1)[-1]
        .removeprefix("Runtime assertion failed for expression ")
        .split(" on node")[0]
    )
    return f"the model's forward (a decision by a size: {text})"


def _dynamic(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return None
    return dict.fromkeys(range(leaf.dim()), torch.export.Dim.AUTO)


class _Adopter:
    """Copies the graph of an exported module, which has a placeholder for each leaf of the arguments."""

    def __init__(self, request: Request, module: fx.GraphModule, ranges: Mapping[Any, Any]) -> None:
        self.request, self.module, self.ranges = request, module, ranges
        self.graph = fx.Graph()
        self.constants: dict[str, Any] = {}
        self.names = {
            id(t): n for n, t in (*request.model.named_buffers(), *request.model.named_parameters())
        }
        self.paths = dict(request.model.named_modules())
        self.child_call, self.last_child = 0, ""

    def capture(self) -> Capture:
        """The graph under the model's FQNs."""
        signature = self.request.signature
        for name in (argument.placeholder for argument in signature.arguments):
            node = self.graph.create_node("placeholder", name, name=name)
            node.meta.update(module_path="", source=None, child_call=0)
        args, kwargs = signature.unflatten(list(self.graph.nodes))
        # an exported graph takes what the example gave, and knows nothing of what it left to its default
        leaves, _ = tree_flatten(dict(signature.signature.bind(*args, **kwargs).arguments))
        self._sizes(leaves, self.ranges)
        results = self._copy(self.module, leaves)
        flat, out_spec = tree_flatten(unflatten_outputs(self.module.graph, results))
        self.graph.output(tuple(flat)).meta.update(module_path="", source=None, child_call=0)
        _write_early(self.graph)
        return Capture(self.graph, out_spec, self.constants)

    def _copy(self, module: fx.GraphModule, operands: Sequence[Any]) -> Any:
        values: dict[fx.Node, Any] = {}
        given = iter(operands)
        for node in module.graph.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "output":
                return args[0]
            elif node.op == "call_module":
                self._guards(module.get_submodule(str(node.target)), args)
            elif node.target is SCALAR_CHECK:
                self._create(node, "call_function", guard, (args[0], _decision(args[1])), {})
            elif node.target in METADATA_CHECKS:
                continue
            elif node.op == "get_attr":
                values[node] = self._attribute(node, resolve(module, str(node.target)))
            elif node.target in REGIONS:
                context, count = REGIONS[node.target](*args)
                with self._entered(node, context):
                    values[node] = self._copy(args[count], args[count + 1 :])
            elif node.target is operator.getitem and isinstance(args[0], tuple | list):
                values[node] = args[0][args[1]]
            else:
                values[node] = self._create(node, node.op, node.target, args, kwargs)
        raise AssertionError("a graph without output")

    def _sizes(self, leaves: Sequence[Any], ranges: Mapping[Any, Any]) -> None:
        """What export has decided of the sizes of the inputs: constants, ranges, and sizes that are equal."""
        placeholders = [n for n in self.module.graph.nodes if n.op == "placeholder"]
        if len(placeholders) != len(leaves):
            raise TraceError("torch.export leaves out some of the arguments")
        first: dict[Any, fx.Node] = {}
        every = []
        for node, leaf in zip(placeholders, leaves, strict=True):
            sizes = getattr(node.meta.get("val"), "shape", ())
            for dim, size in enumerate(sizes) if isinstance(leaf, fx.Node) else ():
                found = self._create(node, "call_method", "size", (leaf, dim), {})
                every.append(found)
                low, high, symbol = size_range(size, ranges)
                if symbol in first:
                    self._decided(node, operator.eq, found, first[symbol])
                elif symbol is not None:
                    first[symbol] = found
                if low == high:
                    self._decided(node, operator.eq, found, low)
                    continue
                if low > 0:
                    self._decided(node, operator.ge, found, low)
                if high is not None:
                    self._decided(node, operator.le, found, high)

        for found in every:
            if not found.users:
                self.graph.erase_node(found)

    def _decided(self, node: fx.Node, comparison: Any, size: fx.Node, other: Any) -> None:
        holds = self._create(node, "call_function", comparison, (size, other), {})
        self._create(node, "call_function", guard, (holds, "the model's forward (a decision by a size)"), {})

    def _guards(self, checks: nn.Module, operands: Sequence[Any]) -> None:
        """What export decided by sizes: in the split too, another size is an error and not a wrong number."""
        values: dict[fx.Node, Any] = {}
        given = iter(operands)
        for node in fx.Tracer().trace(checks).nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "output":
                return
            elif node.target is torch._assert:
                self._create(node, "call_function", guard, (args[0], _decision(args[1])), {})
            else:
                values[node] = self._create(node, node.op, node.target, args, kwargs)

    def _attribute(self, node: fx.Node, value: Any) -> Any:
        if isinstance(value, fx.GraphModule):
            return value  # a region; it is copied where it is called
        if id(value) not in self.names:
            self.names[id(value)] = f"constant_{len(self.constants)}"
            self.constants[self.names[id(value)]] = value
        return self._create(node, "get_attr", self.names[id(value)], (), {})

    @contextlib.contextmanager
    def _entered(self, node: fx.Node, context: tuple[Any, ...]) -> Iterator[None]:
        made = self._create(node, "call_function", context[0], context[1:], {})
        self._create(node, "call_method", "__enter__", (made,), {})
        yield
        self._create(node, "call_method", "__exit__", (made, None, None, None), {})

    def _create(self, node: fx.Node, op: str, target: Any, args: Any, kwargs: Any) -> fx.Node:
        if "functorch" in str(getattr(target, "__module__", "")):
            raise TraceError(
                "torch.export keeps torch.vmap and other transforms as calls that enter and leave them"
            )
        path = _module_path(node, self.paths)
        child = path.split(".")[0]
        self.child_call += bool(child and child != self.last_child)
        self.last_child = child
        name = node.name if op == node.op and target is node.target else None
        copy = self.graph.create_node(op, target, args, kwargs, name=name)
        copy.meta.update(module_path=path, source=_source(node), child_call=self.child_call)
        return copy


def _module_path(node: fx.Node, paths: dict[str, nn.Module]) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    for path, _ in reversed([entry for entry in stack.values() if isinstance(entry, tuple)]):
        plain = re.sub(r"^L\['self'\]\.?", "", str(path))
        if plain in paths:
            return plain
    return ""


def _source(node: fx.Node) -> Source | None:
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    lines = [Source(path, int(line)) for path, line in found if is_the_users(path)]
    return lines[-1] if lines else None


def _write_early(graph: fx.Graph) -> None:
    """Move writes to buffers, which export puts at the end, to where their value is known."""
    copies = [n for n in graph.nodes if n.target is torch.ops.aten.copy_.default]
    for node in copies:
        target, value = node.args[0], node.args[1]
        if not isinstance(target, fx.Node) or not isinstance(value, fx.Node) or target.op != "get_attr":
            continue
        order = {n: i for i, n in enumerate(graph.nodes)}
        readers = [
            user
            for n in graph.nodes
            if n.op == "get_attr" and n.target == target.target
            for user in n.users
            if user is not node
        ]
        last = max([value, target, *readers], key=order.__getitem__)
        if order[last] < order[node] and not node.users:
            last.append(node)
            node.meta = {
                **node.meta,
                "module_path": last.meta["module_path"],
                "child_call": last.meta["child_call"],
            }
