"""An fx graph as Python that reads like the model, and a module that runs just this text.

What fx prints has one statement for each node and frees a value by assigning None. Here a line of the user's is one
line again where that keeps the order of evaluation, beside a comment that says which line it was: parameters are read
where they are used, sizes and intermediate results are written inside the expression that uses them, a context is a
``with`` block. Variables have the user's names and are used again, as a person does (``x = self.norm(x)``), which frees
what they had; the few values that nobody reads any more after that are deleted at the end of the line. Where a module
of a list begins, there is its path.
"""

from __future__ import annotations

import builtins
import itertools
import keyword
import linecache
import math
import operator
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..compat import OpOverload
from ..modules.callables import SPACES, import_of, public_names

WIDTH = 120
_BINARY: dict[Any, tuple[str, int]] = {
    operator.or_: ("|", 1),
    operator.xor: ("^", 2),
    operator.and_: ("&", 3),
    operator.lshift: ("<<", 4),
    operator.rshift: (">>", 4),
    operator.add: ("+", 5),
    operator.sub: ("-", 5),
    operator.mul: ("*", 6),
    operator.matmul: ("@", 6),
    operator.truediv: ("/", 6),
    operator.floordiv: ("//", 6),
    operator.mod: ("%", 6),
    operator.pow: ("**", 8),
    **{
        getattr(operator, n): (s, 0)
        for n, s in zip(("lt", "le", "eq", "ne", "gt", "ge"), ("<", "<=", "==", "!=", ">", ">="), strict=True)
    },
}
_UNARY = {operator.neg: ("-", 7), operator.pos: ("+", 7), operator.invert: ("~", 7)}
_ATOM = 10
_PURE_METHODS = frozenset(("size", "numel", "dim", "stride", "storage_offset", "nelement"))
RESIZES = frozenset(
    ("resize_", "set_", "squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "resize_as_")
)


@dataclass(frozen=True)
class Text:
    """A function as text, and what its names stand for.

    Attributes:
        names: global name → object.
        imports: global name → the statement that imports it; missing for what no module holds.
        made: number of a line → the names of the nodes that it computes.
    """

    code: str
    names: Mapping[str, Any] = field(default_factory=dict)
    imports: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


def write(graph: fx.Graph, known: Mapping[str, Any] | None = None) -> Text:
    """`graph` as the text of a method; global names in `known` keep their meaning."""
    return _Writer(graph, known or {}).write("forward")


@dataclass(frozen=True)
class Printed:
    """What a module runs, and the graph that it was printed from.

    Attributes:
        graph: `_fingerprint` of it, at that time.
    """

    text: Text
    graph: list[tuple[Any, ...]]


def printed(module: StageModule) -> Printed:
    """What `module` runs."""
    found: Printed = type(module)._fxsplit_printed  # type: ignore[attr-defined]
    return found


def is_current(module: StageModule) -> bool:
    """Whether the text is that of the graph as it is now."""
    made = printed(module)
    return made.graph == _fingerprint(module.graph) or made.text.code == write(module.graph).code


class StageModule(fx.GraphModule):
    """A `GraphModule` whose code is what `write` prints; its objects are the model's own. Pickled, it is fx's own."""

    def recompile(self) -> Any:
        """Print the graph and make the text this module's forward; tracebacks show it."""
        text = write(self.graph)
        name = f"<fxsplit {type(self).__name__} {next(_NUMBERS)}>"
        scope = dict(text.names)
        exec(compile(text.code, name, "exec"), scope)
        linecache.cache[name] = (len(text.code), None, text.code.splitlines(keepends=True), name)
        weakref.finalize(self, linecache.cache.pop, name, None)
        # Every GraphModule has a class of its own. What is on it must not hide what a model calls its own tensors.
        kind: Any = type(self)
        kind.forward, kind._fxsplit_printed = scope["forward"], Printed(text, _fingerprint(self.graph))

    @property
    def code(self) -> str:
        """The text that runs."""
        return printed(self).text.code

    def __reduce__(self) -> Any:
        return fx.GraphModule(self, self.graph, type(self).__name__).__reduce__()


_NUMBERS = itertools.count()


def _fingerprint(graph: fx.Graph) -> list[tuple[Any, ...]]:
    return [(n.op, n.name, n.target, n.args, n.kwargs) for n in graph.nodes]


class _Writer:
    def __init__(self, graph: fx.Graph, known: Mapping[str, Any]) -> None:
        self.graph, self.known = graph, known
        self.nodes = list(graph.nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.names: dict[str, Any] = {}
        self.imports: dict[str, str] = {}
        self.taken = {node.name for node in self.nodes if node.users or node.op == "placeholder"}
        self.contexts = _context_blocks(self.nodes)
        self.depth_of = self._depths()
        self.counts = _occurrences(self.nodes)
        self.resizes = any(n.op == "call_method" and n.target in RESIZES for n in self.nodes)
        self.unpacked = {node: parts for node in self.nodes if (parts := _parts(node))}
        self.parts = {part for parts in self.unpacked.values() for part in parts}
        self.pure: set[fx.Node] = set()
        for node in self.nodes:  # operands first: long chains of them need no recursion
            if self._is_pure(node):
                self.pure.add(node)
        self.inside: dict[fx.Node, fx.Node] = {}  # node → the node in whose expression it is written
        for node in self.nodes:
            if self._may_be_inside(node):
                self.inside[node] = next(iter(node.users))
        self.last: dict[fx.Node, int] = {}
        self.holds: dict[str, fx.Node] = {}  # variable → the value that it has at this line
        self.said: dict[fx.Node, str] = {}  # the variable that has a value, where it is not the node's name
        self.lines: list[str] = []
        self.made: dict[int, tuple[str, ...]] = {}
        # how many lines there were after the last statement, it, and what stands beside it
        self.latest = (0, "", "")
        self.blocks: list[int] = []  # line at which each open ``with`` block begins
        self.indent = 1

    # -- what is written inside what ---------------------------------------------------------------------------

    def _depths(self) -> dict[fx.Node, int]:
        """The innermost context block of each node, as the position of its enter."""
        stack, found = [0], {}
        for i, node in enumerate(self.nodes):
            if node in self.contexts and self.contexts[node] == "leave":
                stack.pop()
            found[node] = stack[-1]
            if node in self.contexts and self.contexts[node] == "enter":
                stack.append(i)
        return found

    def _may_be_inside(self, node: fx.Node) -> bool:
        if len(node.users) != 1 or self.counts[node] != 1 or node in self.contexts:
            return False
        if node in self.parts or node in self.unpacked:
            return False
        user = next(iter(node.users))
        if user.op == "output" or user in self.contexts or self.depth_of[user] != self.depth_of[node]:
            return False
        if node.op == "get_attr" or _mode_flag(node):
            return True
        if _is_statement(node) or (_is_statement(user) and not _is_guard(user)):
            return False
        if node.op == "call_module" and user.op == "call_module":
            return False  # modules one after the other are lines
        if node.op == "placeholder" or getattr(node.target, "__name__", "") in (
            "transfer",
            "checkpoint",
        ):
            return False
        return node.meta.get("named") is None and _place(node) is not None and _place(node) == _place(user)

    def _tree(self, node: fx.Node) -> Iterator[fx.Node]:
        """The nodes of an expression in Python's order of evaluation, the node itself last."""
        for operand in _operands(node):
            if self.inside.get(operand) is node:
                yield from self._tree(operand)
        yield node

    def _settle(self, root: fx.Node) -> list[fx.Node]:
        """Take out of the expression of `root` what order or width asks for; gives the nodes that were taken out."""
        tree = list(self._tree(root))
        impure = [n for n in tree if n not in self.pure]
        members, first = set(tree), self.position[impure[0] if impure else root]
        between = self.nodes[first : self.position[root]]
        in_order = impure == sorted(impure, key=self.position.__getitem__)
        in_order = in_order and all(n in members or n in self.pure or n in self.parts for n in between)
        if in_order and len(self._statement(root)) + 4 * self.indent <= WIDTH:
            return []
        apart = [n for n in impure if self.inside.get(n) is root] or [n for n in impure if n is not root][-1:]
        for node in apart:
            del self.inside[node]
        return [*apart, root] if apart else []

    def _is_pure(self, node: fx.Node) -> bool:
        """Reads of attributes and sizes may be written later than they were made."""
        if node.op == "get_attr" or _mode_flag(node):
            return True
        if node.op == "call_method":
            return node.target in _PURE_METHODS and not self.resizes
        arithmetic = node.target in _BINARY or node.target in (len, getattr)
        return (
            arithmetic
            and all(o in self.pure and o.op != "get_attr" for o in _operands(node))
            and bool(_operands(node))
        )

    def _is_root(self, node: fx.Node) -> bool:
        """Whether the node is a statement of its own."""
        return (
            node.op not in ("placeholder", "output")
            and node not in self.inside
            and node not in self.parts
            and self.contexts.get(node) != "made"
        )

    # -- statements ----------------------------------------------------------------------------------------------

    def write(self, function: str) -> Text:
        inputs = [node for node in self.nodes if node.op == "placeholder"]
        self.lines.append(f"def {function}({', '.join(['self', *(n.name for n in inputs)])}):")
        self.taken |= {_base(n) for n in self.nodes if n.users}
        self.said = {n: _base(n) for n in self.nodes}  # about as long as they will be
        roots = [n for n in self.nodes if self._is_root(n)]
        while roots:
            root = roots.pop()
            if root not in self.contexts:
                roots += self._settle(root)
        statements = [n for n in self.nodes if self._is_root(n)]
        dies = self._last_readers(statements)
        self._name(statements)
        previous: Any = None
        block = ""
        for i, node in enumerate(statements):
            line = _line(node)
            if self.contexts.get(node) == "leave":
                self._leave()
                previous = None
            else:
                here = block_of(node)
                if here != block:
                    self._head(here)
                    block = here
                self._put(self._statement(node), line if line != previous and not _is_guard(node) else None)
                self.made[len(self.lines) - 1] = tuple(n.name for n in self._tree(node))
                self.holds.update({self._called(n): n for n in self.unpacked.get(node, [node])})
                previous = line
                if self.contexts.get(node) == "enter":
                    self.indent += 1
                    self.blocks.append(len(self.lines))
            self._delete(dies.get(i, []))
        self.lines.append(f"    return {self._value(self.nodes[-1].args[0], 0)}")
        return Text("\n".join(self.lines) + "\n", self.names, self.imports, self.made)

    def _leave(self) -> None:
        if all(line.lstrip().startswith("#") for line in self.lines[self.blocks.pop() :]):
            self._put("pass")
        self.indent -= 1

    def _head(self, block: str) -> None:
        """Here begins what a module of a list computes."""
        if len(self.lines) > 1:
            self.lines.append("")
        if block:
            self._put(f"# {block}")

    def _put(self, text: str, line: str | None = None) -> None:
        """A statement, and the user's line that it is of: beside it, or above where there is no room."""
        text = "    " * self.indent + text
        if line is not None and len(text) + len(line) + 4 > WIDTH:
            self.lines.append(f"{'    ' * self.indent}# {line}")
            line = None
        self.lines.append(text if line is None else f"{text}  # {line}")
        self.latest = len(self.lines), text, "" if line is None else f"  # {line}"

    def _delete(self, values: Sequence[fx.Node]) -> None:
        """What nobody reads any more, unless its variable has another value already: at the end of the line, or below it."""
        names = [self._called(v) for v in values if self.holds.get(self._called(v)) is v]
        if not names:
            return
        free, (at, text, line) = f"del {', '.join(names)}", self.latest
        indent = len(text) - len(text.lstrip())
        beside = at == len(self.lines) and indent == 4 * self.indent and not text.endswith(":")
        if beside and len(text) + len(free) + len(line) + 2 <= WIDTH:
            self.lines[-1] = f"{text}; {free}{line}"
        else:
            self.lines.append("    " * self.indent + free)

    def _called(self, node: fx.Node) -> str:
        return self.said.get(node, node.name)

    def _name(self, statements: Sequence[fx.Node]) -> None:
        """Variables have the user's names, and are used again when nobody reads their value any more."""
        self.said.clear()
        self.last = self._read_last(statements)
        results = set(self.nodes[-1].all_input_nodes)
        has = {n.name: n for n in self.nodes if n.op == "placeholder" or n in results}
        for i, statement in enumerate(statements):
            for node in self.unpacked.get(statement, [statement]):
                if node in results or not node.users or not self._is_variable(node):
                    continue
                base, number = _base(node), 0
                while True:
                    name = f"{base}_{number}" if number else base
                    holder = has.get(name)
                    free = holder is None or (holder not in results and self.last.get(holder, i) <= i)
                    if free and (holder is None or holder not in self.unpacked.get(statement, ())):
                        break
                    number += 1
                has[name], self.said[node] = node, name

    def _is_variable(self, node: fx.Node) -> bool:
        return node not in self.contexts and node.target is not operator.setitem

    def _read_last(self, statements: Sequence[fx.Node]) -> dict[fx.Node, int]:
        """Value → the index of the last statement that reads it, or makes it."""
        last: dict[fx.Node, int] = {}
        for i, node in enumerate(statements):
            if self.contexts.get(node) == "leave":
                continue
            for made in self.unpacked.get(node, [node]):
                last.setdefault(made, i)
            for inner in self._tree(node):
                for operand in _operands(inner):
                    if operand not in self.inside:
                        last[operand] = i
        return last

    def _last_readers(self, statements: Sequence[fx.Node]) -> dict[int, list[fx.Node]]:
        """Index of a statement → the values that nobody reads after it."""
        result = set(self.nodes[-1].all_input_nodes)
        dies: dict[int, list[fx.Node]] = {}
        for node, i in self._read_last(statements).items():
            value = node.op not in ("placeholder", "get_attr") and node.users and self._is_variable(node)
            if value and node not in self.pure and node not in result:
                dies.setdefault(i, []).append(node)
        end = len(statements) - 1  # what dies with the function needs no word
        return {i: nodes for i, nodes in dies.items() if i < end}

    def _statement(self, node: fx.Node) -> str:
        if self.contexts.get(node) == "enter":
            made = node.args[0] if node.op == "call_method" else node
            assert isinstance(made, fx.Node)
            return f"with {self._expression(made)[0]}:"
        if node.target is operator.setitem:
            owner, key, value = node.args
            return f"{self._value(owner, _ATOM)}[{self._index(key)}] = {self._value(value, 0)}"
        text, _ = self._expression(node)
        if node in self.unpacked:
            return f"{', '.join(map(self._called, self.unpacked[node]))} = {text}"
        return f"{self._called(node)} = {text}" if node.users else text

    # -- expressions -----------------------------------------------------------------------------------------------

    def _expression(self, node: fx.Node) -> tuple[str, int]:
        """The text of a node's operation, and how tightly it binds."""
        target, args = node.target, node.args
        if node.op == "get_attr":
            return f"self.{target}", _ATOM
        if node.op == "call_module":
            return f"self.{target}({self._arguments(args, node.kwargs)})", _ATOM
        if node.op == "call_method":
            owner, *rest = args
            return f"{self._value(owner, _ATOM)}.{target}({self._arguments(rest, node.kwargs)})", _ATOM
        if target in _BINARY and len(args) == 2 and not node.kwargs:
            sign, level = _BINARY[target]
            left = level + 1 if target is operator.pow or level == 0 else level
            right = 7 if target is operator.pow else level + 1
            return f"{self._value(args[0], left)} {sign} {self._value(args[1], right)}", level
        if target in _UNARY and len(args) == 1:
            sign, level = _UNARY[target]
            return f"{sign}{self._value(args[0], level)}", level
        if target is operator.getitem:
            return f"{self._value(args[0], _ATOM)}[{self._index(args[1])}]", _ATOM
        if target is getattr and len(args) == 2 and str(args[1]).isidentifier():
            return f"{self._value(args[0], _ATOM)}.{args[1]}", _ATOM
        return f"{self._function(target)}({self._arguments(args, node.kwargs)})", _ATOM

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        plain = [k for k in kwargs if k.isidentifier() and not keyword.iskeyword(k)]
        odd = {k: v for k, v in kwargs.items() if k not in plain}
        parts = [self._value(a, 0) for a in args] + [f"{k}={self._value(kwargs[k], 0)}" for k in plain]
        return ", ".join([*parts, *([f"**{self._value(odd, 0)}"] if odd else [])])

    def _index(self, key: Any) -> str:
        if isinstance(key, tuple) and key and type(key) is tuple:
            return ", ".join(self._index_part(part) for part in key) + ("," if len(key) == 1 else "")
        return self._index_part(key)

    def _index_part(self, part: Any) -> str:
        if not isinstance(part, slice):
            return self._value(part, 0)
        start, stop, step = (
            "" if v is None else self._value(v, 1) for v in (part.start, part.stop, part.step)
        )
        return f"{start}:{stop}" + (f":{step}" if step else "")

    def _value(self, value: Any, level: int) -> str:
        """An argument; in parentheses where it binds less tightly than its place asks for."""
        if isinstance(value, fx.Node):
            if value not in self.inside:
                return (
                    self._called(value) if value.op != "get_attr" or value.users else f"self.{value.target}"
                )
            text, own = self._expression(value)
            return f"({text})" if own < level else text
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"{self._global(type(value))}({', '.join(self._value(v, 0) for v in value)})"
        if isinstance(value, tuple):
            return "(" + ", ".join(self._value(v, 0) for v in value) + (",)" if len(value) == 1 else ")")
        if isinstance(value, list):
            return "[" + ", ".join(self._value(v, 0) for v in value) + "]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self._value(v, 0)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({self._value(value.start, 0)}, {self._value(value.stop, 0)}, {self._value(value.step, 0)})"
        if value is Ellipsis:
            return "..."
        if isinstance(value, torch.device):
            return f'{self._torch()}.device("{value}")'
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return repr(value).replace("torch", self._torch(), 1)
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if isinstance(value, int | float) and not isinstance(value, bool) and value < 0:
            return f"({value!r})" if level > 7 else repr(value)
        if isinstance(value, type) or callable(value):
            return self._function(value)
        if isinstance(value, str) and value.isprintable() and not any(c in value for c in '"\\'):
            return f'"{value}"'
        return repr(value)

    # -- names of functions --------------------------------------------------------------------------------------

    def _torch(self) -> str:
        return self._space("torch")

    def _space(self, space: str) -> str:
        """The global name of torch, F, math or operator: another one where the model uses that name."""
        module, path = SPACES[space]
        name = space
        while name in self.taken or self.known.get(name, module) is not module:
            name += "_"
        self.names[name] = module
        self.imports[name] = f"import {path}" if name == path else f"import {path} as {name}"
        return name

    def _function(self, function: Any) -> str:
        if getattr(builtins, getattr(function, "__name__", "?"), None) is function:
            return str(getattr(function, "__name__", ""))
        public = public_names().get(id(function))
        if public is not None:
            space, _, rest = public.partition(".")
            return f"{self._space(space)}.{rest}"
        if isinstance(function, OpOverload):
            return f"{self._torch()}.ops.{function}"
        owner = getattr(function, "function", None)  # apply of a custom autograd.Function
        if owner is not None and isinstance(owner, type):
            return f"{self._global(owner)}.apply"
        return self._global(function)

    def _global(self, value: Any) -> str:
        """A global name for a class or function of somebody's module."""
        base = str(getattr(value, "__name__", type(value).__name__)).split(".")[-1]
        base = base if base.isidentifier() else "function"
        name, n = base, 1
        while name in self.taken or any(name in n and n[name] is not value for n in (self.names, self.known)):
            name, n = f"{base}_{n}", n + 1
        if name not in self.names:
            self.names[name] = value
            statement = import_of(value, name)
            if statement is not None:
                self.imports[name] = statement
        return name


def _operands(node: fx.Node) -> list[fx.Node]:
    """The operands in the order in which the printed expression evaluates them."""
    found: list[fx.Node] = []
    arguments: Any = (node.args, node.kwargs)
    if node.target is operator.setitem:
        arguments = (node.args[2], node.args[0], node.args[1])
    fx.node.map_arg(arguments, lambda n: found.append(n))
    return found


def _occurrences(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    counts = dict.fromkeys(nodes, 0)
    for node in nodes:
        for operand in _operands(node):
            counts[operand] += 1
    return counts


def _parts(node: fx.Node) -> list[fx.Node]:
    """The values into which the user's statement takes one apart, if it is read by nothing else."""
    count = node.meta.get("unpacks")
    if count is None or len(node.users) != count or node.op not in ("call_function", "call_method"):
        return []
    parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    every = [parts.get(k) for k in range(count)]
    return [part for part in every if part is not None and part.users] if None not in every else []


def _base(node: fx.Node) -> str:
    """What a person would call a value: as the user, or as the module that gives it, or as what is done."""
    name = node.meta.get("variable")
    if name is None and node.op == "call_module":
        *_, before, last = ("", "", *str(node.meta.get("module_path", node.target)).split("."))
        name = f"{before}_{last}" if last.isdigit() and before else last
    if name is None:
        name = node.name.rstrip("0123456789")
        name = name[:-1] if name.endswith("_") and name.strip("_") and name != node.name else node.name
    clashes = keyword.iskeyword(name) or hasattr(builtins, name) or name == "self" or not name.isidentifier()
    return node.name if clashes else str(name)


def block_of(node: fx.Node) -> str:
    """The innermost module of a list in whose forward a node is: ``h.3``."""
    path = node.meta.get("caller", node.meta.get("module_path", ""))
    parts = str(path or "").split(".")
    numbers = [k for k, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1]) if numbers else ""


def _line(node: fx.Node) -> str | None:
    source = node.meta.get("source")
    return None if source is None else str(source.short)


def _place(node: fx.Node) -> tuple[str, str] | None:
    """The user's line, and the module whose forward it is in."""
    line = _line(node)
    return None if line is None else (line, node.meta.get("caller", node.meta.get("module_path", "")))


def _mode_flag(node: fx.Node) -> bool:
    """``self.block_mode.training``, or what it selects."""
    if node.target is getattr and len(node.args) == 2 and node.args[1] == "training":
        return True
    if node.target is operator.getitem and isinstance(node.args[1], fx.Node):
        return isinstance(node.args[0], tuple) and _mode_flag(node.args[1])
    return False


def _is_guard(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "guard"


def _is_statement(node: fx.Node) -> bool:
    """Whether a node is there for what it does, and not for its value."""
    return node.target is operator.setitem or (not node.users and node.op != "output")


def _context_blocks(nodes: Sequence[fx.Node]) -> dict[fx.Node, str]:
    """Nodes of contexts that can be written as ``with`` blocks: made, entered and left in nested order."""
    stack: list[tuple[fx.Node, fx.Node]] = []
    found: dict[fx.Node, str] = {}
    for node in nodes:
        made = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if node.target is torch.set_grad_enabled:  # is entered when it is made
            stack.append((node, node))
        elif node.op == "call_method" and node.target == "__enter__" and made is not None:
            stack.append((made, node))
        elif node.op == "call_method" and node.target == "__exit__" and made is not None:
            if not stack or stack[-1][0] is not made:
                return {}
            made, entered = stack.pop()
            found.update({entered: "enter", node: "leave"})
            if made is not entered:
                found[made] = "made"
    return {} if stack else found
