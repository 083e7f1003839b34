"""Sums of gradients, whoever comes first."""

import itertools

import pytest
import torch

from fxsplit.replicas.sums import OrderedSum


def test_terms_are_added_in_their_order_and_stay_as_they_are():
    terms = [torch.tensor([1e8]), None, torch.tensor([1.0]), torch.tensor([-1e8])]
    before = [None if t is None else t.clone() for t in terms]
    for order in itertools.permutations(range(4)):
        found = OrderedSum(4, 1)
        for index in order:
            found.add(index, [terms[index]])
        assert found.total()[0] == 0.0  # in any other order, 1 is left
        assert all(a is None or torch.equal(a, b) for a, b in zip(terms, before, strict=True))


def test_a_term_that_is_missing_is_said():
    found = OrderedSum(2, 1)
    found.add(1, [torch.ones(1)])
    with pytest.raises(RuntimeError, match="gradient of micro-batch 0 is missing"):
        found.total()
