"""The stages as a graph: a box for each module, and the values that cross a cut, with their bytes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from ..errors import ArgumentError
from ..graph.nodes import output_values
from ..pipeline import Pipeline
from ..plan.sizes import in_units


def dot(pipe: Pipeline) -> str:
    """In graphviz's language. Nodes of one module that follow each other are one box."""
    facts, graph = pipe.traced.facts, pipe.traced.graph
    stage_of = {name: stage.index for stage in pipe for name in stage.nodes}
    box_of: dict[str, str] = {}
    boxes: dict[int, list[tuple[str, str]]] = {stage.index: [] for stage in pipe}
    latest: dict[tuple[int, str], str] = {}
    for node in graph.nodes:
        if node.name not in stage_of or node.op == "get_attr":
            continue
        key = stage_of[node.name], facts[node.name].module_path
        if key not in latest:
            latest[key] = f"n{len(latest)}"
            boxes[key[0]].append((latest[key], key[1] or type(pipe.model).__name__))
        box_of[node.name] = latest[key]
    lines = ["digraph fxsplit {", '  rankdir=LR; node [shape=box, fontname="sans-serif", fontsize=10];']
    lines.append('  edge [fontname="sans-serif", fontsize=9];')
    for node in graph.nodes:
        if node.op == "placeholder":
            box_of[node.name] = f"in_{node.name}"
            lines.append(f"  {_quoted(box_of[node.name])} [label={_quoted(node.name)}, shape=ellipse];")
    for stage in pipe:
        lines.append(
            f"  subgraph cluster_{stage.index} {{ label={_quoted(f'stage {stage.index} · {stage.device}')};"
        )
        lines += [f"    {box} [label={_quoted(label)}];" for box, label in boxes[stage.index]]
        lines.append("  }")
    edges: dict[tuple[str, str], list[str]] = {}
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            if node.name in box_of and operand.name in box_of and box_of[node.name] != box_of[operand.name]:
                crosses = stage_of.get(operand.name, stage_of[node.name]) != stage_of[node.name]
                label = f"{operand.name}, {in_units(facts[operand.name].nbytes)}" if crosses else ""
                known = edges.setdefault((box_of[operand.name], box_of[node.name]), [])
                known += [label] if label and label not in known else []
    for (a, b), labels in edges.items():
        said = "\\n".join(labels)
        style = f" [label={_quoted(said)}, penwidth=2]" if said else ""
        lines.append(f"  {_quoted(a)} -> {_quoted(b)}{style};")
    lines.append('  out [label="output", shape=ellipse];')
    given = [v.name for v in output_values(graph) if hasattr(v, "name") and v.name in box_of]
    lines += [f"  {_quoted(box)} -> out;" for box in dict.fromkeys(box_of[name] for name in given)]
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("\\\\n", "\\n").replace('"', '\\"')
    return f'"{escaped}"'


def draw(pipe: Pipeline, path: str) -> None:
    """Write the graph to a file that ends in ``.dot`` or ``.svg``.

    Raises:
        ArgumentError: it ends in something else, or there is no graphviz to draw it.
    """
    target = Path(path)
    if target.suffix == ".dot":
        target.write_text(dot(pipe), encoding="utf-8")
        return
    if target.suffix != ".svg":
        raise ArgumentError(f"{path} is neither .dot nor .svg", remedy="--graph graph.dot")
    program = shutil.which("dot")
    if program is None:
        raise ArgumentError(
            "there is no graphviz here, which draws", remedy="--graph graph.dot, or install graphviz"
        )
    done = subprocess.run(
        [program, "-Tsvg", "-o", str(target)], input=dot(pipe), text=True, capture_output=True
    )
    if done.returncode:
        raise ArgumentError(f"graphviz: {done.stderr.strip()}", remedy="--graph graph.dot")
