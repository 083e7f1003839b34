"""A word such as ``"balanced"`` → an explicit ``{module path: device}`` map, by the bytes of the weights."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..errors import PartitionError, did_you_mean
from ..graph.ir import Traced
from ..graph.nodes import compute_nodes
from .device_map import place_nodes
from .units import bonds, find_units
from .weights import nbytes, tensors_of, weights_read
from .written import fewest_keys


@dataclass(frozen=True)
class Piece:
    """What is never split: a module that is one node, a module of a class that was named, or a tensor.

    Attributes:
        path: its name in a device map.
        tensors: the parameters and buffers that its nodes read, by identity.
        positions: of its nodes in program order.
    """

    path: str
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    positions: list[int] = field(default_factory=list)


def device_map_for(
    model: nn.Module, traced: Traced, word: str, limits: Mapping[str, int], no_split: Sequence[str] = ()
) -> dict[str, str]:
    """The device map that `word` stands for.

    Pieces are laid over the devices in the order in which they run, so that values go forward. Those that share a
    parameter go together where that fits; where it does not, the parameter is counted where it is read first.
    *Ensures* that the program may be cut wherever the map changes device.

    Args:
        word: one of ``device_names.DEVICE_MAPS``.
        limits: device → bytes, in the order in which devices are filled; ``"cpu"`` holds what the others cannot.
        no_split: names of classes whose modules stay on one device.

    Raises:
        PartitionError: the weights do not fit, or no module is of a class in `no_split`.
    """
    _check_classes(model, no_split)
    devices = sorted(limits, key=lambda device: device == "cpu")
    sizes = [limits[d] for d in devices]
    pieces = find_pieces(model, traced, no_split)
    if not pieces:
        return {"": devices[0]}
    nodes, legal = compute_nodes(traced.graph), {unit.start for unit in find_units(traced)}
    bound = [  # pieces with no cut between them
        [i for i, piece in enumerate(pieces) if any(b.first <= p <= b.last for p in piece.positions)]
        for b in bonds(traced)
    ]
    while True:
        parts = _as_tied_as_fits(model, pieces, bound, devices, sizes, no_split)
        weights = _weights(pieces, parts)
        ends = _spread(word, weights, devices, sizes, [_depth(pieces, part[0]) for part in parts])
        owner = [next(d for d, end in enumerate(ends) if i < end) for i in range(len(parts))]
        device_map = fewest_keys(
            (pieces[i].path, devices[d]) for part, d in zip(parts, owner, strict=True) for i in part
        )
        placed = place_nodes(model, traced, device_map)
        wrong = [
            {devices.index(str(placed[node.name])) for node in pair}
            for start, pair in enumerate(itertools.pairwise(nodes), start=1)
            if placed[pair[0].name] != placed[pair[1].name] and start not in legal
        ]
        if not wrong:
            return device_map
        # An operation between the pieces follows its operands where it may not: take that cut back.
        first = max(i for i, d in enumerate(owner) if d == min(wrong[0]))
        last = min(i for i, d in enumerate(owner) if d == max(wrong[0]))
        bound.append([i for part in parts[first : last + 1] for i in part])


def find_pieces(model: nn.Module, traced: Traced, no_split: Sequence[str] = ()) -> list[Piece]:
    """The pieces that hold weights, in the order in which they run."""
    nodes, tensors = compute_nodes(traced.graph), tensors_of(model)
    whole = {traced.facts[n.name].module_path for n in nodes if n.op == "call_module"}
    whole |= {path for path, module in model.named_modules() if type(module).__name__ in no_split}
    found: dict[str, Piece] = {}
    for position, node in enumerate(nodes):
        read = weights_read(model, tensors, node)
        path = _outermost(traced.facts[node.name].module_path, whole)
        if path is None and node.op == "get_attr" and read:
            owner = _outermost(str(node.target), whole)
            path = str(node.target) if owner is None else owner
        if path is not None:
            piece = found.setdefault(path, Piece(path))
            piece.positions.append(position)
            piece.tensors.update((id(t), t) for t in read)
    return [piece for piece in found.values() if piece.tensors]


def _outermost(path: str, whole: set[str]) -> str | None:
    parts = path.split(".") if path else []
    prefixes = (".".join(parts[:i]) for i in range(len(parts) + 1))
    return next((prefix for prefix in prefixes if prefix in whole), None)


def _check_classes(model: nn.Module, no_split: Sequence[str]) -> None:
    known = {type(module).__name__ for module in model.modules()}
    if no_split and not known.intersection(no_split):  # a list may name classes that only other models have
        raise PartitionError(
            f"no_split_module_classes names {no_split[0]!r}, but no module of {type(model).__name__} is of that class",
            remedy=did_you_mean(no_split[0], known),
        )


def _as_tied_as_fits(
    model: nn.Module,
    pieces: Sequence[Piece],
    bound: Sequence[Sequence[int]],
    devices: Sequence[str],
    sizes: Sequence[int],
    no_split: Sequence[str],
) -> list[list[int]]:
    """The parts that go to one device each: pieces that are bound together, or share a parameter."""
    readers: dict[int, list[int]] = {}
    for i, piece in enumerate(pieces):
        for tensor in piece.tensors:
            readers.setdefault(tensor, []).append(i)
    ties = [list(tie) for tie in dict.fromkeys(map(tuple, readers.values())) if len(tie) > 1]
    for count in range(len(ties), -1, -1):
        parts = _joined(len(pieces), [*bound, *ties[:count]])
        weights = _weights(pieces, parts)
        ends = fill(weights, sizes)
        if ends[-1] == len(parts):
            return parts
    left = sizes[-1] - sum(weights[ends[-2] if len(ends) > 1 else 0 : ends[-1]])
    path, rest = pieces[parts[ends[-1]][0]].path, sum(weights[ends[-1] :])
    raise PartitionError(
        f"the weights of {type(model).__name__} do not fit: {devices[-1]} has {left:,} bytes left, "
        f"{path!r} takes {weights[ends[-1]]:,}: {weights[ends[-1]] - left:,} bytes are missing",
        where=f"{path!r} and what runs after it: {rest:,} bytes",
        remedy=f"max_memory={{..., {devices[-1]!r}: {sizes[-1] - left + rest}}}, or one more device"
        + (' such as "cpu"' if "cpu" not in devices else "")
        + (", or fewer classes in no_split_module_classes" if no_split else ""),
    )


def _joined(count: int, links: Iterable[Sequence[int]]) -> list[list[int]]:
    """The classes into which `links` join the numbers below `count`, ordered by their smallest."""
    group = list(range(count))
    for link in links:
        joined = {group[i] for i in link}
        if len(joined) > 1:
            group = [min(joined) if g in joined else g for g in group]
    return [[i for i in range(count) if group[i] == g] for g in sorted(set(group))]


def _weights(pieces: Sequence[Piece], parts: Sequence[Sequence[int]]) -> list[int]:
    """Bytes of each part; a tensor of several parts counts in the first."""
    seen: set[int] = set()
    weights = []
    for part in parts:
        new = {t: tensor for i in part for t, tensor in pieces[i].tensors.items() if t not in seen}
        seen.update(new)
        weights.append(nbytes(new.values()))
    return weights


def _depth(pieces: Sequence[Piece], start: int) -> int:
    """How many modules a cut before this piece would go through."""
    if start == 0:
        return 0
    before, after = (pieces[i].path.split(".") for i in (start - 1, start))
    return len(
        list(itertools.takewhile(lambda names: names[0] == names[1], zip(before, after, strict=False)))
    )


def _spread(
    word: str, weights: Sequence[int], devices: Sequence[str], sizes: Sequence[int], depths: Sequence[int]
) -> list[int]:
    """Where each device ends. All of it fits; what the other devices cannot hold is on ``"cpu"``."""
    ends = fill(weights, sizes)
    if word == "sequential":
        return ends
    count = len(devices) - (devices[-1] == "cpu" and len(devices) > 1)
    held, low = ends[count - 1], 0
    spared = 1 if word == "balanced_low_0" and count > 1 else 0
    if spared:
        while fill(weights[low:held], sizes[1:count])[-1] < held - low:
            low += 1
    others = even(weights[low:held], sizes[spared:count], depths[low:held])
    return [*[low] * spared, *(low + end for end in others), *ends[count:]]


def fill(weights: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Where each device ends if each takes, in order, as many of `weights` as it can hold.

    No other contiguous way gets further; the last entry is less than ``len(weights)`` where they do not fit.
    """
    ends, position = [], 0
    for size in sizes:
        while position < len(weights) and weights[position] <= size:
            size -= weights[position]
            position += 1
        ends.append(position)
    return ends


def even(weights: Sequence[int], sizes: Sequence[int], depths: Sequence[int]) -> list[int]:
    """Where each device ends so that the heaviest is as light as possible, exactly; they fit.

    Among such ways: the fewest devices without anything, the fewest modules cut through, the smallest sum of squares.

    Args:
        depths: entry i is how many modules a cut before ``weights[i]`` goes through.
    """
    n = len(weights)

    def suffices(heaviest: int) -> bool:
        return fill(weights, [min(size, heaviest) for size in sizes])[-1] == n

    limit = bisect_left(range(sum(weights) + 1), True, key=suffices)
    best: list[tuple[int, ...] | None] = [(0, 0, 0), *[None] * n]
    origins: list[list[int]] = []
    for size in sizes:
        row: list[tuple[int, ...] | None] = [None] * (n + 1)
        origin = [0] * (n + 1)
        for end in range(n + 1):
            load = 0
            for start in range(end, -1, -1):
                load += weights[start] if start < end else 0
                if load > min(size, limit):
                    break
                before = best[start]
                if before is not None:
                    cut = depths[start] if 0 < start < end else 0
                    cost = (before[0] + (start == end), before[1] + cut, before[2] + load * load)
                    now = row[end]
                    if now is None or cost < now:
                        row[end], origin[end] = cost, start
        best = row
        origins.append(origin)
    ends, end = [], n
    for origin in reversed(origins):
        ends.append(end)
        end = origin[end]
    return ends[::-1]
