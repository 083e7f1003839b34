"""A model on the ``meta`` device: it is captured there, and its graph then reads as one that was captured on the CPU.

model on meta, example       capture, cut: sizes, no values       the graph, for weights that come
(on any device)          ─▶  buffers and example on meta too  ─▶  later, wherever the plan says
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from ..compat import makes_tensors, tree_map
from ..graph.ir import TensorSpec, Traced
from ..graph.nodes import resolve, run_under

META, CPU = torch.device("meta"), torch.device("cpu")


@contextlib.contextmanager
def all_on_meta(model: nn.Module) -> Iterator[None]:
    """All parameters and buffers are on ``meta``, those too that have values; afterwards they are what they were.

    Within, what forward asks for devices is answered as on the CPU.
    """
    made: dict[int, torch.Tensor] = {}
    before: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in dict(table).items():
                if tensor is None or tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    shape = tensor.detach().to(META)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(shape, tensor.requires_grad) if is_parameter else shape
                before.append((table, name, tensor))
                table[name] = made[id(tensor)]
    try:
        with _AsOnCpu():
            yield
    finally:
        for table, name, tensor in before:
            table[name] = tensor


class _AsOnCpu(TorchFunctionMode):
    """Tensors of ``meta`` say that they are on the CPU, and what would be made there is made on ``meta``.

    Whoever decides by a device (``if x.device.type == "cpu"``) decides as on the CPU; ``torch.arange(n)`` meets no tensor of
    another device. The tracer sees each call before, as the user wrote it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _ANSWERS and args[0].is_meta:
            return _ANSWERS[func]
        given = dict(kwargs or {})
        if given.get("device") is not None:
            given["device"] = _on_meta(given["device"])
        elif func in makes_tensors():
            given["device"] = META
        if func is torch.Tensor.cpu:
            return args[0] if args[0].is_meta else func(*args, **given)
        if func is torch.Tensor.to:
            args = (args[0], *map(_on_meta, args[1:]))
        return func(*args, **given)


_TENSOR: Any = torch.Tensor  # whose attributes are descriptors
_ANSWERS: dict[Any, Any] = {
    _TENSOR.device.__get__: CPU,
    _TENSOR.is_cuda.__get__: False,
    _TENSOR.is_cpu.__get__: True,
    _TENSOR.get_device: -1,
}


def _on_meta(device: Any) -> Any:
    is_cpu = isinstance(device, str | torch.device) and torch.device(device).type == "cpu"
    return META if is_cpu else device


def without_values(example: Any) -> Any:
    """The tensors of an example on ``meta``."""
    return tree_map(
        lambda x: x.detach().to(META).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x,
        example,
    )


def with_some_values(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What stands for an example on ``meta`` when there are weights: normal numbers, or zeros where they count something."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for x in inputs:
        if x.is_meta:
            plain = x.dtype.is_floating_point or x.dtype.is_complex
            value = (
                torch.randn(x.shape, dtype=x.dtype, device=CPU, generator=generator)
                if plain
                else torch.zeros(x.shape, dtype=x.dtype, device=CPU)
            )
            x = value.requires_grad_(x.requires_grad)
        found.append(x)
    return found


def as_on_cpu(model: nn.Module, traced: Traced) -> Traced:
    """The same graph, as if the example had been on the CPU, and had no values."""
    other = None if traced.other_mode is None else as_on_cpu(model, traced.other_mode)
    found = as_on(model, replace(traced, other_mode=None), frozenset([META]), CPU)
    return replace(found, other_mode=other, valued=False)


def as_on(model: nn.Module, traced: Traced, devices: Container[torch.device], home: torch.device) -> Traced:
    """The same graph, as if what was on `devices` had been on one: arguments, what is known of values, devices in the code."""
    other = None if traced.other_mode is None else as_on(model, traced.other_mode, devices, home)

    def moved(value: Any) -> Any:
        return home if isinstance(value, torch.device) and value in devices else value

    def spec_of(leaf: Any) -> Any:
        return replace(leaf, device=moved(leaf.device)) if isinstance(leaf, TensorSpec) else leaf

    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
        values[node].args = fx.node.map_aggregate(values[node].args, moved)
        values[node].kwargs = fx.node.map_aggregate(values[node].kwargs, moved)
    constants = traced.constants
    objects = {fqn: constants[fqn] if fqn in constants else resolve(model, fqn) for fqn in traced.names}
    arguments = tuple(replace(a, device=moved(a.device)) for a in traced.signature.arguments)
    facts = {name: replace(fact, value=tree_map(spec_of, fact.value)) for name, fact in traced.facts.items()}
    return replace(
        traced,
        graph=graph,
        module=run_under(graph, traced.names, objects),
        signature=replace(traced.signature, arguments=arguments),
        facts=facts,
        other_mode=other,
    )
