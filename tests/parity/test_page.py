"""`docs/parity.md` names tests that there are, and every file of this folder."""

import re

from ..helpers import ROOT


def test_every_test_that_the_page_names_is_there():
    page = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    named, path = [], ""
    for cell in (line.rsplit("|", 2)[1] for line in page.splitlines() if line.startswith("|")):
        for word in re.findall(r"[\w/]*\.py(?:::\w+)?|::\w+", cell):
            path = path if word.startswith("::") else word.partition("::")[0]
            named.append((path, word.partition("::")[2]))
    assert len(named) > 100
    for path, test in named:
        text = (ROOT / "tests" / path).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in text, (path, test)
    here = {f"parity/{p.name}" for p in (ROOT / "tests" / "parity").glob("test_*.py")} - {
        "parity/test_page.py"
    }
    assert here <= {path for path, _ in named}
