"""`Pipeline`: the model's own tree with a forward that plays the program."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .arguments import explained
from .batch.dims import BatchDims
from .batch.merge import Merge, shown
from .batch.scattered import Scattered
from .compat import has_tangent, in_forward_mode, tree_leaves, tree_unflatten
from .cost.saved import Live, measured_saved
from .errors import ArgumentError, GradientError, MoveError, PlanError, SerializeError, StageIndexError
from .graph.assumptions import attribute_tensors
from .graph.binding import rebound
from .graph.effects import has_hooks
from .graph.ir import Assignment, Program, Stage, Traced
from .graph.nodes import bind, output_names
from .graph.place import gathered
from .loss.criterion import Criterion
from .loss.inside import LossInside
from .loss.losses import LossInParts, check_loss_fn, in_parts
from .loss.reductions import LossFn
from .loss.said import what_counts
from .memory.kept import kept_by_device
from .plan.plan import Plan
from .proof.numerics import verify_numerics
from .proof.plan import in_micro_batches, verify_sizes
from .proof.structure import RULES, verify_structure
from .replicas.replicas import Replica, Replicas, plain_replicas
from .report.tables import stage_table
from .runtime.autograd import PipelineFunction
from .runtime.call import Call, Circumstances
from .runtime.crew import Crew
from .runtime.ddp import Reducers
from .runtime.events import ActionHook
from .runtime.guarded import Guarded, buffers_as_before, written_buffers
from .runtime.hooks import call_with_hooks
from .runtime.model_face import handed_on, says_what_it_takes
from .runtime.reentry import check_not_inside, computing_for
from .runtime.step import call_merged, step_inside, step_outside, wants_merged
from .runtime.watch import Watch
from .saving.save import save_code
from .saving.skeleton import Skeleton
from .schedules.schedule import Schedule
from .schedules.simulate import staircase
from .schedules.tape import Tape

_LOSS = dict.fromkeys(("loss", "criterion", "loss_function"), "pipe.step(x, target=y, loss_fn=...)")
_PROVEN = 1024  # micro-batches, at most
_MOST = 2**20  # micro-batches of a schedule that is shown


class Pipeline(nn.Module):
    """What `fxsplit.compile` returns. Children, parameters, buffers, state_dict and modes are the model's own.

    ``len(pipe)``, ``pipe[i]`` and iteration give the stages.

    Attributes:
        model: the user's model.
        plan, traced, assignment, program: what the compiler made, in order.
        example: the flat example inputs.
        other_mode: the pipeline of the other mode (train or eval), where the model takes another path in it.
    """

    model: nn.Module
    plan: Plan
    traced: Traced
    assignment: Assignment
    program: Program
    dims: BatchDims
    merges: list[Merge]
    example: list[torch.Tensor]
    other_mode: Pipeline | None
    _lock: threading.RLock
    _serial: bool
    _said: Any
    _crew: Crew
    _watch: Watch
    _read_on: list[set[torch.device]]
    _homes: list[torch.device | None]
    _written: Mapping[int, str | None]
    _action_hooks: OrderedDict[int, ActionHook]
    _reducers: Reducers
    _compiler: Callable[..., Pipeline] | None
    _kind: torch.dtype | None

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        traced: Traced,
        assignment: Assignment,
        program: Program,
        dims: BatchDims,
        merges: Sequence[Merge],
        example: Sequence[torch.Tensor],
        other_mode: Pipeline | None = None,
    ) -> None:
        super().__init__()
        own = self.__dict__
        own["model"] = model  # not a child: the tree below is the model's own
        own["_parameters"], own["_buffers"], own["_modules"] = (
            model._parameters,
            model._buffers,
            model._modules,
        )
        own["_non_persistent_buffers_set"] = model._non_persistent_buffers_set
        # Past nn.Module.__setattr__: the model may have a child of one of these names.
        own.update(plan=plan, traced=traced, assignment=assignment, program=program)
        own.update(example=list(example), dims=dims, merges=list(merges), other_mode=other_mode)
        lock = threading.RLock() if other_mode is None else other_mode._lock
        own.update(_lock=lock, _serial=False, _said=None, _reducers=Reducers(), _compiler=None)
        own["_kind"] = _floating_type(model)
        own.update(
            _crew=Crew(model, plan, program, None if other_mode is None else other_mode._crew),
            _watch=Watch(model, traced, program),
        )
        own["_read_on"] = [
            {torch.device(d) for s in program.stages if name in s.inputs for d in assignment.rows[s.index]}
            for name in program.inputs
        ]
        own["_written"] = _written_arguments(traced)
        own["_homes"] = [
            program.homes.get(v) if isinstance(v, str) else None for v in program.outputs[: shown(merges)]
        ]
        own["_action_hooks"] = OrderedDict() if other_mode is None else other_mode._action_hooks

    # -- running -------------------------------------------------------------------------------------------------

    @says_what_it_takes
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for the whole batch; differentiable, whatever the loss outside.

        With ``Plan(gather=False)`` the outputs of the micro-batches, as a `fxsplit.Scattered`. Hooks of the model itself
        then get that.

        Raises:
            ArgumentError: an argument is missing, unknown, or not like the example's.
            BatchError: the arguments disagree on the batch.
        """
        return call_with_hooks(self.model, self.active._forward, args, kwargs)

    @property
    def active(self) -> Pipeline:
        """The pipeline of the mode that the model is in: this one, or `other_mode`."""
        if self.other_mode is None or self.model.training in self.traced.modes:
            return self
        return self.other_mode

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs, chunks, rows = self._split(args, kwargs)
        gather = self.plan.gather or wants_merged(self._lock)
        flat, devices = self._run(inputs, chunks, rows, gather)
        if gather:
            return tree_unflatten(list(map(_sent, flat[0], self._homes)), self.traced.out_spec)
        known = None if self.dims.batch_size(inputs) is None else rows
        return Scattered(flat, self.traced.out_spec, known, devices, self.merges)

    def _split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[torch.Tensor], list[list[torch.Tensor]], list[int]]:
        """The flat inputs, those of each micro-batch, and its rows."""
        check_not_inside(self._lock, self.plan.schedule_name)
        inputs = self._placed(self.traced.signature.flatten(args, kwargs))
        self._watch.asked.check(inputs)
        self._refuse_writes(inputs)
        chunks, rows = self.micro_batches(inputs)
        for i in self._written if len(rows) > 1 else ():
            if not inputs[i].is_inference():
                torch.autograd.graph.increment_version(inputs[i])
            for chunk in chunks:  # what one micro-batch writes is no change of what another has saved
                chunk[i] = chunk[i].data
        self._refuse_tangents(inputs)
        if self.model.training not in self.traced.modes:
            now, then = ("train", "eval") if self.model.training else ("eval", "train")
            raise ArgumentError(
                f"the pipeline is in {now} mode, but its example could be run in {then} mode only when it was compiled",
                remedy="compile with an example that both modes take (batch normalisation wants 2 rows)",
            )
        return inputs, chunks, rows

    def _placed(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs where the program reads them: where the example was, or already where all its readers are.

        What is moved here is moved in the caller's autograd graph: its gradient goes back to the caller's device.
        """
        slots = list(zip(inputs, self.traced.signature.arguments, self._read_on, strict=True))
        if any(x.device != a.device for x, a, _ in slots):
            self._check_homes()
        return [x if x.device == a.device or read <= {x.device} else x.to(a.device) for x, a, read in slots]

    def _check_homes(self) -> None:
        """Refuse a model that was moved after it was compiled: its arguments have been moved, too.

        Raises:
            ArgumentError: a parameter is not on the device of its stage.
        """
        for stage in self.stages:
            homes = {torch.empty(0, device=d).device for d in (stage.row or (stage.device,))}
            for fqn, parameter in stage.named_parameters():
                if parameter.device not in homes:
                    raise ArgumentError(
                        f"{fqn} is on device {parameter.device}, and its stage on {stage.device}: the model was moved after "
                        "it was compiled",
                        remedy="pipe.recompile(), which compiles it where it is now",
                    )

    def _refuse_writes(self, inputs: Sequence[torch.Tensor]) -> None:
        """Refuse an argument that forward writes to in place where autograd records it.

        Eagerly the caller's tensor would get another history. Here its history is the caller's, and stages have leaves.
        """
        for i, where in self._written.items():
            if inputs[i].requires_grad and torch.is_grad_enabled():
                name = self.traced.signature.arguments[i].name
                raise ArgumentError(
                    f"forward writes in place to argument {name!r}, which requires gradients",
                    where=where,
                    remedy=f"{name} = {name}.clone() at the beginning of forward, then compile again; or pass {name}.detach(), "
                    "if nobody needs the gradient",
                )

    def _refuse_tangents(self, inputs: Sequence[torch.Tensor]) -> None:
        every = (t for ts in (inputs, self.model.parameters(), self.model.buffers()) for t in ts)
        if in_forward_mode() and any(map(has_tangent, every)):
            raise GradientError(
                "forward-mode differentiation does not go through a pipeline, and an argument or parameter has a tangent",
                remedy="compute it with the model itself: pipe.unsplit()",
            )

    def run_whole(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Flat outputs for flat inputs, as one micro-batch."""
        self._check_flat(inputs)
        replicas = plain_replicas(self.program)
        flat, _ = self._run(inputs, [list(inputs)], [1], gather=True, replicas=replicas)
        return flat[0]

    def _run(
        self,
        inputs: Sequence[torch.Tensor],
        chunks: list[list[torch.Tensor]],
        rows: list[int],
        gather: bool,
        replicas: Mapping[int, Sequence[Replica]] | None = None,
    ) -> tuple[list[list[Any]], list[torch.device]]:
        """The flat outputs of the batch, or of each micro-batch; and the devices of the micro-batches."""
        with self._lock:
            self._watch.use_current_modules()
            parameters = self._trainable()
            grad = torch.is_grad_enabled() and any(t.requires_grad for t in (*inputs, *parameters.values()))
            new = self._watch.circumstances(inputs)
            call = self._call(chunks, parameters, grad=grad, replicas=replicas, asked=new is not None)
            runner = Guarded(self._lock, self.model, call, self.dims, self.merges, rows, gather)
            with self._crew.anew_after_failure(call):
                if grad:
                    tensors: Sequence[torch.Tensor] = PipelineFunction.apply(  # type: ignore[no-untyped-call]
                        runner, *inputs, *parameters.values()
                    )
                else:
                    tensors, _ = runner.forward()
            if new is not None:
                self._watch.asked.passed(new)
        return runner.results(tensors, [inputs] if gather else chunks), runner.devices()

    def _call(
        self,
        chunks: list[list[torch.Tensor]],
        parameters: dict[str, nn.Parameter],
        *,
        grad: bool,
        replicas: Mapping[int, Sequence[Replica]] | None = None,
        asked: bool = False,
    ) -> Call:
        count, crew = len(chunks), self._crew
        meets = crew.meets(count)
        crew.check_can_meet(meets)
        if replicas is None:
            found = crew.replicas()
            found.tell()
            replicas = found.now(parameters)
        shared, watched = crew.watching(count)
        tape = crew.tape_for(count, meets)
        how = Circumstances(
            grad=grad,
            checkpoint=self.plan.recomputation,
            inside=functools.partial(computing_for, self._lock),
            serial=self._serial,
            intra_op=self.plan.threads,
            hooks=tuple(self._action_hooks.values()),
            norms=crew.norms(meets, replicas),
            drawing=crew.drawing(),
            halved=self._watch.halved() if tape.halves else frozenset(),
            shared=shared,
            watched=watched,
            anomaly=self.plan.detect_anomaly,
            asked=asked,
            rows=self.dims.batch_size,
        )
        return Call(crew.wiring, tape, chunks, parameters, how, replicas)

    def refresh_replicas(self) -> None:
        """Copy all parameters and buffers anew to replicas on other devices, in the next call.

        They follow optimizers, ``load_state_dict``, in-place operations and ``p.data = q`` by themselves. What is written
        through ``p.data`` in place (``p.data.mul_(2)``) leaves no trace: call this after it.
        """
        with self._lock:
            self._crew.refresh()

    def make_replicas(self) -> Replicas:
        """What the replicas of stages run. A call makes it, too, and tells the modules of it."""
        return self._crew.replicas()

    @explained(ArgumentError, "pipe.step(x, target=y, loss_fn=nn.functional.mse_loss)", _LOSS)
    def step(
        self,
        *args: Any,
        loss_fn: Callable[..., torch.Tensor],
        target: Any = None,
        reduction: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Forward, loss and backward of one batch; gradients are added to ``.grad``.

        The loss is that of the whole batch. Under GPipe `loss_fn` sees the merged output once, so every reduction is
        right. Schedules that go backward before all forwards are done compute it for each micro-batch, and weigh it:
        they know the reductions of PyTorch's losses, with `ignore_index` and weights of classes, and have to be told
        that of any other.

        Args:
            args, kwargs: the model's.
            loss_fn: ``loss_fn(output, target)``, or ``loss_fn(output)`` where `target` is None.
            target: a tensor or any structure of them, with a row for each of the batch.
            reduction: ``"mean"`` or ``"sum"`` over rows, of a `loss_fn` that is none of PyTorch's.

        Returns:
            The loss, detached; 0-dim.

        Raises:
            ArgumentError: the loss is not a single number, or its reduction is not known; or
                `DistributedDataParallel` would not reduce the gradients.
            ArgumentError, BatchError: as a call.
        """
        loss, _ = self.step_with_output(*args, loss_fn=loss_fn, target=target, reduction=reduction, **kwargs)
        return loss

    @explained(ArgumentError, "pipe.step(x, target=y, loss_fn=nn.functional.mse_loss)", _LOSS)
    def step_with_output(
        self,
        *args: Any,
        loss_fn: Callable[..., torch.Tensor],
        target: Any = None,
        reduction: str | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        """As `step`; returns the loss and the output of the whole batch, detached: for metrics and logs."""
        check_loss_fn(loss_fn, reduction)
        with torch.enable_grad():
            self._reducers.check(self.model)
            if self.plan.loss_inside and not has_hooks(self.model) and not has_hooks(self):
                inputs, chunks, rows = self.active._split(args, kwargs)
                if len(rows) > 1:
                    known, outputs = self.active.merges, self.active.program.outputs
                    merges = [
                        m for m, v in zip(known[: shown(known)], outputs, strict=False) if isinstance(v, str)
                    ]
                    if isinstance(loss_fn, Criterion):
                        reduction, loss_fn = reduction or loss_fn.reduction, loss_fn.loss_fn
                    try:
                        loss_of = in_parts(loss_fn, target, rows, reduction, merges)
                    except ArgumentError as error:
                        what = f"schedule={self.plan.schedule_name!r}: {error.what}"
                        raise ArgumentError(what, where=error.where, remedy=error.remedy) from error.__cause__
                    return self.active._step_inside(inputs, chunks, rows, loss_of, target)
            with self._lock:
                self.active._watch.use_current_modules()
            with buffers_as_before(written_buffers(self.active.program, self.model)):
                return step_outside(
                    functools.partial(call_merged, self, self._lock), args, kwargs, loss_fn, target
                )

    def _step_inside(
        self,
        inputs: list[torch.Tensor],
        chunks: list[list[torch.Tensor]],
        rows: list[int],
        loss_of: LossInParts,
        target: Any,
    ) -> tuple[torch.Tensor, Any]:
        with self._lock:
            self._watch.use_current_modules()
            parameters = self._trainable()
            new = self._watch.circumstances(inputs)
            call = self._call(chunks, parameters, grad=True, asked=new is not None)
            runner = Guarded(self._lock, self.model, call, self.dims, self.merges, rows)
            around = functools.partial(computing_for, self._lock)
            loss = LossInside(loss_of, self.program.outputs, self.traced.out_spec, around, call.seed)
            with (
                buffers_as_before(written_buffers(self.program, self.model)),
                self._crew.anew_after_failure(call),
            ):
                check = self._said_of(loss, target)
                outputs = step_inside(runner, loss, [*inputs, *parameters.values()], check)
            if new is not None:
                self._watch.asked.passed(new)
        return loss.total(), tree_unflatten(outputs, self.traced.out_spec)

    def _said_of(self, loss: LossInside, target: Any) -> Callable[[], None]:
        """What compares a loss whose reduction the user says, where it has not been compared for such targets yet."""
        parts = loss.loss
        key = (
            getattr(parts.loss_fn, "__code__", parts.loss_fn),
            parts.reduction.how,
            what_counts(parts.targets, parts.rows),
        )
        if parts.reduction.over != "said" or key == self._said:
            return lambda: None
        loss.keeps = True

        def check() -> None:
            loss.check_said(self.merges, target)
            self.__dict__["_said"] = key

        return check

    def criterion(self, loss_fn: LossFn, reduction: str | None = None) -> Criterion:
        """A loss of ``pipe(x)`` that is that of the whole batch, computed where the parts of the output are.

        ``pipe.criterion(loss_fn)(pipe(x), target)``, with ``Plan(gather=False)`` or without.

        Args:
            loss_fn, reduction: as of a `fxsplit.Criterion`.

        Raises:
            ArgumentError: `loss_fn` is not callable, or `reduction` is not its own.
        """
        return Criterion(loss_fn, reduction)

    def register_action_hook(self, hook: ActionHook) -> RemovableHandle:
        """Call ``hook(event)`` after every action of a call, with a `fxsplit.ActionEvent`.

        Hooks run in the workers' threads, one action at a time of each worker. An error in one ends the call as an
        error of the action would. For logs and timelines; what a hook sees is not the model's to compute with.

        Returns:
            A handle; ``handle.remove()`` takes the hook away.
        """
        if not callable(hook):
            raise ArgumentError(
                f"the hook is a {type(hook).__name__}, which cannot be called",
                remedy="pipe.register_action_hook(lambda event: print(event))",
            )
        handle = RemovableHandle(self._action_hooks)
        self._action_hooks[handle.id] = hook
        return handle

    def micro_batches(self, inputs: Sequence[torch.Tensor]) -> tuple[list[list[torch.Tensor]], list[int]]:
        """The flat inputs of each micro-batch, and its rows.

        Raises:
            ArgumentError: these are no flat inputs.
        """
        self._check_flat(inputs)
        rows = self._crew.rows(self.dims.batch_size(inputs))
        return self.dims.split(inputs, rows), rows

    def _check_flat(self, inputs: Sequence[torch.Tensor]) -> None:
        names = self.program.inputs
        flat = isinstance(inputs, list | tuple) and all(isinstance(x, torch.Tensor) for x in inputs)
        if not flat or len(inputs) != len(names):
            raise ArgumentError(
                f"the flat inputs are {len(names)} tensor{'s' * (len(names) != 1)}: {', '.join(names)}",
                remedy="pipe.traced.signature.flatten(args, kwargs) makes them of the arguments of a call",
            )

    def schedule_for(self, micro_batches: int) -> Schedule:
        """The schedule of a batch that is split into this many micro-batches.

        Raises:
            ArgumentError: it is no number of micro-batches.
        """
        _check_count("schedule_for", micro_batches, self.plan)
        return self._crew.schedule_for(micro_batches, self._crew.meets(micro_batches))

    def tape_for(self, micro_batches: int) -> Tape:
        """What a call with this many micro-batches plays; proven.

        Raises:
            ArgumentError: it is no number of micro-batches.
        """
        _check_count("tape_for", micro_batches, self.plan)
        return self._crew.tape_for(micro_batches, self._crew.meets(micro_batches))

    def prove_schedule(self) -> None:
        """Prove the schedule of a batch like the example; of many micro-batches it goes on as it began.

        Raises:
            ScheduleError, PlanError: it cannot be played.
        """
        rows, count = self.dims.batch_size(self.example) or 1, self.plan.micro_batches
        own = isinstance(self.plan.schedule, Schedule)  # as long as it is written down
        self.tape_for(count if own else max(1, min(count, rows, _PROVEN)))

    @property
    def schedule(self) -> Schedule:
        """The schedule of a batch that fills every micro-batch."""
        return self.schedule_for(self.plan.micro_batches)

    @property
    def tape(self) -> Tape:
        """The schedule's instructions, each with what it comes after; ``print(pipe.tape)`` shows them."""
        return self.tape_for(self.plan.micro_batches)

    def _trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that get gradients. (torch.func.functional_call puts tensors there.)"""
        return {fqn: p for fqn, p in self._watch.parameters.items() if p.requires_grad}

    # -- looking -------------------------------------------------------------------------------------------------

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, in execution order."""
        return self.program.stages

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each stage."""
        return self.assignment.devices

    @property
    def hf_device_map(self) -> dict[str, str | tuple[str, str]]:
        """Module path → device (a string such as ``"cuda:0"``), as in Accelerate: ``Plan(device_map=...)`` takes it.

        It gives the same placement again, and the same code wherever neighbouring stages are on different devices:
        a map says devices, not cuts. On one device it is ``{"": device}``; otherwise the user's map, or one with the
        fewest keys.

        Raises:
            PlanError: the plan cuts inside of a module's own forward, or runs the program in another order: no map
                says that.
        """
        found = self.assignment.device_map
        if isinstance(found, str):
            raise PlanError(
                f"no device map says this plan: {found}",
                remedy="cut between modules, such as cut=[...], or hand on pipe.plan instead of pipe.hf_device_map",
            )
        return dict(found)

    def __len__(self) -> int:
        return len(self.stages)

    def __getitem__(self, index: int) -> Stage:
        """One stage.

        Raises:
            StageIndexError: there is none.
        """
        try:
            return self.stages[index]
        except (IndexError, TypeError):
            raise StageIndexError(
                f"pipe[{index!r}]: the pipeline has {len(self)} stage{'s' * (len(self) != 1)}",
                remedy=f"pipe[0] … pipe[{len(self) - 1}]; a module of the model is pipe.get_submodule({str(index)!r})",
            ) from None

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def __bool__(self) -> bool:
        return True

    def print_readable(self) -> str:
        """Print and return the code of all stages."""
        text = "\n\n".join(stage.code for stage in self.stages)
        print(text)
        return text

    def save_code(self, folder: str | os.PathLike[str]) -> None:
        """Write the stages as an importable package of plain modules, which `fxsplit.load` makes a pipeline of again.

        No pickle, no value of a parameter (save ``pipe.state_dict()``), no path of this machine; the same bytes in
        every process.

        Raises:
            SerializeError: the program has a function or constant that no file can name; nothing has been written.
        """
        if not isinstance(folder, str | os.PathLike):
            raise ArgumentError(f"the folder is a {type(folder).__name__}", remedy='pipe.save_code("folder")')
        save_code(self, folder)

    def verify(self) -> str:
        """Prove again that the program is the traced graph, and compare the numbers with the model's.

        Returns:
            What was shown, a line for each rule.

        Raises:
            VerifyError: names the rule or the first number that differs.
        """
        with self._lock:
            for pipe in (self, self.other_mode):
                if pipe is not None:
                    pipe._watch.use_current_modules()
                    verify_structure(self.model, pipe.traced, pipe.program)
            lines = [f"{rule.name}: holds ({rule.why})" for rule in RULES]
            now, example = self.active, self._example_now()
            beside = now._beside_example()
            # Backward in this thread, which has the lock: autograd's own for a device would wait for it.
            with (
                torch.autograd.set_multithreading_enabled(False),
                torch.set_grad_enabled(now.traced.assumptions.grad),
            ):
                verify_numerics(beside.model, beside.traced, now.run_whole, example, of=self.model)
                lines.append(
                    "numbers: outputs, gradients, buffers and random state equal the model's on the example"
                )
                if now.dims.batch_size(example) and self.plan.micro_batches > 1:
                    verify_sizes(
                        beside.model, beside.traced, now.dims, now.micro_batches(example)[1], example
                    )
                    if now.verify_micro_batches(example):
                        lines.append(
                            "micro-batches: the same, for the model on one micro-batch after the other"
                        )
        return "\n".join(lines)

    def verify_micro_batches(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Compare outputs and buffers with the model's on the same micro-batches, one after the other.

        Returns:
            False if they are not comparable: random numbers, or statistics of the whole batch.

        Raises:
            VerifyError: names the first value that differs.
        """
        _, rows = self.micro_batches(inputs)
        plan = self.plan
        random = any(stage.random for stage in self.stages) and self.model.training
        if random or plan.deferred_batch_norm or plan.sync_batch_norm or self._crew.meets(len(rows)):
            return False
        beside = self._beside_example()
        replicas = plain_replicas(self.program)

        def split(values: Sequence[torch.Tensor]) -> list[Any]:
            flat, _ = self._run(values, self.dims.split(values, rows), rows, gather=True, replicas=replicas)
            return flat[0]

        whole = in_micro_batches(beside.model, beside.traced, self.dims, self.merges, rows)
        # Without gradients: a loop goes backward with each micro-batch before the next one writes to buffers.
        with torch.no_grad():
            verify_numerics(beside.model, beside.traced, split, inputs, whole, of=self.model)
        return True

    def report(self) -> str:
        """The stage table: what each stage has and costs, how far from the best the cut can be, and the predicted bubble."""
        sizes = {name: p.numel() * p.element_size() for name, p in self.model.named_parameters()}
        table = stage_table(self.plan, self.traced, self.assignment, sizes)
        named = zip(output_names(self.traced), self.merges, strict=False)
        merges = [f"{name}: {m.how} over micro-batches, {m.note}" for name, m in named if m.note]
        return "\n".join([table, *merges])

    def memory(self) -> dict[torch.device, Live]:
        """Per device the bytes of activations that a batch like the example keeps for backward, by simulation.

        What autograd keeps is measured once on the example; parameters, buffers and arguments are not counted. The
        peak is with one region computed again; workers that share a device may each have one at the same time.
        Where the model is not on the example's device, it is measured on a copy that is.
        """
        with self._lock:
            beside = self._beside_example()
            saved = measured_saved(beside.model, beside.traced, self._example_now())
        count = len(self.micro_batches(self.example)[1])
        schedule = self.schedule_for(count)
        return kept_by_device(saved, self.traced, self.stages, schedule, count, self.plan.recomputation)

    def staircase(self) -> str:
        """The schedule as a picture, one column for each unit of time."""
        return staircase(self.tape)

    def _beside_example(self) -> Pipeline:
        """This pipeline if its model is on the example's device, else one over a copy of the model that is."""
        homes = dict.fromkeys(x.device for x in self.example)
        owned = [*self.model.parameters(), *self.model.buffers()]
        owned += [t for _, t in attribute_tensors(self.model) if t.dim()]
        if not homes or all(t.device in homes for t in owned):
            return self
        home, memo = next(iter(homes)), {}
        for tensor in owned:
            moved = tensor.detach().to(home, copy=True)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
        return self._over(copy.deepcopy(self.model, memo))

    def _example_now(self) -> list[torch.Tensor]:
        """The example, converted as the model was since: a floating point type that it had to the one that it has."""
        before, now = self._kind, _floating_type(self.model)
        if before is None or now is None or before == now:
            return self.example
        return [x.to(now) if x.dtype == before else x for x in self.example]

    def compiled_by(self, compiler: Callable[..., Pipeline]) -> None:
        """What makes this pipeline anew, from model, plan and example."""
        self.__dict__["_compiler"] = compiler

    def recompile(self, *args: Any, **kwargs: Any) -> Self:
        """Capture the model anew, as it is now, under the same plan; this pipeline is then the new one.

        For a model that has changed since it was compiled: a flag, a number, a module, a hook. The model may be spread
        over devices; its parameters come back to where the plan says. Where the plan names no device and the model has
        been moved to another one, it stays there.

        Args:
            args, kwargs: another example; else that of `fxsplit.compile`.

        Raises:
            ArgumentError: the pipeline was made from a state_dict: there is no forward to capture.
            FxsplitError: as `fxsplit.compile`; the pipeline and the model are as before.
        """
        if isinstance(self.model, Skeleton) or self._compiler is None:
            raise ArgumentError(
                "the pipeline was loaded without its model, and there is no forward to capture",
                remedy="fxsplit.load(folder, model), then pipe.recompile(); or fxsplit.compile(model, plan, ...)",
            )
        with self._lock:
            check_not_inside(self._lock, self.plan.schedule_name)
            example = self._example_now()
            tensors = [*self.model.parameters(), *self.model.buffers()]
            homes = {t.device for t in tensors}
            stays = len(homes) == 1 and self.plan.devices is None and self.plan.device_map is None
            if stays:
                home = next(iter(homes))
                example = [x.detach().to(home).requires_grad_(x.requires_grad) for x in example]
            if not (args or kwargs):
                args, kwargs = self.traced.signature.unflatten(example)
            with contextlib.nullcontext() if stays else gathered(self.model, _device_of((args, kwargs))):
                made = self._compiler(self.model, self.plan, example_args=args, example_kwargs=kwargs)
            self._become(made)
        return self

    def _become(self, made: Pipeline) -> None:
        """Take over all that a compile makes. Lock and hooks stay."""
        for one in (self, made.other_mode):
            if one is not None:
                one.__dict__.update(_lock=self._lock, _action_hooks=self._action_hooks)
        for name in ("plan", "traced", "assignment", "program", "dims", "merges", "example", "other_mode"):
            self.__dict__[name] = made.__dict__[name]
        self.__dict__.update(_crew=made._crew, _watch=made._watch, _kind=made._kind)
        self.__dict__.update(_read_on=made._read_on, _homes=made._homes, _written=made._written)

    def unsplit(self) -> nn.Module:
        """The user's model."""
        return self.model

    def extra_repr(self) -> str:
        return f"{len(self)} stages, {self.plan!r}"

    # -- the model's own behaviour ---------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """What is not the pipeline's own is the model's: ``config``, ``dtype``, a child module.

        Raises:
            NoAttributeError: the model does not have it, or it is a method that computes with the unsplit model.
        """
        with contextlib.suppress(AttributeError):
            return super().__getattr__(name)
        return handed_on(self.__dict__.get("model"), name)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model."""
        self.model.train(mode)
        return self

    @property
    def training(self) -> bool:
        """The model's own."""
        model = self.__dict__.get("model")
        return True if model is None else bool(model.training)

    @training.setter
    def training(self, mode: bool) -> None:
        model = self.__dict__.get("model")
        if model is not None:
            model.training = mode

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """The model's own."""
        return self.model.load_state_dict(state_dict, strict=strict, assign=assign)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """What ``to``, ``cuda``, ``half`` and the like call: a dtype may change, a device may not."""
        for device in {t.device for t in (*self.model.parameters(), *self.model.buffers())}:
            try:
                moves = fn(torch.empty(0, device=device)).device != device
            except (RuntimeError, AssertionError):  # a device that is not there
                moves = True
            if moves:
                raise MoveError(
                    "a pipeline is not moved: the plan owns the placement of every stage",
                    remedy="fxsplit.compile(pipe.unsplit(), pipe.plan.replace(devices=...), example_args=...)",
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        """An independent pipeline over a deep copy of the model."""
        found = self._over(copy.deepcopy(self.model, memo))
        for one in (found, found.other_mode):
            if one is not None:
                one._watch.use_current_modules()
        found.active.make_replicas().tell()
        return found

    def _over(self, model: nn.Module) -> Pipeline:
        to_fqn = {name: fqn for fqn, name in self.traced.names.items()}
        traced = replace(self.traced, module=rebound(self.traced.module, to_fqn, model))
        stages = tuple(replace(s, module=rebound(s.module, s.paths, model)) for s in self.program.stages)
        root = bind(
            copy.deepcopy(self.program.root.graph), {f"stage_{s.index}": s.module for s in stages}, "Program"
        )
        program = replace(self.program, stages=stages, root=root)
        other = None if self.other_mode is None else self.other_mode._over(model)
        if other is not None:
            traced = replace(traced, other_mode=other.traced)
        if isinstance(model, Skeleton):
            model.runs(traced)
        found = Pipeline(
            model, self.plan, traced, self.assignment, program, self.dims, self.merges, self.example, other
        )
        found.__dict__["_compiler"] = self._compiler
        return found

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise SerializeError(
            "a Pipeline is not pickled: it would run code when loaded",
            remedy="pipe.save_code(folder) and torch.save(pipe.state_dict(), path); then fxsplit.load(folder, model)",
        )


def _floating_type(model: nn.Module) -> torch.dtype | None:
    """That of the parameters, where they have one."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return kinds.pop() if len(kinds) == 1 else None


def _written_arguments(traced: Traced) -> dict[int, str | None]:
    """Which arguments the program may write to in place, by position, and in which line."""
    inputs = [n.name for n in traced.graph.nodes if n.op == "placeholder"]
    own = {s: i for i, name in enumerate(inputs) for s in traced.facts[name].storages}
    found: dict[int, str | None] = {}
    for name in (n.name for n in traced.graph.nodes if n.name not in inputs):
        fact = traced.facts[name]
        for i in sorted(own[s] for s in fact.writes & own.keys()):
            found.setdefault(i, fact.source.with_text() if fact.source else None)
    return found


def _sent(value: Any, home: torch.device | None) -> Any:
    """An output where the device map sends it; moved in the caller's autograd graph."""
    return value.to(home) if home is not None and isinstance(value, torch.Tensor) else value


def _device_of(example: Any) -> torch.device:
    return next(leaf.device for leaf in tree_leaves(example) if isinstance(leaf, torch.Tensor))


@explained(ArgumentError, "fxsplit.verify(pipe)")
def verify(pipe: Pipeline) -> str:
    """Prove that the pipeline is the model: every rule of the program, and the numbers on the example.

    Returns:
        A line for each rule, with the reason that it is one.

    Raises:
        VerifyError: names the rule, the node and the user's line, or the first number that differs.
        ArgumentError: `pipe` is no pipeline.
    """
    if not isinstance(pipe, Pipeline):
        raise ArgumentError(
            f"verify takes a pipeline, not {type(pipe).__name__}",
            remedy="fxsplit.verify(fxsplit.compile(model, plan, example_args=(x,)))",
        )
    return pipe.verify()


def _check_count(asked: str, micro_batches: object, plan: Plan) -> None:
    whole = isinstance(micro_batches, int) and not isinstance(micro_batches, bool)
    if not whole or not 1 <= micro_batches <= _MOST:  # type: ignore[operator]
        raise ArgumentError(
            f"{asked}({micro_batches!r}): not a number of micro-batches, from 1 to {_MOST}",
            remedy=f"pipe.{asked}({min(plan.micro_batches, _MOST)})",
        )
