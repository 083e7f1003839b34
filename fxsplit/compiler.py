"""`compile`: the passes in order, readable in one minute."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .batch import BatchDims
from .codegen.checkpoints import chosen_runs
from .codegen.emit import generate
from .errors import ArgumentError, PlanError
from .graph import is_within, output_names, output_values
from .ir import Assignment, Program, Traced
from .partition.shared import partition_with_homes
from .place import place
from .plan import Plan
from .proof.numerics import Run, verify_numerics
from .proof.structure import verify_structure
from .runtime.microbatch import Merge, find_merges
from .runtime.pipeline import Pipeline
from .state import preserved
from .trace.front import TRACING, trace


def compile(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    leaf_modules: Sequence[str | type[nn.Module]] = (),
    tracer: Any = None,
    check: bool = True,
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
            it nothing is computed but the trace, so that a model on the ``meta`` device can be planned. The
            structural proof is made in any case.

    Returns:
        The pipeline, an `nn.Module` with the model's own tree.

    Raises:
        PlanError, ModelError, ArgumentError, BatchError, TraceError, PartitionError, VerifyError: see
            `fxsplit.errors`. Nothing has changed then.
    """
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
    kwargs = dict(example_kwargs or {})

    with TRACING, torch.inference_mode(False), torch.enable_grad():
        traced = trace(
            model,
            example_args,
            kwargs,
            leaf_modules=leaf_modules,
            tracer=tracer,
            batch_dims=plan.batch_dims,
            check=check,
        )
        inputs = traced.signature.flatten(example_args, kwargs)
        pipe = _pipeline(model, traced, plan, inputs)
        if check:
            _verify_split(pipe, inputs)
        for placed in (pipe, pipe.other_mode):
            if placed is not None:
                place(model, placed.program)
        return pipe


def _pipeline(model: nn.Module, traced: Traced, plan: Plan, inputs: Sequence[torch.Tensor]) -> Pipeline:
    """Partition, generate, verify: for the graph of the model's mode, and for that of the other mode if it has one."""
    traced, assignment = partition_with_homes(model, traced, plan, inputs)
    _check_devices(assignment)
    program = generate(model, traced, assignment, chosen_runs(model, traced, assignment, plan, inputs))
    verify_structure(model, traced, program)
    dims = BatchDims.of_example(traced.signature, inputs, plan.batch_dims)
    merges = _merges(model, traced, plan, dims, inputs)
    other = None
    if traced.other_mode is not None:
        alike = _placed_alike(plan, traced.other_mode, assignment, program)
        other = _pipeline(model, traced.other_mode, alike, inputs)
    example = [_ordinary(x) for x in inputs]
    return Pipeline(model, plan, traced, assignment, program, dims, merges, example, other)


def _placed_alike(plan: Plan, other: Traced, assignment: Assignment, program: Program) -> Plan:
    """The plan for the other mode: where there are several devices, every module stays on the one that it has."""
    if len(set(assignment.devices)) == 1 and not isinstance(plan.device_map, str):
        return plan
    whole = [str(n.target) for n in other.graph.nodes if n.op == "call_module"]
    placed: dict[str, str] = {}
    for stage in program.stages:
        for name in stage.parameters:
            owner = name.rpartition(".")[0]
            owner = next((path for path in whole if is_within(owner, path)), owner)
            placed.setdefault(owner, str(stage.device))
    placed.setdefault("", str(assignment.devices[-1]))
    return plan.replace(
        stages=None,
        balance=None,
        cut=None,
        devices=None,
        device_map=placed,
        max_memory=None,
        no_split_module_classes=None,
    )


def _verify_split(pipe: Pipeline, inputs: Sequence[torch.Tensor]) -> None:
    """The numbers of the split on the example; the graphs themselves have been compared already.

    Before the parameters have moved to several devices the split cannot run: its graph is run then.
    """
    model = pipe.model
    for one in (pipe, pipe.other_mode):
        if one is None:
            continue
        homes = {torch.empty(0, device=d).device for d in one.devices}
        moves = len(homes) > 1 or bool({x.device for x in (*model.parameters(), *inputs)} - homes)
        run = _run_of(one.traced) if moves else one.run_whole
        with preserved(model):
            if model.training not in one.traced.modes:
                model.train(not model.training)
            verify_numerics(model, one.traced, run, inputs)


def _run_of(traced: Traced) -> Run:
    return lambda values: list(traced.module(*values))


def _ordinary(x: torch.Tensor) -> torch.Tensor:
    """The example without its graph; an inference tensor as an ordinary one."""
    return x.clone() if x.is_inference() else x.detach()


def _check_devices(assignment: Assignment) -> None:
    for stage, device in enumerate(assignment.devices):
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise PlanError(
                f"stage {stage} is placed on {device}, which is not there: {str(error).splitlines()[0]}",
                remedy="name devices that this machine has, such as devices='cpu'",
            ) from None


def _merges(
    model: nn.Module, traced: Traced, plan: Plan, dims: BatchDims, inputs: Sequence[torch.Tensor]
) -> list[Merge]:
    count = len(output_values(traced.graph))
    if plan.micro_batches == 1:
        return [Merge("same")] * count

    draws = False

    def run(values: Sequence[torch.Tensor]) -> list[Any]:
        nonlocal draws
        with preserved(model, parameters=True):
            state = torch.get_rng_state()
            for module in model.modules():
                module.training = False
            found = traced.module(*(v.detach().clone() for v in values))
            draws = draws or not torch.equal(state, torch.get_rng_state())
            return [v.detach() if isinstance(v, torch.Tensor) else v for v in found]

    names = output_names(traced)
    merges, mixing = find_merges(run, inputs, dims, names)
    for name in () if draws else mixing:  # other random numbers are not other rows
        warnings.warn(
            f"{name} of {type(model).__name__} mixes rows of the batch: with micro-batches it is another value",
            stacklevel=3,
        )
    return merges
