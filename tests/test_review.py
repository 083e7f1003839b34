"""What demanding users did to a pipeline: state, hooks, ties and modes that change around it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxsplit
from fxsplit import errors
from fxsplit.testing import assert_equivalent


class Net(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=bias), nn.Linear(4, 4, bias=bias)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def made(forward, **attributes):
    """A `Net` with another forward and some attributes."""
    model = type("Model", (Net,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def compiled(model, *args, **fields):
    return fxsplit.compile(model, fxsplit.Plan(**fields), example_args=args or (torch.randn(6, 4),))


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def test_autocast_that_is_switched_off_inside():
    def forward(self, x):
        h = self.a(x)
        with torch.autocast("cpu", enabled=False):
            return self.b(h.float())

    model = made(forward)
    pipe = compiled(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert pipe(X).dtype == model(X).dtype == torch.float32
        assert torch.equal(pipe(X), model(X))


def test_grad_mode_regions_hold_whatever_the_caller_has_on():
    def forward(self, x):
        with torch.enable_grad():
            h = self.a(x)
        with torch.no_grad():
            scale = self.b(x)
        return h * scale

    model = made(forward)
    with torch.no_grad():
        pipe = compiled(model, stages=2)
        assert pipe(X).grad_fn is None and not torch.is_grad_enabled()
    assert_equivalent(model, pipe, X)
    assert pipe.model.b.weight.grad is None


def loses_gradients_of_casts():
    """Before torch 2.10, a weight that was cast under no_grad had no gradient in the rest of the autocast."""
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            layer(x)
        return not layer(x).requires_grad


@pytest.mark.skipif(loses_gradients_of_casts(), reason="this torch computes no gradient to compare with")
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_region_that_is_cut_is_entered_again(checkpoint):
    def forward(self, x):
        h = self.a(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                y = self.b(h) * 2
                y = self.a(y) + 1
            with torch.set_grad_enabled(torch.is_grad_enabled()):
                z = self.b(y + h).relu()
            z = self.a(z)
        return x + z.float()

    model = made(forward)
    for stages in range(2, 9):
        pipe = compiled(model, stages=stages, checkpoint=checkpoint)
        assert_equivalent(model, pipe, X)
        assert_equivalent(model, copy.deepcopy(pipe), X)
        with torch.no_grad():
            assert torch.equal(pipe(X), model(X))
    assert sum("with torch.no_grad():" in stage.code for stage in pipe) > 1
    assert sum("with torch.autocast(" in stage.code for stage in pipe) > 2


def test_a_tensor_attribute_that_forward_changes():
    def forward(self, x):
        self.n.add_(1)
        return self.a(x) * self.n

    model = made(forward, n=torch.zeros(1))
    reference = copy.deepcopy(model)
    pipe = compiled(model, checkpoint="always")
    assert model.n.item() == 0
    for _ in range(3):
        expected, output = reference(X), pipe(X)
        assert torch.equal(expected, output)
        expected.sum().backward()
        output.sum().backward()
        assert torch.equal(reference.a.weight.grad, model.a.weight.grad)
    assert model.n.item() == 3


def test_leaves_that_are_no_parameters_are_refused():
    with pytest.raises(errors.VerifyError, match="no parameter"):
        compiled(made(lambda self, x: self.a(x * self.w), w=torch.ones(4, requires_grad=True)))
    foreign = nn.Linear(4, 4)
    with pytest.raises(errors.VerifyError, match="no parameter"):
        compiled(made(lambda self, x: F.linear(self.a(x), foreign.weight)))
    assert foreign.weight.grad is None


def test_what_changes_after_compile_is_noticed():
    def tie(model):
        model.b.weight = model.a.weight

    def replace(model):
        model.b = nn.Linear(4, 4, bias=False)

    def hook(model):
        model.a.register_forward_hook(lambda m, a, o: o * 2)

    class Deeper(Net):
        def __init__(self):
            super().__init__(bias=False)
            self.a = nn.Sequential(nn.Linear(4, 4, bias=False))

    for change in (tie, replace, hook):
        model = Deeper() if change is hook else Net()
        pipe = compiled(model, stages=2)
        change(model)
        with pytest.raises(errors.ArgumentError, match="compile again"):
            pipe(X)
    model = Net()
    pipe = compiled(model, stages=2)
    pipe.load_state_dict({k: v.clone() * 2 for k, v in model.state_dict().items()}, assign=True)
    assert_equivalent(model, pipe, X)
    parameters = {k: v.detach() * 3 for k, v in model.named_parameters()}
    found = torch.func.functional_call(pipe, parameters, (X,))
    assert torch.equal(found, torch.func.functional_call(model, parameters, (X,)))


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
    pipe = compiled(model, stages=2, micro_batches=6, replicas=3, checkpoint=checkpoint)
    assert model[0].n == 0 and model[0].log == []
    for _ in range(3):
        expected = torch.cat([reference(x) for x in X.split(1)])
        assert torch.equal(pipe(X), expected)
        pipe_out = pipe(X[:1])
        assert torch.equal(pipe_out, reference(X[:1]))
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
    pipe = compiled(model, stages=2, checkpoint="always")
    assert model[1].w.item() == 1.0
    for _ in range(2):
        expected, output = reference(X), pipe(X)
        assert torch.equal(expected, output) and torch.equal(model[1].w, reference[1].w)
        output.sum().backward()
        expected.sum().backward()
        assert torch.equal(model[0].weight.grad, reference[0].weight.grad)


def test_checkpoints_refuse_what_changed_before_backward():
    pipe = compiled(Net(), stages=2, checkpoint="always")
    output = pipe(X)
    with torch.no_grad():
        pipe.model.a.weight.mul_(2)
    with pytest.raises(errors.GradientError, match=r"optimizer\.step"):
        output.sum().backward()
    output = pipe(X)
    pipe.eval()
    with pytest.raises(errors.GradientError, match="mode"):
        output.sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_roots_that_cannot_be_compiled_say_so():
    for model, said in (
        (nn.Sequential(nn.LazyLinear(3)), "run it once"),
        (nn.ModuleList([nn.Linear(4, 4)]), "no forward"),
        (compiled(Net()), "unsplit"),
        (torch.jit.trace(Net(), X), "ScriptModule"),
    ):
        with pytest.raises(errors.ModelError, match=said):
            compiled(model)
    with pytest.raises(errors.ArgumentError, match="itself fails on the example"):
        compiled(Net(), torch.randn(3, 5))


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
        model = made(lambda self, x, name=name: getattr(self, name)(self.a(x)), **{name: nn.Linear(4, 4)})
        pipe = compiled(model, stages=2)
        assert_equivalent(model, pipe, X)
        assert list(pipe.state_dict()) == list(model.state_dict())


def test_a_device_that_is_not_there_and_a_placement_that_fails_change_nothing():
    model = Net()
    for fields in ({"devices": "cuda:7"}, {"device_map": {"a": "meta", "b": "cuda:7"}}):
        with pytest.raises(errors.PlanError, match="not there"):
            compiled(model, **fields)
    assert {p.device.type for p in model.parameters()} == {"cpu"}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_modules_that_set_their_weight_in_a_hook_with_replicas():
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    pipe = compiled(model, stages=2, micro_batches=3, replicas=2)
    for _ in range(5):
        assert torch.equal(pipe(X), torch.cat([model(x) for x in X.split(2)]))
        pipe(X).sum().backward()


def test_odd_but_legitimate_models():
    class Ordered(nn.Module):
        def forward(self, x):
            import collections

            return collections.OrderedDict(q=x * 2) if x.isfinite().all() else x

    models = [
        (nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4)), torch.randint(0, 9, (3, 2))),
        (made(lambda self, x: torch.topk(self.a(x), 2)), X),
        (made(lambda self, x: (lambda h: (h, h[:, 0]))(self.a(x))), X),
        (nn.Sequential(nn.Linear(4, 4), Ordered()), X),
        (made(lambda self, d: self.a(d["p"]) - self.b(d["q"])), {"p": X, "q": X * 2}),
        (nn.Sequential(compiled(Net()), nn.Linear(4, 4)), X),
        (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)), X),
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), 2), X[None]),
        (nn.Sequential(nn.Linear(4, 4), nn.Flatten(0), nn.Unflatten(0, (-1, 4))), X),
    ]
    for model, x in models:
        pipe = compiled(model, x, checkpoint="always")
        if not isinstance(model[0] if isinstance(model, nn.Sequential) else None, fxsplit.Pipeline):
            assert_equivalent(model, pipe, x)
        assert "same-graph: holds" in pipe.verify()
    pipe = compiled(models[4][0], models[4][1])
    assert torch.equal(pipe({"q": X, "p": X}), models[4][0]({"q": X, "p": X}))
    pipe = compiled(Net())
    assert "numbers: outputs" in pipe.double().verify()


def test_a_model_on_the_meta_device_can_be_planned():
    with torch.device("meta"):
        model, x = Net(), torch.randn(6, 4)
    pipe = compiled(model, x, stages=2)
    assert pipe.devices == (torch.device("meta"),) * 2 and pipe(x).is_meta
