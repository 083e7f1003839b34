"""State that forward writes, and what of a model is changed after the compile."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from fxsplit import errors
from fxsplit.modules.state import preserved
from fxsplit.testing import assert_equivalent
from tests.helpers import SIX_ROWS, TwoLayers, compiled_on_rows, two_layers_with


def test_a_tensor_attribute_that_forward_changes():
    def forward(self, x):
        self.n.add_(1)
        return self.a(x) * self.n

    model = two_layers_with(forward, n=torch.zeros(1))
    reference = copy.deepcopy(model)
    pipe = compiled_on_rows(model, checkpoint="always")
    assert model.n.item() == 0
    for _ in range(3):
        expected, output = reference(SIX_ROWS), pipe(SIX_ROWS)
        assert torch.equal(expected, output)
        expected.sum().backward()
        output.sum().backward()
        assert torch.equal(reference.a.weight.grad, model.a.weight.grad)
    assert model.n.item() == 3


def test_what_changes_after_compile_is_noticed():
    def tie(model):
        model.b.weight = model.a.weight

    def replace(model):
        model.b = nn.Linear(4, 4, bias=False)

    def hook(model):
        model.a.register_forward_hook(lambda m, a, o: o * 2)

    class Deeper(TwoLayers):
        def __init__(self):
            super().__init__(bias=False)
            self.a = nn.Sequential(nn.Linear(4, 4, bias=False))

    for change in (tie, replace, hook):
        model = Deeper() if change is hook else TwoLayers()
        pipe = compiled_on_rows(model, stages=2)
        change(model)
        with pytest.raises(errors.ArgumentError, match="compile again"):
            pipe(SIX_ROWS)
    model = TwoLayers()
    pipe = compiled_on_rows(model, stages=2)
    pipe.load_state_dict({k: v.clone() * 2 for k, v in model.state_dict().items()}, assign=True)
    assert_equivalent(model, pipe, SIX_ROWS)
    parameters = {k: v.detach() * 3 for k, v in model.named_parameters()}
    found = torch.func.functional_call(pipe, parameters, (SIX_ROWS,))
    assert torch.equal(found, torch.func.functional_call(model, parameters, (SIX_ROWS,)))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.n, self.log = nn.Linear(4, 4), 0, []

    def forward(self, x):
        self.n += 1
        self.log.append(self.n)
        return self.lin(x) * self.n


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_state_on_the_python_side_is_kept_in_order(checkpoint):
    torch.manual_seed(0)
    model = nn.Sequential(Counting(), nn.Linear(4, 4))
    reference = copy.deepcopy(model)
    pipe = compiled_on_rows(model, stages=2, micro_batches=6, replicas=3, checkpoint=checkpoint)
    assert model[0].n == 0 and model[0].log == []
    for _ in range(3):
        expected = torch.cat([reference(x) for x in SIX_ROWS.split(1)])
        assert torch.equal(pipe(SIX_ROWS), expected)
        pipe_out = pipe(SIX_ROWS[:1])
        assert torch.equal(pipe_out, reference(SIX_ROWS[:1]))
        pipe_out.sum().backward()
    assert model[0].n == reference[0].n == 21


def test_parameters_that_forward_writes():
    class Decays(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x):
            self.w.data.mul_(0.5)
            return x * self.w if x.isfinite().all() else x

    model = nn.Sequential(nn.Linear(4, 4), Decays(), nn.Linear(4, 4))
    reference = copy.deepcopy(model)
    pipe = compiled_on_rows(model, stages=2, checkpoint="always")
    assert model[1].w.item() == 1.0
    for _ in range(2):
        expected, output = reference(SIX_ROWS), pipe(SIX_ROWS)
        assert torch.equal(expected, output) and torch.equal(model[1].w, reference[1].w)
        output.sum().backward()
        expected.sum().backward()
        assert torch.equal(model[0].weight.grad, reference[0].weight.grad)


def test_what_is_preserved_inside_of_what_is_preserved():
    model = nn.Linear(2, 2)
    first, other = model.weight.detach().clone(), torch.full((2, 2), 5.0)
    with preserved(model, parameters=True):
        with torch.no_grad():
            model.weight.copy_(other)
        for _ in range(2):
            with preserved(model, parameters=True):
                model.weight.data.zero_()
                model.bias.data = torch.zeros(2)
            assert torch.equal(model.weight, other) and model.bias.any()
    assert torch.equal(model.weight, first)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_modules_that_set_their_weight_in_a_hook_with_replicas():
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    pipe = compiled_on_rows(model, stages=2, micro_batches=3, replicas=2)
    for _ in range(5):
        assert torch.equal(pipe(SIX_ROWS), torch.cat([model(x) for x in SIX_ROWS.split(2)]))
        pipe(SIX_ROWS).sum().backward()


@pytest.mark.parametrize("fails", [False, True])
def test_gradients_and_modes_end_as_they_were(fails):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    weight, bias = model[0].weight, model[0].bias
    weight.grad, model[1].training = torch.ones(2, 2), False
    grad = weight.grad
    with contextlib.suppress(KeyError), preserved(model):
        weight.grad.add_(1.0)
        bias.grad = torch.ones(2)
        model.train()
        model[0].eval()
        if fails:
            raise KeyError
    assert weight.grad is grad and torch.equal(grad, torch.ones(2, 2)) and bias.grad is None
    assert [m.training for m in model.modules()] == [True, True, False]
