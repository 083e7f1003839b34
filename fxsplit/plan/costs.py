"""`Cost`: what a node adds to the load of its stage, one row for each word of a plan's ``cost=``.

A new cost is a row in `CATALOG`: its name, its unit, what it needs to know of a node, and a function of that.

    def weigh(node: NodeCost, passes: Passes, device: Device) -> float
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import PlanError, did_you_mean
from .choice import Choice
from .hardware import Device

BACKWARD = 2  # it computes a gradient for each of the two operands of a product
MOST_SECONDS = 1e15  # a sum of them is still a number


@dataclass(frozen=True)
class NodeCost:
    """The figures of one node, for the whole example batch.

    Attributes:
        name: of the node.
        module_path: FQN of the module that runs it.
        parameters: bytes of the parameters that it reads, those that an earlier node has read not counted.
        output: bytes of its value.
        moved: bytes that it reads and writes: operands, parameters and its value; 0 for a view.
        saved: bytes that are kept for its backward, those that an earlier node keeps not counted.
        flops: floating point operations of its forward.
        trained: those of `parameters` that require gradients.
        seconds: measured, of forward and backward; 0 where the plan does not ask for them.
    """

    name: str
    module_path: str
    parameters: int
    output: int
    moved: int
    saved: int
    flops: int
    trained: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Passes:
    """What a step does with a node.

    Attributes:
        training: whether it goes backward.
        copies: how many values are kept for each parameter that is trained: itself, its gradient and the optimizer's.
        again: how often its forward is computed again.
    """

    training: bool
    copies: int
    again: float = 0.0

    @property
    def forwards(self) -> float:
        """All of it, in forwards."""
        return 1 + BACKWARD + self.again if self.training else 1


def roofline_seconds(node: NodeCost, device: Device) -> float:
    """Forward of a node: computing or moving bytes, whichever takes longer (Williams et al., 2009)."""
    assert device.flops is not None and device.bandwidth is not None
    return max(node.flops / device.flops, node.moved / device.bandwidth)


Weigh = Callable[[NodeCost, Passes, Device], float]


@dataclass(frozen=True, eq=False, repr=False)
class Cost(Choice):
    """One way to weigh.

    Attributes:
        name: in the stage table.
        unit: of a load: ``"bytes"``, ``"FLOPs"`` or ``"s"``. In seconds, to read a parameter takes none, and what
            crosses between stages counts too.
        weigh: of one node.
        needs: what has to be known of a node: its parameters; also what one run of the example tells (counts); also its
            measured seconds.
        rates: whether the device has to be described with its rate and bandwidth.
        spelling: the user's seconds; by default the name.
    """

    name: str
    unit: Literal["bytes", "FLOPs", "s"]
    weigh: Weigh
    needs: Literal["parameters", "counts", "seconds"] = "counts"
    rates: bool = False
    spelling: Any = None

    def __post_init__(self) -> None:
        if self.spelling is None:
            object.__setattr__(self, "spelling", self.name)

    @staticmethod
    def of(value: object) -> Cost:
        """The cost that a plan's ``cost=`` spells.

        Raises:
            PlanError: it spells none.
        """
        if isinstance(value, Cost):
            return value
        if isinstance(value, str):
            if value not in CATALOG:
                raise PlanError(
                    f"cost={value!r} is not known",
                    remedy=did_you_mean(value, tuple(CATALOG), label="choices"),
                )
            return CATALOG[value]
        if isinstance(value, Mapping):
            return _given(dict(value))
        if callable(value):
            return _by_function(value)
        raise PlanError(
            f"cost={value!r} is no cost",
            remedy=f"one of {', '.join(CATALOG)}, a function of a node, or {{node name: seconds}}",
        )

    @property
    def own(self) -> bool:
        """Whether the seconds are the user's."""
        return not isinstance(self.spelling, str)

    @property
    def plain(self) -> Any:
        """What it is written as in a file.

        Raises:
            PlanError: it is a function.
        """
        if callable(self.spelling):
            raise PlanError(
                "cost= is a function, which is not written to a file", remedy="cost=pipe.assignment.costs"
            )
        return self.spelling

    def loads(
        self,
        nodes: Mapping[str, NodeCost],
        reads: Sequence[str],
        passes: Mapping[str, Passes],
        device: Device,
    ) -> dict[str, float]:
        """Node name → what it adds to the load of its stage on this device.

        Args:
            reads: the nodes that only read a parameter.

        Raises:
            PlanError: the user's seconds do not fit the nodes, or are no numbers.
        """
        if isinstance(self.spelling, dict):
            _check_names(self.spelling, nodes, reads)
        free = set(reads) if self.unit == "s" else ()
        found = {
            name: 0.0 if name in free else float(self.weigh(node, passes[name], device))
            for name, node in nodes.items()
        }
        if self.own and not any(found.values()):
            raise PlanError("cost= is 0 seconds for every node", remedy='seconds, or cost="params"')
        return found


CATALOG: dict[str, Cost] = {
    row.name: row
    for row in (
        Cost("params", "bytes", lambda node, passes, device: node.parameters, needs="parameters"),
        Cost(
            "memory",
            "bytes",
            lambda node, passes, device: (
                node.parameters + (passes.copies - 1) * node.trained + passes.training * node.saved
            ),
        ),
        Cost("flops", "FLOPs", lambda node, passes, device: passes.forwards * node.flops),
        Cost(
            "roofline",
            "s",
            lambda node, passes, device: passes.forwards * roofline_seconds(node, device),
            rates=True,
        ),
        Cost(
            "time",
            "s",
            lambda node, passes, device: node.seconds * (1 + passes.again / (1 + BACKWARD)),
            needs="seconds",
        ),
    )
}


def _given(seconds: dict[str, float]) -> Cost:
    for name, value in seconds.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not isinstance(name, str) or not number or not 0 <= value < MOST_SECONDS:
            raise PlanError(
                f"cost[{name!r}]={value!r} is not a node's name and its seconds",
                remedy="cost=pipe.assignment.costs, of a pipeline that was planned in seconds",
            )
    return Cost(
        "given seconds",
        "s",
        lambda node, passes, device: seconds.get(node.name, 0.0),
        needs="parameters",
        spelling=seconds,
    )


def _by_function(function: Callable[..., Any]) -> Cost:
    def weigh(node: NodeCost, passes: Passes, device: Device) -> float:
        try:
            seconds = float(function(node))
        except Exception as error:
            error.add_note(f"fxsplit: in cost=, for {node}")
            raise
        if not 0 <= seconds < MOST_SECONDS:
            raise PlanError(
                f"cost= returned {seconds!r} for {node}", remedy="a function that returns seconds"
            )
        return seconds

    return Cost(getattr(function, "__name__", "a function"), "s", weigh, spelling=function)


def _check_names(seconds: Mapping[str, float], nodes: Mapping[str, NodeCost], reads: Sequence[str]) -> None:
    """The user's seconds are for all nodes; to read a parameter takes none."""
    unknown = [name for name in seconds if name not in nodes]
    missing = [name for name in nodes if name not in reads and name not in seconds]
    if unknown or missing:
        raise PlanError(
            f"cost= names {unknown[0]!r}, which is no node of the graph"
            if unknown
            else f"cost= has no seconds for {len(missing)} of the graph's nodes, first {missing[0]!r}",
            remedy='the costs of a pipeline of the same model that was planned in seconds, such as by cost="time": '
            "cost=pipe.assignment.costs",
        )
