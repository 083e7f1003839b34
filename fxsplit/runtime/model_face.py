"""What programs that take models ask of one: the arguments of its forward, and attributes such as ``config``."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import nn

from ..compat import not_compiled
from ..errors import NoAttributeError

# Methods that call the model, whatever arguments it then has: they are called with the pipeline in its place.
IN_PLACE = frozenset(["generate"])

# Methods of transformers' models that look, save or count, and neither compute nor change the model.
_LOOKS = frozenset(
    [
        *("can_generate", "save_pretrained", "push_to_hub", "num_parameters", "get_memory_footprint"),
        *(
            "get_input_embeddings",
            "get_output_embeddings",
            "get_position_embeddings",
            "get_encoder",
            "get_decoder",
        ),
        *("estimate_tokens", "floating_point_ops", "add_model_tags"),
        *("prepare_decoder_input_ids_from_labels", "create_extended_attention_mask_for_decoder"),
    ]
)


class Described:
    """The forward of a pipeline, whose signature is that of its model."""

    def __init__(self, function: Callable[..., Any], pipe: Any) -> None:
        self.__func__, self.__self__ = function, pipe
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the pipeline's forward."""
        return self.__func__(self.__self__, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The model's, without the keywords of any name that the example does not have: a call may not have them."""
        found = self.__self__.traced.signature
        of_model: inspect.Signature = found.signature
        rest = inspect.Parameter.VAR_KEYWORD
        taken = {a.argument for a in found.arguments}
        return of_model.replace(
            parameters=[p for n, p in of_model.parameters.items() if p.kind is not rest or n in taken]
        )


Function = TypeVar("Function", bound=Callable[..., Any])


def says_what_it_takes(function: Function) -> Function:
    """``inspect.signature(pipe.forward)`` is what the model takes: transformers' Trainer keeps columns by it."""
    return cast(Function, _SaysWhatItTakes(function))


class _SaysWhatItTakes:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.__doc__ = function, function.__doc__

    def __get__(self, pipe: nn.Module | None, owner: type) -> Any:
        not_compiled()  # torch.compile(pipe) comes by here before it calls
        return self.function if pipe is None else Described(self.function, pipe)


def handed_on(model: Any, name: str) -> Any:
    """The model's attribute of this name, if reading it does not go around the pipeline.

    Raises:
        NoAttributeError: there is none; or it is a method, which would run the model and not the stages.
    """
    kind = type(model).__name__
    if model is None or name.startswith("__") or not hasattr(model, name):
        raise NoAttributeError(f"neither the pipeline nor its model ({kind}) has an attribute {name!r}")
    found = getattr(model, name)
    if not inspect.ismethod(found) or found.__self__ is not model or name in _LOOKS or name in IN_PLACE:
        return found
    raise NoAttributeError(
        f"the pipeline does not hand on {kind}.{name}, which is a method",
        remedy=f"with pipe.in_place() as model: model.{name}(...), if it calls the model; otherwise "
        f"pipe.unsplit().{name}(...), and compile it again if it changed",
    )


def during(method: Callable[..., Any], context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Any:
    """The method, inside of a context."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with context():
            return method(*args, **kwargs)

    return call
