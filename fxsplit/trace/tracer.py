"""The value-carrying tracer: runs the model on real tensors and writes down what they go through."""

from __future__ import annotations

import operator
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from ..compat import last_node, storage_key, transforms_left, tree_leaves
from ..errors import pass_on_if_full
from ..graph.assumptions import ASKED, global_hooks
from ..inserted.ops import guard
from ..modules.attributes import attributes_of, changed_attributes, restore_attributes
from ..modules.callbacks import callbacks_of
from ..modules.seen import Seen, seen
from ..modules.state import python_random_state, same_python_random
from .capture import Taken
from .operations import (
    ASKS,
    CHANGES_AUTOGRAD,
    COUNT_DEPENDS_ON_SIZE,
    GRAD_CONTEXTS,
    MEMORY_FORMAT,
    OPERATORS,
    OPPOSITE,
    PLAIN,
    RANK_DEPENDS_ON_SIZE,
    REFLECTED,
    SIZE_DEPENDS_ON_DATA,
    SIZED_LIKE_SELF,
    SIZES,
    TENSOR_PROPERTIES,
    TO_NUMBER,
    FunctionCall,
    is_masked,
    is_tensor_method,
)
from .patches import patched
from .reads import Reads
from .records import made_again
from .refusal import BY_VALUE, CannotInlineError, WritesAttributeError
from .source import error_line, in_a_message, is_ours, user_line
from .values import TracedFloat, TracedInt, TracedNumber, nested_leaves, nested_plain, plain

_LITERALS = (
    *(int, float, complex, bool, str, bytes, range, type(None), types.EllipsisType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class Ref:
    """Where a value comes from: a node that exists, or one that is written when somebody first needs it.

    Attributes:
        constant: it is the same in every run.
        from_sizes: it is a function of the sizes of the inputs alone, such as a causal mask.
        data_dependent: its size, or it as a size, depends on what tensors hold.
    """

    __slots__ = ("_node", "constant", "data_dependent", "from_sizes", "make")

    def __init__(
        self,
        make: Callable[[], fx.Node] | fx.Node,
        *,
        constant: bool = False,
        from_sizes: bool = False,
        data_dependent: bool = False,
    ) -> None:
        self._node = make if isinstance(make, fx.Node) else None
        self.make = None if isinstance(make, fx.Node) else make
        self.constant, self.data_dependent = constant, data_dependent
        self.from_sizes = constant or from_sizes

    def node(self, erased: set[fx.Node]) -> fx.Node:
        """The node; written now, if it was not or if it has been erased."""
        if self._node is None or (self._node in erased and self.make is not None):
            assert self.make is not None
            self._node = self.make()
        return self._node


class ValueTracer(TorchFunctionMode):
    """Traces one call of `model`.

    The tensors are real, so whatever the model asks of them has an answer; each also has a `Ref`. Sizes are
    numbers that remember their node. What the model decides by a number is baked in and guarded; what it
    decides by the values of tensors cannot be baked in: the innermost module whose forward does so is
    kept whole, as one node.

    Args:
        kept: module path → reason, of modules that must stay whole; modules found while tracing are added.
        says_compiling: whether ``torch.compiler.is_compiling()`` is true meanwhile. Libraries then leave out
            shortcuts that depend on the values of tensors.
    """

    def __init__(self, model: nn.Module, kept: dict[str, str], *, says_compiling: bool = False) -> None:
        super().__init__()
        self.model, self.kept, self.says_compiling = model, kept, says_compiling
        self.graph = fx.Graph()
        self.constants: dict[str, Any] = {}
        self._paths = {id(module): name for name, module in model.named_modules()}
        self._attributes = _tensor_attributes(model)
        self._parameters = {id(t) for t in (*model.parameters(), *model.buffers())}
        self._refs: dict[int, tuple[Any, Ref]] = {}
        self._undo: list[tuple[int, tuple[Any, Ref] | None]] = []
        self._erased: set[fx.Node] = set()
        self._sizes: dict[tuple[Ref, Any], TracedInt] = {}
        self._guards: dict[Any, fx.Node] = {}
        self._open: dict[int, fx.Node] = {}  # contexts
        self._storages: dict[int, torch.Tensor] = {}
        self._written: set[int] = set()  # storages that something else than constants was written to
        self._left: dict[int, tuple[torch.Tensor, str]] = {}  # what whole modules put into their attributes
        self._random = python_random_state()
        self._stack: list[str] = [""]
        self._child_calls = 0
        self.called: dict[str, None] = {}  # in order
        self.flags: dict[str, frozenset[str]] = {}
        self.reads = Reads(model)
        self.reads.is_on = self.is_tracing
        # A node, the path of a tensor, or "" for the caller; what was asked; the answer.
        self.asked: list[tuple[fx.Node | str, str, Seen]] = []
        self._paused = False
        self._thread = threading.get_ident()

    # -- one trace -----------------------------------------------------------------------------------------

    def trace(
        self, call: Callable[..., Sequence[Any]], inputs: Sequence[torch.Tensor], placeholders: Sequence[str]
    ) -> fx.Graph:
        """The graph of ``call(model, *inputs)``, which returns the flat outputs."""
        for name, x in zip(placeholders, inputs, strict=True):
            node = self.graph.create_node("placeholder", name, name=name)
            node.meta["module_path"], node.meta["source"] = "", None
            self._bind(x, Ref(node))
        before = attributes_of(self.model)
        with patched(self), self:
            outputs = call(self.model, *inputs)
            self._refuse_side_effects(self.model, before)
            self.graph.output(tuple(self._argument(value) for value in outputs))
        self.graph.output_node().meta.update(module_path="", source=None)
        return self.graph

    def taken(self) -> Taken:
        """What forward has read and asked; what it asked of values is left with their nodes."""
        asked: dict[tuple[str, str], Seen] = {}
        for owner, what, answer in self.asked:
            if isinstance(owner, fx.Node):
                if owner not in self._erased:
                    owner.meta.setdefault("asked", {})[what] = answer
            else:
                asked[owner, what] = answer
        rows = tuple((where, what, answer) for (where, what), answer in asked.items())
        return Taken(self.reads.names, self.reads.objects, rows)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(getattr(func, "overloadpacket", func), "__name__", "")
        if self._paused:
            return func(*nested_plain(args), **nested_plain(kwargs))
        if name in PLAIN:
            return self._plain(func, name, args, kwargs)
        if name == "__get__":
            return self._property(func, args)
        if name in CHANGES_AUTOGRAD:
            raise CannotInlineError(f"it calls {name} on a tensor")
        if name == "__set__":
            raise CannotInlineError(f"it sets the {func.__self__.__name__} of a tensor")
        if name in SIZES:
            return self._size(func, name, args, kwargs)
        if func is torch.Tensor.__iter__:
            return iter(args[0].unbind(0))
        if name == "_set_grad_enabled":
            return func(*args)  # the contexts that call it are recorded themselves
        before = _versions((args, kwargs))
        drawn = None if any(not self._ref(t).constant for t, _ in before) else torch.get_rng_state()
        result = func(*nested_plain(args), **nested_plain(kwargs))
        result = self._own_object(result, before)
        random = drawn is not None and not torch.equal(drawn, torch.get_rng_state())
        return self._record(func, name, args, kwargs, result, before, random=random)

    def _plain(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a tensor is, and not what it holds: written down as asked, or guarded."""
        result = func(*nested_plain(args), **nested_plain(kwargs))
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if name in MEMORY_FORMAT and isinstance(result, bool):
            if id(tensors[0]) in self._refs and not self._ref(tensors[0]).constant:
                self._guard(
                    operator.eq, self._traced(result, Ref(self._call(func, name, args, kwargs))), result
                )
            return result
        as_text = name in ("__repr__", "__format__") and any(id(t) in self._refs for t in tensors)
        if as_text and not in_a_message():
            raise CannotInlineError(f"it uses the {BY_VALUE} as a text")
        for tensor in tensors if name in ASKS else ():
            self._ask(tensor, ASKS[name])
        return result

    def _ask(self, tensor: torch.Tensor, what: str) -> None:
        """Forward decides by what `tensor` is: it has to be that in every call."""
        if _asked_by_us():
            return
        path = self._attributes.get(id(tensor))
        if path is not None:
            self.asked.append((path, what, ASKED[what](tensor)))
        elif id(tensor) in self._refs and not self._ref(tensor).constant:
            self.asked.append((self._ref(tensor).node(self._erased), what, ASKED[what](tensor)))

    def ask_caller(self, what: str, value: Any, *, by_torch: bool) -> None:
        """Forward decides by the state of its caller, such as whether gradients are wanted."""
        kinds = GRAD_CONTEXTS if "grad" in what or "inference" in what else (torch.autocast,)
        if any(node.target in kinds for node in self._open.values()):
            return  # its own
        if by_torch and self._stack[-1] and "fastpath" not in what:  # such as nn.TransformerEncoderLayer
            raise CannotInlineError(f"it chooses a kernel by {what}")
        self.asked.append(("", what, seen(value, {})))

    def _own_object(self, result: Any, operands: list[tuple[torch.Tensor, int]]) -> Any:
        """An operand handed back unchanged gets an object of its own: it has two names in the program.

        Dropout does so in eval mode and not in train mode. In-place operations keep theirs.
        """
        if any(result is t and t._version == version for t, version in operands):
            return _alias(result)
        return result

    # -- recording -----------------------------------------------------------------------------------------

    def _record(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        before: Sequence[tuple[torch.Tensor, int]],
        *,
        random: bool = False,
    ) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        operands = [self._ref(t) for t in tensors]
        numbers = [n.ref for n in nested_leaves((args, kwargs)) if isinstance(n, TracedNumber)]
        pure = not random and not any(self._is_written(t) for t in tensors)
        constant = pure and all(ref.constant for ref in (*operands, *numbers))
        from_sizes = pure and all(ref.from_sizes for ref in (*operands, *numbers))
        if not constant:
            self._written |= {storage_key(t) for t, version in before if t._version != version}
        if not any(isinstance(t, torch.Tensor) for t in tree_leaves(result)) and not (
            result is None and name.startswith("__set")
        ):
            if constant or not operands:
                return result
            if (from_sizes or name == "is_same_size") and isinstance(result, bool | int | float):
                number = self._traced(result, Ref(self._call(func, name, args, kwargs)))
                self._guard(operator.eq, number, result)
                return result
            if name == "item" and isinstance(result, int | float) and not isinstance(result, bool):
                return self._traced(result, Ref(self._call(func, name, args, kwargs), data_dependent=True))
            raise CannotInlineError(f"it uses the {BY_VALUE} ({name.strip('_')})")
        sized_by_data = (
            name in SIZE_DEPENDS_ON_DATA or (name == "where" and len(args) == 1) or is_masked(name, args)
        )
        if name == "repeat_interleave":
            sized_by_data = any(isinstance(a, torch.Tensor) for a in (*args[1:], *kwargs.values()))
        if name in SIZED_LIKE_SELF or (name.endswith("_") and not name.endswith("__")):
            operands = operands[:1]
        data_dependent = sized_by_data or any(ref.data_dependent for ref in (*operands, *numbers))
        ref = Ref(
            self._call(func, name, args, kwargs),
            constant=constant,
            from_sizes=from_sizes and name != "empty",
            data_dependent=data_dependent,
        )
        if name in RANK_DEPENDS_ON_SIZE and not constant:
            self._guard_rank(result, ref)
        if name in COUNT_DEPENDS_ON_SIZE and not constant and isinstance(result, tuple | list):
            self._guard_count(name, args, kwargs, ref, len(result))
        return self._bind(result, ref)

    def _is_written(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and storage_key(tensor) in self._written

    def _call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        if name in TO_NUMBER:
            return self._create("call_function", TO_NUMBER[name], args, kwargs)
        method = is_tensor_method(func, name)
        if method and not kwargs:
            if name in REFLECTED:
                return self._create("call_function", REFLECTED[name], args[::-1], {})
            if name in OPERATORS:
                return self._create("call_function", OPERATORS[name], args, {})
        return (
            self._create("call_method", name, args, kwargs)
            if method
            else self._create("call_function", func, args, kwargs)
        )

    def _create(
        self, op: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str | None = None
    ) -> fx.Node:
        mapped = tuple(self._argument(a) for a in args), {k: self._argument(v) for k, v in kwargs.items()}
        node = self.graph.create_node(op, target, *mapped, name=name)
        node.meta["module_path"] = self._stack[-1]
        node.meta["source"] = user_line()
        node.meta["child_call"] = self._child_calls
        return node

    def _argument(self, value: Any) -> Any:
        """`value` as fx writes it: tensors and numbers as nodes, inside any nesting."""
        if isinstance(value, TracedNumber):
            return value.ref.node(self._erased)
        if isinstance(value, torch.Tensor):
            return self._ref(value).node(self._erased)
        if isinstance(value, tuple | list):
            items = [self._argument(item) for item in value]
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                try:
                    return type(value)(*items)
                except Exception as error:  # it looks at what it is made of
                    raise CannotInlineError(f"an operation takes a {type(value).__name__}") from error
            return items if isinstance(value, list) else tuple(items)
        if type(value) in (dict, OrderedDict):
            return {key: self._argument(item) for key, item in value.items()}
        if isinstance(value, dict) or (is_dataclass(value) and not isinstance(value, type)):
            return self._create("call_function", *made_again(value))
        if isinstance(value, slice):
            return slice(*(self._argument(part) for part in (value.start, value.stop, value.step)))
        if (
            type(value).__module__ == "numpy"
            and getattr(value, "shape", None) == ()
            and hasattr(value, "item")
        ):
            return value.item()
        if isinstance(value, _LITERALS) or (
            isinstance(value, type) and value.__module__ in ("builtins", "torch")
        ):
            return value
        raise CannotInlineError(f"an operation takes a {type(value).__name__}")

    def _ref(self, tensor: torch.Tensor) -> Ref:
        known = self._refs.get(id(tensor))
        if known is not None:
            return known[1]
        path = self._attributes.get(id(tensor))
        if path is None:
            if storage_key(tensor) in self._storages:
                raise CannotInlineError("it makes a tensor from another one past torch's functions")
            if id(tensor) in self._left or tensor.grad_fn is not None:
                where = self._left.get(id(tensor), (None, "a module that is kept whole"))[1]
                raise CannotInlineError(f"it reads a tensor that the forward of {where} left behind")
            path = next(
                (n for n, t in self.constants.items() if t is tensor), f"constant_{len(self.constants)}"
            )
            self.constants[path] = tensor
        # Not remembered: every reader gets a get_attr of its own. Not constant: somebody may write to it.
        return Ref(lambda: self._create("get_attr", path, (), {}))

    def _bind(self, value: Any, ref: Ref) -> Any:
        """Remember where the tensors in `value` come from; numbers in it are replaced by traced ones."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._attributes:
                self._undo.append((id(value), self._refs.get(id(value))))
                self._refs[id(value)] = (value, ref)
                if value.layout is torch.strided:
                    self._storages.setdefault(storage_key(value), value)
            return value
        if isinstance(value, Mapping):
            for key in list(value):
                item = self._bind(value[key], self._item(ref, key))
                if item is not value[key]:
                    value[key] = item  # type: ignore[index]
            return value
        if isinstance(value, tuple | list):
            items = [self._bind(item, self._item(ref, i)) for i, item in enumerate(value)]
            if all(a is b for a, b in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if is_dataclass(value) and not isinstance(value, type):
            for field in value.__dataclass_fields__:
                self._bind(getattr(value, field), self._attribute(ref, field))
            return value
        if isinstance(value, int | float) and not isinstance(value, bool) and not ref.constant:
            return self._traced(value, ref)
        return value

    def _item(self, ref: Ref, key: Any) -> Ref:
        return self._later(ref, lambda: self._write(operator.getitem, ref, key))

    def _attribute(self, ref: Ref, name: str) -> Ref:
        return self._later(ref, lambda: self._write(getattr, ref, name))

    def _write(self, function: Any, ref: Ref, key: Any) -> fx.Node:
        owner = ref.node(self._erased)
        node = self.graph.call_function(function, (owner, key))
        node.meta.update({key: owner.meta.get(key) for key in ("module_path", "source")})
        node.meta["child_call"] = owner.meta.get("child_call", 0)
        return node

    def _later(self, origin: Ref, make: Callable[[], fx.Node]) -> Ref:
        return Ref(
            make, constant=origin.constant, from_sizes=origin.from_sizes, data_dependent=origin.data_dependent
        )

    # -- numbers -------------------------------------------------------------------------------------------

    def _traced(self, value: int | float, ref: Ref) -> TracedInt | TracedFloat:
        return TracedInt(value, ref, self) if isinstance(value, int) else TracedFloat(value, ref, self)

    def number(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        """``function(*operands)``, recorded when its result is first needed."""
        value = function(*map(plain, operands))
        if not isinstance(value, int | float):
            raise CannotInlineError(f"a size becomes a {type(value).__name__}")
        refs = [n.ref for n in operands if isinstance(n, TracedNumber)]
        ref = Ref(
            lambda: self._create("call_function", function, operands, {}),
            from_sizes=all(r.from_sizes for r in refs),
            data_dependent=any(r.data_dependent for r in refs),
        )
        return self._traced(value, ref)

    def guard_comparison(self, function: Callable[..., bool], a: Any, b: Any) -> bool:
        """The outcome of a comparison, baked in; another outcome is an error when the program runs."""
        outcome = bool(function(plain(a), plain(b)))
        if self._paused or self._thread != threading.get_ident():
            return outcome
        for number in (a, b):
            if isinstance(number, TracedNumber) and number.ref.data_dependent:
                raise CannotInlineError(f"it branches on a size that depends on the {BY_VALUE}")
        self._guard(function if outcome else OPPOSITE[function], a, b)
        return outcome

    def guard_value(self, number: TracedNumber) -> None:
        """The number is used as a plain one: it has to be this one when the program runs."""
        self.guard_comparison(operator.eq, number, number.value)

    def _guard(self, function: Callable[..., bool], a: Any, b: Any) -> None:
        operands = tuple(self._argument(v) for v in (a, b))
        if operands[0] is operands[1]:
            return  # a size is as large as itself
        known = self._guards.get((function, operands))
        if known is not None and known not in self._erased:
            return
        line = user_line()
        condition = self._create("call_function", function, (a, b), {})
        self._guards[function, operands] = self._create(
            "call_function",
            guard,
            (condition_number(condition, self), line.short if line else "the model"),
            {},
        )

    def _guard_count(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], ref: Ref, count: int
    ) -> None:
        sections = args[1] if len(args) > 1 else kwargs.get("chunks", kwargs.get("split_size"))
        if name != "unbind" and isinstance(sections, tuple | list):
            return  # the sections are listed: the operation itself checks that they fit
        number = self._traced(count, self._later(ref, lambda: self._create_len(ref)))
        self._guard(operator.eq, number, count)

    def _guard_rank(self, result: torch.Tensor, ref: Ref) -> None:
        """``x.squeeze()`` has fewer dimensions where one of them is 1."""
        number = self._traced(result.dim(), self._later(ref, lambda: self._write_call("dim", ref)))
        self._guard(operator.eq, number, result.dim())

    def _write_call(self, method: str, ref: Ref) -> fx.Node:
        node = self.graph.call_method(method, (ref.node(self._erased),))
        node.meta["module_path"], node.meta["source"] = self._stack[-1], user_line()
        return node

    def _create_len(self, ref: Ref) -> fx.Node:
        node = self.graph.call_function(len, (ref.node(self._erased),))
        node.meta["module_path"], node.meta["source"] = self._stack[-1], user_line()
        return node

    def _property(self, func: Any, args: tuple[Any, ...]) -> Any:
        name, tensor = func.__self__.__name__, args[0]
        if name == "shape":
            return self._size(torch.Tensor.size, "size", (tensor,), {})
        result = func(*args)
        if name == "nbytes":
            self._ask(tensor, "dtype")
            return self._size(torch.Tensor.numel, "numel", (tensor,), {}) * tensor.itemsize
        if name not in TENSOR_PROPERTIES or not isinstance(result, torch.Tensor):
            if name in ASKS:
                self._ask(tensor, ASKS[name])
            return result
        ref = self._ref(tensor)
        node = self._create("call_function", getattr, (tensor, name), {})
        return self._bind(result, self._later(ref, lambda: node))

    def _size(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*nested_plain(args), **nested_plain(kwargs))
        tensor = args[0]
        if id(tensor) in self._attributes:
            self._ask(tensor, "shape")
            return result
        if self._ref(tensor).constant:
            return result
        if name == "__len__":
            guard = self._dimension(tensor, "size", 0, result)
            self.guard_value(guard)
            return result  # Python's len() wants a plain int
        if isinstance(result, int):
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            return self._dimension(
                tensor, name, None if dim is None else int(dim) % max(1, tensor.dim()), result
            )
        numbers: list[Any] = [self._dimension(tensor, name, i, value) for i, value in enumerate(result)]
        return torch.Size(numbers) if isinstance(result, torch.Size) else tuple(numbers)

    def _dimension(self, tensor: torch.Tensor, name: str, dim: int | None, value: int) -> TracedInt:
        ref = self._ref(tensor)
        key = (ref, (name, dim))
        if key not in self._sizes:
            arguments = (tensor,) if dim is None else (tensor, dim)

            def make() -> fx.Node:
                mapped = (ref.node(self._erased), *arguments[1:])
                node = self.graph.call_method(name, mapped)
                node.meta["module_path"], node.meta["source"] = self._stack[-1], user_line()
                return node

            self._sizes[key] = TracedInt(
                value, Ref(make, from_sizes=not ref.data_dependent, data_dependent=ref.data_dependent), self
            )
        return self._sizes[key]

    # -- modules -------------------------------------------------------------------------------------------

    def call_module(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Inline the module's forward, or write it as one node if that cannot be."""
        path = self._paths.get(id(module))
        if path is None or path == "":
            return original(module, *args, **kwargs)
        self._child_calls += len(self._stack) == 1
        self.called[path] = None
        reason = self.kept.get(path)
        if reason is None:
            reason = _why_opaque(module)
            if reason is not None and reason != "":
                self.kept[path] = reason
        if reason is not None:
            return self._call_whole(original, module, path, args, kwargs)
        read, asked = self.reads.mark(), len(self.asked)
        mark, last = len(self._undo), last_node(self.graph)
        stack, before = list(self._stack), attributes_of(module)
        grad_mode, generator = torch.is_grad_enabled(), torch.get_rng_state()
        self._stack.append(path)
        try:
            with transforms_left():
                result = original(module, *args, **kwargs)
            self._refuse_side_effects(module, before)
            return result
        except Exception as error:  # whatever the user's forward raises
            pass_on_if_full(error)
            self.kept[path] = _reason(error)
            restore_attributes(module, before)
            self._rewind(mark, last)
            self.reads.rewind(read)
            del self.asked[asked:]
            self._paused = False
            with torch._C.DisableTorchFunction():
                torch.set_grad_enabled(grad_mode)
                torch.set_rng_state(generator)
        finally:
            self._stack[:] = stack
        return self._call_whole(original, module, path, args, kwargs)

    def _call_whole(
        self,
        original: Callable[..., Any],
        module: nn.Module,
        path: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        name = f"layer_{path.replace('.', '_')}" if path[0].isdigit() else None  # fx would say `_0`
        operands = [self._ref(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        numbers = [n.ref for n in nested_leaves((args, kwargs)) if isinstance(n, TracedNumber)]
        node = self._create("call_module", path, args, kwargs, name)
        node.meta["module_path"], node.meta["caller"] = path, self._stack[-1]
        self._paused = True
        try:
            before = _versions((args, kwargs))
            taken = nested_plain(args), nested_plain(kwargs)
            leaves = list(map(id, tree_leaves(taken)))
            result = self._own_object(original(module, *taken[0], **taken[1]), before)
            if list(map(id, tree_leaves(taken))) != leaves:
                raise CannotInlineError(f"the forward of {path}, which stays whole, changes its argument")
            self._written |= {storage_key(t) for t, version in before if t._version != version}
        finally:
            self._paused = False
        if self.kept.get(path):
            for inner_path, inner in module.named_modules():
                for tensor in _attribute_tensors(inner):
                    if id(tensor) not in self._attributes:
                        self._left[id(tensor)] = tensor, f"{path}.{inner_path}".rstrip(".")
        self._random = python_random_state()  # what it draws, it draws again when the program runs
        unknown = self.kept.get(path, "") != ""  # a module of torch.nn decides nothing by values
        data_dependent = unknown and not isinstance(result, torch.Tensor)
        data_dependent = data_dependent or any(r.data_dependent for r in (*operands, *numbers))
        return self._bind(result, Ref(node, data_dependent=data_dependent))

    def call_function(
        self, call: Callable[..., Any], cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A custom autograd.Function is one node: what its forward does must not be inlined past its backward."""
        before, drawn = _versions((args, kwargs)), torch.get_rng_state()
        self._paused = True
        try:
            result = self._own_object(call(*nested_plain(args), **nested_plain(kwargs)), before)
            random = not torch.equal(drawn, torch.get_rng_state())
        finally:
            self._paused = False
        return self._record(FunctionCall(cls), cls.__name__, args, kwargs, result, before, random=random)

    def _rewind(self, mark: int, last: fx.Node | None) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node is last:
                break
            self.graph.erase_node(node)
            self._erased.add(node)
        while len(self._undo) > mark:
            key, known = self._undo.pop()
            if known is None:
                self._refs.pop(key, None)
            else:
                self._refs[key] = known

    def _refuse_side_effects(self, module: nn.Module, before: dict[str, Any]) -> None:
        written = changed_attributes(module, before)
        if written:
            restore_attributes(module, before)
            raise WritesAttributeError(f"its forward writes self.{written[0]}")
        now = python_random_state()
        if not same_python_random(now, self._random):
            self._random = now
            raise CannotInlineError("its forward draws from Python's or NumPy's random numbers")

    # -- what torch is made to tell (see patches.py) -------------------------------------------------------------

    def is_tracing(self) -> bool:
        """Whether this thread is in a forward that is being inlined."""
        return not self._paused and threading.get_ident() == self._thread

    def read_mode(self, module: nn.Module) -> None:
        """Write down whose forward asks for ``module.training``."""
        path = self._paths.get(id(module))
        if path is not None:
            here = self._stack[-1]
            self.flags[here] = self.flags.get(here, frozenset()) | {path}

    def enter_context(self, context: Any) -> None:
        """`with torch.no_grad():` becomes nodes: the context, its __enter__, its __exit__."""
        args, kwargs = _context_arguments(context)
        node = self._create("call_function", type(context), args, kwargs)
        self._open[id(context)] = node
        if not isinstance(context, torch.set_grad_enabled):  # sets the mode when it is made
            entered = self.graph.call_method("__enter__", (node,))
            entered.meta.update(node.meta)

    def leave_context(self, context: Any) -> None:
        """The end of the block, if its beginning was written and not rolled back."""
        node = self._open.pop(id(context), None)
        if self.is_tracing() and node is not None and node not in self._erased:
            left = self.graph.call_method("__exit__", (node, None, None, None))
            left.meta.update(node.meta)


def _asked_by_us() -> bool:
    """Whether the innermost frame outside of this file is fxsplit's."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        if frame.f_code.co_name not in _ASKING:
            return True
        frame = frame.f_back
    return frame is not None and is_ours(frame.f_code.co_filename)


_ASKING = ("_ask", "_property", "_plain", "_size", "__torch_function__")


def _versions(values: Any) -> list[tuple[torch.Tensor, int]]:
    """The tensors in `values` with the number of in-place writes that each has seen."""
    return [
        (t, t._version)
        for t in nested_leaves(values)
        if isinstance(t, torch.Tensor) and not t.is_inference() and t.layout is torch.strided
    ]


def condition_number(node: fx.Node, tracer: ValueTracer) -> TracedInt:
    """A comparison's node, as a number that can be an argument."""
    return TracedInt(1, Ref(node), tracer)


def _context_arguments(context: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(context, torch.autocast):
        kwargs = {
            "dtype": context.fast_dtype,
            "enabled": context._enabled,
            "cache_enabled": context._cache_enabled,
        }
        return (context.device,), kwargs
    return ((context.mode,), {}) if isinstance(context, torch.set_grad_enabled) else ((), {})


def _tensor_attributes(model: nn.Module) -> dict[int, str]:
    """id → path of the tensors that are attributes of the model's modules; ties have their first name."""
    found: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found.setdefault(id(tensor), name)
    for path, module in model.named_modules():
        for key, value in module.__dict__.items():
            if isinstance(value, torch.Tensor):
                found.setdefault(id(value), f"{path}.{key}" if path else key)
    return found


def _attribute_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors in plain attributes of a module, and in lists and dicts there."""
    for value in module.__dict__.values():
        if value is None or isinstance(value, int | float | str) or (type(value) is dict and not value):
            continue
        for leaf in nested_leaves(value):
            if isinstance(leaf, torch.Tensor):
                yield leaf


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another Python object for the same values and the same place in the autograd graph."""
    return tensor.view_as(tensor) if tensor.layout is torch.strided else tensor.clone()


def _why_opaque(m: nn.Module) -> str | None:
    """Why `m` must not be inlined although its forward may trace; ``""`` for the basic modules of torch.nn."""
    if isinstance(m, torch.jit.ScriptModule):
        return "it is a ScriptModule"
    if "_orig_mod" in m._modules:
        return "it was made by torch.compile"
    if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
        return "it has hooks"
    if callbacks_of(m):
        return "it has a replication callback"
    if global_hooks():
        return "all modules have hooks"
    basic = type(m).__module__.startswith(("torch.nn", "torch.ao.nn"))
    if basic and (isinstance(m, nn.MultiheadAttention) or not m._modules):
        return ""
    return None


def _reason(error: Exception) -> str:
    line = error_line(error)
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if not isinstance(error, CannotInlineError):
        text = f"{type(error).__name__}: {text}"
    return f"{text}, {line.short}" if line else text
