"""`compile`: the passes in order, readable in one minute."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .arguments import compile_spellings, explained
from .batch.dims import BatchDims
from .batch.merge import Merge, Merges
from .codegen.emit import generate
from .compat import tree_leaves, tree_map
from .compiled import Compiled, by_mode
from .errors import ArgumentError, PartitionError, PlanError, ScheduleError, pass_on_if_full
from .graph.ir import Assignment, Program, Traced
from .graph.moved import Example
from .graph.nodes import is_within, output_values
from .graph.place import check_attributes, check_devices, gathered, gathered_attributes, has_no_values
from .graph.signature import Signature
from .memory.regions import Runs, chosen_runs
from .memory.simulated import with_simulated_memory
from .merging.decide import Merging, find_merges
from .modules.reach import reach
from .modules.state import preserved
from .partition.shared import partition_with_homes
from .passes import named, recorded
from .pipeline import Pipeline
from .plan.checkpoint import Paths
from .plan.plan import Plan
from .plan.sizes import in_units
from .proof.numerics import ModelFailsError, Run, verify_numerics
from .proof.plan import verify_sizes
from .proof.structure import verify_structure
from .questions import verify_micro_batches
from .replicas.meet import check_replicas
from .report.tables import sizes_of, stage_table
from .runtime.unsaid import whole_modules
from .trace.front import TRACING, trace
from .trace.spread import Together, is_spread
from .trace.without_values import all_on_meta, as_on, as_on_cpu, with_some_values, without_values
from .weights.sources import source_of


@explained(
    ArgumentError,
    "fxsplit.compile(model, plan, example_args=(x,))",
    compile_spellings("compile", vars(Plan())),
)
def compile(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    leaf_modules: Sequence[str | type[nn.Module]] = (),
    tracer: Any = None,
    check: bool = True,
    weights: Any = None,
) -> Pipeline:
    """Split an unchanged model into stages and return a pipeline that computes the same.

    Args:
        model: any `nn.Module`; its parameters, names and modules stay its own. Parameters and buffers move
            to the device of their stage, in place, once everything else has succeeded.
        plan: where to cut, where to place, how to run; one stage by default.
        example_args, example_kwargs: one call of the model, with at least one tensor. Any batch size runs
            afterwards.
        leaf_modules: module paths and classes of modules that stay whole, as one node.
        tracer: the only front end to use instead of fxsplit's own: an `fx.Tracer`, or a function from the model
            to a `torch.fx.GraphModule`. A model that is a `GraphModule` already needs none.
        check: compare outputs, gradients, buffers and random numbers with the model's: of every captured graph, on
            the example and on another batch size, before it is accepted; and of the split, on the example. Without
            it the model runs once in each mode, its graph once in each mode, and for micro-batches once more on
            the example and on a part of it. The structural proof is made in any case. Of a model on the ``meta`` device
            there are no numbers to compare; with `weights` outputs are compared, and the rest by `Pipeline.verify`.
        weights: of a model on the ``meta`` device: what `Pipeline.load_weights` takes.

    Returns:
        The pipeline, an `nn.Module` with the model's own tree.

    Raises:
        PlanError, ModelError, ArgumentError, BatchError, TraceError, PartitionError, VerifyError: see
            `fxsplit.errors`. Nothing has changed then.
        WeightsError: as of `Pipeline.load_weights`; no weight has been put into the model. What had values, buffers
            say, may be on the device of its stage.
    """
    plan, kwargs = _arguments(plan, example_args, example_kwargs)
    grad, empty = torch.is_grad_enabled(), has_no_values(model)
    source = None if weights is None else source_of(weights)
    able = (
        contextlib.nullcontext(((example_args, kwargs), frozenset[torch.device]()))
        if empty
        else _able_to_run(model, example_args, kwargs)
    )
    with TRACING, _ordinary_mode(), able as (given, spread), recorded() as passes:
        shown = without_values(given) if empty else given
        with all_on_meta(model) if empty else contextlib.nullcontext():
            traced = trace(
                model,
                *shown,
                leaf_modules=leaf_modules,
                tracer=tracer,
                batch_dims=plan.batch_dims,
                check=check and not empty,
                grad=grad,
            )
            if spread:
                traced = as_on(model, traced, spread, _device_of(given))
            inputs = traced.signature.flatten(*shown)
            pipe = _pipeline(model, traced, plan, inputs, check)
        if empty:
            pipe.is_like(with_some_values(Signature.of_example(model.forward, *given).flatten(*given)))
        elif check:
            _verify_split(pipe, inputs, moves=bool(spread))
        pipe.settle()
        pipe.went_through(passes)
        pipe.compiled_by(functools.partial(compile, leaf_modules=leaf_modules, tracer=tracer, check=check))
    if source is not None:
        pipe.load_weights(source)
        if check:
            _verify_loaded(pipe)
    return pipe


@contextlib.contextmanager
def _ordinary_mode() -> Iterator[None]:
    # Backward in this thread: autograd's own for a device may be waiting for a pipeline that is compiled again.
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),
    ):
        yield


@contextlib.contextmanager
def _able_to_run(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[Sequence[Any], Mapping[str, Any]], frozenset[torch.device]]]:
    """What is given of the example, and the devices over which the model is spread: a pipeline leaves parameters on several.

    Of a model on one device the example is brought there. One that is spread runs where it is, and what its operations read
    is brought together; where that cannot be, its parameters are brought to the example's device, and after an error back.
    Some models run as they are, because they move values themselves.
    """
    homes = (
        {t.device for t in (*model.parameters(), *model.buffers())} if isinstance(model, nn.Module) else set()
    )
    example = [leaf.device for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    nowhere = frozenset[torch.device]()
    if not homes or not example or len(homes.union(example)) == 1 or _runs(model, args, kwargs):
        yield (args, kwargs), nowhere
        return
    there = example[0] if len(homes) > 1 else next(iter(homes))
    if len(homes) > 1:
        with gathered_attributes(model, there), Together(model):
            if _runs(model, args, kwargs):
                yield (args, kwargs), frozenset(homes.union(example))
                return
    with gathered(model, there):
        yield (
            tree_map(
                lambda x: (
                    x.detach().to(there).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
                ),
                (args, kwargs),
            ),
            nowhere,
        )


def _device_of(example: Any) -> torch.device:
    return next(leaf.device for leaf in tree_leaves(example) if isinstance(leaf, torch.Tensor))


def _runs(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    # Copies: a forward writes into the cache that it is given.
    args, kwargs = tree_map(lambda x: _ordinary(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
    with preserved(model, parameters=True), torch.no_grad():
        try:
            model.forward(*args, **kwargs)
        except Exception as error:
            pass_on_if_full(error)
            return False
    return True


def _arguments(
    plan: Plan | None, example_args: Sequence[Any], example_kwargs: Mapping[str, Any] | None
) -> tuple[Plan, dict[str, Any]]:
    if plan is None:
        plan = Plan()
    if not isinstance(plan, Plan):
        raise PlanError(
            f"the plan is {type(plan).__name__}", remedy="fxsplit.compile(model, fxsplit.Plan(stages=2), ...)"
        )
    if not isinstance(example_args, tuple | list):
        raise ArgumentError(
            f"example_args is a {type(example_args).__name__}, not a tuple of arguments",
            remedy="example_args=(x,)",
        )
    if example_kwargs is not None and not isinstance(example_kwargs, Mapping):
        raise ArgumentError("example_kwargs is not a dict of arguments", remedy='example_kwargs={"x": x}')
    return plan, dict(example_kwargs or {})


def _cut(assignment: Assignment) -> str:
    rows = zip(assignment.stages, assignment.devices, assignment.loads, strict=True)
    return "\n".join(
        f"stage {i} on {at}, {load:g}: {', '.join(names)}" for i, (names, at, load) in enumerate(rows)
    )


def _pipeline(
    model: nn.Module, traced: Traced, plan: Plan, inputs: Sequence[torch.Tensor], check: bool
) -> Pipeline:
    """Its program for the mode that the model is in, and that for the other mode if it takes another path in it."""
    first = _compiled(model, traced, plan, inputs, check)
    other = None
    if traced.other_mode is not None:
        other = _other_program(model, first, traced.other_mode, inputs, check)
    pipe = Pipeline(model, plan, by_mode(first, other), [_ordinary(x) for x in inputs])
    pipe.prove_schedules()
    return pipe


def _compiled(
    model: nn.Module, traced: Traced, plan: Plan, inputs: Sequence[torch.Tensor], check: bool
) -> Compiled:
    """Partition, generate, verify: for one graph."""
    dims = BatchDims.of_example(traced.signature, inputs, plan.batch_dims)
    merging = _merging(model, traced, plan, dims, inputs, check)
    traced, assignment, runs = _assign(model, merging.traced, plan, inputs)
    if has_no_values(model):
        traced = as_on_cpu(model, traced)
    check_devices(assignment)
    program = generate(model, traced, assignment, runs)
    _check_threads(plan, program)
    check_attributes(model, traced, program)
    verify_structure(model, traced, program)
    check_replicas(model, plan, program)
    _check_offload(plan, program)
    _warn(model, plan, merging)
    return Compiled(plan, traced, assignment, program, dims, Merges(merging.merges))


@named("partition", lambda found: _cut(found[1]))
def _assign(
    model: nn.Module, traced: Traced, plan: Plan, inputs: Sequence[torch.Tensor]
) -> tuple[Traced, Assignment, list[Runs]]:
    """Partition, and choose what is recomputed; again with less room where the simulated memory is over a limit."""
    rows = BatchDims.of_example(traced.signature, inputs, plan.batch_dims).batch_size(inputs) or 1
    plan = plan.replace(micro_batches=min(plan.micro_batches, max(rows, 1)))  # no more of them than rows
    for room in (1.0, 0.97, 0.9, 0.8):
        ordered, assignment = partition_with_homes(model, traced, plan, inputs, room)
        runs = chosen_runs(model, ordered, assignment, plan, inputs)
        assignment = with_simulated_memory(model, ordered, assignment, plan, runs, inputs)
        over = [
            (i, s.memory - s.limit)
            for i, s in enumerate(assignment.forecast.stages)
            if s.memory is not None and s.limit is not None and s.memory > s.limit
        ]
        if not over or plan.ways_to_cut() not in ([], ["stages"]):
            break
    if over:
        stage, excess = max(over, key=lambda pair: pair[1])
        raise PartitionError(
            f"stage {stage} needs {in_units(excess)} more memory than {assignment.devices[stage]} has, by simulation",
            remedy='checkpoint="always", more stages or micro-batches, or another cut',
        )
    return ordered, assignment, runs


@explained(
    ArgumentError,
    "fxsplit.preview(model, plan, example_args=(x,))",
    compile_spellings("preview", vars(Plan())),
)
def preview(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    leaf_modules: Sequence[str | type[nn.Module]] = (),
    tracer: Any = None,
) -> Preview:
    """What `compile` would make of a model, without generating, moving or checking anything.

    The model may be on the ``meta`` device, and the devices of the plan need not be there. Arguments are as in `compile`.

    Raises:
        PlanError, ModelError, ArgumentError, BatchError, TraceError, PartitionError: as in `compile`.
    """
    plan, kwargs = _arguments(plan, example_args, example_kwargs)
    empty, given = has_no_values(model), (example_args, kwargs)
    with TRACING, _ordinary_mode(), all_on_meta(model) if empty else contextlib.nullcontext():
        if empty:
            given = without_values(given)
        traced = trace(
            model,
            *given,
            leaf_modules=leaf_modules,
            tracer=tracer,
            batch_dims=plan.batch_dims,
            check=False,
        )
        inputs = traced.signature.flatten(*given)
        traced, assignment, _ = _assign(model, traced, plan, inputs)
    return Preview(plan, traced, assignment, stage_table(plan, traced, assignment, sizes_of(model)))


@dataclass(frozen=True, eq=False)
class Preview:
    """A plan for a model, before anything is made of it.

    Attributes:
        plan: as of a `Pipeline`.
        traced: the same.
        assignment: the same.
        text: the stage table; what the preview prints as.
    """

    plan: Plan
    traced: Traced
    assignment: Assignment
    text: str

    def __str__(self) -> str:
        return self.text


def _other_program(
    model: nn.Module, first: Compiled, other: Traced, inputs: Sequence[torch.Tensor], check: bool
) -> Compiled:
    """That of the other mode: every module stays where it is. It may have other stages, and lacks some modules."""
    plan, assignment = first.plan, first.assignment
    chosen = plan.recomputation
    if isinstance(chosen, Paths):  # some may run in one mode only
        plan = plan.replace(checkpoint=lambda path, _: path in chosen.spelling)
    if len(set(assignment.devices)) == 1 and not isinstance(plan.device_map, str):
        try:
            return _compiled(model, other, plan, inputs, check)
        except (PartitionError, ScheduleError):  # fewer units, or no such path
            plan = plan.placed({"": str(assignment.devices[0]), **_pairs_of(plan)})
            return _compiled(model, other, plan, inputs, check)
    placed: dict[str, Any] = _placed_alike(other, first.program)
    placed.update(_pairs_of(plan))
    try:
        return _compiled(model, other, plan.placed(placed), inputs, check)
    except PartitionError:  # an operation has no neighbour that says where it runs
        placed.setdefault("", str(assignment.devices[-1]))
        return _compiled(model, other, plan.placed(placed), inputs, check)


def _pairs_of(plan: Plan) -> dict[str, tuple[str, str]]:
    """What the user's map says of where outputs go."""
    said = plan.device_map if isinstance(plan.device_map, Mapping) else {}
    return {path: device for path, device in said.items() if isinstance(device, tuple)}


def _placed_alike(other: Traced, program: Program) -> dict[str, str]:
    """Where the modules that have parameters are. Operations follow what they compute with."""
    whole = [str(n.target) for n in other.graph.nodes if n.op == "call_module"]
    placed: dict[str, str] = {}
    for stage in program.stages:
        for name in stage.parameters:
            owner = name.rpartition(".")[0] or name
            owner = next((path for path in whole if is_within(owner, path)), owner)
            placed.setdefault(owner, str(stage.device))
    return placed


@named("compare the split")
def _verify_split(pipe: Pipeline, inputs: Sequence[torch.Tensor], *, moves: bool) -> None:
    """The numbers of the split on the example, and on the micro-batches that the plan makes of it.

    Args:
        moves: whether parameters are to be moved: before that the split cannot run, and its graph is run.
    """
    model, example = pipe.model, Example(pipe.model, inputs)
    for engine in pipe.engines():
        one = engine.compiled
        homes = {torch.empty(0, device=d).device for d in one.devices}
        moves = moves or len(homes) > 1 or bool({x.device for x in (*model.parameters(), *inputs)} - homes)
        run = _run_of(one.traced) if moves else engine.run_whole
        with preserved(model), torch.set_grad_enabled(one.traced.assumptions.grad):
            if model.training not in one.traced.modes:
                model.train(not model.training)
            verify_numerics(model, one.traced, run, inputs)
            if one.dims.batch_size(inputs) and one.plan.micro_batches > 1:
                if not one.plan.sync_batch_norm:  # then a micro-batch is not computed by itself
                    verify_sizes(model, one.traced, one.dims, engine.micro_batches(inputs)[1], inputs)
                if not moves and any(stage.writes or stage.stateful for stage in one.stages):
                    verify_micro_batches(engine, example, inputs)


def _verify_loaded(pipe: Pipeline) -> None:
    """The outputs on the example. Gradients would be as large as the model."""
    model = pipe.model
    for engine in pipe.engines():
        traced = engine.compiled.traced
        together = Together(model) if is_spread(model) else contextlib.nullcontext()
        with TRACING, together, preserved(model), torch.inference_mode(False), torch.no_grad():
            if traced.assumptions.asks_for_grad:
                continue
            if model.training not in traced.modes:
                model.train(not model.training)
            with contextlib.suppress(ModelFailsError):  # float16, say, on a CPU that does not compute with it
                verify_numerics(model, traced, engine.run_whole, pipe.example)


def _run_of(traced: Traced) -> Run:
    return lambda values: list(traced.module(*values))[: traced.out_spec.num_leaves]


def _ordinary(x: torch.Tensor) -> torch.Tensor:
    """A copy of the example, without its graph; an inference tensor as an ordinary one."""
    return x.detach().clone().requires_grad_(x.requires_grad)


def _check_threads(plan: Plan, program: Program) -> None:
    """A stage computes its micro-batches in a thread of its own, in every call in a new one.

    Raises:
        PlanError: a module keeps something for each thread.
    """
    for stage in program.stages if plan.micro_batches > 1 else ():
        for path, module in whole_modules(stage):
            if any(isinstance(value, threading.local) for value in reach(module).objects.values()):
                raise PlanError(
                    f"{path} has a threading.local, and stages compute micro-batches in threads of their own, so it would "
                    "find another state there than in the caller's thread",
                    remedy="an attribute of the module in its place, or micro_batches=1",
                )


def _check_offload(plan: Plan, program: Program) -> None:
    """Refuse weights that are to be fetched, and have nowhere to go.

    Raises:
        PlanError: every stage is on the CPU.
    """
    if plan.offload and not any(stage.offloaded for stage in program.stages):
        raise PlanError(
            "offload=True keeps parameters on the CPU until their stage computes, and every stage is on the CPU",
            remedy='devices="cuda:0", or leave out offload=',
        )


def _merging(
    model: nn.Module,
    traced: Traced,
    plan: Plan,
    dims: BatchDims,
    inputs: Sequence[torch.Tensor],
    check: bool,
) -> Merging:
    """How outputs are merged; nothing is to be merged of one micro-batch."""
    if plan.micro_batches == 1:
        return Merging(traced, (Merge("same"),) * len(output_values(traced.graph)))
    return find_merges(model, traced, dims, inputs, check=check)


def _warn(model: nn.Module, plan: Plan, merging: Merging) -> None:
    for what in () if plan.sync_batch_norm else merging.warnings:
        warnings.warn(
            f"{what}: with micro-batches, {type(model).__name__} gives another value than for the whole batch",
            stacklevel=4,
        )
