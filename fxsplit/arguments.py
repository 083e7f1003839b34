"""Calls with arguments that a function does not take: an error that says what to type, whatever the caller came from."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from .errors import FxsplitError, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")


def explained(
    error: type[FxsplitError], example: str, spellings: Mapping[str, str] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function raise `error` where Python would say that an argument is missing, unknown or one too many.

    Nothing is done in a call that is right.

    Args:
        example: a call that is right.
        spellings: what others call an argument → what to type here.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError as raised:
                if isinstance(raised, FxsplitError):
                    raise
                try:
                    signature.bind(*args, **kwargs)
                except TypeError as why:
                    what, remedy = _explain(function, signature, why, kwargs, example, spellings or {})
                    raise error(what, remedy=remedy) from None
                raise

        return call

    return decorate


def _explain(
    function: Any,
    signature: inspect.Signature,
    why: TypeError,
    kwargs: Mapping[str, Any],
    example: str,
    spellings: Mapping[str, str],
) -> tuple[str, str]:
    owner = function.__qualname__.removesuffix(".__init__").removesuffix(".forward")
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    unknown = [k for k in kwargs if k not in signature.parameters]
    name = next((k for k in unknown if not takes_any or k in spellings), None)
    if name is None:
        return f"{owner}(): {why}", example
    known = [k for k in signature.parameters if k != "self"]
    if name in spellings:
        return f"{owner}() has no argument {name!r}", spellings[name]
    return (
        f"{owner}() has no argument {name!r}",
        f"{did_you_mean(name, known, label='arguments')} As in {example}",
    )


# What torchgpipe, torch.distributed.pipelining, DeepSpeed, Megatron and others call it → here.
PLAN_WORDS = {
    **dict.fromkeys(
        (
            "chunks",
            "n_microbatches",
            "num_microbatches",
            "microbatches",
            "num_chunks",
            "n_micro_batches",
            "mb",
        ),
        "micro_batches",
    ),
    **dict.fromkeys(
        (
            "num_stages",
            "n_stages",
            "num_partitions",
            "partitions",
            "pp_size",
            "pipeline_parallel_size",
            "nstages",
        ),
        "stages",
    ),
    **dict.fromkeys(("split_spec", "split_points", "cuts", "split", "cut_points"), "cut"),
    **dict.fromkeys(("num_replicas", "dp_size", "data_parallel_size", "n_replicas"), "replicas"),
    **dict.fromkeys(("recompute", "activation_checkpointing", "checkpointing", "remat"), "checkpoint"),
    **dict.fromkeys(("device", "device_ids"), "devices"),
    "deferred": "deferred_batch_norm",
    "sync_bn": "sync_batch_norm",
    "no_split_modules": "no_split_module_classes",
    "num_workers": "workers",
    "args_chunk_spec": "batch_dims",
    "kwargs_chunk_spec": "batch_dims",
}
_EXAMPLES = {
    "micro_batches": "8",
    "stages": "2",
    "cut": '["h.4", "h.8"]',
    "replicas": "2",
    "checkpoint": '"always"',
    "devices": '["cuda:0", "cuda:1"]',
    "deferred_batch_norm": "True",
    "sync_batch_norm": "True",
    "no_split_module_classes": '["Block"]',
    "workers": "2",
    "batch_dims": '{"mask": None}',
    "balance": "[2, 2]",
    "device_map": '"auto"',
}
PLAN_SPELLINGS = {word: f"Plan({field}={_EXAMPLES[field]})" for word, field in PLAN_WORDS.items()}


def compile_spellings(function: str, fields: Mapping[str, Any]) -> dict[str, str]:
    """For a function that takes a plan: the fields of the plan, in their place, and what else an example is called."""
    words = {**{name: name for name in fields}, **PLAN_WORDS}
    found = {
        word: f"fxsplit.{function}(model, fxsplit.Plan({field}={_EXAMPLES.get(field, '...')}), example_args=(x,))"
        for word, field in words.items()
    }
    inputs = (
        "args",
        "example_inputs",
        "sample_input",
        "sample_inputs",
        "mb_args",
        "inputs",
        "example",
        "sample",
    )
    return {**found, **dict.fromkeys(inputs, f"fxsplit.{function}(model, plan, example_args=(x,))")}
