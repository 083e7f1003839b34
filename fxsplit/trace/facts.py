"""Run the graph once on the example and write down what each node does: values, writes, randomness."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from ..compare import equal
from ..compat import Interpreter, storage_key, tree_leaves, tree_map
from ..errors import pass_on_if_full
from ..graph import effects
from ..graph.ir import NodeFacts, TensorSpec
from ..graph.nodes import resolve
from ..modules.attributes import Snapshot, attributes_of, changed_attributes
from ..modules.reach import Reach, objects_in, reach
from ..modules.state import preserved, python_random_state, same_python_random, state_tensors


def find_facts(
    model: nn.Module, module: fx.GraphModule, inputs: Sequence[torch.Tensor]
) -> Mapping[str, NodeFacts]:
    """Facts per node name, from one run in the model's mode and one in the other mode.

    Dropout returns its input in eval mode and draws numbers in train mode; batch normalisation writes its
    buffers in train mode only: what may be cut apart has to hold for both. Where the other mode cannot run
    on this example (batch normalisation of a single row), every module is taken to draw and to write.
    """
    modes = [m.training for m in model.modules()]
    found: list[dict[str, NodeFacts]] = []
    for flip in (False, True):
        with preserved(model, parameters=True), torch.enable_grad():
            for m, training in zip(model.modules(), modes, strict=True):
                m.training = (not any(modes)) if flip else training
            torch.default_generator.manual_seed(next(_SEEDS))  # `preserved` puts it back
            finder = _FactFinder(model, module, first_number=_OTHER_MODE if flip else 0)
            try:
                finder.run(*(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs))
            except Exception as error:
                pass_on_if_full(error)
                if not flip:
                    raise
                return {name: _cautious(model, module, name, fact) for name, fact in found[0].items()}
            found.append(finder.found())
    return {name: _union(fact, found[1][name]) for name, fact in found[0].items()}


_OTHER_MODE = 1 << 32  # storages of the two runs are numbered apart, so that their union stays meaningful


def _union(a: NodeFacts, b: NodeFacts) -> NodeFacts:
    return replace(
        a,
        storages=a.storages | b.storages,
        writes=a.writes | b.writes,
        lasting=a.lasting | b.lasting,
        buffers=tuple(dict.fromkeys((*a.buffers, *b.buffers))),
        stateful=a.stateful or b.stateful,
        returns=a.returns if a.returns == b.returns else None,
        alias=a.returns or b.returns,
        random=a.random or b.random,
        rng_state=a.rng_state or b.rng_state,
    )


def _cautious(model: nn.Module, module: fx.GraphModule, name: str, fact: NodeFacts) -> NodeFacts:
    node = next(n for n in module.graph.nodes if n.name == name)
    if node.op != "call_module":
        return fact
    own = {id(t) for t in state_tensors(resolve(module, str(node.target))).values()}
    return replace(
        fact, buffers=tuple(n for n, t in state_tensors(model).items() if id(t) in own), random=True
    )


@dataclass
class _Asked:
    """What was done with the default generator beside drawing from it.

    Attributes:
        state: something has asked for its state, as torch.utils.checkpoint and fork_rng do.
        seeded: it has another seed.
    """

    state: bool = False
    seeded: bool = False


_SEEDS = itertools.count(0x5EED_0F_FAC75)  # that nobody else would think of


@contextlib.contextmanager
def _generator_asked() -> Iterator[_Asked]:
    """Around a node, in whose stead nobody draws."""
    asked, original, seed = _Asked(), torch.get_rng_state, torch.default_generator.initial_seed()

    def noted() -> torch.Tensor:
        asked.state = True
        return original()

    torch.get_rng_state = noted
    try:
        yield asked
    finally:
        torch.get_rng_state = original
    asked.seeded = torch.default_generator.initial_seed() != seed
    if asked.seeded:
        torch.default_generator.manual_seed(next(_SEEDS))


def _changed_objects(module: nn.Module, before: dict[str, Any]) -> list[Any]:
    """The module, if it has set attributes, and what it changed inside of them."""
    names = changed_attributes(module, before)
    return [module, *(o for name in names for o in objects_in(module.__dict__.get(name)))] if names else []


_OPERATIONS = ("call_function", "call_method")


class _Before:
    """What there was before a node was run, to see what it has done.

    Args:
        by_value: tensors that are compared by what they hold.
    """

    def __init__(self, held: Reach, read: Sequence[torch.Tensor], by_value: Sequence[torch.Tensor]) -> None:
        self._read = read
        self._versions = [(t, t._version) for t in (*read, *held.tensors.values())]
        self._values = [(t, t.detach().clone()) for t in by_value]
        self._attributes = [(m, attributes_of(m)) for m in held.modules.values()]
        self._around = [Snapshot(o) for o in held.around]
        self._generators, self._python = _generator_states(read), python_random_state()

    def written(self) -> list[torch.Tensor]:
        """The tensors that hold something else now, or may."""
        found = [t for t, version in self._versions if t._version != version]
        return found + [t for t, before in self._values if not equal(t, before)]

    def changed(self) -> list[Any]:
        """The modules and objects that do."""
        found = [o for m, before in self._attributes for o in _changed_objects(m, before)]
        return found + [o for s in self._around if s.changed() for o in objects_in(s.value)]

    def drew(self) -> bool:
        """Whether a default generator of torch's is in another state."""
        pairs = zip(self._generators, _generator_states(self._read), strict=True)
        return not all(torch.equal(a, b) for a, b in pairs)

    def python_drew(self) -> bool:
        """Whether one of Python's or NumPy's is."""
        return not same_python_random(self._python, python_random_state())


class _FactFinder(Interpreter):
    """What every node may do, and, by version counters, values and generators around it, what it has done."""

    def __init__(self, model: nn.Module, module: fx.GraphModule, first_number: int) -> None:
        super().__init__(module, garbage_collect_values=False)  # a reused address would look like an alias
        self.facts: dict[str, NodeFacts] = {}
        self._numbers: dict[Any, int] = {}
        self._first_number = first_number
        self._lasting: set[int] = set()
        self._nameless: set[int] = set()  # what outlives the call, and is neither an argument nor a buffer
        self._parameter_names = {id(p): name for name, p in model.named_parameters()}  # ties: the first name
        self._buffer_names: dict[int, list[str]] = {}  # several, where they are views of each other
        for name, tensor in state_tensors(model).items():
            self._buffer_names.setdefault(self._number(tensor), []).append(name)

    def found(self) -> dict[str, NodeFacts]:
        """The facts; of the objects that modules share, only those that somebody changes."""
        objects = {number for key, number in self._numbers.items() if isinstance(key, tuple)}
        idle = objects - {n for fact in self.facts.values() for n in fact.writes}
        return {
            name: replace(fact, storages=fact.storages - idle, lasting=fact.lasting - idle)
            for name, fact in self.facts.items()
        }

    def run_node(self, n: fx.Node) -> Any:
        held, calls = self._held(n), n.op == "call_module"
        read = [
            t
            for t in tree_leaves(self.map_nodes_to_values((n.args, n.kwargs), n))
            if isinstance(t, torch.Tensor)
        ]
        known = calls and effects.is_known(resolve(self.module, str(n.target)))
        may = effects.of_module(resolve(self.module, str(n.target))) if calls else effects.May()
        before = _Before(held, read, self._written_unseen(n, held, read, known))
        with _generator_asked() as asked:
            value = super().run_node(n)
        written = [*before.written(), *may.writes, *(self.env[o] for o in effects.may_write(n))]
        changed = before.changed()
        if may.draws_python or (calls and not known and before.python_drew()):
            changed.append(random)
        draws = before.drew() or may.draws or (not calls and n.op in _OPERATIONS and effects.may_draw(n))
        others = [] if known else [*held.objects.values(), *held.modules.values()]
        if draws or asked.seeded:
            others.append(torch.default_generator)
        if asked.seeded:  # others go on from where it leaves the generator
            changed.append(torch.default_generator)
        made = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
        owned = list(held.tensors.values())
        writes = {self._number(t) for t in written} | {self._object(o) for o in changed}
        objects = {self._object(o) for o in (*others, *changed)}
        own = {self._number(t) for t in (made if n.op == "placeholder" else owned)} | objects
        self._lasting |= own
        if n.op in ("call_module", "get_attr"):
            self._nameless |= own - self._buffer_names.keys() - {self._object(torch.default_generator)}
        tensors = [*read, *owned, *made] if n.op != "output" else []
        names = self._parameter_names
        self.facts[n.name] = NodeFacts(
            module_path=n.meta.get("module_path", ""),
            source=n.meta.get("source"),
            child_call=n.meta.get("child_call", 0),
            value=tree_map(_spec, value),
            storages=frozenset({self._number(t) for t in tensors} | objects | writes),
            writes=frozenset(writes),
            lasting=frozenset(own),
            stateful=bool(writes & self._nameless),
            parameters=tuple(dict.fromkeys(names[id(t)] for t in owned if id(t) in names)),
            buffers=tuple(name for w in sorted(writes) for name in self._buffer_names.get(w, ())),
            returns=next((o.name for o in n.all_input_nodes if value is self.env[o]), None) if made else None,
            random=draws,
            rng_state=asked.state or asked.seeded,
        )
        return value

    def _written_unseen(
        self, n: fx.Node, held: Reach, read: Sequence[torch.Tensor], known: bool
    ) -> list[torch.Tensor]:
        """What may be written past the version counter, and shows in the values.

        Kernels write to running statistics, users to `.data`. The basic modules of torch.nn do not write to parameters.
        """
        if n.op in _OPERATIONS:
            return [t for t in read if self._number(t) in self._lasting]
        return [t for t in held.tensors.values() if not (known and isinstance(t, nn.Parameter))]

    def _held(self, n: fx.Node) -> Reach:
        """What a node can get hold of beside its operands."""
        if n.op not in ("call_module", "get_attr"):
            return Reach()
        return reach(resolve(self.module, str(n.target)))

    def _number(self, tensor: torch.Tensor) -> int:
        key = storage_key(tensor) if tensor.layout is torch.strided else id(tensor)
        return self._numbers.setdefault(key, self._first_number + len(self._numbers))

    def _object(self, value: Any) -> int:
        return self._numbers.setdefault(("object", id(value)), self._first_number + len(self._numbers))


def _spec(leaf: Any) -> Any:
    return TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf


def _generator_states(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    devices = sorted({t.device.index for t in tensors if t.device.type == "cuda"})
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(i) for i in devices)]
