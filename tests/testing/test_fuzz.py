"""The fuzz: what it finds, how it makes it smaller, and that it can be replayed."""

import json
import re

import pytest

from fxsplit.testing import fuzz
from fxsplit.testing.fuzz import Case, check, main, smaller
from fxsplit.testing.programs import Recipe


def test_a_case_follows_from_its_number_and_is_kept_as_text():
    for seed in range(40):
        case = Case.of_seed(seed)
        assert case == Case.of_seed(seed) == Case.from_json(case.to_json())


@pytest.mark.slow
def test_what_it_prints(capsys, tmp_path):
    assert main(["--cases", "6", "--seed", "3", "--folder", str(tmp_path)]) == 0
    assert re.search(r"6 cases from seed 3 in \d+ s, [\d.]+ a second, 0 failed", capsys.readouterr().out)
    assert not list(tmp_path.iterdir())


def test_what_fails_is_made_smaller_and_replayed(capsys, tmp_path, monkeypatch):
    def fails(case):
        if case.recipe.has("gelu") and case.plan.get("stages", 1) > 1:
            raise ValueError("on purpose")
        return "equal"

    monkeypatch.setattr(fuzz, "check", fails)
    seed = next(
        n
        for n in range(1000)
        if Case.of_seed(n).recipe.has("gelu") and Case.of_seed(n).plan.get("stages", 1) > 1
    )
    assert main(["--cases", "1", "--seed", str(seed), "--folder", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    (file,) = tmp_path.iterdir()
    assert f"case {seed} fails: on purpose" in out and f"--replay {file}" in out
    case = json.loads(file.read_text())
    assert [name for name, _, _ in case["recipe"]["steps"]] == ["gelu"] and set(case["plan"]) == {"stages"}
    with pytest.raises(ValueError, match="on purpose"):
        main(["--replay", str(file)])


def test_smaller_gives_up_in_the_end():
    case = Case(Recipe((("linear", 0, 0),)), {}, 4, 4)
    assert smaller(case, lambda other: True, tries=5).recipe.steps


# Found by it, and what was wrong.


def test_a_value_written_in_place_can_be_timed():
    """cost="time" went backward through its graph twice."""
    case = Case(Recipe((("twice", 11, 29), ("set", 17, 5)), (1,), form="loss"), {"cost": "time"}, 1, 9, False)
    assert check(case) == "equal"


def test_an_attribute_of_the_packages_own_models_is_noticed():
    """They were taken for code of fxsplit's, whose reads are not recorded: a changed attribute gave the old numbers."""
    case = Case(Recipe((("scaled", 0, 0),)), {}, 4, 4)
    assert check(case).startswith("refused: AssumptionError")


def test_means_of_what_is_normalised_already_are_rounding():
    """With another number of threads they were another 1e-9 of a variance of 1, and a right split was refused."""
    steps = (("batchnorm", 12, 15), ("view_add_", 29, 18), ("batchnorm", 26, 23))
    case = Case(Recipe(steps, (4,), seed=6), {"stages": 3, "micro_batches": 2, "threads": 2}, 4, 6, seed=648)
    assert check(case) == "equal"


def test_parts_of_a_batch_may_round_as_what_they_are_computed_in_does():
    """Under autocast in forward a batch and its parts are not the same to float32's precision: models were refused."""
    for seed in (676, 1, 2):
        case = Case(
            Recipe((("autocast", 0, 0), ("autocast", 1, 0)), seed=seed),
            {"micro_batches": 3},
            8,
            11,
            seed=seed,
        )
        assert check(case) == "equal"
