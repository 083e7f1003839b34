"""What passes ask of graphs, paths and examples."""

import torch
from torch import nn

from fxsplit.graph.moved import Example
from fxsplit.graph.nodes import first_difference, is_within


def test_the_first_difference_may_be_that_one_goes_on():
    rows = [("a",), ("b",)]
    assert first_difference(rows, rows) is None and first_difference(rows, [("a",), ("c",)]) == 1
    assert first_difference(rows, rows[:1]) == first_difference(rows[:1], rows) == 1


def test_a_path_is_inside_of_another_by_components():
    assert is_within("h.1.a", "h.1") and is_within("h.1", "h.1") and is_within("h", "")
    assert not is_within("h.10", "h.1") and not is_within("h", "h.1")


def test_an_example_follows_the_type_that_the_model_had():
    model = nn.Linear(2, 2)
    given = [torch.ones(2), torch.ones(2).double(), torch.ones(2).long()]
    example = Example(model, given)
    assert example.for_model(model) is example.inputs
    found = example.for_model(model.half())
    assert [x.dtype for x in found] == [torch.float16, torch.float64, torch.int64]
    model.bias.data = model.bias.data.double()  # of two types: nobody knows which
    assert example.for_model(model) is example.inputs
