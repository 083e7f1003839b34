"""The faults of `mutants.toml` are what they are said to be; `python -m tests.mutants` tries them."""

from . import mutants

ROWS = mutants.mutants()


def text_of(mutant):
    return (mutants.ROOT / "fxsplit" / mutant.file).read_text(encoding="utf-8")


def test_there_are_many_and_in_every_package():
    folders = {p.parent.name for p in (mutants.ROOT / "fxsplit").glob("*/__init__.py")}
    assert len(ROWS) >= 150
    assert not folders - {m.package for m in ROWS} - {"demo"}


def test_each_changes_one_place_of_a_module_that_is_still_python():
    for mutant in ROWS:
        changed = mutant.applied(text_of(mutant))
        assert changed != text_of(mutant), mutant
        compile(changed, mutant.file, "exec")


def test_no_two_are_the_same():
    assert len({(m.file, m.old, m.new) for m in ROWS}) == len(ROWS)


def test_its_tests_are_there():
    for mutant in ROWS:
        assert bool(mutant.tests) != bool(mutant.equivalent), mutant
        files = [a.partition("::")[0] for a in mutant.arguments if a.startswith("tests/")]
        assert bool(files) == bool(mutant.tests), mutant
        for file in files:
            assert (mutants.ROOT / file).exists(), mutant
        for test in (a.partition("::")[2].partition("[")[0] for a in mutant.arguments if "::" in a):
            assert f"def {test}(" in "".join((mutants.ROOT / f).read_text() for f in files), mutant
