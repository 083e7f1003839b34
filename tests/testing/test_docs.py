"""`docs/testing.md`: the test that it says to paste passes."""

import re

import pytest

from ..helpers import ROOT

pytest_plugins = ["pytester"]


@pytest.mark.slow
def test_the_tests_of_the_page(pytester):
    conftest, test = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "testing.md").read_text(), re.DOTALL
    )[:2]
    pytester.makepyfile(conftest=conftest)
    pytester.makepyfile(test)
    found = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", "--fxsplit-examples", "3")
    found.assert_outcomes(passed=2)
