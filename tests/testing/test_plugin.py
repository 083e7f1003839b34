"""The pytest plugin, as a user has it: a file with a few lines."""

import pytest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.slow

MODEL = """
import pytest
import torch
from torch import nn
from fxsplit.testing.programs import Counter

pytest_plugins = ["fxsplit.testing.plugin"]


class Net(nn.Module):
    def __init__(self, rate=0.5):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.drop = nn.Dropout(rate)
        self.embedding = nn.Embedding(10, 8)

    def forward(self, x, ids=None, scale=2.0):
        y = self.drop(self.layers(x)) * scale
        return y if ids is None else y + self.embedding(ids)
"""


@pytest.fixture
def outcome(pytester):
    def run(test, *options):
        pytester.makepyfile(conftest='pytest_plugins = ["fxsplit.testing.plugin"]')
        pytester.makepyfile(MODEL.replace('pytest_plugins = ["fxsplit.testing.plugin"]', "") + test)
        return pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", "-W", "ignore", *options)

    return run


def test_a_model_in_two_lines(outcome):
    found = outcome(
        """
def test_the_split_is_the_model(fxsplit_check):
    assert fxsplit_check(Net(), torch.randn(8, 8), ids=torch.randint(10, (8,)), scale=3.0) > 3
""",
        "--fxsplit-examples",
        "8",
    )
    found.assert_outcomes(passed=1)


def test_the_marker(outcome):
    found = outcome(
        """
@pytest.mark.fxsplit(examples=4)
def test_the_split_is_the_model(fxsplit_check):
    assert 1 <= fxsplit_check(Net(), torch.randn(8, 8), plan={"stages": 2}, rows=(4, 6)) <= 4
"""
    )
    found.assert_outcomes(passed=1)


def test_a_failure_says_where(outcome):
    """A stage that is not what was traced: here a call of the compiler's that is broken on purpose."""
    found = outcome(
        """
import fxsplit.testing.plugin as plugin

def broken(model, fields, *args, **kwargs):
    pipe = compiled(model, fields, *args, **kwargs)
    module = pipe[0].module
    node = next(n for n in module.graph.nodes if n.op == "call_module")
    with module.graph.inserting_after(node):
        more = module.graph.call_function(torch.add, (node, 1.0))
    node.replace_all_uses_with(more, delete_user_cb=lambda user: user is not more)
    module.recompile()
    return pipe

compiled, plugin.compiled_under = plugin.compiled_under, broken

def test_the_split_is_the_model(fxsplit_check):
    fxsplit_check(Net(), torch.randn(8, 8), plan={"stages": 2, "checkpoint": "never"})
"""
    )
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["*NotEquivalentError: *differs*", "*where: *stage 0, in layers.*"])
    assert "plan: {" in found.stdout.str()


def test_what_is_refused_always_is_a_failure(outcome):
    found = outcome(
        """
class Reads(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x

def test_the_split_is_the_model(fxsplit_check):
    fxsplit_check(Reads(), torch.randn(8, 8))
"""
    )
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["*TraceError*"])
