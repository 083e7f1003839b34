"""A pytest plugin: ``pytest_plugins = ["fxsplit.testing.plugin"]`` in ``conftest.py``, or ``pytest -p fxsplit.testing.plugin``.

It has the fixture `fxsplit_check`, the option ``--fxsplit-examples N``, and the marker ``fxsplit(examples=N)``. It is not loaded
by itself, because it imports torch, which other test suites of the same environment should not wait for.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, note, settings
from torch import nn

from ..errors import FxsplitError, NotEquivalentError
from .equivalence import assert_equivalent
from .plans import compiled_under
from .strategies import batches, copied, fields_of_plans

EXAMPLES = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--fxsplit-examples``."""
    group = parser.getgroup("fxsplit")
    group.addoption(
        "--fxsplit-examples",
        type=int,
        metavar="N",
        help=f"plans and batches that each fxsplit_check tries (default: {EXAMPLES}, or what the marker says)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """The marker."""
    config.addinivalue_line("markers", "fxsplit(examples=N): how many plans and batches fxsplit_check tries")


@pytest.fixture
def fxsplit_check(request: pytest.FixtureRequest) -> Callable[..., int]:
    """``fxsplit_check(model, x, ...)``: the model, split under random plans, computes on random batches what it computes.

    The batches are like the arguments, with other rows and values. Keyword arguments are the model's, but for these:

    * ``plan``: a dict of fields that every plan has, such as ``{"stages": 2}``; the others are drawn.
    * ``rows``: the fewest and the most rows of a batch.
    * ``atol``, ``rtol``: by default equality is bit for bit.

    What fxsplit refuses with an error that says why (a batch that cannot be cut, say) is no failure; if it refuses
    everything, that is one. Returns how many were compared. A failure names the plan, and where the two part.
    """
    marker = request.node.get_closest_marker("fxsplit")
    asked = request.config.getoption("--fxsplit-examples")
    usual = marker.kwargs.get("examples", EXAMPLES) if marker is not None else EXAMPLES
    return _checking(asked or usual)


def _checking(examples: int) -> Callable[..., int]:
    def check(
        model: nn.Module,
        *args: Any,
        plan: dict[str, Any] | None = None,
        rows: tuple[int, int] = (1, 9),
        atol: float = 0.0,
        rtol: float = 0.0,
        **kwargs: Any,
    ) -> int:
        compared, refused = 0, list[FxsplitError]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled_under(
                model, {}, args, kwargs
            )  # what cannot be captured is refused once, and not for every plan

        @settings(
            max_examples=examples,
            deadline=None,
            derandomize=bool(os.environ.get("CI")),
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(fields_of_plans(model, **(plan or {})), batches(model, args, kwargs, rows=rows))
        def one(fields: dict[str, Any], batch: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
            nonlocal compared
            given_args, given_kwargs = copied(batch)
            note(f"plan: {fields}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    pipe = compiled_under(model, fields, args, kwargs, keep=plan or {})
                    assert_equivalent(
                        copy.deepcopy(model), pipe, *given_args, atol=atol, rtol=rtol, **given_kwargs
                    )
                except NotEquivalentError:
                    raise
                except FxsplitError as error:
                    refused.append(error)
                    assume(False)
            compared += 1

        one()
        if not compared:
            raise refused[0]
        return compared

    return check
