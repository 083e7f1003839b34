"""What may happen when a node runs: by its class and its operation. What the example did only adds to it.

A layer that has running statistics may write them, whether or not the example's numbers moved them; one that drops
values may draw, whatever its rate is now; what a module of the user's does, that stays whole, nobody knows: it may
write its buffers, and draw. (`proof/structure.py` derives from the facts what stages may do a second time, by itself:
a proof that asked here would repeat what it is to find.)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ..modules.reach import draws_python_random

# What draws in train mode alone, and only if this attribute is not zero.
RATES: dict[type[nn.Module], str] = {
    nn.modules.dropout._DropoutNd: "p",
    nn.MultiheadAttention: "dropout",
    nn.RNNBase: "dropout",
}
_DRAW = (*RATES, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
# fmt: off
# Operations that torch tags as seeded, and functions over them.
DRAWING = frozenset(
    [
        "alpha_dropout", "bernoulli", "binomial", "cauchy", "dropout", "dropout1d", "dropout2d", "dropout3d",
        "exponential", "feature_alpha_dropout", "feature_dropout", "fractional_max_pool2d", "fractional_max_pool3d",
        "geometric", "gru", "gumbel_softmax", "log_normal", "lstm", "multi_head_attention_forward", "multinomial",
        "native_dropout", "normal", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like",
        "random", "randperm", "rnn_relu", "rnn_tanh", "rrelu", "rrelu_with_noise", "scaled_dot_product_attention",
        "uniform", "_fused_dropout", "_sample_dirichlet", "_scaled_dot_product_attention_math",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu", "_standard_gamma",
    ]
)
# fmt: on
_STATISTICS = ("batch_norm", "instance_norm", "moving_avg")  # part of the name of what writes to its operands


@dataclass(frozen=True)
class May:
    """What a module may do beside computing its output.

    Attributes:
        writes: buffers and parameters that it may write to.
        draws: whether it may draw from a default generator of torch's.
        draws_python: whether it may draw from Python's or NumPy's random numbers.
    """

    writes: tuple[torch.Tensor, ...] = ()
    draws: bool = False
    draws_python: bool = False


def of_module(module: nn.Module) -> May:
    """What the forward of a module that is one node may do."""
    writes: list[torch.Tensor] = []
    draws = False
    for inner in module.modules():
        if not is_known(inner):
            writes += _own_tensors(inner)
            draws = True
        elif isinstance(inner, nn.modules.batchnorm._NormBase):
            writes += [t for t in inner._buffers.values() if t is not None]
        elif isinstance(inner, nn.Embedding | nn.EmbeddingBag) and inner.max_norm is not None:
            writes.append(inner.weight)  # rows that are too long are made shorter in place
        draws = draws or isinstance(inner, _DRAW)
    return May(tuple(writes), draws, draws_python_random(module))


def is_known(module: nn.Module) -> bool:
    """Whether it is a layer of torch.nn's, without hooks: what such a one does is in the tables above."""
    return type(module).__module__.startswith(("torch.nn.modules", "torch.nn.parallel")) and not has_hooks(
        module
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether a module itself has hooks of its forward or backward."""
    tables = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return any(tables)


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    own = [*module._buffers.values(), *module.__dict__.values()]
    return [t for t in own if isinstance(t, torch.Tensor)]


def rated_layers(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """The layers in it that draw, and the attributes that say how much; none if anything in it draws by something else."""
    found = []
    for inner in module.modules():
        names = [n for kind, n in RATES.items() if isinstance(inner, kind)]
        if not is_known(inner) or (not names and isinstance(inner, _DRAW)):
            return []
        found += [(inner, name) for name in names[:1]]
    return found


def draws_now(layer: nn.Module, rate: str) -> bool:
    """Whether a layer with a rate draws, by its rate and mode as they are."""
    return layer.training and getattr(layer, rate) != 0


def may_draw(node: fx.Node) -> bool:
    """Whether the operation of a ``call_function`` or ``call_method`` may draw from a default generator."""
    name = name_of(node)
    if name.removesuffix("_") not in DRAWING:
        return False
    given = _arguments(node)
    if name == "scaled_dot_product_attention":
        given.setdefault("dropout_p", 0.0)
    off = any(_is(given.get(rate), 0) for rate in ("p", "dropout_p", "dropout"))
    off = off or any(given.get(mode) is False for mode in ("train", "training"))
    return not off and given.get("generator") is None


def may_write(node: fx.Node) -> list[fx.Node]:
    """The operands that an operation may write to; of those that no schema tells, attributes of the model's."""
    if node.op not in ("call_function", "call_method"):
        return []
    given, schema = _arguments(node), getattr(node.target, "_schema", None)
    marked = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write] if schema else []
    found = [value for name in marked if isinstance(value := given.get(name), fx.Node)]
    name = name_of(node)
    statistics = any(word in name for word in _STATISTICS) and not any(
        given.get(mode) is False for mode in ("train", "training", "use_input_stats")
    )
    if statistics or (name in ("embedding", "embedding_bag") and given.get("max_norm") is not None):
        found += [operand for operand in node.all_input_nodes if operand.op == "get_attr"]
    return found


def statistics(module: fx.GraphModule) -> Iterator[list[str]]:
    """Paths, taken apart, of the running statistics that normalisations in a graph over modules write."""
    for node in module.graph.nodes:
        if node.op == "call_module":
            called = module.get_submodule(str(node.target))
            for path, inner in called.named_modules():
                if isinstance(inner, nn.modules.batchnorm._NormBase):
                    yield from (
                        [str(node.target), *path.split("."), n] if path else [str(node.target), n]
                        for n in inner._buffers
                    )
        elif any(word in name_of(node) for word in _STATISTICS):
            yield from (str(operand.target).split(".") for operand in may_write(node))


def _is(value: Any, number: float) -> bool:
    return isinstance(value, int | float) and value == number


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by their names, as far as these are known."""
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema is not None else _parameter_names(node.target)
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _parameter_names(target: Any) -> list[str]:
    if target is torch.nn.functional.scaled_dot_product_attention:
        return ["query", "key", "value", "attn_mask", "dropout_p"]  # a builtin
    try:
        return list(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return []


def name_of(node: fx.Node) -> str:
    """The name of its operation, without overload."""
    target: Any = node.target
    if isinstance(target, str):
        return target
    return str(getattr(getattr(target, "overloadpacket", target), "__name__", ""))
