"""Run the graph once on the example and write down what each node does: values, writes, randomness."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from ..compare import equal
from ..compat import storage_key, tree_leaves, tree_map
from ..graph import resolve
from ..ir import NodeFacts, TensorSpec
from ..state import attributes_of, changed_attributes, preserved, state_tensors


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
            finder = _FactFinder(model, module, first_number=_OTHER_MODE if flip else 0)
            try:
                finder.run(*(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs))
            except Exception:
                if not flip:
                    raise
                return {name: _cautious(model, module, name, fact) for name, fact in found[0].items()}
            found.append(finder.facts)
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


@contextlib.contextmanager
def _rng_state_reads() -> Iterator[list[None]]:
    """An entry for each time that something asks for the generator's state, as torch.utils.checkpoint and fork_rng do."""
    reads: list[None] = []
    original = torch.get_rng_state

    def noted() -> torch.Tensor:
        reads.append(None)
        return original()

    torch.get_rng_state = noted
    try:
        yield reads
    finally:
        torch.get_rng_state = original


class _FactFinder(fx.Interpreter):
    """Watches version counters, buffer values and the generator's state around every node."""

    def __init__(self, model: nn.Module, module: fx.GraphModule, first_number: int) -> None:
        super().__init__(module, garbage_collect_values=False)  # a reused address would look like an alias
        self.facts: dict[str, NodeFacts] = {}
        self._numbers: dict[int, int] = {}
        self._first_number = first_number
        self._lasting: frozenset[int] = frozenset()
        self._parameter_names = {id(p): name for name, p in model.named_parameters()}  # ties: the first name
        self._buffer_names = {self._number(t): name for name, t in state_tensors(model).items()}

    def run_node(self, n: fx.Node) -> Any:
        owned = self._owned_tensors(n)
        read = [
            t
            for t in tree_leaves(self.map_nodes_to_values((n.args, n.kwargs), n))
            if isinstance(t, torch.Tensor)
        ]
        # What is written past the version counter shows in the values: kernels write to running statistics,
        # users to `.data`. The basic modules of torch.nn do not write to parameters.
        basic = n.op == "call_module" and type(resolve(self.module, str(n.target))).__module__.startswith(
            "torch.nn"
        )
        by_value = [t for t in owned if not (basic and isinstance(t, nn.Parameter))]
        if n.op in ("call_function", "call_method"):
            by_value = [t for t in read if self._number(t) in self._lasting]
        versions = [(t, t._version) for t in (*read, *owned)]
        values = [(t, t.detach().clone()) for t in by_value]
        generator, attributes = _generator_states(read), self._attributes(n)
        with _rng_state_reads() as reads:
            value = super().run_node(n)
        written = [t for t, version in versions if t._version != version]
        changed = [t for t, before in values if not equal(t, before)]
        stateful = any(changed_attributes(m, before) for m, before in attributes)
        made = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
        tensors = [*read, *owned, *made] if n.op != "output" else []
        writes = {self._number(t) for t in (*written, *changed)}
        own = frozenset(self._number(t) for t in (made if n.op == "placeholder" else owned))
        storages = frozenset(self._number(t) for t in tensors)
        if stateful:  # as if the module had a storage of its own: all its calls stay together
            token = self._numbers.setdefault(id(attributes[0][0]), self._first_number + len(self._numbers))
            writes, own, storages = writes | {token}, own | {token}, storages | {token}
        self._lasting |= own
        self.facts[n.name] = NodeFacts(
            module_path=n.meta.get("module_path", ""),
            source=n.meta.get("source"),
            child_call=n.meta.get("child_call", 0),
            value=tree_map(_spec, value),
            storages=storages,
            writes=frozenset(writes),
            lasting=own,
            stateful=stateful or any(isinstance(t, nn.Parameter) for t in (*written, *changed)),
            parameters=tuple(
                dict.fromkeys(self._parameter_names[id(t)] for t in owned if id(t) in self._parameter_names)
            ),
            buffers=tuple(self._buffer_names[w] for w in sorted(writes) if w in self._buffer_names),
            returns=next((o.name for o in n.all_input_nodes if value is self.env[o]), None) if made else None,
            random=not all(
                torch.equal(a, b) for a, b in zip(generator, _generator_states(read), strict=True)
            ),
            rng_state=bool(reads),
        )
        return value

    def _owned_tensors(self, n: fx.Node) -> list[torch.Tensor]:
        if n.op == "call_module":
            owner = resolve(self.module, str(n.target))
            return [*owner.parameters(), *state_tensors(owner).values()]
        if n.op == "get_attr":
            value = resolve(self.module, str(n.target))
            return [value] if isinstance(value, torch.Tensor) else []
        return []

    def _attributes(self, n: fx.Node) -> list[tuple[nn.Module, dict[str, Any]]]:
        if n.op != "call_module":
            return []
        return [(m, attributes_of(m)) for m in resolve(self.module, str(n.target)).modules()]

    def _number(self, tensor: torch.Tensor) -> int:
        key = storage_key(tensor) if tensor.layout is torch.strided else id(tensor)
        return self._numbers.setdefault(key, self._first_number + len(self._numbers))


def _spec(leaf: Any) -> Any:
    return TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else leaf


def _generator_states(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    devices = sorted({t.device.index for t in tensors if t.device.type == "cuda"})
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(i) for i in devices)]
