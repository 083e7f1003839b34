"""Facts about an fx.Graph that several passes need: comparing, binding to a model, bytes across a cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from ..compat import tree_flatten_with_paths, tree_unflatten
from .code import StageModule
from .ir import NodeFacts, Stage, Traced

COMPUTE = ("call_module", "call_function", "call_method", "get_attr")


def compute_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that belong to a stage: all but placeholders and the output, in program order."""
    return [node for node in graph.nodes if node.op in COMPUTE]


def output_values(graph: fx.Graph) -> tuple[Any, ...]:
    """The flat outputs: nodes and constants."""
    values = graph.output_node().args[0]
    assert isinstance(values, tuple | list)
    return tuple(values)


def output_names(traced: Traced) -> list[str]:
    """How the user would write each flat output: ``output``, ``output['logits']``."""
    tree = tree_unflatten(
        [torch.empty(0)] * traced.out_spec.num_leaves, traced.out_spec
    )  # records are looked into if they hold tensors
    return [f"output{path}" for path, _ in tree_flatten_with_paths(tree)]


def resolve(model: nn.Module, fqn: str) -> Any:
    """The module, parameter, buffer or attribute of `model` with this path; ``""`` is the model."""
    owner: Any = model
    for part in fqn.split(".") if fqn else ():
        owner = getattr(owner, part)
    return owner


def plain_tensors(model: nn.Module, traced: Traced) -> set[str]:
    """What the program reads of tensors that are attributes of modules, neither parameters nor buffers.

    Nobody moves them; where they may be elsewhere, the program transfers them.
    """
    registered = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    registered |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    read = {str(n.target) for n in traced.graph.nodes if n.op == "get_attr"}
    found = read - registered - set(traced.constants)
    return {name for name in found if isinstance(resolve(model, name), torch.Tensor)}


class ModuleMode:
    """Reads ``training`` of a module that was written into the graph, without being its parent.

    Attributes:
        path: FQN of the module.
        module: the user's object.
    """

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module = path, module

    @property
    def training(self) -> bool:
        """The mode of the module now."""
        return self.module.training


def is_within(path: str, ancestor: str) -> bool:
    """Whether module `path` is `ancestor` or inside it, by path components: ``"1"`` does not hold ``"10"``."""
    return not ancestor or path == ancestor or path.startswith(ancestor + ".")


def bind(graph: fx.Graph, attributes: Mapping[str, Any], class_name: str) -> fx.GraphModule:
    """A `GraphModule` of `graph` whose targets are these very objects (nothing is copied), with code to be read."""
    return StageModule(dict(attributes), graph, class_name)


def run_under(graph: fx.Graph, names: Mapping[str, str], objects: Mapping[str, Any]) -> fx.GraphModule:
    """A module that runs `graph` with its targets under other names: an FQN may be ``code`` or ``a.b`` beside ``a``."""
    copy = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        values[node] = copy.node_copy(node, values.__getitem__)
        if node.op in ("call_module", "get_attr"):
            values[node].target = names[str(node.target)]
    return bind(copy, {names[fqn]: value for fqn, value in objects.items()}, "Traced")


def structure(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Every node as (op, target, args, kwargs) with operands as positions: equal for equal programs."""
    position = {node: i for i, node in enumerate(graph.nodes)}

    def plain(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", position[value])
        if isinstance(value, tuple | list):
            return (type(value).__name__, *map(plain, value))
        if isinstance(value, dict):
            return ("dict", *((key, plain(item)) for key, item in value.items()))
        if isinstance(value, slice):
            return ("slice", plain(value.start), plain(value.stop), plain(value.step))
        if isinstance(value, torch.device):
            return "device"  # follows the stage
        return (type(value).__name__, repr(value) if isinstance(value, float) else value)

    # a placeholder is its position, whatever its name
    return [
        (
            node.op,
            None if node.op in ("placeholder", "output") else node.target,
            plain(node.args),
            plain(node.kwargs),
        )
        for node in graph.nodes
    ]


def first_difference(a: Sequence[tuple[Any, ...]], b: Sequence[tuple[Any, ...]]) -> int | None:
    """Index of the first row in which two `structure` lists differ, or None."""
    for i, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def cut_bytes(traced: Traced, nodes: Sequence[fx.Node]) -> list[int]:
    """Entry i: bytes of the distinct values that live across a cut before ``nodes[i]``."""
    position = {node: i for i, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 2)
    for node in traced.graph.nodes:
        if node.op == "output":
            continue
        readers = [position[user] for user in node.users if user in position]
        if not readers or (node.op == "get_attr" and traced.facts[node.name].parameters):
            continue  # a parameter does not travel: every stage reads its own
        start = position.get(node, -1)
        nbytes = traced.facts[node.name].nbytes
        if node.op != "placeholder" and max(readers) > start:
            change[start + 1] += nbytes
            change[max(readers) + 1] -= nbytes
    alive, across = 0, []
    for i in range(len(nodes)):
        alive += change[i]
        across.append(alive)
    return across


def stage_graph(stage_of: Mapping[str, int], graph: fx.Graph) -> dict[int, set[int]]:
    """The quotient graph: stages, and those that each has values from."""
    quotient: dict[int, set[int]] = {stage: set() for stage in sorted(set(stage_of.values()))}
    for node in graph.nodes:
        for user in node.users:
            a, b = stage_of.get(node.name), stage_of.get(user.name)
            if a is not None and b is not None and a != b:
                quotient[b].add(a)
    return quotient


def is_context(node: fx.Node) -> bool:
    """Whether the value is a context such as ``torch.no_grad()``: it is entered and left, and never travels."""
    return any(user.op == "call_method" and user.target == "__exit__" for user in node.users)


def enters(node: fx.Node) -> fx.Node | None:
    """The context that `node` enters; ``torch.set_grad_enabled`` is entered when it is made."""
    if node.target is torch.set_grad_enabled:
        return node
    if node.op == "call_method" and node.target == "__enter__" and isinstance(node.args[0], fx.Node):
        return node.args[0]
    return None


def leaves(node: fx.Node) -> fx.Node | None:
    """The context that `node` leaves."""
    is_exit = node.op == "call_method" and node.target == "__exit__"
    return node.args[0] if is_exit and isinstance(node.args[0], fx.Node) else None


def open_contexts(nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, ...]]:
    """Entry i: the contexts that are open before ``nodes[i]``, outermost first; the last entry: after the last node."""
    found: list[tuple[fx.Node, ...]] = [()]
    for node in nodes:
        entered, left = enters(node), leaves(node)
        now = found[-1] if entered is None else (*found[-1], entered)
        found.append(tuple(c for c in now if c is not left))
    return found


def device_constants(node: fx.Node) -> set[torch.device]:
    """The devices written in the arguments of a node."""
    found: set[torch.device] = set()
    fx.node.map_aggregate(
        (node.args, node.kwargs), lambda v: found.add(v) if isinstance(v, torch.device) else v
    )
    return found


def module_paths(facts: Mapping[str, NodeFacts], names: Sequence[str]) -> tuple[str, str]:
    """First and last module path that these nodes lie in, skipping the model itself where others exist."""
    paths = [facts[name].module_path for name in names]
    inner = [path for path in paths if path] or paths
    return (inner[0], inner[-1]) if inner else ("", "")


def region_runs(stage: Stage) -> list[tuple[int, int]]:
    """The recomputed regions of a stage as runs ``[start, end)`` of its nodes."""
    place = {name: i for i, name in enumerate(stage.nodes)}
    runs = []
    for region in region_modules(stage.module):
        inside = [
            place[n.name]
            for n in region.graph.nodes
            if n.name in place and n.op not in ("placeholder", "output")
        ]
        runs.append((min(inside), max(inside) + 1))
    return runs


def region_modules(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The checkpoint regions of a stage module."""
    for _, child in module.named_children():
        if isinstance(child, fx.GraphModule):
            yield child
