"""Weights of a model that is made without values, as if it had been made with them: what making it does is done later.

While the model is made on ``meta``, each operation is written down. Afterwards all are done in their order, on the CPU,
with the same random numbers; of what they make, only the tensors that are asked for stay. So a rank has the weights that
the whole model would have, initialized by whatever its constructor does, and the memory of its own stages::

    made on meta      empty(8, 4) → s0   s0.uniform_()   empty(4, 2) → s1   s1.normal_()   s0.mul_(0.1)
    done later        ············ all of it, in this order; s1, which nobody here wants, goes after its last use

After the deferred initialization of torchdistX.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..compat import TorchDispatchMode, storage_key, tree_leaves, tree_map
from ..errors import WeightsError


@dataclass(frozen=True)
class _View:
    """A tensor of the recording: which memory, and how it lies in it."""

    memory: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: torch.Tensor) -> _View:
        return _View(
            storage_key(tensor),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
        )


@dataclass(frozen=True)
class _Step:
    function: Any
    args: Any
    kwargs: Any
    made: tuple[_View | None, ...]  # of its flat results, those in memory of their own


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is done to tensors without values, inside of it and ``torch.device("meta")``."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[_Step] = []
        self._last: dict[int, int] = {}  # memory → the last step that uses it
        self._filled: set[int] = set()  # memory that something was written to
        self._kept: list[torch.UntypedStorage] = []  # so that no other memory gets its number
        self._real: dict[int, torch.Tensor] = {}  # memory that had values all along, numbers say

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do it on meta, and write it down."""
        kwargs = kwargs or {}
        written = tree_map(self._written, (args, kwargs))
        result = func(*args, **kwargs)
        flat = tree_leaves(result)
        made = tuple(self._new(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in flat)
        self._note(func, written, made, mutates=any(map(_is_written, func._schema.arguments)))
        return result

    def _note(self, func: Any, written: Any, made: tuple[_View | None, ...], *, mutates: bool) -> None:
        if not (mutates or any(made)):
            return
        for view in (*tree_leaves(written), *made):
            if isinstance(view, _View):
                self._last[view.memory] = len(self._steps)
        if mutates:
            self._filled |= {v.memory for v in tree_leaves(written) if isinstance(v, _View)}
        elif "empty" not in str(func):
            self._filled |= {v.memory for v in made if v is not None}
        self._steps.append(_Step(func, written[0], written[1], made))

    @contextlib.contextmanager
    def initializers(self) -> Iterator[None]:
        """The functions of `torch.nn.init` are steps, each as a whole: some of them do nothing on meta."""
        functions = {
            n: f
            for n, f in vars(nn.init).items()
            if n.endswith("_") and not n.startswith("_") and callable(f)
        }
        inside = False

        def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal inside
                if inside or not any(isinstance(v, torch.Tensor) for v in (*args, *kwargs.values())):
                    return function(*args, **kwargs)
                inside = True
                try:
                    with torch.no_grad():
                        detached = tree_map(
                            lambda v: v.detach() if isinstance(v, torch.Tensor) else v, (args, kwargs)
                        )
                    self._note(function, tree_map(self._written, detached), (), mutates=True)
                    return next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
                finally:
                    inside = False

            return call

        for name, function in functions.items():
            setattr(nn.init, name, wrapped(function))
        try:
            yield
        finally:
            for name, function in functions.items():
                setattr(nn.init, name, function)

    def _written(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        view = _View.of(value)
        if view.memory not in self._last and not value.is_meta:
            self._real.setdefault(view.memory, value)
        return view

    def _new(self, tensor: torch.Tensor) -> _View | None:
        view = _View.of(tensor)
        if view.memory in self._last or view.memory in self._real:
            return None
        self._kept.append(tensor.untyped_storage())
        self._last[view.memory] = -1
        return view

    def replayed(self, model: nn.Module, wanted: Collection[str]) -> dict[str, torch.Tensor]:
        """Some of the tensors of the model, by name: with values; draws from the default generator as making it would.

        Raises:
            WeightsError: one of them was not made in the recording.
        """
        tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        tensors.update(model.named_buffers(remove_duplicate=False))
        views = {name: _View.of(t.detach()) for name, t in tensors.items() if name in wanted and t.is_meta}
        missing = [name for name, view in views.items() if view.memory not in self._filled]
        if missing:
            raise WeightsError(
                f"make_model() gives no values to {', '.join(missing[:5])}",
                remedy="weights=, with their values; or initialize them in the constructor, by torch.nn.init.normal_(p), say",
            )
        memory = self._played({view.memory for view in views.values()})
        return {name: _seen(memory[view.memory], view).clone() for name, view in views.items()}

    def _played(self, stays: Collection[int]) -> dict[int, torch.Tensor]:
        """Memory → a tensor over it."""
        memory: dict[int, torch.Tensor] = dict(self._real)
        ends: dict[int, list[int]] = {}
        for number, last in self._last.items():
            if number not in stays:
                ends.setdefault(last, []).append(number)
        step = _Step(None, (), {}, ())

        def real(value: Any) -> Any:
            if isinstance(value, _View):
                if value.memory not in memory:
                    raise WeightsError(
                        f"make_model() computes with values that it has from outside ({step.function}), which are not "
                        "there on meta",
                        remedy="weights=, with the values of the model",
                    )
                return _seen(memory[value.memory], value)
            return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else value

        with torch.no_grad():
            for k, step in enumerate(self._steps):
                args, kwargs = tree_map(real, (step.args, step.kwargs))
                results = tree_leaves(step.function(*args, **kwargs))
                for view, leaf in zip(step.made, results, strict=False):  # an initializer makes nothing new
                    if view is not None:
                        memory[view.memory] = leaf
                for number in ends.get(k, ()):
                    memory.pop(number, None)
        return memory


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


class _FromNumbers(TorchFunctionMode):
    """Tensors that are made of numbers have their values on the CPU first: on meta these would be lost."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and kwargs.get("device") is None:
            made = func(*args, **{**kwargs, "device": "cpu"})
            return made.detach().to("meta").requires_grad_(made.requires_grad)
        return func(*args, **kwargs)


def _seen(tensor: torch.Tensor, view: _View) -> torch.Tensor:
    """Another view of the memory of a tensor."""
    plain = torch.empty(0, dtype=view.dtype)
    return plain.set_(tensor.untyped_storage(), view.offset, view.sizes, view.strides)


def recorded(make_model: Callable[[], nn.Module]) -> tuple[nn.Module, Recording]:
    """The model on ``meta``, and what was done to make it."""
    recording = Recording()
    with torch.device("meta"), _FromNumbers(), recording, recording.initializers():
        model = make_model()
    return model, recording
