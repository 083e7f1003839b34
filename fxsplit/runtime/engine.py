"""Who plays the program of one mode: what is known of it between calls, and a call of it."""

from __future__ import annotations

import copy
import functools
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..batch.scattered import Scattered
from ..compat import tree_unflatten
from ..compiled import Compiled
from ..errors import ArgumentError
from ..graph.binding import rebound
from ..graph.nodes import bind
from ..loss.criterion import Criterion
from ..loss.inside import LossInside, Said
from ..loss.losses import LossInParts, in_parts
from ..loss.reductions import LossFn
from ..replicas.replicas import Company, Replica, plain_replicas
from ..saving.skeleton import Skeleton
from .autograd import PipelineFunction
from .call import Call, Circumstances
from .crew import Crew
from .events import Listener
from .guarded import Guarded, buffers_as_before
from .hub import Here
from .inputs import Inputs
from .reentry import check_not_inside, computing_for
from .step import step_inside, takes_step
from .torch_compile import check_can_be_compiled, compile_modules, is_put_aside
from .watch import Watch


class Common:
    """What the programs of one pipeline have in common: they are played one at a time, over one model.

    Attributes:
        lock: held by whoever plays.
        listeners: called after every instruction.
        company: the copies of the model.
        left: threads that still wait for a copy that has failed.
        said: what was compared of losses whose reduction the user says.
        serial: play everything in the calling thread (the oracle of the tests).
        options: of `torch.compile`, where it compiles the stages.
        hub: where the stages are.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.listeners: OrderedDict[int, Listener] = OrderedDict()
        self.company = Company()
        self.left: list[threading.Thread] = []
        self.said = Said()
        self.serial = False
        self.options: Mapping[str, Any] | None = None
        self.hub = Here()


class Batch:
    """The arguments of one call: whole, in micro-batches, and how many rows each has."""

    def __init__(
        self, inputs: Sequence[torch.Tensor], chunks: list[list[torch.Tensor]], rows: list[int]
    ) -> None:
        self.inputs, self.chunks, self.rows = inputs, chunks, rows


class Engine:
    """Plays one program of a pipeline.

    Attributes:
        compiled: the program, and what it was made of.
        crew, watch: who plays it, and whether the model is still what it was made for.
        loss_inside: whether a step computes the loss for each micro-batch.
    """

    def __init__(self, model: nn.Module, compiled: Compiled, common: Common) -> None:
        self.model, self.compiled, self.common = model, compiled, common
        plan, program = compiled.plan, compiled.program
        self.crew = Crew(model, plan, program, common.company, common.left)
        self.watch = Watch(model, compiled.traced, program)
        self.inputs = Inputs(model, compiled)
        self.loss_inside = plan.loss_inside
        self._checkpoint, self._schedule = plan.recomputation, plan.schedule_name
        visible = program.outputs[: compiled.merges.shown]
        homes = [program.homes.get(v) if isinstance(v, str) else None for v in visible]
        self._homes = homes if any(homes) else []  # where the device map sends outputs
        # How the outputs merge that are not the same in all calls.
        self._varying = [m for m, v in zip(compiled.merges, visible, strict=False) if isinstance(v, str)]

    def compile_stages(self, options: Mapping[str, Any]) -> None:
        """Let `torch.compile` compile the stages.

        Raises:
            PlanError: they cannot be.
        """
        check_can_be_compiled(self.compiled, self.crew.tapes, options)
        compile_modules([stage.module for stage in self.compiled.stages], options)

    # -- a call --------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output: for the whole batch, or as the plan says."""
        compiled, batch = self.compiled, self.batch(args, kwargs)
        gather = compiled.plan.gather or takes_step(self.common.lock)
        flat, devices = self.run(batch, gather=gather)
        spec = compiled.traced.out_spec
        if gather:
            return tree_unflatten(list(map(_sent, flat[0], self._homes)) if self._homes else flat[0], spec)
        known = None if compiled.dims.batch_size(batch.inputs) is None else batch.rows
        return Scattered(flat, spec, known, devices, compiled.merges)

    def batch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
        """The arguments of a call, in micro-batches.

        Raises:
            ArgumentError, AssumptionError, BatchError: they are not like the example's.
        """
        check_not_inside(self.common.lock, self._schedule)
        inputs = self.inputs.flat(args, kwargs)
        self.watch.asked.check(inputs)
        self.inputs.refuse_writes(inputs)
        rows = self.crew.rows(self.compiled.dims.batch_size(inputs))
        self._check_mode()
        return Batch(inputs, self.inputs.split(inputs, rows), rows)

    def _check_mode(self) -> None:
        if self.model.training not in self.compiled.traced.modes:
            now, then = ("train", "eval") if self.model.training else ("eval", "train")
            raise ArgumentError(
                f"the pipeline is in {now} mode, but its example could be run in {then} mode only when it was compiled",
                remedy="compile with an example that both modes take (batch normalisation wants 2 rows)",
            )

    def micro_batches(self, inputs: Sequence[torch.Tensor]) -> tuple[list[list[torch.Tensor]], list[int]]:
        """The flat inputs of each micro-batch, and its rows.

        Raises:
            ArgumentError: these are no flat inputs.
        """
        self.inputs.check_flat(inputs)
        rows = self.crew.rows(self.compiled.dims.batch_size(inputs))
        return self.compiled.dims.split(inputs, rows), list(rows)

    def run(
        self,
        batch: Batch,
        *,
        gather: bool,
        plain: bool = False,
    ) -> tuple[list[list[Any]], Sequence[torch.device]]:
        """The flat outputs of the batch, or of each micro-batch; and the devices of the micro-batches.

        Args:
            plain: every stage once, without its other replicas.
        """
        inputs, common = batch.inputs, self.common
        with common.lock:
            self.watch.use_current_modules()
            parameters = self.watch.trainable()
            grad = torch.is_grad_enabled() and any(t.requires_grad for t in (*inputs, *parameters.values()))
            new = self.watch.circumstances(inputs)
            call = self._call(batch.chunks, parameters, grad=grad, plain=plain, asked=new is not None)
            # In a step, who takes it puts the buffers back.
            written = () if takes_step(common.lock) else self.watch.written()
            runner = Guarded(common.lock, written, call, self.compiled, batch.rows, gather)
            with self.crew.anew_after_failure(call):
                if grad:
                    tensors: Sequence[torch.Tensor] = PipelineFunction.apply(  # type: ignore[no-untyped-call]
                        runner, *inputs, *parameters.values()
                    )
                else:
                    tensors, _ = runner.forward()
            if new is not None:
                self.watch.asked.passed(new)
        flat = runner.results(tensors, [inputs] if gather else batch.chunks)
        return flat, () if gather else runner.devices()

    def run_whole(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Flat outputs for flat inputs, as one micro-batch."""
        self.inputs.check_flat(inputs)
        batch = Batch(inputs, [list(inputs)], [1])
        flat, _ = self.run(batch, gather=True, plain=True)
        return flat[0]

    def run_in(self, rows: list[int], inputs: Sequence[torch.Tensor]) -> list[Any]:
        """The same in micro-batches of so many rows."""
        batch = Batch(inputs, self.compiled.dims.split(inputs, rows), rows)
        flat, _ = self.run(batch, gather=True, plain=True)
        return flat[0]

    def _call(
        self,
        chunks: list[list[torch.Tensor]],
        parameters: dict[str, nn.Parameter],
        *,
        grad: bool,
        plain: bool = False,
        asked: bool = False,
    ) -> Call:
        count, crew, common, plan = len(chunks), self.crew, self.common, self.compiled.plan
        meets = crew.meets(count)
        crew.check_can_meet(meets)
        replicas: Mapping[int, Sequence[Replica]]
        if plain and not any(s.offloaded for s in self.compiled.stages):
            replicas = plain_replicas(self.compiled.program)
        else:
            found = crew.replicas()
            found.tell()
            replicas = found.now(parameters)
        shared, watched = crew.watching(count)
        tape = crew.tape_for(count, meets)
        if not common.hub.everything:
            tape = common.hub.tape(tape, crew.wiring)
        compiled = common.options is not None or is_put_aside()
        if compiled:
            check_can_be_compiled(self.compiled, [tape])
        serial = common.serial or (compiled and self.watch.may_compile_anew(chunks, grad=grad))
        how = Circumstances(
            grad=grad,
            checkpoint=self._checkpoint,
            compiled_as=self.compiled,
            inside=functools.partial(computing_for, common.lock),
            serial=serial,
            intra_op=plan.threads,
            listeners=tuple(common.listeners.values()),
            norms=crew.norms(meets, replicas),
            drawing=crew.drawing(),
            halved=self.watch.halved() if tape.halves else frozenset(),
            shared=shared,
            watched=watched,
            anomaly=plan.detect_anomaly,
            compiled=compiled,
            asked=asked,
            hub=common.hub,
            rows=self.compiled.dims.batch_size,
        )
        return Call(crew.wiring, tape, chunks, parameters, how, replicas)

    # -- a step with the loss inside -------------------------------------------------------------------------------

    def step(
        self, batch: Batch, loss_fn: LossFn, target: Any, reduction: str | None, *, output: bool
    ) -> tuple[torch.Tensor, Any]:
        """The loss of the batch, and the output of the whole batch if that is asked for; gradients are added to ``.grad``.

        Raises:
            ArgumentError: the reduction of the loss is not known, or not what is said.
        """
        parts = self._in_parts(loss_fn, target, batch.rows, reduction)
        common, compiled = self.common, self.compiled
        with common.lock:
            self.watch.use_current_modules()
            parameters = self.watch.trainable()
            new = self.watch.circumstances(batch.inputs)
            call = self._call(batch.chunks, parameters, grad=True, asked=new is not None)
            runner = Guarded(common.lock, (), call, compiled, batch.rows)
            around = functools.partial(computing_for, common.lock)
            spec = compiled.traced.out_spec
            loss = LossInside(parts, compiled.program.outputs, spec, around, call.seed)
            with buffers_as_before(self.watch.written()), self.crew.anew_after_failure(call):
                check = common.said.check_of(loss, compiled.merges, target)
                step_inside(runner, loss, [*batch.inputs, *parameters.values()], check)
            if new is not None:
                self.watch.asked.passed(new)
        whole = tree_unflatten(runner.merged(loss.rows()), spec) if output else None
        return loss.total(), whole

    def _in_parts(
        self, loss_fn: LossFn, target: Any, rows: Sequence[int], reduction: str | None
    ) -> LossInParts:
        if isinstance(loss_fn, Criterion):
            reduction, loss_fn = reduction or loss_fn.reduction, loss_fn.loss_fn
        try:
            return in_parts(loss_fn, target, rows, reduction, self._varying)
        except ArgumentError as error:
            what = f"schedule={self._schedule!r}: {error.what}"
            raise ArgumentError(what, where=error.where, remedy=error.remedy) from error.__cause__


def engines(model: nn.Module, compiled: Mapping[bool, Compiled]) -> dict[bool, Engine]:
    """Who plays in each mode; one for both where one program does."""
    common = Common()
    made = {id(one): Engine(model, one, common) for one in compiled.values()}
    return {mode: made[id(one)] for mode, one in compiled.items()}


def over(compiled: Mapping[bool, Compiled], model: nn.Module) -> dict[bool, Compiled]:
    """The same programs over another model of the same tree."""
    made: dict[int, Compiled] = {}
    for one in reversed({id(one): one for one in compiled.values()}.values()):
        traced, program = one.traced, one.program
        to_fqn = {name: fqn for fqn, name in traced.names.items()}
        other = next((m.traced for m in made.values()), None)
        traced = replace(traced, module=rebound(traced.module, to_fqn, model), other_mode=other)
        stages = tuple(replace(s, module=rebound(s.module, s.paths, model)) for s in program.stages)
        named: dict[str, Any] = {f"stage_{s.index}": s.module for s in stages}
        root = bind(copy.deepcopy(program.root.graph), named, "Program")
        program = replace(program, stages=stages, root=root)
        made[id(one)] = replace(one, traced=traced, program=program)
    found = {mode: made[id(one)] for mode, one in compiled.items()}
    if isinstance(model, Skeleton):
        model.runs(next(iter(found.values())).traced)
    return found


def _sent(value: Any, home: torch.device | None) -> Any:
    """An output where the device map sends it; moved in the caller's autograd graph."""
    return value.to(home) if home is not None and isinstance(value, torch.Tensor) else value
