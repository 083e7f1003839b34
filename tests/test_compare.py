"""Equal or not, element by element."""

import torch

from fxsplit.compare import agree, agree_each, difference, equal


def test_numbers_of_other_types_and_shapes_are_not_equal():
    one = torch.ones(2)
    assert equal(one, one.clone()) and not equal(one, one.double()) and not equal(one, one[:1])
    assert not agree(one, one.double(), rtol=1.0) and not agree_each(one, one.double())
    assert not equal(1, 1.0) and not equal(1, True) and equal(float("nan"), float("nan"))
    assert equal(torch.full((2,), float("nan")), torch.full((2,), float("nan")))
    assert "float64" in difference(one, one.double())


def test_a_column_of_small_numbers_is_compared_with_itself():
    expected = torch.tensor([[1.0, 1e-3], [1.0, 1e-3]])
    near, far = expected.clone(), expected.clone()
    near[:, 0] += 5e-5
    far[:, 1] += 5e-5
    assert agree_each(near, expected) and not agree_each(far, expected)
    assert not agree_each(near, expected.masked_fill(expected < 1, float("inf")))
