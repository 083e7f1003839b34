"""`load`: a pipeline from a folder that `save_code` wrote, over a model or over a state_dict."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from .assumptions import Assumptions
from .batch import BatchDims
from .callables import resolve_name
from .codegen.emit import generate
from .compat import name_namedtuple, spec_from_text
from .compiler import compile
from .errors import SerializeError
from .graph import ModuleMode, resolve, run_under
from .ir import Assignment, Forecast, NodeFacts, Source, StageForecast, Traced
from .microbatch import Merge, Total
from .place import place
from .plan import Plan
from .proof.structure import verify_structure
from .replicate.meet import check_replicas
from .runtime.pipeline import Pipeline
from .saving.save import FORMAT, source
from .saving.skeleton import Skeleton, rebuild
from .saving.values import decode, decode_signature, import_all
from .seen import Seen
from .signature import Argument, Signature
from .trace.front import ASKED_WHOLE


def load(folder: str | os.PathLike[str], model: nn.Module | Mapping[str, torch.Tensor]) -> Pipeline:
    """The pipeline that was saved in `folder`.

    It is proven again that the program is the graph, and that the files in the folder are the program: a stage
    that was edited by hand is refused.

    Args:
        model: the model, whose parameters the pipeline then uses, or a state_dict; the modules are then made anew
            from their classes and attributes, without calling their constructors.

    Raises:
        SerializeError: the folder holds no pipeline, or one that does not fit the model or its own files.
    """
    path = Path(folder)
    try:
        data = json.loads((path / "program.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SerializeError(
            f"{os.fspath(folder)} holds no pipeline: {error}", remedy="write it with pipe.save_code(folder)"
        ) from None
    if data.get("format") != FORMAT:
        raise SerializeError(
            f"{os.fspath(folder)} was written in format {data.get('format')}, this version reads {FORMAT}",
            remedy="save the pipeline again with this version",
        )
    graphs = [g for g in (data["graph"], data["other_mode"]) if g is not None]
    for graph in graphs:
        import_all(graph["imports"])
        for name in graph["namedtuples"]:
            name_namedtuple(resolve_name(name))
    own = model if isinstance(model, nn.Module) else rebuild(data["model"], model)
    plan = Plan.from_dict(data["plan"])
    pipe: Pipeline | None = None
    for prefix, graph in reversed([*zip(("", "other_mode_"), graphs, strict=False)]):
        pipe = _pipeline(path, prefix, graph, own, plan, pipe)
    assert pipe is not None
    if isinstance(own, Skeleton):
        own.runs(pipe.traced)
    for placed in (pipe, pipe.other_mode):
        if placed is not None:
            place(own, placed.program)
    pipe.active.make_replicas().tell()
    whole = [path for path, why in pipe.traced.kept_whole.items() if why == ASKED_WHOLE]
    pipe.compiled_by(functools.partial(compile, leaf_modules=whole))
    return pipe


def _pipeline(
    path: Path, prefix: str, data: Mapping[str, Any], model: nn.Module, plan: Plan, other: Pipeline | None
) -> Pipeline:
    try:
        traced = _traced(data, model, other)
        assignment = Assignment(
            tuple(tuple(names) for names in data["stages"]),
            tuple(torch.device(d) for d in data["devices"]),
            tuple(data["loads"]),
            data["cost"],
            data["costs"],
            tuple(tuple(torch.device(d) for d in row) for row in data["rows"]),
            _forecast(data["forecast"]),
            _device_map(data["device_map"]),
        )
        regions = [[(a, b) for a, b in runs] for runs in data["regions"]]
        program = generate(model, traced, assignment, regions)
    except (AttributeError, KeyError) as error:
        raise SerializeError(
            f"the saved pipeline does not fit {type(model).__name__}: {error}",
            remedy="load it with the model that it was compiled from",
        ) from error
    verify_structure(model, traced, program)
    check_replicas(model, plan, program)
    for stage in program.stages:
        file = path / f"{prefix}stage_{stage.index}.py"
        if not file.exists() or file.read_text(encoding="utf-8") != source(stage):
            raise SerializeError(
                f"{file.name} is not the code of the saved program: it was edited, or is of another version",
                remedy="save the pipeline again; to change what it computes, change the model and compile",
            )
    dims = BatchDims(tuple(data["batch_dims"]), tuple(a.name for a in traced.signature.arguments))
    merges = [_merge(row) for row in data["merges"]]
    return Pipeline(model, plan, traced, assignment, program, dims, merges, _example(data, traced), other)


def _merge(data: Mapping[str, Any]) -> Merge:
    total = None if data["total"] is None else Total(**data["total"])
    return Merge(**{**data, "total": total, "terms": tuple((i, n) for i, n in data["terms"])})


def _device_map(data: Mapping[str, Any] | str) -> Mapping[str, Any] | str:
    if isinstance(data, str):
        return data
    return {path: tuple(device) if isinstance(device, list) else device for path, device in data.items()}


def _forecast(data: Mapping[str, Any]) -> Forecast:
    return Forecast(**{**data, "stages": tuple(StageForecast(**one) for one in data["stages"])})


def _traced(data: Mapping[str, Any], model: nn.Module, other: Pipeline | None) -> Traced:
    signature = Signature(
        signature=decode_signature(data["signature"]),
        spec=spec_from_text(data["spec"]),
        names=tuple(data["names"]),
        arguments=tuple(
            Argument(name, placeholder, argument, decode(dtype), decode(device), dim)
            for name, placeholder, argument, dtype, device, dim in data["arguments"]
        ),
        constants={i: decode(value) for i, value in data["argument_constants"]},
        given=(data["given"][0], tuple(data["given"][1])),
    )
    graph, facts = _graph(data)
    constants: dict[str, Any] = {}
    for name, value in data["constants"].items():
        is_mode = isinstance(value, dict) and "mode" in value
        constants[name] = (
            ModuleMode(value["mode"], resolve(model, value["mode"])) if is_mode else decode(value)
        )
    assumptions = Assumptions.from_json(data["assumptions"])
    changes = "" if isinstance(model, Skeleton) else assumptions.changes(model)
    if changes:
        raise SerializeError(
            f"the saved pipeline does not fit {type(model).__name__}: {changes}",
            remedy="load it over a model like the one that was saved, or compile this one",
        )
    names = dict(data["local_names"])
    objects = {fqn: constants[fqn] if fqn in constants else resolve(model, fqn) for fqn in names}
    return Traced(
        graph=graph,
        names=names,
        module=run_under(graph, names, objects),
        signature=signature,
        out_spec=spec_from_text(data["out_spec"]),
        facts=facts,
        constants=constants,
        front_end=data["front_end"],
        kept_whole=data["kept_whole"],
        modes=tuple(data["modes"]),
        other_mode=None if other is None else other.traced,
        assumptions=assumptions,
    )


def _graph(data: Mapping[str, Any]) -> tuple[fx.Graph, dict[str, NodeFacts]]:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    facts: dict[str, NodeFacts] = {}
    for row in data["nodes"]:
        if row["op"] == "output":
            graph.output(tuple(decode(v, nodes) for v in data["outputs"]))
            continue
        target = decode(row["target"]) if row["op"] == "call_function" else row["target"]
        args = decode(row["args"], nodes) if "args" in row else ()
        kwargs = decode(row["kwargs"], nodes) if "kwargs" in row else {}
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
            meta["asked"] = {str(what): Seen.from_json(was) for what, was in meta["asked"].items()}
        node.meta.update({"module_path": "", "source": None, **meta})
        fact = dict(row["facts"])
        for key in ("storages", "writes", "lasting"):
            fact[key] = frozenset(fact[key])
        for key in ("parameters", "buffers"):
            fact[key] = tuple(fact[key])
        fact["value"] = decode(fact["value"])
        facts[node.name] = NodeFacts(source=node.meta["source"], **fact)
    graph.output_node().meta.update(module_path="", source=None)
    facts[graph.output_node().name] = NodeFacts("", None)
    return graph, facts


def _example(data: Mapping[str, Any], traced: Traced) -> list[torch.Tensor]:
    """Inputs like the example's: its numbers are not saved."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for (shape, dtype, requires_grad), argument in zip(
        data["example"], traced.signature.arguments, strict=True
    ):
        kind = decode(dtype)
        floating = kind.is_floating_point or kind.is_complex
        x = torch.randn(shape, generator=generator).to(kind) if floating else torch.zeros(shape, dtype=kind)
        found.append(x.to(argument.device).requires_grad_(requires_grad))
    return found
