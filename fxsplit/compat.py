"""The one module that touches names which torch does not promise to keep.

Each name says in which version of torch it was seen. Everything else in fxsplit uses documented torch.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import importlib
import io
import json
import logging
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, cast

import torch
from torch import fx, nn
from torch.utils import (
    _device,  # torch 2.13
    _python_dispatch,  # torch 2.13
    _pytree,  # torch 2.13: the pytree that transformers and torch.export register with
)

from .caches import Follows, is_cache, put_together, taken_apart

TreeSpec = _pytree.TreeSpec
OpOverload = torch._ops.OpOverload  # torch 2.13
Function = TypeVar("Function", bound=Callable[..., Any])


class TorchDispatchMode(_python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """torch's, which torch.compile looks away from, but only where there is a torch.compile.

    What torch 2.10 to 2.15 wraps around ``__torch_dispatch__`` for that imports torch._dynamo and SymPy, which takes 2.4 s
    and adds a filter of warnings, and costs some microseconds for each operation.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if DYNAMO in sys.modules:  # as it is when a module has been compiled
            kind: Any = type(self)
            _look_away(kind)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # torch 2.10 to 2.15
        return False


@functools.cache
def _look_away(mode: Any) -> None:
    disable = torch._disable_dynamo  # type: ignore[attr-defined]  # torch 2.9 to 2.15
    mode.__torch_dispatch__ = disable(mode.__torch_dispatch__, recursive=True)


def load_quietly(name: str) -> None:
    """Import a module of torch's that its first use would import, without the filter of warnings that SymPy leaves."""
    if name not in sys.modules:
        with warnings.catch_warnings():
            importlib.import_module(name)


def set_frame_compiler(compiler: Any) -> Any:
    """What `torch.compile` compiles the frames of this thread by from now on; returns what it was: None for nothing."""
    return torch._C._dynamo.eval_frame.set_eval_frame(compiler)  # torch 2.9 to 2.15


def fake_tensors() -> contextlib.AbstractContextManager[Any]:
    """In which operations have sizes and no values; ordinary tensors may be read."""
    module = importlib.import_module("torch._subclasses.fake_tensor")  # torch 2.9 to 2.15
    found: contextlib.AbstractContextManager[Any] = module.FakeTensorMode(allow_non_fake_inputs=True)
    return found


def not_traced(function: Function) -> Function:
    """`torch.compile` calls it as it is, from what it compiles."""
    dynamo, marked = torch._C._dynamo.eval_frame, cast(Any, function)  # torch 2.9 to 2.15
    skip = dynamo._FrameAction.SKIP
    marked.__code__ = marked.__code__.replace()  # its own: a decorator's is that of all that it decorates
    dynamo.set_code_exec_strategy(marked.__code__, dynamo._FrameExecStrategy(skip, skip))
    marked._torchdynamo_disable = True
    return function


@functools.cache
def _skip() -> None:
    importlib.import_module(f"{DYNAMO}.trace_rules").add(__package__)


def not_compiled() -> None:
    """`torch.compile` leaves fxsplit's own functions as they are, and looks at those that they call."""
    if DYNAMO in sys.modules:
        _skip()  # torch 2.9 to 2.15


DYNAMO = "torch._dynamo"  # torch 2.10 to 2.15: by the first operation under a dispatch mode of torch's own
SYMBOLIC_SHAPES = (
    "torch.fx.experimental.symbolic_shapes"  # torch 2.9 to 2.15: by the first backward from gradients
)


class _Record:
    """Stands for a dataclass, dict subclass or cache that nobody registered as a pytree, while it is taken apart."""

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass(frozen=True)
class _RecordType:
    """Class and fields of a record; `template` rebuilds one without calling the user's constructor.

    Of a cache, `rest` is what it has beside its tensors and numbers.
    """

    cls: type
    keys: tuple[Any, ...]
    template: Any = field(compare=False, repr=False)
    rest: tuple[tuple[str, Any], ...] | None = None

    @classmethod
    def of(cls, value: Any) -> _RecordType:
        if is_cache(value):
            held, rest = taken_apart(value)
            return cls(type(value), tuple(held), None, rest)
        keys = tuple(value) if isinstance(value, dict) else tuple(f.name for f in fields(value))
        template = copy.copy(value)
        if isinstance(value, OrderedDict):
            OrderedDict.clear(template)
        elif isinstance(value, dict):
            dict.clear(template)
        return cls(type(value), keys, template)

    @classmethod
    def named(cls, module: str, qualified: str, keys: Sequence[str], rest: Any = None) -> _RecordType:
        """The type with this name; its constructor is not called."""
        kind: Any = _named_class(module, qualified)
        if rest is None:
            return cls(kind, tuple(keys), kind.__new__(kind))
        found = tuple((key, value if how is None else _REST[how](value)) for key, how, value in rest)
        return cls(kind, tuple(keys), None, found)

    def dumped(self) -> list[Any]:
        """What `named` takes."""
        row = [self.cls.__module__, self.cls.__qualname__, list(self.keys)]
        return row if self.rest is None else [*row, [[key, *_dumped(value)] for key, value in self.rest]]

    def values_of(self, value: Any) -> list[Any]:
        found = [
            dict.__getitem__(value, k) if isinstance(value, dict) else getattr(value, k) for k in self.keys
        ]
        return [_with_records(item) for item in found]

    def build(self, values: Iterable[Any]) -> Any:
        if self.rest is not None:
            return put_together(self.cls, dict(zip(self.keys, values, strict=True)), self.rest)
        value = copy.copy(self.template)
        for key, item in zip(self.keys, values, strict=True):
            if isinstance(value, OrderedDict):
                OrderedDict.__setitem__(value, key, item)
            elif isinstance(value, dict):
                dict.__setitem__(value, key, item)
            if not isinstance(value, dict) or key in getattr(
                value, "__dict__", ()
            ):  # some keep their items as attributes too
                object.__setattr__(value, key, item)  # frozen ones too
        return value


def _named_class(module: str, qualified: str) -> type:
    found: Any = sys.modules[module]  # imported by whoever may decide that, see `spec_from_text`
    for part in qualified.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


_REST: dict[str, Callable[[Any], Any]] = {  # what a cache has beside its tensors, from JSON
    "follows": Follows,
    "dtype": lambda name: _dtype(name),
    "device": torch.device,
    "class": lambda row: _named_class(*row),
}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch.{name} is no dtype")
    return found


def _dumped(value: Any) -> tuple[str | None, Any]:
    if isinstance(value, Follows):
        return "follows", str(value)
    if isinstance(value, torch.dtype):
        return "dtype", str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return "device", str(value)
    return ("class", [value.__module__, value.__qualname__]) if isinstance(value, type) else (None, value)


def _flatten_record(record: _Record) -> tuple[list[Any], _RecordType]:
    kind = _RecordType.of(record.value)
    return kind.values_of(record.value), kind


def _flatten_record_with_keys(record: _Record) -> tuple[list[tuple[Any, Any]], _RecordType]:
    values, kind = _flatten_record(record)
    key = _pytree.MappingKey if issubclass(kind.cls, dict) else _pytree.GetAttrKey
    return [(key(k), v) for k, v in zip(kind.keys, values, strict=True)], kind


_pytree.register_pytree_node(  # torch 2.13; the public one has no keys
    _Record,
    _flatten_record,
    lambda values, kind: kind.build(values),
    serialized_type_name="fxsplit.Record",
    to_dumpable_context=lambda kind: kind.dumped(),
    from_dumpable_context=lambda row: _RecordType.named(*row),
    flatten_with_keys_fn=_flatten_record_with_keys,
)


def _with_records(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor) or not any(_is_record(leaf) for leaf in _pytree.tree_leaves(tree)):
        return tree
    return _pytree.tree_map(lambda leaf: _Record(leaf) if _is_record(leaf) else leaf, tree)


def _is_record(leaf: Any) -> bool:
    """Whether `leaf` is a cache, or an unregistered dataclass or dict subclass with a tensor or cache somewhere in it."""
    if isinstance(leaf, torch.Tensor | type | str | int | float | None):
        return False
    if is_cache(leaf):
        return True
    if not (isinstance(leaf, dict) or is_dataclass(leaf)):
        return False
    inside = (
        list(leaf.values()) if isinstance(leaf, dict) else [getattr(leaf, f.name, None) for f in fields(leaf)]
    )
    return any(isinstance(x, torch.Tensor) or _is_record(x) for x in _pytree.tree_leaves(inside))


def tree_flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of `tree` in order, and the structure that holds them.

    Besides registered pytrees, dataclasses and dict subclasses that hold tensors are looked into, and caches.
    """
    return _pytree.tree_flatten(_with_records(tree))


def tree_flatten_with_paths(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of `tree` with their access paths, such as ``['image'][0]``."""
    records = _with_records(tree)
    try:
        leaves, _ = _pytree.tree_flatten_with_path(records)
    except ValueError:  # some class was registered without the names of its parts: their numbers, then
        return [(f"[{i}]", leaf) for i, leaf in enumerate(_pytree.tree_leaves(records))]
    return [(_pytree.keystr(path), leaf) for path, leaf in leaves]


def tree_unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """The inverse of `tree_flatten`."""
    return _pytree.tree_unflatten(list(leaves), spec)


def register_pytree(
    cls: type, flatten: Callable[[Any], tuple[list[Any], Any]], unflatten: Callable[[Iterable[Any], Any], Any]
) -> None:
    """Let torch look into values of a class of ours."""
    _pytree.register_pytree_node(cls, flatten, unflatten)  # torch 2.13


def spec_to_text(spec: TreeSpec) -> str:
    """A structure as JSON text."""
    for kind in classes_in(spec):
        name_namedtuple(kind)
    return _pytree.treespec_dumps(spec)  # torch 2.13


def spec_from_text(text: str, find: Callable[[str], Any]) -> TreeSpec:
    """The inverse of `spec_to_text`.

    Args:
        find: looks up a class or function by ``module:name``, or refuses to; called before torch imports any.
    """
    for name in names_in_spec(text):
        name_namedtuple(find(name))
    return _pytree.treespec_loads(text)  # torch 2.13


_PLAIN_TYPES = (
    None,
    "builtins.tuple",
    "builtins.list",
    "builtins.dict",
    "collections.OrderedDict",
    "collections.deque",
)


def names_in_spec(text: str) -> list[str]:
    """``module:name`` of what is looked up to read a structure. 2.9 to 2.15: each node has a type, a context as JSON, and
    children.

    Raises:
        ValueError: a type that nobody has registered, or no structure.
    """
    found, todo = [], [json.loads(text)[1]]
    while todo:
        node = todo.pop()
        kind, context = node["type"], node["context"]
        todo += node["children_spec"]
        if kind == "fxsplit.Record":
            found.append(f"{context[0]}:{context[1]}")
            rest = context[3] if len(context) > 3 else []
            found += [f"{value[0]}:{value[1]}" for _, how, value in rest if how == "class"]
        elif kind == "collections.defaultdict":
            found.append(f"{context['default_factory_module']}:{context['default_factory_name']}")
        elif kind == "collections.namedtuple":
            found.append(_name_of_type(context))
        elif kind not in _PLAIN_TYPES:
            found.append(_name_of_type(kind))
        found += _enums_in(context)
    return found


def _name_of_type(name: str) -> str:
    cls = _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)
    if cls is None:
        raise ValueError(f"nobody has registered {name!r} as a pytree")
    return f"{cls.__module__}:{cls.__qualname__}"


def _enums_in(context: Any) -> list[str]:
    """torch looks up ``{"__enum__": …, "fqn": "module:name"}`` wherever it stands in a context."""
    with contextlib.suppress(ValueError):
        context = json.loads(context) if isinstance(context, str) else context
    found, todo = [], [context]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            if "__enum__" in value:
                found.append(value["fqn"])
            todo += value.values()
        elif isinstance(value, list):
            todo += value
    return found


def name_namedtuple(kind: type) -> None:
    """Let a namedtuple of somebody's be written and read by name; once for each class."""
    if (
        isinstance(kind, type)
        and issubclass(kind, tuple)
        and hasattr(kind, "_fields")
        and kind not in _pytree.SUPPORTED_SERIALIZED_TYPES
    ):
        _pytree._register_namedtuple(
            kind, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}"
        )  # torch 2.13


def classes_in(spec: TreeSpec) -> list[type]:
    """The classes that a structure is made of."""
    own = spec.context.cls if isinstance(spec.context, _RecordType) else spec.type
    if own is collections.namedtuple:
        own = spec.context
    # 2.9 has the attribute, later versions the method
    children = spec.children() if hasattr(spec, "children") else spec.children_specs
    return [own] * (own is not None) + [c for child in children for c in classes_in(child)]


def function_apply(cls: type) -> Callable[..., Any]:
    """``cls.apply`` of a custom `torch.autograd.Function`, as torch defines it: 2.9 in Python, 2.15 in C."""
    found: Callable[..., Any] = _FUNCTION_APPLY.__get__(None, cls)
    return found


_FUNCTION_APPLY: Any = torch.autograd.Function.__dict__["apply"]


def last_node(graph: fx.Graph) -> fx.Node | None:
    """The last node so far. `reversed` gives an iterator from torch 2.13 on, and something to iterate over before."""
    return next(iter(reversed(graph.nodes)), None)


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of `tree` in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    leaves = _pytree.tree_leaves(tree)
    return _pytree.tree_leaves(_with_records(tree)) if any(map(_is_record, leaves)) else leaves


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with `fn` applied to each leaf."""
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    return _pytree.tree_map(fn, _with_records(tree))


def backward_keeps_graph() -> bool:
    """Whether the backward pass that is running was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())  # torch 2.13


@contextlib.contextmanager
def parameter_hooks_silenced(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Tensor hooks of `parameters` do not fire inside.

    The pipeline's inner backward passes compute per-micro-batch gradients of the user's own parameters; the
    user's hooks must see the sum, once, when autograd receives it.
    """
    silenced = [(p, p._backward_hooks) for p in parameters if p._backward_hooks]  # torch 2.13
    for p, _ in silenced:
        p._backward_hooks = None
    try:
        yield
    finally:
        for p, hooks in silenced:
            p._backward_hooks = hooks


@contextlib.contextmanager
def transforms_left() -> Iterator[None]:
    """Transforms of torch.func (vmap, grad) that are entered inside and not left, because of an error, are left."""
    functorch = torch._C._functorch  # torch 2.13
    depth = functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        if functorch.get_dynamic_layer_stack_depth() > depth:
            functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)


class Interpreter(fx.Interpreter):
    """fx's without its progress bar (torch 2.13), which starts a thread of tqdm's and leaves it, shown or not."""

    def run(self, *args: Any, **_: Any) -> Any:
        """Run the graph node by node: the value of the output node."""
        self.env, self.args_iter = {}, iter(args)
        for node in self.graph.nodes:
            self.env[node] = self.run_node(node)
            if node.op == "output":
                return self.env[node]
            if self.garbage_collect_values:
                for spent in self.user_to_last_uses.get(node, []):
                    del self.env[spent]
        raise AssertionError("a graph without output")


@contextlib.contextmanager
def _no_monitor() -> Iterator[None]:
    """Progress bars of torch's own interpreters start no thread that looks after them."""
    bar: Any = vars(torch.hub)["tqdm"]  # torch 2.13
    before = getattr(bar, "monitor_interval", 0)
    bar.monitor_interval = 0
    try:
        yield
    finally:
        bar.monitor_interval = before


@contextlib.contextmanager
def quiet_export() -> Iterator[None]:
    """`torch.export` says on the log and as warnings what it then raises; here it raises only."""
    loggers = [
        logging.getLogger(name) for name in ("torch", "torch._dynamo", "torch.export", "torch._export")
    ]  # 2.13
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), _no_monitor():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# torch 2.13: regions of an exported graph → the context that they run in, as (function, *arguments), and the
# position of the region among the arguments
REGIONS: dict[Any, Callable[..., tuple[tuple[Any, ...], int]]] = {
    torch.ops.higher_order.wrap_with_set_grad_enabled: lambda enabled, *_: (
        (torch.enable_grad if enabled else torch.no_grad,),
        1,
    ),
    torch.ops.higher_order.wrap_with_autocast: lambda device, dtype, enabled, cache, *_: (
        (torch.autocast, device, dtype, enabled, cache),
        4,
    ),
}


# torch 2.13: what an exported graph asserts of types and devices; under autocast, or on another device, it is wrong
SCALAR_CHECK = torch.ops.aten._assert_scalar.default  # torch 2.13
METADATA_CHECKS = frozenset([torch.ops.aten._assert_tensor_metadata.default])


def size_range(size: Any, ranges: Any) -> tuple[int, int | None, Any]:
    """Least and largest value of a size of an exported graph (None: any), and the symbol that it is.

    Raises:
        ValueError: it is no symbol of its own: sizes of the inputs are tied to each other.
    """
    if isinstance(size, int):
        return size, size, None
    symbol = size.node.expr  # torch 2.13
    if not symbol.is_Symbol:
        raise ValueError(f"a size of the inputs has to be {symbol}")
    found = ranges.get(symbol)
    if found is None:
        return 0, None, symbol
    high = found.upper
    return int(found.lower), int(high) if high.is_Integer else None, symbol


def unflatten_outputs(graph: fx.Graph, outputs: Any) -> Any:
    """The outputs of an exported graph in the model's structure."""
    return graph._codegen.process_outputs(outputs)  # torch 2.13


RNN_CACHES = ("_flat_weights", "_flat_weight_refs")  # torch 2.13: what an RNN keeps beside its parameters


def restore_rnn(module: torch.nn.RNNBase) -> None:
    """Make the caches of an RNN again from its parameters."""
    module._init_flat_weights()  # torch 2.13


# Fused operations that torch.utils.flop_counter does not count. torch 2.13
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_RECURRENT_LAYER = torch.ops.aten.mkldnn_rnn_layer
TRILINEAR = torch.ops.aten._trilinear


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def storage_key(tensor: torch.Tensor) -> int:
    """An identity for the memory of `tensor`: equal for views of one storage. Valid while it lives."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout is not torch.strided and tensor.layout in _COMPRESSED:
        tensor = tensor.values()
    return int(tensor.untyped_storage()._cdata)  # torch 2.13


def functorch_levels() -> list[tuple[Any, str]]:
    """Where torch.func's transforms enter: refused before they do, because an error inside leaves them entered."""
    owners = [
        importlib.import_module(f"torch._functorch.{name}") for name in ("vmap", "eager_transforms")
    ]  # 2.13
    return [(owner, name) for owner in owners for name in vars(owner) if name.endswith("_increment_nesting")]


def sdpa_switches() -> list[str]:
    """Names in ``torch._C`` that switch kernels of scaled_dot_product_attention."""
    return [
        name for name in dir(torch._C) if name.startswith(("_set_sdp_use_", "_set_sdp_priority"))
    ]  # torch 2.13


def autocast_kinds() -> list[str]:
    """The types of device that have an autocast state of their own."""
    return list(torch._C._autocast_supported_devices())  # torch 2.13


def default_device() -> torch.device:
    """Where new tensors are made. Torch 2.9 itself cannot say so after ``set_default_device(None)``."""
    try:
        return torch.get_default_device()
    except AttributeError:
        return torch.empty(0).device


def saved_tensors_hooks_in_force() -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """Pack and unpack of the innermost `saved_tensors_hooks` of this thread; None where there is none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # torch 2.13


def saved_tensors_hooks_refused() -> str | None:
    """What `disable_saved_tensors_hooks` says in this thread; None where it is not in force."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()  # torch 2.13


def backward_uses_threads() -> bool:
    """Whether `torch.autograd.set_multithreading_enabled` is on in this thread."""
    return torch._C._is_multithreading_enabled()  # torch 2.13


def modes_in_force() -> bool:
    """Whether this thread is inside of a `TorchFunctionMode` or `TorchDispatchMode`; a default device is none."""
    functions = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch 2.13
    dispatch = torch._C._len_torch_dispatch_stack()  # torch 2.13
    return dispatch > 0 or any(not isinstance(mode, _device.DeviceContext) for mode in functions)


def same_generator(a: torch.Generator, b: torch.Generator) -> bool:
    """Whether two objects are the same generator of random numbers."""
    return a is b or bool(a._cdata == b._cdata)  # type: ignore[attr-defined]  # torch 2.13


def in_forward_mode() -> bool:
    """Whether forward-mode differentiation is under way: tensors may carry tangents."""
    return bool(torch.autograd.forward_ad._current_level >= 0)  # torch 2.13


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether it carries one."""
    return torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


GLOBAL_HOOKS = [  # torch 2.9 to 2.13: hooks of all modules
    getattr(nn.modules.module, f"_global_{name}_hooks")
    for name in ("forward", "forward_pre", "backward", "backward_pre")
]


def makes_tensors() -> set[Any]:
    """torch's functions that take a device and are given no tensor."""
    return _device._device_constructors()  # type: ignore[no-any-return]  # torch 2.9 to 2.15; it keeps the set


def like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A parameter, or what else `tensor` is, over the memory of `value`."""
    return torch.Tensor._make_subclass(type(tensor), value, tensor.requires_grad)  # torch 2.9 to 2.15


plain_tensors = (
    torch._C.DisableTorchFunctionSubclass
)  # torch 2.9 to 2.15: subclasses of tensors compute as tensors

add_each = torch._foreach_add_  # torch 2.9 to 2.15: in place, each to its own, in one call
