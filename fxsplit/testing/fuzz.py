"""Random models under random plans, for as long as there is time: python -m fxsplit.testing.fuzz --minutes 10 --seed 0

Every case follows from one number. It compiles a random model under a random plan, and compares it with the model: called in
both modes, without gradients, in a step, after attributes have changed. A refusal is no failure, and is counted by its
words; anything else than the model's numbers is. What fails is made smaller, and kept as a file that ``--replay`` runs.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import json
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..compare import agree, difference
from ..compat import tree_leaves
from ..errors import FxsplitError, NotEquivalentError, VerifyError
from ..pipeline import Pipeline
from ..plan.checkpoint import Budget
from ..plan.hardware import Device
from ..plan.plan import Plan
from .equivalence import compare
from .plans import compiled_under, odd_seconds, random_fields
from .programs import Program, Recipe, RowsCache, Scaled, choices, random_recipe


@dataclass(frozen=True)
class Case:
    """A model, a plan, and how they are called.

    Attributes:
        plan: fields of a `Plan`.
        rows: of the batch that is compared.
        example_rows: of that which it is compiled for.
        training: the mode in which it is compiled.
        grad: which inputs require gradients.
        seed: of inputs and masks.
    """

    recipe: Recipe
    plan: Mapping[str, Any]
    rows: int
    example_rows: int
    training: bool = True
    grad: tuple[bool, ...] = (False, False, False)
    seed: int = 0

    @classmethod
    def of_seed(cls, seed: int) -> Self:
        """The case of a number."""
        choose = choices(seed)
        recipe = random_recipe(choose)
        fields = random_fields(choose, Program(recipe), batch_dims={"x": 0})
        least = recipe.least_rows * Plan(**fields).micro_batches
        return cls(
            recipe,
            fields,
            choose.randint(least, least + 8),
            choose.randint(max(least, 4), least + 8),
            choose.choice((True, True, False)),
            tuple(choose.choice((True, False)) for _ in range(3)),
            choose.randint(0, 1000),
        )

    def to_json(self) -> str:
        """As text."""
        fields = {
            **dataclasses.asdict(self),
            "recipe": self.recipe.to_dict(),
            "plan": dict(map(_plain, self.plan.items())),
        }
        return json.dumps(fields, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """From such text."""
        fields = json.loads(text)
        plan = dict(map(_from_plain, fields["plan"].items()))
        return cls(
            **{
                **fields,
                "recipe": Recipe.from_dict(fields["recipe"]),
                "plan": plan,
                "grad": tuple(fields["grad"]),
            }
        )


def _plain(item: tuple[str, Any]) -> tuple[str, Any]:
    name, value = item
    if value is odd_seconds:
        return name, "odd_seconds"
    if isinstance(value, Budget):
        return name, {"budget": value.nbytes}
    return name, value.to_dict() if isinstance(value, Device) else value


def _from_plain(item: tuple[str, Any]) -> tuple[str, Any]:
    name, value = item
    if value == "odd_seconds":
        return name, odd_seconds
    if isinstance(value, dict) and set(value) == {"budget"}:
        return name, Budget(value["budget"])
    return name, Device(**value) if name == "hardware" and isinstance(value, dict) else value


def check(case: Case) -> str:
    """Run one case.

    Returns:
        ``"equal"``; or why there is nothing to compare: what fxsplit refused, or that the model itself cannot do it.

    Raises:
        Exception: anything else is a failure.
    """
    model = Program(case.recipe).train(case.training)
    args, kwargs = model.example(case.rows, case.seed, case.grad)
    if not _trains(model, args, kwargs):
        return "the model itself fails"
    shown, named = model.example(case.example_rows, case.seed + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            pipe = compiled_under(model, case.plan, shown, named)
            pipe.verify()
            torch.manual_seed(case.seed)
            _compared(case, model, pipe, args, kwargs)
            _stepped(case, pipe, args, kwargs)
            model.train(not case.training), pipe.train(not case.training)
            _compared(case, model, pipe, args, kwargs)
            with torch.no_grad():
                _compared(case, model, pipe, args, kwargs)
            _changed(case, model, pipe, args, kwargs)
        except VerifyError:  # what a compile makes is not the model: it noticed, and is wrong all the same
            raise
        except FxsplitError as error:
            return f"refused: {type(error).__name__}: {' '.join(error.what.split()[:6])}"
    return "equal"


def _trains(model: Program, args: Sequence[Tensor], kwargs: Mapping[str, Any]) -> bool:
    """In-place writes may destroy what backward needs."""
    twin = copy.deepcopy(model)
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in args]
    try:
        for mode in (True, False):
            output = twin.train(mode)(*inputs, **_named(kwargs, grad=True))
            roots = [t for t in _tensors(output) if t.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
    except (RuntimeError, ValueError):
        return False
    return True


def _compared(
    case: Case, model: Program, pipe: Pipeline, args: Sequence[Tensor], kwargs: Mapping[str, Any]
) -> None:
    # Autograd rebuilds the graph of a view when its base was written to, at its next use: where it then adds the gradient
    # of a stale view is no fact of the program, and with three summands the rounding shows.
    # Kernels with another number of threads add up in another order, too.
    near = 1e-4 * (case.recipe.has("view_add_") or (case.plan.get("threads") or 1) > 1)
    found = compare(model, pipe, *args, rtol=near, atol=near, **kwargs)
    for name, how in found.differences.items():
        raise NotEquivalentError(f"{name} differs: {how}", where=found.first)


def _stepped(case: Case, pipe: Pipeline, args: Sequence[Tensor], kwargs: Mapping[str, Any]) -> None:
    """A step gives the loss and the gradients of a call with the loss after it; those are compared with the model's."""
    if case.recipe.form == "loss":
        return
    called, stepped = copy.deepcopy(pipe), copy.deepcopy(pipe)
    state = torch.get_rng_state()
    output = called(*_detached(args), **_named(kwargs))
    expected = _loss(output if called.plan.gather else output.gather())
    if not expected.requires_grad:
        return
    expected.backward()  # type: ignore[no-untyped-call]
    torch.set_rng_state(state)
    loss = stepped.step(*_detached(args), loss_fn=_loss, reduction="sum", **_named(kwargs))
    pairs: dict[str, tuple[Tensor | None, Tensor | None]] = {"the loss of a step": (loss, expected.detach())}
    parameters = zip(stepped.named_parameters(), called.parameters(), strict=True)
    pairs |= {f"gradient of {name} in a step": (p.grad, q.grad) for (name, p), q in parameters}
    for name, (a, b) in pairs.items():
        if not agree(a, b, rtol=1e-4, atol=1e-4):
            raise NotEquivalentError(f"{name} differs: {difference(a, b)}")


def _detached(args: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach() for x in args]


def _named(kwargs: Mapping[str, Any], grad: bool = False) -> dict[str, Any]:
    return {
        name: RowsCache(x.kept)
        if isinstance(x, RowsCache)
        else x.detach().clone().requires_grad_(grad and x.requires_grad)
        for name, x in kwargs.items()
    }


def _tensors(output: Any) -> list[Tensor]:
    leaves: list[Any] = tree_leaves(output)
    return [t for leaf in leaves for t in (leaf.kept if isinstance(leaf, RowsCache) else [leaf])]


def _loss(output: Any) -> Tensor:
    total = torch.zeros(())
    for leaf in _tensors(output):
        total = total + leaf.sigmoid().sum()
    return total


def _changed(
    case: Case, model: Program, pipe: Pipeline, args: Sequence[Tensor], kwargs: Mapping[str, Any]
) -> None:
    """An attribute that is another one now is followed, or the call is refused."""
    if not case.recipe.has("scaled"):
        return
    for module in (*model.modules(), *pipe.model.modules()):
        if isinstance(module, Scaled):
            module.scale = 3.0
    _compared(case, model, pipe, args, kwargs)


# -- smaller cases ----------------------------------------------------------------------------------------------------


def smaller(case: Case, fails: Callable[[Case], bool], tries: int = 300) -> Case:
    """A case that fails too, and has nothing that could be left out, one by one."""
    found = True
    while found and tries > 0:
        found = False
        for less in _less(case):
            tries -= 1
            if tries < 0:
                break
            if fails(less):
                case, found = less, True
                break
    return case


def _less(case: Case) -> Iterator[Case]:
    recipe = case.recipe
    for k in range(len(recipe.steps) if len(recipe.steps) > 1 else 0):
        steps = recipe.steps[:k] + recipe.steps[k + 1 :]
        yield dataclasses.replace(case, recipe=dataclasses.replace(recipe, steps=steps))
    for name in case.plan:
        rest = {n: v for n, v in case.plan.items() if n != name}
        try:
            Plan(**rest)
        except FxsplitError:
            continue
        yield dataclasses.replace(case, plan=rest)
    if len(recipe.outputs) > 1:
        yield dataclasses.replace(case, recipe=dataclasses.replace(recipe, outputs=recipe.outputs[:1]))
    if recipe.inputs > 1:
        yield dataclasses.replace(case, recipe=dataclasses.replace(recipe, inputs=1))
    if recipe.past:
        yield dataclasses.replace(case, recipe=dataclasses.replace(recipe, past=False))
    if recipe.form != "tensor":
        yield dataclasses.replace(case, recipe=dataclasses.replace(recipe, form="tensor"))
    if any(case.grad):
        yield dataclasses.replace(case, grad=(False, False, False))
    for rows in {recipe.least_rows * Plan(**case.plan).micro_batches} - {case.rows}:
        yield dataclasses.replace(case, rows=rows)


def failure_of(case: Case) -> BaseException | None:
    """What goes wrong, if something does."""
    try:
        check(case)
    except Exception as error:
        return error
    return None


# -- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases; returns 1 if one has failed."""
    parser = argparse.ArgumentParser(
        prog="python -m fxsplit.testing.fuzz", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--cases", type=int, help="end after so many")
    parser.add_argument("--seed", type=int, default=0, help="of the first case (default: 0)")
    parser.add_argument("--folder", default="fuzz", help="where failing cases are kept (default: fuzz)")
    parser.add_argument("--replay", metavar="FILE", help="run the case of a file")
    parser.add_argument("--steps", action="store_true", help="say which case is run, before it is")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.replay:
        case = Case.from_json(Path(given.replay).read_text(encoding="utf-8"))
        print(check(case))
        return 0
    begin, failed = time.monotonic(), 0
    outcomes: dict[str, list[int]] = collections.defaultdict(list)  # what came out → of which cases
    number = given.seed
    while time.monotonic() - begin < 60 * given.minutes and (
        given.cases is None or number < given.seed + given.cases
    ):
        if given.steps:
            print(number, flush=True)
        failed += not _run(number, outcomes, Path(given.folder))
        number += 1
        if sys.stderr.isatty() and number % 20 == 0:
            print(f"\r{number - given.seed} cases, {failed} failed", end="", file=sys.stderr, flush=True)
    seconds = time.monotonic() - begin
    for what, numbers in sorted(outcomes.items(), key=lambda item: -len(item[1])):
        print(f"{len(numbers):8} {what} (case {numbers[0]}{', …' * (len(numbers) > 1)})")
    print(
        f"{number - given.seed} cases from seed {given.seed} in {seconds:.0f} s, "
        f"{(number - given.seed) / seconds:.1f} a second, {failed} failed"
    )
    return int(failed > 0)


def _run(number: int, outcomes: dict[str, list[int]], folder: Path) -> bool:
    case = Case.of_seed(number)
    try:
        outcomes[check(case)].append(number)
        return True
    except Exception as error:
        kind, text = type(error), "".join(traceback.format_exception(error)[-8:])
        case = smaller(case, lambda c: isinstance(failure_of(c), kind))
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"case-{number}.json"
        file.write_text(case.to_json(), encoding="utf-8")
        print(f"case {number} fails: {failure_of(case) or text}", flush=True)
        print(f"  python -m fxsplit.testing.fuzz --replay {file}", flush=True)
        outcomes[f"FAILED: {kind.__name__}"].append(number)
        return False


if __name__ == "__main__":
    random.seed(0)
    sys.exit(main())
