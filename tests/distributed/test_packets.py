"""What travels between ranks, and who they are, in one process."""

import pytest
import torch

from fxsplit.distributed.mesh import init
from fxsplit.distributed.packets import Unpacking, packed
from fxsplit.errors import RankError

TENSORS = {
    "plain": torch.randn(2, 3, 4),
    "turned": torch.randn(2, 3, 4).permute(2, 0, 1),
    "expanded": torch.randn(3, 1).expand(3, 5),
    "empty": torch.empty(0, 3),
    "number": torch.tensor(2),
    "wants a gradient": torch.randn(4, requires_grad=True),
}


def test_what_comes_is_what_was_sent_in_the_same_layout():
    items = [(name, k, None, (value, "beside")) for k, (name, value) in enumerate(TENSORS.items())]
    header, numbers = packed(items)
    found = Unpacking(header, torch.device("cpu"))
    for place, sent in zip(found.places, numbers, strict=True):
        place.copy_(sent)
    for (name, k, same, (value, word)), item in zip(found.items(), items, strict=True):
        expected = TENSORS[name]
        assert (name, k, same, word) == (*item[:3], "beside")
        assert torch.equal(value, expected) and value.dtype == expected.dtype
        assert value.stride() == expected.stride() or not expected.numel()
        assert value.requires_grad == expected.requires_grad
    assert sum(n.numel() for n in numbers) == 4 * (24 + 24 + 3 + 4) + 8  # what is expanded travels once


def test_what_has_no_plain_memory_is_refused():
    with pytest.raises(RankError, match=r"mask is a tensor of the kind torch\.sparse_coo"):
        packed([("mask", 0, None, torch.eye(2).to_sparse())])


def test_ranks_that_are_too_many_or_too_few_are_refused(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    for pp, dp in ((2, 1), (3, 2)):
        with pytest.raises(RankError, match=f"are {pp * dp} ranks, and there are 4"):
            init(pp=pp, dp=dp, device="cpu")
