"""Small random models: a recipe, and the module that plays it.

A recipe is plain data, so it prints, shrinks and is kept as JSON. It is a list of steps ``(operation, i, j)``: each computes
new values from the i-th and j-th of those before. All values have as many rows as the batch and `WIDTH` columns::

    x ──▶ v0 ──linear(0)──▶ v1 ──add(1, 0)──▶ v2 ──▶ tied head ──▶ outputs

Extend `OPERATIONS` with every new thing that a model may do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 4
FORMS = ("tensor", "dict", "tuple", "loss", "cache")
_T = TypeVar("_T")


class Choose(Protocol):
    """What makes random choices: a `random.Random`, or Hypothesis."""

    def choice(self, options: Sequence[_T], /) -> _T:
        """One of them."""

    def randint(self, low: int, high: int, /) -> int:
        """From `low` to `high`, both included."""


@dataclass(frozen=True)
class Recipe:
    """A model as data.

    Attributes:
        steps: operation, and the numbers of its two operands among the values so far.
        outputs: numbers of the values that it returns, from the last one back.
        inputs: 1 to 3 tensors; the third one is given by its name.
        form: how it returns them, of `FORMS`; with a ``"loss"`` there is the mean loss of rows that count beside them,
            with a ``"cache"`` what the steps have kept.
        seed: of its parameters.
        past: it takes a cache too, which it adds to.
    """

    steps: tuple[tuple[str, int, int], ...]
    outputs: tuple[int, ...] = (0,)
    inputs: int = 1
    form: str = "tensor"
    seed: int = 0
    past: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """From plain values."""
        steps = tuple((str(name), int(i), int(j)) for name, i, j in fields["steps"])
        return cls(**{**fields, "steps": steps, "outputs": tuple(fields["outputs"])})

    def has(self, *names: str) -> bool:
        """Whether one of these operations is in it."""
        return any(name in names for name, _, _ in self.steps)

    @property
    def least_rows(self) -> int:
        """Batch normalisation wants two in every micro-batch."""
        return 2 if self.has("batchnorm") else 1


def random_recipe(choose: Choose, *, most: int = 8, inputs: int | None = None) -> Recipe:
    """Up to `most` steps."""
    names = sorted(OPERATIONS)
    steps = [
        (choose.choice(names), choose.randint(0, 30), choose.randint(0, 30))
        for _ in range(choose.randint(1, most))
    ]
    outputs = [choose.randint(0, 10) for _ in range(choose.randint(1, 3))]
    return Recipe(
        tuple(steps),
        tuple(outputs),
        inputs or choose.randint(1, 3),
        choose.choice(FORMS),
        choose.randint(0, 100),
        choose.choice((False, False, True)),
    )


class Program(nn.Module):
    """Plays a recipe. Inputs: (rows, `WIDTH`), each; so are its outputs, and a loss has no dimension."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            self.recipe = recipe
            self.shared = nn.Linear(WIDTH, WIDTH)
            self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
            self.tied.weight = self.shared.weight
            made = (OPERATIONS[name].make for name, _, _ in recipe.steps)
            self.steps = nn.ModuleList(nn.Identity() if make is None else make() for make in made)
            self.runs = tuple(OPERATIONS[name].run for name, _, _ in recipe.steps)

    def forward(
        self, x: Tensor, y: Tensor | None = None, *, z: Tensor | None = None, past: RowsCache | None = None
    ) -> Any:
        """The values that the recipe returns, in its form."""
        values = [v * 1.0 for v in (x, y, z) if v is not None]
        cache = RowsCache() if past is None else past
        for module, run, (name, i, j) in zip(self.steps, self.runs, self.recipe.steps, strict=True):
            a, b = values[i % len(values)], values[j % len(values)]
            values += run(self, module, a, cache if name == "cached" else b)
        values.append(self.tied(values[-1]))
        picked = [values[-1 - k % len(values)] for k in self.recipe.outputs]
        return self._as_said(picked, x, cache)

    def _as_said(self, picked: list[Tensor], x: Tensor, cache: RowsCache) -> Any:
        form = self.recipe.form
        if form == "cache":
            return {"first": picked[0], "past": cache}
        if form == "loss":
            target = torch.where(x[:, 0] > -0.5, (x[:, 1] > 0).long(), -100)
            return {"loss": F.cross_entropy(picked[0], target, ignore_index=-100), "logits": picked[0]}
        if form == "tuple":
            return tuple(picked)
        if form == "dict" or len(picked) > 1:
            return {"first": picked[0], "rest": tuple(picked[1:])}
        return picked[0]

    def example(
        self, rows: int, seed: int = 0, grad: Sequence[bool] = ()
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Arguments of one call."""
        generator = torch.Generator().manual_seed(seed)
        wanted = [*grad, False, False, False]
        made = [
            torch.randn(rows, WIDTH, generator=generator).requires_grad_(wanted[k])
            for k in range(self.recipe.inputs)
        ]
        named: dict[str, Any] = {"z": made[2]} if len(made) == 3 else {}
        if self.recipe.past:
            named["past"] = RowsCache([torch.randn(rows, 1, WIDTH, generator=generator)])
        return tuple(made[:2]), named


# -- what programs are made of ----------------------------------------------------------------------------------------


class Pack(nn.Module):
    """A submodule with a dict and a tuple as its output."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        """Input: (rows, `WIDTH`)."""
        y = self.lin(x)
        return {"a": y, "more": (y.sigmoid(), x)}


class RowsCache:
    """What the layers of a model have kept, as caches of keys and values do: one tensor for each layer."""

    def __init__(self, kept: Sequence[Tensor] = ()) -> None:
        self.kept = list(kept)

    def update(self, value: Tensor) -> Tensor:
        """Keep `value` (rows, `WIDTH`); all that was kept so far, (rows, so many, `WIDTH`)."""
        before = self.kept[-1:]
        self.kept.append(torch.cat([*before, value[:, None]], dim=1))
        return self.kept[-1]


class Cached(nn.Module):
    """Attends to what the layers before it have kept, and keeps something itself."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: RowsCache) -> Tensor:
        """Input and output: (rows, `WIDTH`)."""
        kept = cache.update(self.lin(x))
        weights = (kept @ x[:, :, None]).softmax(dim=1)
        out: Tensor = (weights * kept).sum(dim=1)
        return out


class Branchy(nn.Module):
    """Branches on the values of a tensor, and so stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Input and output: (rows, `WIDTH`)."""
        y: Tensor = self.lin(x)
        return y if x.sum() > 1e9 else y * 2


class Counter(nn.Module):
    """Writes buffers in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.mean = nn.Buffer(torch.zeros(())), nn.Buffer(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Input and output: (rows, `WIDTH`)."""
        self.calls.add_(1)
        self.mean.copy_(self.mean * 0.9 + x.detach().mean(0) * 0.1)
        return x - self.mean


class Scaled(nn.Module):
    """Reads a plain attribute, which may be another one in the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        """Input and output: (rows, `WIDTH`)."""
        return x * self.scale


class Twice(nn.Module):
    """Calls one child twice, and has another behaviour in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Input and output: (rows, `WIDTH`)."""
        y: Tensor = self.lin(self.lin(x))
        return y * 0.5 if self.training else y


@dataclass(frozen=True)
class Operation:
    """One kind of step.

    Attributes:
        run: the program, the step's module, and two values → new values. (Of ``cached``: a value and the cache.)
        make: the step's module; None if it has none.
    """

    run: Callable[[Program, nn.Module, Tensor, Any], list[Tensor]]
    make: Callable[[], nn.Module] | None = None


def _module(make: Callable[[], nn.Module]) -> Operation:
    return Operation(lambda p, m, a, b: [m(a)], make)


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def _iadd(p: Program, m: nn.Module, a: Tensor, b: Tensor) -> list[Tensor]:
    y = a * 1
    alias = y
    y += b
    return [alias]


def _packed(p: Program, m: nn.Module, a: Tensor, b: Tensor) -> list[Tensor]:
    found = m(a)
    return [found["a"] + found["more"][0], found["more"][1]]


def _autocast(p: Program, m: nn.Module, a: Tensor, b: Tensor) -> list[Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m(a)
    return [y.float() + b]


def _no_grad(p: Program, m: nn.Module, a: Tensor, b: Tensor) -> list[Tensor]:
    with torch.no_grad():
        y = m(a) * 2
    return [y + b]


def _set(p: Program, m: nn.Module, a: Tensor, b: Tensor) -> list[Tensor]:
    y = a.clone()
    y[:, 0] = b[:, 1]
    return [y]


def _embedded(p: Program, m: nn.Module, a: Tensor, b: Tensor) -> list[Tensor]:
    return [m((a.detach()[:, 0] * 3).long().abs() % 5) + b]


def _gathered(p: Program, m: nn.Module, a: Tensor, b: Tensor) -> list[Tensor]:
    return [a + a.gather(1, b.argmax(dim=1, keepdim=True))]


def _attended(p: Program, m: nn.Module, a: Tensor, b: Tensor) -> list[Tensor]:
    q, k = a.view(-1, 1, 2, 2), b.reshape(-1, 1, 2, 2)
    return [F.scaled_dot_product_attention(q, k, k).reshape(-1, WIDTH)]


OPERATIONS: dict[str, Operation] = {
    "linear": _module(_linear),
    "norm": _module(lambda: nn.LayerNorm(WIDTH)),
    "groupnorm": _module(lambda: nn.GroupNorm(2, WIDTH)),
    "batchnorm": _module(lambda: nn.BatchNorm1d(WIDTH)),
    "dropout": _module(lambda: nn.Dropout(0.3)),
    "f_dropout": Operation(lambda p, m, a, b: [F.dropout(a, 0.2, p.training)]),
    "shared": Operation(lambda p, m, a, b: [p.shared(a)]),
    "tied": Operation(lambda p, m, a, b: [F.linear(a, p.shared.weight.t())]),
    "add": Operation(lambda p, m, a, b: [a + b]),
    "mul": Operation(lambda p, m, a, b: [a * b.sigmoid()]),
    "gelu": Operation(lambda p, m, a, b: [F.gelu(a)]),
    "where": Operation(lambda p, m, a, b: [torch.where(a > 0, a, b * 0.1)]),
    "masked": Operation(lambda p, m, a, b: [a.masked_fill(b < 0, 0.0)]),
    "add_": Operation(lambda p, m, a, b: [a.add_(b)]),
    "inplace_relu": _module(lambda: nn.ReLU(inplace=True)),
    "view_add_": Operation(lambda p, m, a, b: [a.view(-1, 2).mul_(2).view(-1, WIDTH)]),
    "set": Operation(_set),
    "iadd": Operation(_iadd),
    "chunk": Operation(lambda p, m, a, b: [torch.cat(a.chunk(2, dim=1)[::-1], dim=1)]),
    "unbind": Operation(lambda p, m, a, b: [torch.stack(a.unbind(1)[::-1], dim=1)]),
    "cat": Operation(lambda p, m, a, b: [torch.cat([a, b], dim=1)[:, 1 : WIDTH + 1]]),
    "pack": Operation(_packed, Pack),
    "cached": Operation(lambda p, m, a, cache: [m(a, cache)], Cached),
    "counter": _module(Counter),
    "branchy": _module(Branchy),
    "scaled": _module(Scaled),
    "twice": _module(Twice),
    "detached": Operation(lambda p, m, a, b: [a.detach() + b]),
    "no_grad": Operation(_no_grad, _linear),
    "autocast": Operation(_autocast, _linear),
    "checkpointed": Operation(lambda p, m, a, b: [checkpoint(m, a, use_reentrant=False)], _linear),
    "embedded": Operation(_embedded, lambda: nn.Embedding(5, WIDTH)),
    "gathered": Operation(_gathered),
    "attended": Operation(_attended),
    "shape": Operation(
        lambda p, m, a, b: [a * (a.shape[1] - 3) + torch.ones(a.shape[0], 1) * b]
    ),
}  # fmt: skip


def choices(seed: int) -> Choose:
    """Choices that follow from a seed alone."""
    return random.Random(seed)
