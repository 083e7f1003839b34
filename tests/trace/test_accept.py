"""Which models are taken: odd ones that are right, and roots that cannot be compiled."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxsplit
from fxsplit import errors
from fxsplit.testing import assert_equivalent
from tests.helpers import SIX_ROWS, TwoLayers, compiled_on_rows, two_layers_with


def test_leaves_that_are_no_parameters_are_refused():
    with pytest.raises(errors.VerifyError, match="no parameter"):
        compiled_on_rows(
            two_layers_with(lambda self, x: self.a(x * self.w), w=torch.ones(4, requires_grad=True))
        )
    foreign = nn.Linear(4, 4)
    with pytest.raises(errors.VerifyError, match="no parameter"):
        compiled_on_rows(two_layers_with(lambda self, x: F.linear(self.a(x), foreign.weight)))
    assert foreign.weight.grad is None


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_roots_that_cannot_be_compiled_say_so():
    for model, said in (
        (nn.Sequential(nn.LazyLinear(3)), "run it once"),
        (nn.ModuleList([nn.Linear(4, 4)]), "no forward"),
        (compiled_on_rows(TwoLayers()), "unsplit"),
        (torch.jit.trace(TwoLayers(), SIX_ROWS), "ScriptModule"),
    ):
        with pytest.raises(errors.ModelError, match=said):
            compiled_on_rows(model)
    with pytest.raises(errors.ArgumentError, match="itself fails on the example"):
        compiled_on_rows(TwoLayers(), torch.randn(3, 5))


def test_names_that_collide_with_ours():
    for name in (
        "plan",
        "example",
        "program",
        "dims",
        "code",
        "graph",
        "meta",
        "stages",
        "recompile",
        "forward_",
        "_lock",
    ):
        model = two_layers_with(
            lambda self, x, name=name: getattr(self, name)(self.a(x)), **{name: nn.Linear(4, 4)}
        )
        pipe = compiled_on_rows(model, stages=2)
        assert_equivalent(model, pipe, SIX_ROWS)
        assert list(pipe.state_dict()) == list(model.state_dict())


def test_odd_but_legitimate_models():
    class Ordered(nn.Module):
        def forward(self, x):
            import collections

            return collections.OrderedDict(q=x * 2) if x.isfinite().all() else x

    models = [
        (nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4)), torch.randint(0, 9, (3, 2))),
        (two_layers_with(lambda self, x: torch.topk(self.a(x), 2)), SIX_ROWS),
        (two_layers_with(lambda self, x: (lambda h: (h, h[:, 0]))(self.a(x))), SIX_ROWS),
        (nn.Sequential(nn.Linear(4, 4), Ordered()), SIX_ROWS),
        (
            two_layers_with(lambda self, d: self.a(d["p"]) - self.b(d["q"])),
            {"p": SIX_ROWS, "q": SIX_ROWS * 2},
        ),
        (nn.Sequential(compiled_on_rows(TwoLayers()), nn.Linear(4, 4)), SIX_ROWS),
        (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)), SIX_ROWS),
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), 2),
            SIX_ROWS[None],
        ),
        (nn.Sequential(nn.Linear(4, 4), nn.Flatten(0), nn.Unflatten(0, (-1, 4))), SIX_ROWS),
    ]
    for model, x in models:
        pipe = compiled_on_rows(model, x, checkpoint="always")
        if not isinstance(model[0] if isinstance(model, nn.Sequential) else None, fxsplit.Pipeline):
            assert_equivalent(model, pipe, x)
        assert "same-graph: holds" in pipe.verify()
    pipe = compiled_on_rows(models[4][0], models[4][1])
    assert torch.equal(pipe({"q": SIX_ROWS, "p": SIX_ROWS}), models[4][0]({"q": SIX_ROWS, "p": SIX_ROWS}))
    pipe = compiled_on_rows(TwoLayers())
    assert "numbers: outputs" in pipe.double().verify()
