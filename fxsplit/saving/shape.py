"""What `program.json` looks like: which values stand where, and how many there may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SerializeError

MOST_NODES = 100_000
MOST_STAGES = 1024  # and replicas, together

Check = Callable[[Any], str | None]


@dataclass(frozen=True)
class Row:
    """A list with these values, in this order; the last one may be there any number of times if `rest`."""

    shapes: tuple[Any, ...]

    def __init__(self, *shapes: Any) -> None:
        object.__setattr__(self, "shapes", shapes)


@dataclass(frozen=True)
class Table:
    """An object with any keys, and values of one shape."""

    shape: Any
    key: Any = str


@dataclass(frozen=True)
class Either:
    """One of several shapes."""

    shapes: tuple[Any, ...]

    def __init__(self, *shapes: Any) -> None:
        object.__setattr__(self, "shapes", shapes)


@dataclass(frozen=True)
class Such:
    """A value of one shape for which something holds as well."""

    shape: Any
    holds: Callable[[Any], bool]
    what: str


def check_shape(value: Any, shape: Any, where: str) -> None:
    """Refuse a value that is not of this shape.

    A shape is a type, None, a list with the shape of its items, a dict with that of each key (a key that ends in ``?`` may
    be missing), or one of the classes above. ``object`` is anything.

    Raises:
        SerializeError: it is not.
    """
    why = _differs(value, shape, where)
    if why:
        raise SerializeError(f"program.json is damaged: {why}", remedy="save the pipeline again")


def _differs(value: Any, shape: Any, where: str) -> str | None:
    if isinstance(shape, Either):
        whys = [_differs(value, one, where) for one in shape.shapes]
        return None if None in whys else whys[-1]
    if isinstance(shape, Such):
        why = _differs(value, shape.shape, where)
        return why or (None if shape.holds(value) else f"{where} is not {shape.what}")
    if isinstance(shape, Row):
        if not isinstance(value, list) or len(value) != len(shape.shapes):
            return f"{where} is no list of {len(shape.shapes)}"
        return _first(
            (v, s, f"{where}[{i}]") for i, (v, s) in enumerate(zip(value, shape.shapes, strict=True))
        )
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{where} is no list"
        return _first((v, shape[0], f"{where}[{i}]") for i, v in enumerate(value))
    if isinstance(shape, Table):
        if not isinstance(value, dict):
            return f"{where} is no object"
        return _first((v, shape.shape, f"{where}.{k}") for k, v in value.items()) or _first(
            (k, shape.key, f"a key of {where}") for k in value
        )
    if isinstance(shape, dict):
        return _object_differs(value, shape, where)
    if shape is None:
        return None if value is None else f"{where} is not null"
    if shape is float:
        return None if type(value) in (int, float) and abs(value) < 1e300 else f"{where} is no number"
    return None if shape is object or type(value) is shape else f"{where} is no {shape.__name__}"


def _object_differs(value: Any, shape: dict[str, Any], where: str) -> str | None:
    if not isinstance(value, dict):
        return f"{where} is no object"
    known = {key.removesuffix("?") for key in shape}
    odd = [k for k in value if k not in known]
    odd += [k for k in shape if not k.endswith("?") and k not in value]
    if odd:
        return f"{where} should not have, or lacks, {odd[0]!r}"
    return _first(
        (value[key.removesuffix("?")], inner, f"{where}.{key.removesuffix('?')}")
        for key, inner in shape.items()
        if key.removesuffix("?") in value
    )


def _first(rows: Any) -> str | None:
    return next((why for row in rows if (why := _differs(*row)) is not None), None)


def _is_small(value: int) -> bool:
    return 0 <= value < 2**63


def _is_word(value: str) -> bool:
    return value.isprintable() and len(value) < 10_000


def _is_path(value: str) -> bool:
    return _is_word(value) and not any(part.startswith("__") for part in value.split("."))


def _at_most(most: int) -> Callable[[Sequence[Any]], bool]:
    return lambda value: len(value) <= most


COUNT = Such(int, _is_small, "a size or an index")
WORD = Such(str, _is_word, "a printable word")
PATH = Such(str, _is_path, "the path of a module, parameter or buffer")  # no `__class__.__init__.__globals__`
IDENTIFIER = Such(str, str.isidentifier, "an identifier")
OPTIONAL_PATH = Either(None, PATH)

_FACTS = {
    "module_path": PATH,
    "child_call": COUNT,
    "value": object,
    "storages": [COUNT],
    "writes": [COUNT],
    "lasting": [COUNT],
    "parameters": [PATH],
    "buffers": [PATH],
    "stateful": bool,
    "returns": Either(None, WORD),
    "alias": Either(None, WORD),
    "random": bool,
    "rng_state": bool,
}
_META = {
    "named?": object,
    "variable?": str,
    "unpacks?": int,
    "caller?": PATH,
    "module_path?": PATH,
    "source?": Row(WORD, COUNT),
    "asked?": Table(object),
}
_NODE = Either(
    {"op": Such(str, "output".__eq__, "an operation"), "args?": object},
    {
        "op": Such(
            str,
            ("placeholder", "get_attr", "call_module", "call_method", "call_function").__contains__,
            "an operation",
        ),
        "name": IDENTIFIER,
        "target": object,
        "facts": _FACTS,
        "args?": object,
        "kwargs?": object,
        "meta": _META,
    },
)
_STAGE_FORECAST = {
    "bytes_in": float,
    "bytes_out": float,
    "flops": Either(None, float),
    "state": Either(None, float),
    "memory": Either(None, float),
    "limit": Either(None, float),
}
_MERGE = {
    "how": Such(str, ("rows", "same", "mean", "sum", "total").__contains__, "a way to merge"),
    "dim": COUNT,
    "weight": Either(None, COUNT),
    "total": Either(
        None,
        {"output": COUNT, "how": Such(str, ("clamp", "add").__contains__, "clamp or add"), "number": float},
    ),
    "terms": [Row(COUNT, float)],
    "note": WORD,
}
_SEEN = Row(str, str, list)
GRAPH = {
    "classes": [WORD],
    "signature": [object],
    "spec": str,
    "names": [WORD],
    "given": Row(COUNT, [str]),
    "arguments": [Row(WORD, IDENTIFIER, WORD, object, object, COUNT)],
    "argument_constants": [Row(COUNT, object)],
    "example": [Row([COUNT], object, bool)],
    "out_spec": str,
    "nodes": Such([_NODE], _at_most(MOST_NODES), f"a list of at most {MOST_NODES}"),
    "outputs": [object],
    "constants": Table(object),
    "local_names": Table(IDENTIFIER, PATH),
    "front_end": WORD,
    "kept_whole": Table(str, PATH),
    "modes": [bool],
    "stages": Such([[WORD]], _at_most(MOST_STAGES), f"a list of at most {MOST_STAGES}"),
    "devices": [WORD],
    "loads": [float],
    "cost": WORD,
    "costs": Table(float),
    "rows": Such([[WORD]], lambda rows: sum(map(len, rows)) <= MOST_STAGES, f"at most {MOST_STAGES} workers"),
    "device_map": Either(Table(Either(WORD, Row(WORD, WORD)), PATH), str),
    "forecast": {
        "unit": WORD,
        "bound": float,
        "stages": [_STAGE_FORECAST],
        "cut_bytes": float,
        "bubble": float,
        "how": WORD,
        "advice": WORD,
    },
    "regions": [[Row(COUNT, COUNT)]],
    "batch_dims": [Either(None, COUNT)],
    "merges": [_MERGE],
    "assumptions": {"rows": [Row(str, str, str, _SEEN)], "names": [str], "grad": bool},
}
_DESCRIBED = Either(
    None,
    {"why_not": str},
    {"class": WORD, "attributes": Table(object, Such(str, _is_path, "the name of an attribute"))},
)
_TENSOR = Either(
    Row(PATH, Such(str, "none".__eq__, "none"), Such(str, ("parameter", "buffer").__contains__, "a kind")),
    Row(
        PATH,
        Such(str, ("parameter", "buffer").__contains__, "a kind"),
        OPTIONAL_PATH,
        bool,
        [COUNT],
        object,
    ),
)
MODEL = {
    "name": IDENTIFIER,
    "modules": Such(
        [Row(PATH, OPTIONAL_PATH, bool, _DESCRIBED)], _at_most(MOST_NODES), f"a list of at most {MOST_NODES}"
    ),
    "tensors": [_TENSOR],
    "attributes": [Row(PATH, object)],
}
PROGRAM = {
    "about?": str,
    "format": int,
    "torch": str,
    "plan": dict,
    "graph": GRAPH,
    "other_mode": Either(None, GRAPH),
    "model": MODEL,
}
