"""`load`: a pipeline from a folder that `save_code` wrote, over a model or over a state_dict."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from .arguments import explained
from .batch.dims import BatchDims
from .batch.merge import Merge, Merges, Total
from .codegen.emit import generate
from .compat import SYMBOLIC_SHAPES, load_quietly, spec_from_text
from .compiled import Compiled, by_mode
from .compiler import compile
from .errors import ArgumentError, FxsplitError, SerializeError
from .files import read_json, read_text
from .graph.assumptions import ASKED, CALLER, LOOKUPS, Assumptions, caller_now
from .graph.ir import Assignment, Forecast, NodeFacts, Source, StageForecast, Traced
from .graph.nodes import ModuleMode, resolve, run_under
from .graph.place import check_attributes, check_devices
from .graph.signature import Argument, Signature
from .modules.seen import Seen
from .partition.device_map import output_homes
from .pipeline import Pipeline
from .plan.plan import Plan
from .proof.structure import verify_structure
from .replicas.meet import check_replicas
from .saving.fits import check_call, check_names, check_sizes
from .saving.save import FORMAT, source
from .saving.shape import PROGRAM, check_shape
from .saving.skeleton import Skeleton, class_names, rebuild
from .saving.trust import Names
from .saving.values import Decoder, names_in
from .schedules.schedule import Schedule
from .trace.front import ASKED_WHOLE

_MOST_NUMBERS = 2**28  # of an example


@explained(ArgumentError, 'fxsplit.load("folder", model), with trust=[...] by name')
def load(
    folder: str | os.PathLike[str],
    model: nn.Module | Mapping[str, torch.Tensor],
    *,
    trust: Sequence[str] = (),
) -> Pipeline:
    """The pipeline that was saved in `folder`.

    It is proven again that the program is the graph, and that the files in the folder are the program: a stage
    that was edited by hand is refused. The Python files are compared, and not run; nothing is imported or called that the
    folder names, but torch's and Python's functions of tensors and numbers, what the forwards of `model` name, and what
    `trust` says.

    Args:
        model: the model, whose parameters the pipeline then uses, or a state_dict; the modules are then made anew
            from their classes and attributes, without calling their constructors. Classes that are not torch's need
            `trust`.
        trust: names of modules (``"my.package"``, with all that is in them), functions and classes
            (``"my.module:function"``) that the folder may name beyond these.

    Raises:
        SerializeError: the folder holds no pipeline, or one that does not fit the model or its own files, or names what
            is not trusted.
        ArgumentError: an argument is of another kind.
    """
    path = _folder(folder)
    _check_model(model)
    load_quietly(SYMBOLIC_SHAPES)
    names = Names(model if isinstance(model, nn.Module) else None, trust)
    data = _program(path, folder)
    try:
        if isinstance(model, nn.Module):
            _check_fits(data, model)
        names.check(_names(data, by_state_dict=not isinstance(model, nn.Module)))
        pipe = _pipeline(path, data, model, names)
    except FxsplitError:
        raise
    except (
        Exception
    ) as error:  # whatever a file that anybody may have written makes of the code that reads it
        raise SerializeError(
            f"{os.fspath(folder)} is damaged, or does not fit the model: {type(error).__name__}: {error}",
            remedy="save the pipeline again, or load it with the model that it was compiled from",
        ) from error
    pipe.settle()
    whole = [path for path, why in pipe.traced.kept_whole.items() if why == ASKED_WHOLE]
    pipe.compiled_by(functools.partial(compile, leaf_modules=whole))
    return pipe


def _folder(folder: str | os.PathLike[str]) -> Path:
    try:
        return Path(folder)
    except TypeError:
        raise ArgumentError(
            f"the folder is a {type(folder).__name__}", remedy='fxsplit.load("folder", model)'
        ) from None


def _check_model(model: Any) -> None:
    if isinstance(model, nn.Module):
        return
    if not isinstance(model, Mapping) or not all(isinstance(t, torch.Tensor) for t in model.values()):
        raise ArgumentError(
            f"the model is a {type(model).__name__}, neither a module nor a state_dict of tensors",
            remedy="fxsplit.load(folder, model), or fxsplit.load(folder, model.state_dict())",
        )


def _program(path: Path, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What program.json says; its shape is as it should be."""
    try:
        data = read_json(path / "program.json")
        if not isinstance(data, dict):
            raise ValueError("program.json is no object")
    except (OSError, ValueError) as error:
        raise SerializeError(
            f"{os.fspath(folder)} holds no pipeline: {error}", remedy="write it with pipe.save_code(folder)"
        ) from None
    if data.get("format") != FORMAT:
        raise SerializeError(
            f"{os.fspath(folder)} was written in format {data.get('format')!r}, this version reads {FORMAT}",
            remedy="save the pipeline again with this version",
        )
    check_shape(data, PROGRAM, "program")
    return data


def _graphs(data: Mapping[str, Any]) -> list[Any]:
    return [graph for graph in (data["graph"], data["other_mode"]) if graph is not None]


def _check_fits(data: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse a model that is not like the one that was saved, before names that such a one has are looked at."""
    for graph in _graphs(data):
        changes = Assumptions.from_json(graph["assumptions"]).changes(model)
        if changes:
            raise SerializeError(
                f"the saved pipeline does not fit {type(model).__name__}: {changes}",
                remedy="load it over a model like the one that was saved, or compile this one",
            )


def _names(data: Mapping[str, Any], *, by_state_dict: bool) -> Iterator[Any]:
    """All that the file wants to be looked up; of the modules only where they are to be made."""
    for graph in _graphs(data):
        yield from graph["classes"]
        yield from names_in(graph)
    if by_state_dict:
        yield from class_names(data["model"])
        yield from names_in(data["model"])


def _pipeline(
    path: Path, data: Mapping[str, Any], model: nn.Module | Mapping[str, torch.Tensor], names: Names
) -> Pipeline:
    """The pipeline; nothing has been moved."""
    for graph in _graphs(data):
        for name in graph["classes"]:  # to import a class registers it
            names.find(name)
    own = model if isinstance(model, nn.Module) else rebuild(data["model"], model, Decoder(names), names)
    plan = Plan.from_dict(data["plan"])
    made: list[Compiled] = []
    for prefix, graph in reversed([*zip(("", "other_mode_"), _graphs(data), strict=False)]):
        played = _played(plan, graph) if prefix else plan
        made.append(_compiled(path, prefix, graph, own, played, names, made[0].traced if made else None))
    pipe = Pipeline(own, plan, by_mode(*reversed(made)), _example(data["graph"], made[-1].traced))
    pipe.prove_schedules()
    if isinstance(own, Skeleton):
        own.runs(pipe.traced)
    return pipe


def _played(plan: Plan, graph: Mapping[str, Any]) -> Plan:
    """What the program of the other mode is played by: a schedule of the user's own may be for other stages."""
    own = isinstance(plan.schedule, Schedule) and plan.schedule.stages != len(graph["stages"])
    return plan.replace(schedule="gpipe") if own else plan


def _compiled(
    path: Path,
    prefix: str,
    data: Mapping[str, Any],
    model: nn.Module,
    plan: Plan,
    names: Names,
    other: Traced | None,
) -> Compiled:
    traced = _traced(data, model, names, other)
    check_names(data["local_names"])
    check_sizes(data, traced.signature.spec.num_leaves, traced.out_spec.num_leaves)
    assignment = Assignment(
        tuple(tuple(names) for names in data["stages"]),
        tuple(torch.device(d) for d in data["devices"]),
        tuple(data["loads"]),
        data["cost"],
        data["costs"],
        tuple(tuple(torch.device(d) for d in row) for row in data["rows"]),
        _forecast(data["forecast"]),
        (device_map := _device_map(data["device_map"])),
        output_homes(model, traced, device_map),
        plan.offload,
    )
    if isinstance(plan.replicas, int) and any(n != plan.replicas for n in assignment.replicas):
        raise ValueError(f"the plan has {plan.replicas} replicas, its stages {assignment.replicas}")
    check_devices(assignment)
    regions = [[(a, b) for a, b in runs] for runs in data["regions"]]
    program = generate(model, traced, assignment, regions)
    check_attributes(model, traced, program)
    verify_structure(model, traced, program)
    check_replicas(model, plan, program)
    for stage in program.stages:
        file = path / f"{prefix}stage_{stage.index}.py"
        expected = source(stage)
        if not _holds(file, expected):
            raise SerializeError(
                f"{file.name} is not the code of the saved program: it was edited, or is of another version",
                remedy="save the pipeline again; to change what it computes, change the model and compile",
            )
    dims = BatchDims(tuple(data["batch_dims"]), tuple(a.name for a in traced.signature.arguments))
    return Compiled(plan, traced, assignment, program, dims, Merges(map(_merge, data["merges"])))


def _holds(file: Path, expected: str) -> bool:
    try:
        return read_text(file, 2 * len(expected.encode())) == expected
    except (OSError, ValueError):
        return False


def _merge(data: Mapping[str, Any]) -> Merge:
    total = None if data["total"] is None else Total(**data["total"])
    return Merge(**{**data, "total": total, "terms": tuple((i, n) for i, n in data["terms"])})


def _device_map(data: Mapping[str, Any] | str) -> Mapping[str, Any] | str:
    if isinstance(data, str):
        return data
    return {path: tuple(device) if isinstance(device, list) else device for path, device in data.items()}


def _forecast(data: Mapping[str, Any]) -> Forecast:
    return Forecast(**{**data, "stages": tuple(StageForecast(**one) for one in data["stages"])})


def _traced(data: Mapping[str, Any], model: nn.Module, names: Names, other: Traced | None) -> Traced:
    decode = Decoder(names)
    signature = Signature(
        signature=decode.signature(data["signature"]),
        spec=spec_from_text(data["spec"], names.find),
        names=tuple(data["names"]),
        arguments=tuple(
            Argument(name, placeholder, argument, decode.dtype(dtype), decode.device(device), dim)
            for name, placeholder, argument, dtype, device, dim in data["arguments"]
        ),
        constants={i: decode(value) for i, value in data["argument_constants"]},
        given=(data["given"][0], tuple(data["given"][1])),
    )
    graph, facts = _graph(data, names, model)
    constants: dict[str, Any] = {}
    for name, value in data["constants"].items():
        is_mode = isinstance(value, dict) and "mode" in value
        constants[name] = (
            ModuleMode(value["mode"], model.get_submodule(value["mode"]))
            if is_mode
            else _tensor(decode(value))
        )
    local = dict(data["local_names"])
    objects = {fqn: constants[fqn] if fqn in constants else _part(model, fqn) for fqn in local}
    return Traced(
        graph=graph,
        names=local,
        module=run_under(graph, local, objects),
        signature=signature,
        out_spec=spec_from_text(data["out_spec"], names.find),
        facts=facts,
        constants=constants,
        front_end=data["front_end"],
        kept_whole=data["kept_whole"],
        modes=tuple(data["modes"]),
        other_mode=other,
        assumptions=_assumptions(data),
    )


def _assumptions(data: Mapping[str, Any]) -> Assumptions:
    found = Assumptions.from_json(data["assumptions"])
    for row in found.rows:
        kinds = {**LOOKUPS, "argument": ASKED, "value": ASKED, "caller": CALLER}
        whats = ASKED if row.kind in ("asked", "argument", "value") else [row.what]
        if row.kind not in kinds or row.what not in whats or len(row.what) > 200:
            raise ValueError(f"{row.kind} {row.what!r} cannot be asked")
        if row.kind == "caller":
            caller_now(row.what)  # a question of torch's, with plain arguments
    return found


def _part(model: nn.Module, fqn: str) -> Any:
    """A module or tensor of the model: nothing else can be reached by a path."""
    found = resolve(model, fqn)
    if not isinstance(found, nn.Module | torch.Tensor):
        raise ValueError(f"{fqn} is a {type(found).__name__} of the model, no module or tensor")
    return found


def _tensor(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ValueError("a constant is no tensor")
    return value


def _graph(data: Mapping[str, Any], names: Names, model: nn.Module) -> tuple[fx.Graph, dict[str, NodeFacts]]:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    facts: dict[str, NodeFacts] = {}
    decode = Decoder(names, nodes)
    for row in data["nodes"]:
        if row["op"] == "output":
            graph.output(tuple(decode(v) for v in data["outputs"]))
            continue
        target = decode.function(row["target"]) if row["op"] == "call_function" else row["target"]
        args = decode(row["args"]) if "args" in row else ()
        kwargs = decode(row["kwargs"]) if "kwargs" in row else {}
        check_call(row["op"], target, args, kwargs)
        node = graph.create_node(row["op"], target, args, kwargs, name=row["name"])
        if node.name != row["name"]:
            raise SerializeError(
                f"the name {row['name']!r} cannot be given again", remedy="save the pipeline again"
            )
        nodes[node.name] = node
        meta = dict(row["meta"])
        if "source" in meta:
            meta["source"] = Source(*meta["source"])
        if "asked" in meta:
            meta["asked"] = {what: Seen.from_json(was) for what, was in meta["asked"].items()}
            if not meta["asked"].keys() <= ASKED.keys():
                raise ValueError(f"{[*meta['asked']]} cannot be asked")
        node.meta.update({"module_path": "", "source": None, **meta})
        fact = dict(row["facts"])
        for key in ("storages", "writes", "lasting"):
            fact[key] = frozenset(fact[key])
        for key in ("parameters", "buffers"):
            fact[key] = tuple(fact[key])
        fact["value"] = decode.facts(fact["value"])
        facts[node.name] = NodeFacts(source=node.meta["source"], **fact)
    graph.output_node().meta.update(module_path="", source=None)
    facts[graph.output_node().name] = NodeFacts("", None)
    return graph, facts


def _example(data: Mapping[str, Any], traced: Traced) -> list[torch.Tensor]:
    """Inputs like the example's: its numbers are not saved."""
    decode = Decoder(Names(None))
    generator = torch.Generator().manual_seed(0)
    found = []
    if sum(math.prod(shape) for shape, _, _ in data["example"]) > _MOST_NUMBERS:
        raise SerializeError(
            f"the example has more than {_MOST_NUMBERS} numbers", remedy="compile with a smaller one"
        )
    for (shape, dtype, requires_grad), argument in zip(
        data["example"], traced.signature.arguments, strict=True
    ):
        kind = decode.dtype(dtype)
        floating = kind.is_floating_point or kind.is_complex
        x = torch.randn(shape, generator=generator).to(kind) if floating else torch.zeros(shape, dtype=kind)
        found.append(x.to(argument.device).requires_grad_(requires_grad))
    return found
