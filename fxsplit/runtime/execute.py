"""One call of a pipeline: what a forward and a backward action do with a stage and a micro-batch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..compat import TreeSpec, parameter_hooks_silenced, tree_leaves, tree_map, tree_unflatten
from ..errors import GradientError
from ..ir import Program, Stage
from ..ops import recomputation, transfers_cut
from ..replicate.reduce import OrderedSum
from ..schedules.actions import Action, Kind, Needs, Schedule
from ..schedules.needs import dependencies, parameter_chains
from .blame import users_line
from .loss import MicroLoss, leaves_of
from .rng import draw_base_seed, seeded, stage_seed
from .worker import play, play_serially


@dataclass
class _Record:
    """What a forward leaves for the backward of the same stage and micro-batch."""

    inputs: dict[str, list[Any]]  # flat leaves of each input on the stage's device, detached
    homes: dict[str, list[torch.device | None]]  # where those leaves came from: their gradients go back there
    outputs: dict[str, list[Any]]  # flat leaves of each output, with their graph


class Call:
    """The values and gradients of one call, for all its micro-batches.

    Args:
        chunks: per micro-batch the flat tensor inputs.
        parameters: FQN → parameter, those that get gradients.
        grad: whether a backward may follow.
        checkpoint: which micro-batches are recomputed.
        serial: play everything in the calling thread (the oracle of the tests).
        out_spec: the structure of the outputs.
    """

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        chunks: Sequence[Sequence[torch.Tensor]],
        parameters: dict[str, nn.Parameter],
        *,
        grad: bool,
        checkpoint: Any,
        serial: bool,
        out_spec: TreeSpec,
    ) -> None:
        self.program, self.schedule, self.chunks, self.parameters = program, schedule, chunks, parameters
        self.grad, self.checkpoint = grad, checkpoint
        # One micro-batch leaves nothing to overlap: the caller's own thread and random numbers.
        self.serial = serial or len(chunks) == 1
        self.base_seed = (
            draw_base_seed() if len(chunks) > 1 and any(s.random for s in program.stages) else None
        )
        self.made_by, self.readers = program.producers(), program.readers()
        self.results = {v for v in program.outputs if isinstance(v, str)}
        self.values: dict[tuple[str, int], Any] = {}
        self.unread: dict[tuple[str, int], int] = {}
        self.records: dict[tuple[int, int], _Record] = {}
        self.gradients: dict[tuple[str, int], list[torch.Tensor | None]] = {}
        self.parameter_gradients: dict[tuple[str, int], torch.Tensor | None] = {}
        self.chains = parameter_chains(program)
        self.sums: dict[str, OrderedSum] = {}
        self.keep_graph = False
        self.out_spec = out_spec
        self.loss: MicroLoss | None = None
        self.losses: dict[int, torch.Tensor] = {}
        self.loss_gradients: dict[int, tuple[torch.Tensor, dict[int, torch.Tensor | None]]] = {}
        self.loss_turns = threading.Lock()
        self.differentiable = False
        self.inside_loss: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.lock = threading.Lock()
        self.turns = {
            s.index: threading.Lock()
            for s in program.stages
            if (s.writes or s.stateful) and checkpoint != "never"
        }
        for i, chunk in enumerate(chunks):
            for name, value in zip(program.inputs, chunk, strict=True):
                self._publish(name, i, value)

    # -- the two halves ----------------------------------------------------------------------------------------

    def forward(self) -> list[list[Any]]:
        """Play the forward half. Returns per micro-batch the flat outputs, without graph."""
        self._play("F", frozenset(s.index for s in self.program.stages if s.writes or s.stateful))
        rows = []
        for i in range(len(self.chunks)):
            rows.append([self.values[v, i] if isinstance(v, str) else v[0] for v in self.program.outputs])
        self.values.clear()
        return rows

    def backward(self, gradients: Sequence[dict[str, Any]], *, keep_graph: bool) -> None:
        """Play the backward half. Afterwards `input_gradient` and `parameter_gradient` have the results.

        Args:
            gradients: per micro-batch the gradient of each output value, by name.
            keep_graph: whether this call may be played backward again.
        """
        self.keep_graph = keep_graph
        self.gradients = {(name, i): [g] for i, row in enumerate(gradients) for name, g in row.items()}
        self.parameter_gradients = {}
        self.sums = {fqn: OrderedSum(len(self.chunks)) for fqn in self.parameters}
        again = frozenset(s.index for s in self.program.stages if s.writes and self.checkpoint != "never")
        with parameter_hooks_silenced(list(self.parameters.values())):
            self._play("B", again)
        if not keep_graph:
            self.records.clear()

    def step(self, loss: MicroLoss) -> list[torch.Tensor]:
        """Play the whole schedule, the loss of a micro-batch before the backward of its last stage.

        Afterwards `input_gradient` and `parameter_gradient` have the results.

        Returns:
            The weighted loss of each micro-batch, detached.
        """
        self.loss = loss
        if self.base_seed is None:
            self.base_seed = draw_base_seed()
        self.sums = {fqn: OrderedSum(len(self.chunks)) for fqn in self.parameters}
        with parameter_hooks_silenced(list(self.parameters.values())):
            self._play_lists(self.schedule.workers, self.step_needs())
        if not self.differentiable:
            raise GradientError(
                "the loss depends on nothing that requires a gradient",
                remedy="pipe(x) computes without gradients",
            )
        return [self.losses[i] for i in range(len(self.chunks))]

    def step_needs(self) -> Needs:
        """What has to be done before an action of a whole step: the loss needs all outputs, their gradients the loss."""
        stages = self.program.stages
        base = dependencies(
            self.program, in_turn=frozenset(s.index for s in stages if s.writes or s.stateful)
        )
        makers = sorted({self.made_by[v] for v in self.results} - {-1})
        last = stages[-1].index

        def needs(action: Action) -> list[Action]:
            before = list(base(action))
            if action.kind == "B" and action.stage == last:
                before += [Action("F", s, action.micro_batch) for s in makers if s != last]
            elif action.kind == "B":
                before.append(Action("B", last, action.micro_batch))
            return before

        return needs

    def input_gradient(self, name: str, micro_batch: int) -> torch.Tensor | None:
        """The gradient of one graph input of one micro-batch."""
        found = self.gradients.get((name, micro_batch))
        return found[0] if found else None

    def parameter_gradient(self, fqn: str) -> torch.Tensor | None:
        """The sum over all micro-batches, added in their order."""
        return self.sums[fqn].total() if fqn in self.chains else None

    def release(self) -> None:
        """Drop the gradients that the caller has taken."""
        self.gradients, self.parameter_gradients, self.sums = {}, {}, {}

    def _play(self, kind: Kind, in_turn: frozenset[int]) -> None:
        needs: Needs = dependencies(self.program, in_turn=in_turn)
        self._play_lists(self.schedule.half(kind), needs)

    def _play_lists(self, workers: Sequence[Sequence[Action]], needs: Needs) -> None:
        if self.serial:
            play_serially(workers, needs, self._act)
        else:
            names = [f"stage {s}.{r}" for s, r in self.schedule.labels]
            play(workers, needs, self._act, names)

    def _act(self, action: Action) -> None:
        """Replicas of a stage that writes to its buffers take turns: one may be computing the other's forward again."""
        with self.turns.get(action.stage, contextlib.nullcontext()):
            if action.kind == "F":
                self._forward(action)
            else:
                if self.loss is not None and action.stage == self.program.stages[-1].index:
                    self._loss(action)
                self._backward(action)

    def _loss(self, action: Action) -> None:
        """The loss of one micro-batch, and the gradients of the outputs.

        What else the loss depends on (its own parameters, weights that it penalises) gets its gradient at the end of
        the step, in one sum.
        """
        assert self.loss is not None and self.base_seed is not None
        i = action.micro_batch
        seed = stage_seed(self.base_seed, i, len(self.program.stages))
        with (
            self._errors_say_where(action),
            self.loss_turns,
            seeded(seed, self.program.stages[-1].device),
            torch.enable_grad(),
        ):
            taken = {v: self._take(v, i) for v in sorted(self.results)}
            flat = [taken[v] if isinstance(v, str) else v[0] for v in self.program.outputs]
            with self.inside_loss():
                part = self.loss(i, tree_unflatten(flat, self.out_spec))
            leaves = {v: tree_leaves(value) for v, value in taken.items()}
            wanted = {id(leaf): leaf for row in leaves.values() for leaf in row if _has_grad(leaf)}
            others = [t for t in leaves_of(part) if id(t) not in wanted]
            found: dict[int, torch.Tensor | None] = {}
            if part.requires_grad:
                every = [*wanted.values(), *others]
                # The graph behind a target that came with one is there for the next micro-batch.
                gradients = torch.autograd.grad(part, every, retain_graph=True, allow_unused=True)
                found = {id(t): g for t, g in zip(every, gradients, strict=True)}
            for v, row in leaves.items():
                self.gradients[v, i] = [found.get(id(leaf)) for leaf in row]
            for t in others:
                self.loss_gradients.setdefault(id(t), (t, {}))[1][i] = found[id(t)]
            self.losses[i] = part.detach()
            self.differentiable = self.differentiable or part.requires_grad

    def loss_gradient_sums(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What the loss depends on beside the outputs, and its gradient: added up in the order of micro-batches."""
        sums = []
        for tensor, parts in self.loss_gradients.values():
            terms = [g for _, g in sorted(parts.items()) if g is not None]
            if terms:
                sums.append((tensor, sum(terms[1:], terms[0])))
        return sums

    # -- actions -----------------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        stage, i = self.program.stages[action.stage], action.micro_batch
        with (
            self._errors_say_where(action),
            self._random_numbers(stage, i),
            torch.set_grad_enabled(self.grad),
        ):
            inputs = {name: self._take(name, i) for name in stage.inputs}
            with recomputation(self._is_recomputed(i)), transfers_cut() as crossings:
                result = stage.module(*inputs.values())
            outputs = dict(zip(stage.outputs, (result,) if len(stage.outputs) == 1 else result, strict=True))
            if self.grad:
                moved = {id(tensor): arrived for tensor, arrived in crossings}
                leaves = {name: tree_leaves(v) for name, v in inputs.items()}
                self.records[action.stage, i] = _Record(
                    inputs={
                        name: [moved.get(id(leaf), leaf) for leaf in row] for name, row in leaves.items()
                    },
                    homes={name: [_home(leaf) for leaf in row] for name, row in leaves.items()},
                    outputs={name: tree_leaves(v) for name, v in outputs.items()},
                )
            for name, value in outputs.items():
                self._publish(name, i, value)

    def _backward(self, action: Action) -> None:
        stage, i = self.program.stages[action.stage], action.micro_batch
        key = (action.stage, i)
        record = self.records[key] if self.keep_graph else self.records.pop(key)
        roots: list[torch.Tensor] = []
        seeds: list[torch.Tensor] = []

        def seed(tensors: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> None:
            for tensor, gradient in zip(tensors, gradients, strict=True):
                if gradient is not None and tensor.requires_grad:
                    roots.append(tensor)
                    seeds.append(gradient.to(tensor.device))

        for name, leaves in record.outputs.items():
            seed(leaves, self.gradients.pop((name, i), [None] * len(leaves)))
        # Gradients from later readers enter here, so that autograd adds this stage's to them, in the order
        # of the unsplit model.
        wanted: list[torch.Tensor] = []
        for name, leaves in record.inputs.items():
            seed(leaves, self.gradients.get((name, i), [None] * len(leaves)))
            wanted += [leaf for leaf in leaves if _has_grad(leaf)]
        owned = [fqn for fqn in stage.parameters if fqn in self.parameters]
        for fqn in owned:
            parameter = self.parameters[fqn]
            seed([parameter], [self.parameter_gradients.pop((fqn, i), None)])
            wanted.append(parameter)
        if roots and wanted:
            with self._errors_say_where(action), self._random_numbers(stage, i, recomputed=True):
                found: Iterator[torch.Tensor | None] = iter(
                    torch.autograd.grad(roots, wanted, seeds, retain_graph=self.keep_graph, allow_unused=True)
                )
        else:
            found = iter((None,) * len(wanted))
        for name, leaves in record.inputs.items():
            gradients = [next(found) if _has_grad(leaf) else None for leaf in leaves]
            homes = record.homes[name]
            self.gradients[name, i] = [
                g if g is None else g.to(d) for g, d in zip(gradients, homes, strict=True)
            ]
        for fqn in owned:
            gradient = next(found)
            if self.chains[fqn][0] == stage.index:
                self.sums[fqn].add(i, gradient)
            elif gradient is not None:
                self.parameter_gradients[fqn, i] = gradient

    # -- values ------------------------------------------------------------------------------------------------

    def _publish(self, name: str, i: int, value: Any) -> None:
        """Make a value readable for later stages: detached, and marked with whether it needs a gradient."""
        readers = len(self.readers[name]) + (name in self.results)
        if readers:
            self.values[name, i] = tree_map(_handed_over, value)
            self.unread[name, i] = readers

    def _take(self, name: str, i: int) -> Any:
        """A leaf of its own for this reader; the value is dropped after the last one."""
        value = tree_map(_handed_over, self.values[name, i])
        with self.lock:
            self.unread[name, i] -= 1
            if not self.unread[name, i]:
                del self.values[name, i]
        return value

    # -- circumstances -------------------------------------------------------------------------------------------

    def _is_recomputed(self, micro_batch: int) -> bool:
        if self.checkpoint == "except_last":
            return micro_batch < len(self.chunks) - 1
        return bool(self.checkpoint != "never")  # chosen regions are recomputed in every micro-batch

    @contextlib.contextmanager
    def _random_numbers(self, stage: Stage, i: int, *, recomputed: bool = False) -> Iterator[None]:
        if self.base_seed is None or not stage.random or (recomputed and not self._is_recomputed(i)):
            yield
            return
        with seeded(stage_seed(self.base_seed, i, stage.index), stage.device):
            yield

    @contextlib.contextmanager
    def _errors_say_where(self, action: Action) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            stage = self.program.stages[action.stage]
            what = "forward" if action.kind == "F" else "backward"
            first, last = stage.modules
            span = first if first == last else f"{first} … {last}"
            error.add_note(
                f"fxsplit: in the {what} of stage {action.stage} ({span or 'the model'}, on {stage.device}), "
                f"micro-batch {action.micro_batch} of {len(self.chunks)}, action {action}{users_line(error)}"
            )
            raise


def _home(leaf: Any) -> torch.device | None:
    return leaf.device if isinstance(leaf, torch.Tensor) else None


def _has_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _handed_over(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)
