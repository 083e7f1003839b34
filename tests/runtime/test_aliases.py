"""One tensor that crosses cuts under several names: its gradients are added in the order of the unsplit model."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxsplit
from fxsplit import Plan


class Twice(nn.Module):
    """A tensor, and what hands it on, are read in turns by layers in several stages."""

    def __init__(self, hand_on):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.hand_on = hand_on
        self.passing = nn.Identity()

    def forward(self, x):
        h = self.a(x)
        same = self.hand_on(h)
        first = self.layers[0](h)
        second = self.layers[1](torch.tanh(first) + same)
        third = self.layers[2](torch.tanh(second) * h)
        fourth = self.layers[3](torch.tanh(third) + self.passing(same))
        return fourth + same * h, same


HANDS_ON = {
    "identity": nn.Identity(),
    "contiguous": lambda h: h.contiguous(),
    "flatten": nn.Flatten(),
    "dropout": nn.Dropout(0.5),
    "float": lambda h: h.float(),
    "to": lambda h: h.to(torch.float32),  # is not there any more when the program is cut
}


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
@pytest.mark.parametrize("name", HANDS_ON)
def test_gradients_are_those_of_one_tensor(name, schedule, checkpoint):
    for seed in range(4):
        torch.manual_seed(seed)
        model, x = Twice(HANDS_ON[name]), torch.randn(6, 8, requires_grad=True)
        model.eval()
        plan = Plan(
            cut=["layers.0", "layers.1", "layers.2"],
            micro_batches=2,
            schedule=schedule,
            checkpoint=checkpoint,
        )
        pipe = fxsplit.compile(model, plan, example_args=(x,))
        assert pipe.program.aliases or name == "to"
        wanted = [x, *model.parameters()]
        found = torch.autograd.grad([v.square().sum() for v in pipe(x)], wanted)
        parts = [torch.autograd.grad([v.square().sum() for v in model(part)], wanted) for part in x.split(3)]
        for a, b, c in zip(found, *parts, strict=True):
            assert torch.equal(a, b + c)


def test_one_tensor_is_given_out_under_two_names():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout()

        def forward(self, x):
            h = self.a(x)
            y = self.b(h)
            return h, self.drop(h), y

    model, x = Both().double(), torch.randn(6, 4).double()
    pipe = fxsplit.compile(model, Plan(cut=["b"], micro_batches=2), example_args=(x,))
    assert pipe.program.aliases  # though it is none in train mode
    model.eval()
    for chosen in ((0,), (1,), (0, 1), (0, 1, 2)):
        found, expected = (
            torch.autograd.grad(
                sum(out[k].square().sum() * (k + 1) for k in chosen), list(model.a.parameters())
            )
            for out in (pipe(x), model(x))
        )
        torch.testing.assert_close(found, expected)


def test_a_view_that_is_written_in_place():
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(4, 4)

        def forward(self, x):
            h = self.a(x).clone()
            left = h[:, :4]
            h.mul_(2.0)
            return self.b(left) + left * left + F.relu(left)

    torch.manual_seed(0)
    model, x = Written(), torch.randn(6, 8)
    pipe = fxsplit.compile(model, Plan(cut=["b"]), example_args=(x,))
    found = torch.autograd.grad(pipe(x).square().sum(), list(model.parameters()))
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_outputs_share_no_memory_with_each_other_or_an_argument():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            y = self.a(x)
            return y, y.view(-1), x.view(-1), x

    model, x = Views(), torch.randn(2, 4)
    pipe = fxsplit.compile(model, Plan(), example_args=(x,))
    for m, count in ((model, 2), (pipe, 4)):
        given = m(x)
        assert given[3] is x and len({v.untyped_storage().data_ptr() for v in given}) == count
