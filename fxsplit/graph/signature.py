"""What goes in and out of the model: any pytree of arguments ↔ the flat tensor inputs of the graph."""

from __future__ import annotations

import copy
import inspect
import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..compat import TreeSpec, tree_flatten, tree_flatten_with_paths, tree_unflatten
from ..errors import ArgumentError, did_you_mean
from ..modules.seen import changeable, seen


@dataclass(frozen=True)
class Argument:
    """One tensor input of the graph.

    Attributes:
        name: how the user writes it: ``x``, ``batch['image']``.
        placeholder: the identifier that the generated code uses for it.
        argument: the parameter of `forward` that it is a part of.
    """

    name: str
    placeholder: str
    argument: str
    dtype: torch.dtype
    device: torch.device
    dim: int


@dataclass(frozen=True)
class Signature:
    """How the arguments of `forward` become the flat tensor inputs of the graph.

    Leaves of the arguments that are not tensors (None, numbers, strings, …) are part of the program: a call
    must give the same ones as the example did.
    """

    signature: inspect.Signature
    spec: TreeSpec
    names: tuple[str, ...]  # of every leaf, tensors and constants
    arguments: tuple[Argument, ...]
    constants: Mapping[int, Any]  # leaf index → value, for leaves that are not tensors
    given: tuple[int, tuple[str, ...]]  # how many arguments the example gave by position, and which by name

    @classmethod
    def of_example(cls, forward: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
        """The signature of a call ``forward(*args, **kwargs)``.

        Raises:
            ArgumentError: `forward` does not take these arguments, or none of them holds a tensor.
        """
        signature = inspect.signature(forward)
        bound = _bind(signature, args, kwargs)
        for given, value in bound.arguments.items():
            _refuse_packed(given, value)
        leaves, spec = tree_flatten(dict(bound.arguments))
        names = tuple(_readable(path) for path, _ in tree_flatten_with_paths(dict(bound.arguments)))
        arguments, constants = [], {}
        taken: set[str] = set()
        for i, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
            if isinstance(leaf, torch.Tensor):
                _refuse_layout(name, leaf)
                argument = re.split(r"[\[.]", name, maxsplit=1)[0]
                arguments.append(
                    Argument(name, _identifier(name, taken), argument, leaf.dtype, leaf.device, leaf.dim())
                )
            else:
                constants[i] = snapshot(leaf)
        if not arguments:
            raise ArgumentError(
                "the example arguments hold no tensor",
                where=f"example_args={tuple(args)!r}, example_kwargs={dict(kwargs)!r}",
                remedy="fxsplit.compile(model, plan, example_args=(x,)) with x as the model takes it",
            )
        return cls(signature, spec, names, tuple(arguments), constants, (len(args), tuple(kwargs)))

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The flat tensor inputs of this call, in the order of `arguments`.

        Raises:
            ArgumentError: an argument is missing, unknown, or of another kind or type than the example's, or has no
                data; or a constant differs from the example's.
        """
        bound = _bind(self.signature, args, kwargs)
        leaves, spec = tree_flatten(dict(bound.arguments))
        if spec != self.spec:
            by_name = {_readable(path): leaf for path, leaf in tree_flatten_with_paths(dict(bound.arguments))}
            if by_name.keys() == set(self.names) and len(by_name) == len(leaves):
                leaves, spec = [by_name[name] for name in self.names], self.spec  # dicts in another order
        if spec != self.spec:
            names = [_readable(path) for path, _ in tree_flatten_with_paths(dict(bound.arguments))]
            odd = next((n for n in (*names, *self.names) if (n in names) != (n in self.names)), self.names[0])
            raise ArgumentError(
                f"the arguments are not nested like the example's: they differ at {odd!r}",
                where=f"compiled for {', '.join(self.names)}; called with {', '.join(names)}",
                remedy="call with the example's structure, or pipe.recompile(...) with these arguments, to compile again",
            )
        tensors = []
        slots = iter(self.arguments)
        for i, (name, leaf) in enumerate(zip(self.names, leaves, strict=True)):
            if i in self.constants:
                _check_constant(name, leaf, self.constants[i])
            else:
                tensors.append(_check_tensor(next(slots), leaf))
        return tensors

    def unflatten(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`args` and `kwargs` of `forward`, given as in the example, with these values in place of the tensor inputs.

        What the example left to its default is left to it: a decorator may tell that from the default given.
        """
        values = iter(tensors)
        leaves = [self.constants[i] if i in self.constants else next(values) for i in range(len(self.names))]
        bound = inspect.BoundArguments(self.signature, tree_unflatten(leaves, self.spec))
        count, by_name = self.given
        args, kwargs = bound.args, bound.kwargs
        named = dict(zip(self.signature.parameters, args, strict=False))
        return args[:count], {name: kwargs[name] if name in kwargs else named[name] for name in by_name}


def _refuse_packed(name: str, value: Any) -> None:
    if _holds_packed(value):
        raise ArgumentError(
            f"argument {name!r} is a PackedSequence, whose rows cannot be told apart",
            remedy="pass the padded tensor and the lengths, and pack them in forward: "
            "nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)",
        )


def _holds_packed(value: Any) -> bool:
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return True
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return any(map(_holds_packed, inside))


def _refuse_layout(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise ArgumentError(
            f"argument {name!r} is a {kind} tensor, which cannot be cut into micro-batches or handed from stage to stage",
            remedy=f"pass it as a dense one ({name}.to_padded_tensor(0.0), with a mask)"
            if tensor.is_nested
            else f"pass {name}.to_dense(), or its indices and values as two arguments",
        )


def _bind(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        unknown = [name for name in kwargs if name not in signature.parameters]
        known = [n for n, p in signature.parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        remedy = did_you_mean(unknown[0], known) if unknown else f"the model takes forward{signature}"
        raise ArgumentError(f"wrong arguments: {error}", where=f"forward{signature}", remedy=remedy) from None
    bound.apply_defaults()
    return bound


def _check_constant(name: str, value: Any, constant: Any) -> None:
    if not _same_constant(value, constant):
        shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise ArgumentError(
            f"argument {name!r} was {constant!r} when the pipeline was compiled, and is {shown} now",
            remedy=f"pass {name}={constant!r}, or pipe.recompile(...) with these arguments, to compile again with them",
        )


def snapshot(value: Any) -> Any:
    """`value` as it is now: a copy of what may change inside, where it can be copied."""
    if isinstance(value, torch.nn.Module) or not changeable(value):
        return value
    try:
        copied = copy.deepcopy(value)
    except Exception:  # whatever the user's class raises
        return value
    return copied if seen(copied, {}).same(seen(value, {})) else value


def _same_constant(value: Any, constant: Any) -> bool:
    if type(value) is not type(constant) or isinstance(value, torch.Tensor):
        return False
    if isinstance(value, torch.nn.Module) or not changeable(constant):
        return (
            value is constant or bool(value == constant) or bool(value != value and constant != constant)
        )  # NaN is itself
    return seen(value, {}).same(seen(constant, {}))


def _check_tensor(argument: Argument, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(
            f"argument {argument.name!r} is {type(value).__name__}, not a tensor",
            remedy="pass a tensor, or pipe.recompile(...) with these arguments, to compile again",
        )
    for what, expected, got in (
        ("dimensions", argument.dim, value.dim()),
        ("kind of dtype", _kind(argument.dtype), _kind(value.dtype)),
    ):
        if expected != got:
            raise ArgumentError(
                f"argument {argument.name!r} has {what} {got}, but the pipeline was compiled for {expected}",
                where=f"{argument.name}: shape {tuple(value.shape)}, {value.dtype}, on {value.device}",
                remedy="convert the argument, or pipe.recompile(...) with these arguments, to compile again",
            )
    return value


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "floating point"
    return "complex" if dtype.is_complex else "bool" if dtype is torch.bool else "integer"


def _readable(path: str) -> str:
    """``['batch']['image'][0]`` as ``batch['image'][0]``."""
    match = re.match(r"\['([^']*)'\]", path)
    return match.group(1) + path[match.end() :] if match else path


def _identifier(name: str, taken: set[str]) -> str:
    """A free Python identifier that reads like `name`."""
    word = re.sub(r"\W+", "_", name).strip("_") or "input"
    if word[0].isdigit() or keyword.iskeyword(word) or word == "self":
        word = f"input_{word}"
    unique, n = word, 1
    while unique in taken:
        unique, n = f"{word}_{n}", n + 1
    taken.add(unique)
    return unique
