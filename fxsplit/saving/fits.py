"""Whether the parts of a file fit each other, and its calls are such as a program has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from ..errors import SerializeError
from ..modules.names import is_free
from .harmless import is_attribute, methods


def check_call(op: str, target: Any, args: Any, kwargs: Any) -> None:
    """Refuse a node that would call a method that is not a tensor's, or read more than an attribute.

    Raises:
        SerializeError: it would.
    """
    if not isinstance(args, tuple) or not isinstance(kwargs, dict) or not all(map(_is_word, kwargs)):
        _refuse(f"the arguments of {target} are no arguments")
    if op != "call_function" and not isinstance(target, str):
        _refuse(f"{target!r} is no target of {op}")
    if op == "call_method" and target not in methods():
        _refuse(f"it calls a method {target!r}, which is none that computes with tensors")
    if op in ("get_attr", "call_module") and any(part.startswith("__") for part in str(target).split(".")):
        _refuse(f"{target!r} is no path of a module or tensor")
    if target is getattr and (len(args) not in (2, 3) or not is_attribute(args[1])):
        _refuse(f"it reads an attribute {args[1:2]!r}")
    if op == "placeholder" and not target.isidentifier():
        _refuse(f"{target!r} is no name of an input")


def _is_word(name: Any) -> bool:
    return isinstance(name, str) and len(name) < 1000


def check_names(local: Mapping[str, str]) -> None:
    """Refuse names of modules and tensors in the code that are not their own.

    Raises:
        SerializeError: two are the same, or one is something else already.
    """
    if len(set(local.values())) != len(local):
        _refuse("two modules or tensors have one name")
    for name in local.values():
        if not is_free(name):
            _refuse(f"{name!r} is not the name of a module or tensor")


def check_sizes(data: Mapping[str, Any], leaves: int, outputs: int) -> None:
    """Refuse lists that should be of one length, and are not, and indices past their end.

    Args:
        leaves, outputs: how many there are of arguments and outputs, by their structures.

    Raises:
        SerializeError: names the first.
    """
    stages, merges, arguments = len(data["stages"]), data["merges"], data["arguments"]
    constants = [i for i, _ in data["argument_constants"]]
    rest = sorted(set(range(leaves)) - set(constants))
    inputs = [row["target"] for row in data["nodes"] if row["op"] == "placeholder"]
    indices = [
        i
        for m in merges
        for i in (m["weight"], (m["total"] or {}).get("output"), *(i for i, _ in m["terms"]))
        if i is not None
    ]
    for holds, what in (
        (stages > 0, "there are no stages"),
        (all(len(data[k]) == stages for k in ("devices", "loads", "rows", "regions")), "lists of stages"),
        (all(data["rows"]), "a stage has no device"),
        (all(d == row[0] for d, row in zip(data["devices"], data["rows"], strict=False) if row), "devices"),
        (len(data["forecast"]["stages"]) == stages, "the forecast"),
        (
            all(
                a < b <= len(names) and (not i or a >= runs[i - 1][1])
                for names, runs in zip(data["stages"], data["regions"], strict=False)
                for i, (a, b) in enumerate(runs)
            ),
            "regions",
        ),
        (len(data["names"]) == leaves and len(arguments) == len(rest), "arguments"),
        (len(set(constants)) == len(constants) and all(i < leaves for i in constants), "constant arguments"),
        ([a[1] for a in arguments] == inputs, "inputs"),
        (len(data["example"]) == len(arguments) == len(data["batch_dims"]), "the example"),
        (all(len(e[0]) == a[5] for e, a in zip(data["example"], arguments, strict=False)), "dimensions"),
        (outputs <= len(data["outputs"]) == len(merges), "outputs"),
        (all(i < len(merges) for i in indices), "indices of outputs"),
        (data["modes"] and len(set(data["modes"])) == len(data["modes"]), "modes"),
        (sum(row["op"] == "output" for row in data["nodes"]) == 1, "there is not one output"),
    ):
        if not holds:
            _refuse(f"{what} do not fit each other")


def _refuse(why: str) -> NoReturn:
    raise SerializeError(f"program.json is damaged: {why}", remedy="save the pipeline again")
