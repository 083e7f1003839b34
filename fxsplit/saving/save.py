"""`save_code`: write a pipeline as an importable package of plain modules and a JSON file."""

from __future__ import annotations

import json
import keyword
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import fx, nn

from ..compat import classes_in, spec_to_text
from ..compiled import Compiled
from ..errors import SerializeError
from ..files import read_json, read_text
from ..graph.code import StageModule, write
from ..graph.ir import NodeFacts, Stage, Traced
from ..graph.nodes import ModuleMode, output_values, region_runs
from ..plan.checkpoint import Where
from ..plan.plan import Plan
from .skeleton import describe
from .values import CannotEncodeError, encode, encode_signature, memory_of, sparse_parts

FORMAT = 2
_PYTHONS = ("builtins", "collections")


class Savable(Protocol):
    """What of a `Pipeline` is written."""

    model: nn.Module
    plan: Plan
    compiled: Mapping[bool, Compiled]

    @property
    def example(self) -> list[torch.Tensor]:
        """The flat example inputs."""


def _programs(pipe: Savable) -> dict[str, Compiled | None]:
    """What is written of each program: under which prefix its files, and which key its graph."""
    first, *other = {id(one): one for one in pipe.compiled.values()}.values()
    return {"": first, "other_mode_": other[0] if other else None}


def save_code(pipe: Savable, folder: str | os.PathLike[str]) -> None:
    """Write the stages as Python files that can be read, diffed and imported, and what `load` needs as JSON.

    Values of parameters are not written: save ``pipe.state_dict()``. The files are the same in every process, and
    hold no path of this machine.

    Raises:
        SerializeError: the program has a function or constant that no file can name; nothing has been written then.
    """
    files = {"program.json": _json(_program(pipe)) + "\n"}
    for prefix, one in _programs(pipe).items():
        for stage in one.stages if one is not None else ():
            files[f"{prefix}stage_{stage.index}.py"] = source(stage)
    files["__init__.py"] = _package(pipe)
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SerializeError(
            f"{os.fspath(folder)} cannot be a folder: {error.strerror}",
            remedy="name a new or an empty folder",
        ) from error
    _refuse_to_overwrite(target, files)
    for name in _written_before(target) - files.keys():
        (target / name).unlink(missing_ok=True)
    for name, text in files.items():
        (target / name).write_text(text, encoding="utf-8")


def _written_before(target: Path) -> set[str]:
    """The stages of the program that is in this folder already: files of ours. Any other is the user's."""
    try:
        data = read_json(target / "program.json")
        if "format" not in data or "plan" not in data:
            return set()
        graphs = {"": data["graph"], "other_mode_": data["other_mode"]}
        names = {f"{p}stage_{i}.py" for p, g in graphs.items() for i in range(len(g["stages"] if g else ()))}
        return {name for name in names if _is_ours(target / name)}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _refuse_to_overwrite(folder: Path, files: Iterable[str]) -> None:
    for name in files:
        path = folder / name
        if (path.exists() or path.is_symlink()) and not _is_ours(path):
            raise SerializeError(
                f"{os.fspath(path)} is there already, and was not written by save_code",
                remedy="name a new or an empty folder",
            )


def _is_ours(path: Path) -> bool:
    """Whether a file begins as those that are written here: it is nobody else's. One that is empty may be replaced."""
    try:
        text = "" if path.is_symlink() else read_text(path)
    except (OSError, ValueError):
        return False
    if path.is_symlink() or path.suffix == ".json":
        return not path.is_symlink() and (not text.strip() or ('"format"' in text and '"plan"' in text))
    return (
        not text.strip() or text.startswith('"""stage ') or "written by fxsplit." in text.partition("\n")[0]
    )


def _json(program: dict[str, Any]) -> str:
    try:
        return "\n".join(_rows(program, 0))
    except ValueError as error:
        raise SerializeError(
            f"the pipeline cannot be saved: {error}", remedy="a plan and costs with finite numbers"
        ) from error


_BROKEN = 3  # levels of objects and lists that have a line for each of what they hold: a node is a line


def _rows(value: Any, depth: int) -> Iterator[str]:
    """JSON, sorted, with a line for each node."""
    if depth == _BROKEN or not value or not isinstance(value, dict | list):
        yield json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":"))
        return
    ends = "{}" if isinstance(value, dict) else "[]"
    keys = sorted(value) if isinstance(value, dict) else [None] * len(value)
    yield ends[0]
    for n, key in enumerate(keys):
        begin = "" if key is None else f"{json.dumps(key)}:"
        comma = "," if n + 1 < len(keys) else ""
        *before, last = _rows(value[n if key is None else key], depth + 1)
        lines = [*before, last + comma]
        yield begin + lines[0]
        yield from lines[1:]
    yield ends[1]


def source(stage: Stage) -> str:
    """The file of one stage: a class that takes the model, and a class for each region that is recomputed.

    Raises:
        SerializeError: its code calls a function that cannot be imported.
    """
    regions = [(name, r) for name, r in stage.module.named_children() if isinstance(r, StageModule)]
    texts = [(f"Stage{stage.index}", stage.module), *((_class_name(stage, name), r) for name, r in regions)]
    imports = {"import torch", "from torch import nn"}
    classes = []
    names: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        **dict.fromkeys(name for name, _ in texts),
    }  # one file, one meaning
    for name, module in texts:
        text = write(module.graph, known=names)
        names.update(text.names)
        for word, value in text.names.items():
            if word not in text.imports:
                raise SerializeError(
                    f"stage {stage.index} calls {getattr(value, '__qualname__', value)!r}, which cannot be imported",
                    remedy="define it at the top level of a module, not in a function or in __main__",
                )
            imports.add(text.imports[word])
        lines = [f"class {name}(nn.Module):", "    def __init__(self, model):", "        super().__init__()"]
        if module is not stage.module:
            lines.append(
                f"        self.meta = {{'random': {module.meta['random']}, 'writes': {module.meta['writes']}}}"
            )
        for target in dict.fromkeys(
            str(n.target) for n in module.graph.nodes if n.op in ("call_module", "get_attr")
        ):
            lines.append(f"        {_binding(stage, module, target)}")
        body = "".join(f"    {line}\n" if line else "\n" for line in text.code.splitlines())
        classes.append("\n".join(lines) + "\n\n" + body)
    ordered = sorted(imports, key=lambda line: (not line.startswith("import"), line))
    first, *more = (line.removeprefix("# ") for line in stage.header.splitlines())
    summary = "\n".join(more)
    return f'"""{first}\n\n{summary}\n"""\n\n' + "\n".join(ordered) + "\n\n\n" + "\n\n".join(classes)


def _class_name(stage: Stage, region: str) -> str:
    return f"Stage{stage.index}{''.join(part.capitalize() for part in region.split('_'))}"


def _binding(stage: Stage, module: fx.GraphModule, name: str) -> str:
    value = getattr(module, name)
    if isinstance(value, fx.GraphModule) and name not in stage.paths:
        return f"self.{name} = {_class_name(stage, name)}(model)"
    if isinstance(value, ModuleMode):
        return f'self.__dict__["{name}"] = model.get_submodule("{value.path}")  # only its mode is read'
    if name not in stage.paths:
        return f"self.register_buffer({name!r}, {_literal(value)}, persistent=False)"
    fqn = stage.paths[name]
    if isinstance(value, nn.Module):
        return f'self.{name} = model.get_submodule("{fqn}")'
    owner, _, leaf = fqn.rpartition(".")
    holder = f'model.get_submodule("{owner}")' if owner else "model"
    plain = leaf.isidentifier() and not keyword.iskeyword(leaf)
    return f"self.{name} = {holder}.{leaf}" if plain else f"self.{name} = getattr({holder}, {leaf!r})"


def _literal(tensor: torch.Tensor) -> str:
    """A constant of the program as Python."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    shape = tuple(plain.shape)
    if plain.layout is not torch.strided:
        parts = ", ".join(map(_literal, sparse_parts(plain)))
        if plain.layout is torch.sparse_coo:
            return f"torch.sparse_coo_tensor({parts}, {shape}).coalesce()"
        return f"torch.sparse_compressed_tensor({parts}, {shape}, layout={plain.layout})"
    if plain.is_contiguous():
        return f"{_flat(plain.flatten())}.reshape({shape})"
    memory = plain.as_strided((memory_of(plain),), (1,))
    return f"{_flat(memory)}.as_strided({shape}, {plain.stride()})"


def _flat(tensor: torch.Tensor) -> str:
    values = re.sub(r"\b(inf|nan)\b", r'float("\1")', repr(tensor.tolist()))
    return f"torch.tensor({values}, dtype={tensor.dtype})"


def _package(pipe: Savable) -> str:
    first = next(iter(pipe.compiled.values()))
    numbers = [stage.index for stage in first.stages]
    names = ", ".join(f"Stage{i}" for i in numbers)
    lines = [
        f'"""{type(pipe.model).__name__} in {len(numbers)} stages, written by fxsplit.',
        "",
        "fxsplit.load(folder, model) gives the pipeline; Stage0(model) is the first stage alone.",
        '"""',
        "",
        *(f"from .stage_{i} import Stage{i}" for i in numbers),
        "",
        f"STAGES = ({names},)" if len(numbers) == 1 else f"STAGES = ({names})",
    ]
    return "\n".join(lines) + "\n"


def _program(pipe: Savable) -> dict[str, Any]:
    about = "generated by fxsplit; what runs is in the files beside it"
    data = {"about": about, "format": FORMAT, "torch": torch.__version__.split("+")[0], "plan": _plan(pipe)}
    try:
        data["graph"], data["other_mode"] = [
            None if one is None else _graph(one, pipe.example) for one in _programs(pipe).values()
        ]
    except CannotEncodeError as error:
        raise SerializeError(
            f"the pipeline cannot be saved: {error.what}",
            remedy="define functions and classes at the top level of a module, and return plain structures",
        ) from error
    data["model"] = describe(pipe.model, [one.traced for one in pipe.compiled.values()])
    return data


def _plan(pipe: Savable) -> dict[str, Any]:
    plan = pipe.plan
    if isinstance(plan.checkpoint, Where):
        plan = plan.replace(checkpoint="always")  # the regions themselves are in the file
    if callable(plan.weighing.spelling):
        plan = plan.replace(cost=next(iter(pipe.compiled.values())).assignment.costs)
    return plan.to_dict()


def _graph(compiled: Compiled, example: Sequence[torch.Tensor]) -> dict[str, Any]:
    traced, assignment = compiled.traced, compiled.assignment
    signature = traced.signature
    kinds = [c for spec in (signature.spec, traced.out_spec) for c in classes_in(spec)]
    return {
        "classes": sorted(
            {f"{c.__module__}:{c.__qualname__}" for c in kinds if c.__module__ not in _PYTHONS}
        ),
        "signature": encode_signature(signature.signature),
        "spec": spec_to_text(signature.spec),
        "names": list(signature.names),
        "given": [signature.given[0], list(signature.given[1])],
        "arguments": [
            [a.name, a.placeholder, a.argument, encode(a.dtype), encode(a.device), a.dim]
            for a in signature.arguments
        ],
        "argument_constants": [[i, encode(v)] for i, v in sorted(signature.constants.items())],
        "example": [[list(x.shape), encode(x.dtype), x.requires_grad] for x in example],
        "out_spec": spec_to_text(traced.out_spec),
        "nodes": [_node(node, traced) for node in traced.graph.nodes],
        "outputs": [encode(v) for v in output_values(traced.graph)],
        "constants": {name: _constant(value) for name, value in sorted(traced.constants.items())},
        "local_names": dict(traced.names),
        "front_end": traced.front_end,
        "kept_whole": dict(traced.kept_whole),
        "modes": list(traced.modes),
        "stages": [list(names) for names in assignment.stages],
        "devices": [str(d) for d in assignment.devices],
        "loads": list(assignment.loads),
        "cost": assignment.cost,
        "costs": dict(assignment.costs),
        "rows": [[str(d) for d in row] for row in assignment.rows],
        "device_map": assignment.device_map
        if isinstance(assignment.device_map, str)
        else dict(assignment.device_map),
        "forecast": asdict(assignment.forecast),
        "regions": [region_runs(stage) for stage in compiled.stages],
        "batch_dims": list(compiled.dims.dims),
        "merges": [asdict(m) for m in compiled.merges],
        "assumptions": traced.assumptions.to_json(),
    }


def _constant(value: Any) -> Any:
    return {"mode": value.path} if isinstance(value, ModuleMode) else encode(value)


def _node(node: fx.Node, traced: Traced) -> dict[str, Any]:
    if node.op == "output":
        return {"op": "output"}
    target = encode(node.target) if node.op == "call_function" else str(node.target)
    row = {"op": node.op, "name": node.name, "target": target, "facts": _facts(traced.facts[node.name])}
    if node.op not in ("placeholder", "get_attr"):
        row["args"], row["kwargs"] = encode(tuple(node.args)), encode(dict(node.kwargs))
    meta = {
        key: node.meta[key]
        for key in ("named", "variable", "unpacks", "caller", "module_path")
        if node.meta.get(key) is not None
    }
    if "asked" in node.meta:
        meta["asked"] = {what: was.to_json() for what, was in node.meta["asked"].items()}
    source = node.meta.get("source")
    if source is not None:
        meta["source"] = [os.path.basename(source.path), source.line]
    return {**row, "meta": meta}


def _facts(fact: NodeFacts) -> dict[str, Any]:
    try:
        value = encode(fact.value)
    except CannotEncodeError:
        value = None
    return {
        "module_path": fact.module_path,
        "child_call": fact.child_call,
        "value": value,
        "storages": sorted(fact.storages),
        "writes": sorted(fact.writes),
        "lasting": sorted(fact.lasting),
        "parameters": list(fact.parameters),
        "buffers": list(fact.buffers),
        "stateful": fact.stateful,
        "returns": fact.returns,
        "alias": fact.alias,
        "random": fact.random,
        "rng_state": fact.rng_state,
    }
