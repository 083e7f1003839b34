"""Where weights come from: a state_dict, a file, a sharded checkpoint, a folder, or a function of the user's."""

from __future__ import annotations

import functools
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ArgumentError, WeightsError

KINDS = (
    "a state_dict, a .safetensors or .pt file, the .index.json of a sharded checkpoint, a folder with one of these, "
    "or a function from a name to a tensor"
)
_INDEX = ".index.json"
_SAFE, _PICKLED = (".safetensors",), (".pt", ".pth", ".bin")
# In a folder the first of these that is there, as transformers and Accelerate look for them.
_IN_FOLDER = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
# The types of numbers in a .safetensors file, and torch's names.
_NAMES = {
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "BF16": "bfloat16",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


@dataclass(frozen=True)
class Shape:
    """What is known of a tensor before it is read."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Shape:
        """That of one that is there."""
        return Shape(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.sizes)}"


class Source(ABC):
    """Tensors by name.

    Attributes:
        what: it is, in messages.
    """

    what: str

    @abstractmethod
    def shapes(self) -> Mapping[str, Shape] | None:
        """What is there, without reading it; None if only asking tells.

        Raises:
            WeightsError: a file is damaged or missing.
        """

    @abstractmethod
    def read(self, name: str, device: torch.device) -> torch.Tensor | None:
        """One of them, in memory that nobody else has, on `device`; None if it is not there.

        Raises:
            WeightsError: it cannot be read.
        """


def source_of(given: Any) -> Source:
    """The source that somebody gives.

    Raises:
        ArgumentError: it is none.
        WeightsError: there is no such file, or no checkpoint in the folder.
    """
    if isinstance(given, Source):
        return given
    if isinstance(given, Mapping):
        odd = next(
            (k for k, v in given.items() if not (isinstance(k, str) and isinstance(v, torch.Tensor))), None
        )
        if odd is not None:
            held = [k for k, v in given.items() if isinstance(v, Mapping)]
            raise ArgumentError(
                f"weights= has {odd!r}, which is no tensor under a name",
                remedy=f"weights=checkpoint[{held[0]!r}]" if held else "the state_dict of a model",
            )
        return _Held(given, "the state_dict")
    if isinstance(given, str | os.PathLike):
        return _at(Path(given))
    if callable(given) and not isinstance(given, torch.nn.Module):
        return _Asked(given)
    raise ArgumentError(f"weights= is a {type(given).__name__}", remedy=KINDS)


class _Held(Source):
    """A state_dict."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], what: str) -> None:
        self.tensors, self.what = tensors, what

    def shapes(self) -> Mapping[str, Shape]:
        return {name: Shape.of(t) for name, t in self.tensors.items() if "_extra_state" not in name}

    def read(self, name: str, device: torch.device) -> torch.Tensor | None:
        found = self.tensors.get(name)
        return None if found is None else _copied(found, name, device, self.what)


class _Asked(Source):
    """A function of the user's, from a name to a tensor or None."""

    def __init__(self, function: Callable[[str], torch.Tensor | None]) -> None:
        self.function = function
        self.what = f"{getattr(function, '__name__', 'the function')}(name)"

    def shapes(self) -> None:
        return None

    def read(self, name: str, device: torch.device) -> torch.Tensor | None:
        found = self.function(name)
        if found is not None and not isinstance(found, torch.Tensor):
            raise WeightsError(
                f"{self.what} gives a {type(found).__name__} for {name!r}",
                remedy="return a tensor, or None for what is to be left out",
            )
        return None if found is None else _copied(found, name, device, self.what)


def _copied(tensor: torch.Tensor, name: str, device: torch.device, what: str) -> torch.Tensor:
    if tensor.is_meta or tensor.layout is not torch.strided:
        kind = "is on meta and has no values" if tensor.is_meta else f"is {tensor.layout}, and not dense"
        raise WeightsError(f"{name} of {what} {kind}", remedy="the state_dict of a model that has values")
    return tensor.detach().to(device, copy=True)


class _SafeFile(Source):
    """A .safetensors file. Each tensor is read by itself: of what is mapped into memory nothing stays."""

    def __init__(self, path: Path) -> None:
        self.path, self.what = path, path.name

    def shapes(self) -> Mapping[str, Shape]:
        found = {}
        with self._opened("cpu") as file:
            for name in file.keys():  # noqa: SIM118  (it is no mapping)
                part = file.get_slice(name)
                found[name] = Shape(tuple(part.get_shape()), _dtype(part.get_dtype(), self.path))
        return found

    def read(self, name: str, device: torch.device) -> torch.Tensor | None:
        on = str(device) if device.type in ("cpu", "cuda") else "cpu"
        with self._opened(on) as file:
            found: torch.Tensor = file.get_tensor(name)
        # On the CPU it is a view of the file, which others may write to or cut short.
        return found.clone() if found.device == device and on == "cpu" else found.to(device)

    def _opened(self, device: str) -> Any:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise WeightsError(
                f"{self.path} is read by the safetensors library, which is not installed",
                remedy='pip install "fxsplit[weights]", or pip install safetensors',
            ) from None
        try:
            return safe_open(self.path, framework="pt", device=device)
        except (SafetensorError, OSError, ValueError) as error:
            raise _damaged(self.path, error) from error


class _PickledFile(Source):
    """A file that torch.save wrote; only tensors and plain containers are read from it."""

    def __init__(self, path: Path) -> None:
        self.path, self.what = path, path.name

    @functools.cached_property
    def _held(self) -> _Held:
        try:
            try:
                found = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                found = torch.load(
                    self.path, map_location="cpu", weights_only=True
                )  # the format before torch 1.6
        except Exception as error:
            raise _damaged(self.path, error) from error
        if not isinstance(found, Mapping):
            raise WeightsError(
                f"{self.path} holds a {type(found).__name__}, not a state_dict",
                remedy="torch.save(model.state_dict(), path)",
            )
        inner = [
            k for k, v in found.items() if isinstance(v, Mapping) and k in ("state_dict", "model", "module")
        ]
        if inner:
            raise WeightsError(
                f"{self.path} holds a checkpoint of {', '.join(map(str, found))}",
                remedy=f"weights=torch.load({str(self.path)!r}, mmap=True)[{inner[0]!r}]",
            )
        return source_of(found)  # type: ignore[return-value]

    def shapes(self) -> Mapping[str, Shape]:
        return self._held.shapes()

    def read(self, name: str, device: torch.device) -> torch.Tensor | None:
        return self._held.read(name, device)


class _Shards(Source):
    """Several files, and which name is in which."""

    def __init__(self, what: str, files: Mapping[str, Source]) -> None:
        self.what, self._files = what, files

    def shapes(self) -> Mapping[str, Shape]:
        found: dict[str, Shape] = {}
        for file in dict.fromkeys(self._files.values()):
            held = file.shapes() or {}
            wanted = [name for name, other in self._files.items() if other is file]
            missing = [name for name in wanted if name not in held]
            if missing:
                raise WeightsError(
                    f"{self.what} says that {missing[0]!r} is in {file.what}, which does not have it",
                    remedy="get the checkpoint again, all of its files",
                )
            found.update((name, held[name]) for name in wanted)
        return found

    def read(self, name: str, device: torch.device) -> torch.Tensor | None:
        return self._files[name].read(name, device)


def _at(path: Path) -> Source:
    """What is at a path."""
    if path.is_dir():
        return _in_folder(path)
    if not path.is_file():
        raise WeightsError(f"there is no file {path}", remedy=KINDS)
    if path.name.endswith(_INDEX):
        return _indexed(path)
    if path.suffix in _SAFE:
        return _SafeFile(path)
    if path.suffix in _PICKLED:
        return _PickledFile(path)
    raise WeightsError(f"{path} is none of the files that weights are read from", remedy=KINDS)


def _in_folder(folder: Path) -> Source:
    for name in _IN_FOLDER:
        if (folder / name).is_file():
            return _at(folder / name)
    for pattern in (f"*{_INDEX}", *(f"*{end}" for end in (*_SAFE, *_PICKLED))):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return _at(found[0])
        if found:
            raise WeightsError(
                f"{folder} has several: {', '.join(p.name for p in found[:4])}",
                remedy="weights= the file, or the .index.json that says what is in which",
            )
    raise WeightsError(f"{folder} has no checkpoint", remedy=KINDS)


def _indexed(path: Path) -> Source:
    try:
        told = json.loads(path.read_text())["weight_map"]
        names = {str(name): str(file) for name, file in told.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(
            f"{path} is no index of a checkpoint: {type(error).__name__}: {error}",
            remedy='it has a "weight_map" from names to files, as transformers writes it',
        ) from None
    files: dict[str, Source] = {}
    for file in dict.fromkeys(names.values()):
        if Path(file).name != file:
            raise WeightsError(
                f"{path} names {file!r}, which is no file beside it", remedy="get the checkpoint again"
            )
        if not (path.parent / file).is_file():
            raise WeightsError(
                f"{path} names {file}, which is not there",
                remedy="get the checkpoint again, all of its files",
            )
        files[file] = _at(path.parent / file)
    return _Shards(path.name, {name: files[file] for name, file in names.items()})


def _damaged(path: Path, error: BaseException) -> WeightsError:
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return WeightsError(
        f"{path} cannot be read: {text}", remedy="get the file again: it is damaged or of another kind"
    )


def _dtype(name: str, path: Path) -> torch.dtype:
    """That of a safetensors file."""
    kind = getattr(torch, _NAMES.get(name, ""), None)
    if kind is None:
        raise WeightsError(
            f"{path} has numbers of type {name}, which this torch does not have", remedy="convert the file"
        )
    return kind  # type: ignore[no-any-return]
