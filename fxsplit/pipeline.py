"""`Pipeline`: the model's own tree with a forward that plays the program."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from . import questions
from .arguments import explained
from .batch.dims import BatchDims
from .batch.merge import Merge
from .compat import not_traced, set_frame_compiler
from .compiled import Compiled
from .cost.saved import Live
from .errors import ArgumentError, BatchError, PlanError, SerializeError, StageIndexError
from .graph.effects import has_hooks
from .graph.ir import Assignment, Program, Stage, Traced
from .graph.moved import Example, refuse_to_move
from .graph.place import has_no_values, place
from .loss.criterion import Criterion
from .loss.losses import check_loss_fn
from .loss.reductions import LossFn
from .memory.kept import Kept
from .passes import Pass
from .plan.plan import Plan
from .replicas.replicas import Replicas
from .runtime.ddp import Reducers
from .runtime.engine import Engine, engines, over
from .runtime.events import ActionHook, Listener, for_each_action
from .runtime.guarded import buffers_as_before
from .runtime.hooks import call_with_hooks
from .runtime.in_place import InPlace, in_the_place_of
from .runtime.model_face import IN_PLACE, during, handed_on, says_what_it_takes
from .runtime.reentry import check_not_inside
from .runtime.step import call_merged, step_outside
from .runtime.torch_compile import put_aside
from .saving.save import save_code
from .saving.skeleton import Skeleton
from .schedules.schedule import Schedule
from .schedules.simulate import staircase
from .schedules.tape import Instruction, Tape
from .timeline.step import simulated
from .timeline.timeline import Timeline
from .weights.fill import Loaded, fill
from .weights.sources import source_of

_LOSS = dict.fromkeys(("loss", "criterion", "loss_function"), "pipe.step(x, target=y, loss_fn=...)")
_PROVEN = 1024  # micro-batches, at most
_MOST = 2**20  # micro-batches of a schedule that is shown


class Pipeline(nn.Module):
    """What `fxsplit.compile` returns. Children, parameters, buffers, state_dict and modes are the model's own.

    ``len(pipe)``, ``pipe[i]`` and iteration give the stages.

    Attributes:
        model: the user's model.
        plan: as it was asked for.
        compiled: mode → what the compiler made for it, ``True`` for train(). One for both, unless the model takes another
            path in eval(); a mode in which the example could not be run is not there.
        traced: the graph, of the mode in which it was compiled. So are `assignment`, `program`, `stages`, `dims` and `merges`.
        example: the flat example inputs.
        passes: what the compiler did, in the order in which each ended, with what it made; none of a copy or a loaded one.
    """

    model: nn.Module
    plan: Plan
    compiled: Mapping[bool, Compiled]
    _engines: Mapping[bool, Engine]
    _example: Example
    _reducers: Reducers
    passes: tuple[Pass, ...]
    _compiler: Callable[..., Pipeline] | None
    _others: list[Any]  # pipelines over the same model, for other kinds of calls

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        compiled: Mapping[bool, Compiled],
        example: Sequence[torch.Tensor],
    ) -> None:
        """From what was made for each mode; that in which the model is, or was compiled, comes first."""
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
        own.update(plan=plan, compiled=dict(compiled), _engines=engines(model, compiled))
        own.update(
            _example=Example(model, example), _reducers=Reducers(), _compiler=None, _others=[], passes=()
        )

    # -- what was made -------------------------------------------------------------------------------------------

    @property
    def _first(self) -> Compiled:
        return next(iter(self.compiled.values()))

    @property
    def traced(self) -> Traced:
        """The model as a graph."""
        return self._first.traced

    @property
    def assignment(self) -> Assignment:
        """Which node is in which stage, and where that is."""
        return self._first.assignment

    @property
    def program(self) -> Program:
        """The stages, and what goes between them."""
        return self._first.program

    @property
    def dims(self) -> BatchDims:
        """How inputs are cut into micro-batches."""
        return self._first.dims

    @property
    def merges(self) -> list[Merge]:
        """How flat outputs are put together."""
        return list(self._first.merges)

    @property
    def example(self) -> list[torch.Tensor]:
        """The flat example inputs."""
        return self._example.inputs

    @property
    def active(self) -> Compiled:
        """What was made for the mode that the model is in."""
        return self._now.compiled

    @property
    def _now(self) -> Engine:
        """Who plays in the mode that the model is in; where there is nobody, whoever then says so."""
        found = self._engines.get(self.model.training)
        return self._begun if found is None else found

    @property
    def _begun(self) -> Engine:
        return next(iter(self._engines.values()))

    # -- weights -------------------------------------------------------------------------------------------------

    def load_weights(self, source: Any) -> Loaded:
        """Weights for a model that was compiled on the ``meta`` device, each put where its stage is.

        One tensor at a time is read, and goes to the device of its stage. Buffers that no checkpoint holds are computed
        by the model's own code (``reset_buffers``, ``reset_parameters``, transformers' ``_init_weights``), where that
        gives the same values every time. Optimizers are made after this: parameters without values are replaced.

        Args:
            source: a state_dict; a ``.safetensors`` or ``.pt`` file; the ``.index.json`` of a sharded checkpoint; a folder
                with one of these; or a function from a name to a tensor, or to None for what it does not have.

        Returns:
            What was loaded; prints as a line.

        Raises:
            WeightsError: a file cannot be read, or the source does not fit the model: all that is missing, not known to the
                model, or of another shape or type is named. The model is as it was then.
            ArgumentError: `source` is none of these.
        """
        stages = [stage for engine in self.engines() for stage in engine.compiled.stages]
        with self._begun.common.lock, torch.inference_mode(False), torch.no_grad():
            found = fill(self.model, stages, source_of(source))
            for engine in self.engines():
                engine.watch.use_current_modules()
            self.settle()
        return found

    def settle(self) -> None:
        """Parameters and buffers go where their stages are, and replicas follow them; without weights, what has values."""
        replicas = None if has_no_values(self.model) else self.make_replicas()
        for engine in self.engines():
            place(self.model, engine.compiled.program)
        if replicas is not None:
            replicas.refresh()
            replicas.tell()

    def is_like(self, example: Sequence[torch.Tensor]) -> None:
        """The flat inputs that stand for the example, where that has no values."""
        self.__dict__["_example"] = Example(self.model, example)

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
        compiler = set_frame_compiler(None)
        try:
            with put_aside(compiler) if compiler is not None else contextlib.nullcontext():
                return call_with_hooks(self.model, self._now.forward, args, kwargs)
        finally:
            set_frame_compiler(compiler)

    def takes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments is like the example, and the model what it was."""
        try:
            self._now.batch(args, kwargs)
            self._now.watch.use_current_modules()
        except (ArgumentError, BatchError):
            return False
        return True

    def run_whole(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Flat outputs for flat inputs, as one micro-batch."""
        return self._now.run_whole(inputs)

    def refresh_replicas(self) -> None:
        """Copy all parameters and buffers anew to replicas on other devices, in the next call.

        They follow optimizers, ``load_state_dict``, in-place operations and ``p.data = q`` by themselves. What is written
        through ``p.data`` in place (``p.data.mul_(2)``) leaves no trace: call this after it.
        """
        with self._begun.common.lock:
            self._begun.crew.refresh()

    def make_replicas(self) -> Replicas:
        """What the replicas of stages run. A call makes it, too, and tells the modules of it."""
        return self._now.crew.replicas()

    @not_traced
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
        return self._step(args, kwargs, loss_fn, target, reduction, output=False)[0]

    @not_traced
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
        return self._step(args, kwargs, loss_fn, target, reduction, output=True)

    def _step(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        loss_fn: LossFn,
        target: Any,
        reduction: str | None,
        *,
        output: bool,
    ) -> tuple[torch.Tensor, Any]:
        check_loss_fn(loss_fn, reduction)
        now = self._now
        with torch.enable_grad():
            self._reducers.check(self.model)
            if now.loss_inside and not has_hooks(self.model) and not has_hooks(self):
                batch = now.batch(args, kwargs)
                if len(batch.rows) > 1:
                    return now.step(batch, loss_fn, target, reduction, output=output)
            lock = now.common.lock
            with lock:
                now.watch.use_current_modules()
            call = functools.partial(call_merged, self, lock)
            with buffers_as_before(now.watch.written()):
                return step_outside(call, args, kwargs, loss_fn, target)

    def compile_stages(self, **options: Any) -> Self:
        """Let `torch.compile` compile each stage, in place; the schedule, transfers and gradients between them stay fxsplit's.

        ``pipe.compile(...)`` is the same. ``torch.compile(pipe)(x)`` does it for that call, and not for ``pipe.step``.
        Compiled kernels round in another way than the model, so `verify` still compares what the code says. Stages that
        draw random numbers take turns, since compiled code draws from the default generator.

        Args:
            options: what `torch.compile` takes: ``backend``, ``mode``, ``dynamic``, ...

        Returns:
            The pipeline.

        Raises:
            PlanError: the plan splits backward, recomputes, has replicas, keeps statistics of the whole batch or looks for
                anomalies: nothing has been compiled.
        """
        for engine in self.engines():
            engine.compile_stages(options)
        self._begun.common.options = options
        return self

    def compile(self, *args: Any, **options: Any) -> None:
        """As `compile_stages`."""
        self.compile_stages(*args, **options)

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
        return self._register(for_each_action(hook))

    @contextlib.contextmanager
    def timeline(self) -> Iterator[Timeline]:
        """Record the calls within: ``with pipe.timeline() as timeline: pipe.step(x, target=y, loss_fn=f)``.

        ``print(timeline)``; ``timeline.save("page.html")`` writes a page, ``timeline.save("trace.json")`` a trace for
        Perfetto. What was recorded before an error is there, too.
        """
        found = Timeline(self.model, self._measure_kept)
        with self._register(found.hear):
            yield found

    def simulated_timeline(self, seconds: Callable[[Instruction], float] | None = None) -> Timeline:
        """The timeline of a step under the plan, in which everything begins as soon as it can; nothing is run.

        Args:
            seconds: of an instruction (its `kind`, `stage` and `micro_batches`). By default the loads of the stages as
                the plan has them, in units of one forward of one micro-batch through the mean stage.

        Raises:
            ArgumentError: `seconds` is not a function.
        """
        if seconds is not None and not callable(seconds):
            raise ArgumentError(
                f"seconds is a {type(seconds).__name__}, which cannot be called",
                remedy='pipe.simulated_timeline(lambda x: 0.002 if x.kind == "backward" else 0.001)',
            )
        step = simulated(self._first, self.tape, seconds)
        return Timeline(self.model, self._measure_kept, [step])

    def _measure_kept(self, compiled: Compiled) -> Kept | None:
        """What its stages keep for backward, where it is a program of this pipeline, and not of a call of another kind."""
        found = [engine for engine in self.engines() if engine.compiled is compiled]
        return questions.kept(found[0], self._example) if found else None

    def _register(self, listener: Listener) -> RemovableHandle:
        listeners = self._begun.common.listeners
        handle = RemovableHandle(listeners)
        listeners[handle.id] = listener
        return handle

    def micro_batches(self, inputs: Sequence[torch.Tensor]) -> tuple[list[list[torch.Tensor]], list[int]]:
        """The flat inputs of each micro-batch, and its rows.

        Raises:
            ArgumentError: these are no flat inputs.
        """
        return self._now.micro_batches(inputs)

    def schedule_for(self, micro_batches: int) -> Schedule:
        """The schedule of a batch that is split into this many micro-batches.

        Raises:
            ArgumentError: it is no number of micro-batches.
        """
        _check_count("schedule_for", micro_batches, self.plan)
        crew = self._begun.crew
        return crew.schedule_for(micro_batches, crew.meets(micro_batches))

    def tape_for(self, micro_batches: int) -> Tape:
        """What a call with this many micro-batches plays; proven.

        Raises:
            ArgumentError: it is no number of micro-batches.
        """
        _check_count("tape_for", micro_batches, self.plan)
        crew = self._begun.crew
        return crew.tape_for(micro_batches, crew.meets(micro_batches))

    def prove_schedules(self) -> None:
        """Prove the schedule of a batch like the example; of many micro-batches it goes on as it began.

        Raises:
            ScheduleError, PlanError: it cannot be played.
        """
        for engine in self.engines():
            plan, dims = engine.compiled.plan, engine.compiled.dims
            rows, count = dims.batch_size(self.example) or 1, plan.micro_batches
            own = isinstance(plan.schedule, Schedule)  # as long as it is written down
            most = count if own else max(1, min(count, rows, _PROVEN))
            engine.crew.tape_for(most, engine.crew.meets(most))

    def engines(self) -> list[Engine]:
        """Who plays: one for each program."""
        return list(dict.fromkeys(self._engines.values()))

    @property
    def schedule(self) -> Schedule:
        """The schedule of a batch that fills every micro-batch."""
        return self.schedule_for(self.plan.micro_batches)

    @property
    def tape(self) -> Tape:
        """The schedule's instructions, each with what it comes after; ``print(pipe.tape)`` shows them."""
        return self.tape_for(self.plan.micro_batches)

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
        """Prove again that the program is the traced graph, and compare the numbers with the model's, where it has weights.

        Returns:
            What was shown, a line for each rule.

        Raises:
            VerifyError: names the rule or the first number that differs.
        """
        with self._now.common.lock:
            return questions.verify(self.engines(), self._now, self._example)

    def verify_micro_batches(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Compare outputs and buffers with the model's on the same micro-batches, one after the other.

        Returns:
            False if they are not comparable: random numbers, or statistics of the whole batch.

        Raises:
            VerifyError: names the first value that differs.
        """
        return questions.verify_micro_batches(self._now, self._example, inputs)

    def report(self) -> str:
        """The stage table: what each stage has and costs, how far from the best the cut can be, and the predicted bubble."""
        return questions.report(self.model, self._first)

    def memory(self) -> dict[torch.device, Live]:
        """Per device the bytes of activations that a batch like the example keeps for backward, by simulation.

        What autograd keeps is measured once on the example; parameters, buffers and arguments are not counted. The
        peak is with one region computed again; workers that share a device may each have one at the same time.
        Where the model is not on the example's device, it is measured on a copy that is; without weights on ``meta``.
        """
        return questions.memory(self._now, self._example)

    def staircase(self) -> str:
        """The schedule as a picture, one column for each unit of time."""
        return staircase(self.tape)

    def went_through(self, passes: Sequence[Pass]) -> None:
        """What the compiler did, for `passes`."""
        self.__dict__["passes"] = tuple(passes)

    def compiled_by(self, compiler: Callable[..., Pipeline] | None) -> None:
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
        with self._begun.common.lock:
            check_not_inside(self._begun.common.lock, self.plan.schedule_name)
            example = self._example.for_model(self.model)
            tensors = [*self.model.parameters(), *self.model.buffers()]
            homes = {t.device for t in tensors}
            stays = len(homes) == 1 and self.plan.devices is None and self.plan.device_map is None
            if stays:
                home = next(iter(homes))
                example = [x.detach().to(home).requires_grad_(x.requires_grad) for x in example]
            if not (args or kwargs):
                args, kwargs = self.traced.signature.unflatten(example)
            self._become(self._compiler(self.model, self.plan, example_args=args, example_kwargs=kwargs))
        return self

    @contextlib.contextmanager
    def in_place(self) -> Iterator[nn.Module]:
        """Within it, calling the model calls the stages: ``model.generate(...)``, trainers and metrics go on as they are.

        A call whose arguments are not like the example's (a decoding step with a cache, another mask) is compiled when it
        first comes, for the same devices, and kept. ``model.forward(...)``, past ``model(...)``, is the model's own.

        Returns:
            The model.

        Raises:
            ArgumentError: the pipeline was made from a state_dict: the model has no forward of its own.
            FxsplitError: in a call: as `fxsplit.compile`, of a kind of call that cannot be compiled.
        """
        if isinstance(self.model, Skeleton) or self._compiler is None:
            raise ArgumentError(
                "the pipeline was loaded without its model, in whose place it could be",
                remedy="fxsplit.load(folder, model)",
            )
        lock, schedule = self._begun.common.lock, self.plan.schedule_name
        stand_in = InPlace(self, self._others, self._for_other_arguments, lock, schedule)
        with in_the_place_of(self.model, stand_in):
            yield self.model

    def _for_other_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pipeline:
        """A pipeline over the same model, for calls that are not like the example."""
        if self._compiler is None:
            raise ArgumentError("the pipeline does not know what it was compiled from")
        made = self._compiler(self.model, self._placed_as_it_is(), example_args=args, example_kwargs=kwargs)
        made._take_over(self)
        return made

    def _placed_as_it_is(self) -> Plan:
        """The plan, for another graph of the same model: every module stays on its device."""
        if len(set(self.devices)) == 1:
            return self.plan
        return self.plan.placed(self.hf_device_map)

    def _become(self, made: Pipeline) -> None:
        """Take over all that a compile makes. Lock and hooks stay."""
        made._take_over(self)
        for name in ("plan", "compiled", "_engines", "_example", "_others"):
            self.__dict__[name] = made.__dict__[name]

    def _take_over(self, other: Pipeline) -> None:
        """Play one at a time with another pipeline, announce actions to the same hooks, be compiled as it is."""
        mine, its = self._begun.common, other._begun.common
        mine.lock, mine.listeners, mine.serial = its.lock, its.listeners, its.serial
        if its.options is not None:
            self.compile_stages(**its.options)

    def unsplit(self) -> nn.Module:
        """The user's model."""
        return self.model

    def _repr_html_(self) -> str:
        """In a notebook: the stages, and below, folded, their code."""
        headline = f"{type(self.model).__name__} in {len(self)} stages: {self.plan!r}"
        return questions.as_html(self.model, self._first, headline)

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
        found = handed_on(self.__dict__.get("model"), name)
        return during(found, self.in_place) if name in IN_PLACE else found

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
        """The model's own.

        Raises:
            ArgumentError: the model has no weights yet. PyTorch would copy the values to nowhere.
        """
        if has_no_values(self.model) and not assign:
            raise ArgumentError(
                "the pipeline has no weights yet, and load_state_dict copies into those that are there",
                remedy="pipe.load_weights(state_dict)",
            )
        return self.model.load_state_dict(state_dict, strict=strict, assign=assign)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """What ``to``, ``cuda``, ``half`` and the like call: a dtype may change, a device may not."""
        refuse_to_move(self.model, fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        """An independent pipeline over a deep copy of the model."""
        model = copy.deepcopy(self.model, memo)
        found = Pipeline(model, self.plan, over(self.compiled, model), self.example)
        found.compiled_by(self._compiler)
        if not has_no_values(model):
            for engine in found.engines():
                engine.watch.use_current_modules()
            found.make_replicas().tell()
        if self._begun.common.options is not None:
            found.compile_stages(**self._begun.common.options)
        return found

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise SerializeError(
            "a Pipeline is not pickled: it would run code when loaded",
            remedy="pipe.save_code(folder) and torch.save(pipe.state_dict(), path); then fxsplit.load(folder, model)",
        )


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
