"""`compile`: the passes in order, readable in one minute."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .codegen.emit import generate
from .errors import PlanError
from .graph import output_values, region_modules
from .ir import Program, Traced
from .partition.assign import partition
from .plan import Plan
from .runtime.microbatch import BatchDims, Merge, find_merges
from .runtime.pipeline import Pipeline
from .state import preserved
from .trace.front import TRACING, trace
from .verify.numerics import verify_numerics
from .verify.structure import verify_structure


def compile(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    check: bool = True,
) -> Pipeline:
    """Split an unchanged model into stages and return a pipeline that computes the same.

    Args:
        model: any `nn.Module`; its parameters, names and modules stay its own. Parameters and buffers move
            to the device of their stage, in place, once everything else has succeeded.
        plan: where to cut, where to place, how to run; one stage by default.
        example_args, example_kwargs: one call of the model, with at least one tensor. Any batch size runs
            afterwards.
        check: run the example through the model and through the split and compare outputs, gradients,
            buffers and random numbers. The structural proof is made in any case.

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
    kwargs = dict(example_kwargs or {})

    with TRACING:
        traced = trace(model, example_args, kwargs)
        inputs = traced.signature.flatten(example_args, kwargs)
        assignment = partition(model, traced, plan, inputs)
        program = generate(model, traced, assignment, checkpoints=plan.checkpoint != "never")
        verify_structure(model, traced, program)
        if check:
            moves = any(
                device != x.device for device in assignment.devices for x in [*model.parameters(), *inputs]
            )
            verify_numerics(model, traced, traced.module if moves else program.root, inputs)
        dims = BatchDims.of_example(traced.signature, inputs, plan.batch_dims)
        merges = _merges(model, traced, plan, dims, inputs)
        _place(model, program)
        return Pipeline(model, plan, traced, assignment, program, dims, merges, [x.detach() for x in inputs])


def _merges(
    model: nn.Module, traced: Traced, plan: Plan, dims: BatchDims, inputs: Sequence[torch.Tensor]
) -> list[Merge]:
    count = len(output_values(traced.graph))
    if plan.micro_batches == 1:
        return [Merge("same")] * count

    def run(values: Sequence[torch.Tensor]) -> list[Any]:
        with preserved(model), torch.no_grad():
            for module in model.modules():
                module.training = False
            return list(traced.module(*(v.detach().clone() for v in values)))

    merges, mixing = find_merges(run, inputs, dims, [f"output {i}" for i in range(count)])
    for name in mixing:
        warnings.warn(
            f"{name} of {type(model).__name__} mixes rows of the batch: with micro-batches it is another value",
            stacklevel=3,
        )
    return merges


def _place(model: nn.Module, program: Program) -> None:
    """Move every parameter and buffer to the device of its stage; the Parameter objects stay the same."""
    for stage in program.stages:
        for module in (stage.module, *region_modules(stage.module)):
            for name, constant in module._buffers.items():
                if name not in stage.paths and constant is not None:
                    module._buffers[name] = constant.to(stage.device)
        for fqn in dict.fromkeys(stage.paths.values()):
            owner_path, _, leaf = fqn.rpartition(".")
            owner = model.get_submodule(owner_path) if owner_path else model
            value = getattr(owner, leaf, None)
            if isinstance(value, nn.Module):
                value.to(stage.device)
            elif isinstance(value, nn.Parameter):
                value.data = value.data.to(stage.device)
            elif isinstance(value, torch.Tensor) and leaf in owner._buffers:
                owner._buffers[leaf] = value.to(stage.device)
