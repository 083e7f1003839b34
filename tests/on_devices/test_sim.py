"""The simulated devices themselves: their numbers are the CPU's, bit for bit, and they do not mix."""

import copy
import multiprocessing
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import sim

DEVICES = ["sim:0", "sim:1", "sim:2", "sim:3"]


# -- the same numbers ----------------------------------------------------------------------------------------------


class Cnn(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.ConvTranspose2d(8, 4, 2),
            nn.GroupNorm(2, 4),
            nn.BatchNorm2d(4, momentum=None),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 5),
        )


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True)
        self.encode = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.encode(self.embed(tokens), mask).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind, **how):
        super().__init__()
        self.layers, self.head = kind(6, 8, **how), nn.LazyLinear(5)

    def forward(self, x):
        return self.head(self.layers(x)[0][-1])


class Cell(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell = kind(6, 5)

    def forward(self, x):
        state = self.cell(x)
        return state if isinstance(state, torch.Tensor) else state[0] + state[1]


class Attention(nn.Module):
    def __init__(self, mask=None, **how):
        super().__init__()
        self.out, self.mask, self.how = nn.Linear(8, 5), mask, how

    def forward(self, x):
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        mask = None if self.mask is None else self.mask.to(x.device)
        y = F.scaled_dot_product_attention(heads, heads, heads, mask, **self.how)
        return self.out(y.transpose(1, 2).flatten(2)).sum(1)


def rows(*sizes):
    return lambda: torch.randn(*sizes)


MODELS = {
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(9, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.3), nn.Linear(32, 5)
        ),
        rows(6, 9),
    ),
    "cnn": (Cnn, rows(6, 3, 10, 10)),
    "transformer": (Transformer, lambda: torch.randint(12, (6, 7))),
    "lstm": (lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.2), rows(4, 6, 6)),
    "lstm both ways": (lambda: Recurrent(nn.LSTM, bidirectional=True, bias=False), rows(4, 6, 6)),
    "gru": (lambda: Recurrent(nn.GRU, num_layers=2), rows(4, 6, 6)),
    "rnn": (lambda: Recurrent(nn.RNN, num_layers=2), rows(4, 6, 6)),
    "lstm cell": (lambda: Cell(nn.LSTMCell), rows(6, 6)),
    "gru cell": (lambda: Cell(nn.GRUCell), rows(6, 6)),
    "attention": (Attention, rows(6, 7, 8)),
    "causal attention": (lambda: Attention(is_causal=True), rows(6, 7, 8)),
    "masked attention": (lambda: Attention(torch.ones(7, 7).tril().bool()), rows(6, 7, 8)),
    "biased attention": (lambda: Attention(torch.randn(7, 7)), rows(6, 7, 8)),
    "attention with dropout": (lambda: Attention(dropout_p=0.2), rows(6, 7, 8)),
}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "adamw, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "adamw, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "adamw, one by one": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=False),
}


def trained(model, batch, optimizer, device, steps=3):
    """All that comes of some steps of training and one of evaluation."""
    torch.manual_seed(1)
    model.to(device)
    batch = batch.detach().to(device).requires_grad_(batch.is_floating_point())
    target, optimizer, found = torch.arange(5, device=device), optimizer(model.parameters()), []
    for _ in range(steps):
        output = model(batch)
        loss = F.cross_entropy(output[:5], target, label_smoothing=0.1) + F.nll_loss(
            output[1:].log_softmax(1), target, ignore_index=2
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [output.detach(), loss.detach(), *(p.grad.clone() for p in model.parameters())]
    with torch.no_grad():
        found.append(model.eval()(batch))
    found += [batch.grad] if batch.grad is not None else []
    found += [t.clone() for t in model.state_dict().values()]
    assert {t.device for t in found} == {torch.device(device)}
    return [*(t.cpu() for t in found), torch.get_rng_state()]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_a_cpu(name, optimizer):
    make, batch = MODELS[name]
    model, x = make(), batch()
    model(x)
    twin = copy.deepcopy(model)
    expected = trained(model, x.clone(), OPTIMIZERS[optimizer], "cpu")
    found = trained(twin, x.clone(), OPTIMIZERS[optimizer], "sim:2")
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), (i, (a - b).abs().max())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_are_those_of_a_cpu(optimizer):
    make, batch = MODELS["mlp"]
    model, x = make(), batch()
    expected = trained(copy.deepcopy(model), x, OPTIMIZERS[optimizer], "cpu")
    found = trained(model, x, OPTIMIZERS[optimizer], "sim:1")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def many(x):
    """Operations that read, write and make memory in different ways."""
    device = x.device
    y = x @ x.t()
    q = y.clone()
    q[1] = 3
    q[q > 1] *= 2
    q[:, 2:].add_(1)
    yield q
    yield torch.cat([y, x], 1)
    yield y.index_put((torch.tensor([0, 1], device=device), torch.tensor([2, 1])), y[:2, 0], accumulate=True)
    yield torch.zeros_like(y).scatter_add_(0, torch.zeros(1, 4, dtype=torch.long, device=device), y[:1])
    yield from (*y.sort(-1), *y.topk(2), *y.chunk(2), y.unfold(0, 2, 1), y.tril(), y.roll(1), y.var(0))
    yield from (y.cumsum(0), y.nonzero(), y.masked_select(y > 0), torch.where(y > 0, y, 2), y[y > 0], y[None])
    yield F.interpolate(y[None, None], scale_factor=2.0, mode="bilinear")
    yield F.pad(y, (1, 1))
    yield torch.einsum("ab,cb->ac", x, x)
    yield torch.fft.rfft(y).conj().imag
    yield torch.linalg.solve(y + 9 * torch.eye(4, device=device), y)
    out = torch.empty(0, device=device)
    torch.mm(y, y, out=out)
    yield out
    yield from (torch.randperm(5, device=device), torch.randint(9, (3,), device=device), torch.rand_like(y))
    yield from (torch.multinomial(y.softmax(-1), 2), torch.bernoulli(y.sigmoid()), F.gumbel_softmax(y))
    yield torch.empty(3, device=device).normal_(generator=torch.Generator(device=device).manual_seed(3))
    yield from (
        F.dropout(y, 0.5),
        F.alpha_dropout(y, 0.5),
        F.dropout1d(y[None], 0.5),
        F.rrelu(y, training=True),
    )
    yield torch.tril_indices(3, 3, device=device)
    yield torch.tensor(y.sum().item(), device=device)


def test_operations_are_those_of_a_cpu():
    x = torch.randn(4, 6)
    results = []
    for device in ("cpu", "sim:3"):
        torch.manual_seed(2)
        results.append(list(many(x.to(device))))
    for a, b in zip(*results, strict=True):
        assert b.device == torch.device("sim:3") and torch.equal(a, b.cpu()) and a.stride() == b.stride()


# -- memory --------------------------------------------------------------------------------------------------------


def test_factories():
    for device in DEVICES:
        for x in (
            torch.zeros(2, 3, device=device),
            torch.arange(4, device=device),
            torch.full((2,), 7.0, device=device),
            torch.tensor([1, 2], device=device),
            torch.linspace(0, 1, 3, device=device),
            torch.empty_strided((2, 3), (1, 2), device=device),
            torch.randn(3, device=device),
        ):
            assert str(x.device) == device and x.is_sim
            assert torch.empty_like(x).device == x.new_zeros(2).device == (x + 1).device == x.device
    assert str(torch.zeros(1, device="sim").device) == "sim:0"
    with torch.sim.device(2):
        assert str(torch.zeros(1, device="sim").device) == "sim:2"
    with torch.device("sim:1"):
        assert str(torch.zeros(1).device) == "sim:1"
    assert torch.accelerator.device_count() == 4 and torch.accelerator.current_device_index() == 0
    with pytest.raises(RuntimeError, match="no device sim:4"):
        torch.zeros(1, device="sim:4")


@pytest.mark.parametrize("here", ["cpu", "sim:0"])
@pytest.mark.parametrize("there", ["cpu", "sim:0", "sim:1"])
def test_copies_keep_values_and_strides(here, there):
    for x in (torch.randn(3, 4).t(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)):
        a = x.to(here)
        b = a.to(there, copy=True)
        assert str(b.device) == there and b.stride() == x.stride() and torch.equal(b.cpu(), x)
        assert b.data_ptr() != a.data_ptr() and a.to(a.device) is a
    leaf = torch.randn(3, device=here, requires_grad=True)
    leaf.to(there).mul(2).sum().backward()
    assert leaf.grad.device == leaf.device and leaf.grad.tolist() == [2, 2, 2]
    a = torch.zeros(3, device=there)
    a.copy_(torch.ones((), device=here))
    assert a.tolist() == [1, 1, 1]


def test_views_share_memory_and_count_their_writes():
    x = torch.zeros(4, 4, device="sim:1")
    view = x.view(2, 8)[:, ::2].t()
    before = x._version
    view.add_(1)
    assert x.sum() == 8 and x._version == view._version == before + 1
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    x.data.mul_(2)
    assert x.sum() == 16 and x._version == before + 1
    y = x.clone().requires_grad_()
    z = y.exp()
    z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
    with torch.inference_mode():
        assert (x[0] + 1).is_inference() and not x[0].is_inference()


def test_sizes_can_change():
    x = torch.arange(3.0, device="sim:1")
    x.resize_(5)[3:] = 7
    assert x.tolist() == [0, 1, 2, 7, 7] and x.untyped_storage().nbytes() == 20
    view = x[:2]
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0 == view.untyped_storage().nbytes()
    a = torch.empty(0, device="sim:1").set_(torch.ones(4, device="sim:1").untyped_storage(), 1, (2,), (1,))
    assert a.tolist() == [1, 1] and str(a.device) == "sim:1"


def test_parameters_stay_the_same_objects():
    model = nn.Linear(3, 2)
    weight, optimizer = model.weight, torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.randn(2, 3)).sum().backward()
    model.zero_grad()
    model.to("sim:1")
    assert model.weight is weight and str(weight.device) == "sim:1"
    model(torch.randn(2, 3, device="sim:1")).sum().backward()
    before, version = weight.detach().clone(), weight._version
    optimizer.step()
    assert weight._version > version and not torch.equal(before, weight)
    weight.data = torch.zeros(2, 3)
    assert weight.device.type == "cpu"


def test_deepcopy_and_state_dict():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to("sim:2")
    twin = copy.deepcopy(model)
    assert {t.device for t in twin.state_dict().values()} == {torch.device("sim:2")}
    assert torch.equal(twin[0].weight, model[0].weight)
    assert twin[0].weight.data_ptr() != model[0].weight.data_ptr()
    on_host = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    on_host.load_state_dict(model.state_dict())
    assert on_host[0].weight.device.type == "cpu" and torch.equal(on_host[0].weight, model[0].weight.cpu())
    model.load_state_dict({k: torch.zeros_like(v) for k, v in on_host.state_dict().items()})
    assert not model[0].weight.any() and str(model[0].weight.device) == "sim:2"


# -- devices -------------------------------------------------------------------------------------------------------

PAIRS = [("sim:0", "sim:1"), ("sim:0", "cpu"), ("cpu", "sim:0")]


@pytest.mark.parametrize("devices", PAIRS, ids=" ".join)
@pytest.mark.parametrize(
    "operation",
    [
        torch.add,
        torch.mm,
        F.linear,
        torch.Tensor.add_,
        torch.dist,
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.where(a > 0, a, b),
        lambda a, b: torch.mm(a, a, out=b),
        lambda a, b: F.embedding(a.long(), b),
        lambda a, b: F.layer_norm(a, (2, 2), b),
        lambda a, b: F.conv1d(a, b[None]),
        lambda a, b: F.scaled_dot_product_attention(a[None], b[None], b[None]),
        lambda a, b: nn.LSTM(2, 2).to(a.device)(b),
        lambda a, b: torch.zeros(2, 2, device=a.device).index_put_((torch.tensor([0]),), b),
    ],
)
def test_devices_do_not_mix(operation, devices):
    a, b = (torch.ones(2, 2, device=d) for d in devices)
    with pytest.raises(RuntimeError, match=r"same device|same dtype"):
        operation(a, b)


def test_numbers_of_the_cpu_and_its_indices_may_be_read():
    x = torch.arange(4.0, device="sim:1")
    assert (x * torch.tensor(2.0)).tolist() == [0, 2, 4, 6] and (torch.tensor(1.0) - x).device == x.device
    assert x[torch.tensor([3, 1])].tolist() == [3, 1]
    x[torch.tensor([True, False, False, True])] = 9
    assert x.tolist() == [9, 1, 2, 9]
    with pytest.raises(RuntimeError, match="same device"):
        torch.tensor(1.0).add_(x[0])


def test_each_device_has_a_thread_of_autograd():
    seen = {}

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.device = str(x.device)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            assert str(gradient.device) == ctx.device and torch.sim.current_device() == gradient.device.index
            seen[ctx.device] = threading.get_ident()
            return gradient

    x = leaf = torch.ones(2, requires_grad=True)
    for device in DEVICES:
        x = Seen.apply(x.to(device)) * 2
    x.sum().backward()
    assert leaf.grad.tolist() == [16, 16] and len({*seen.values(), threading.get_ident()}) == 5


def test_the_random_numbers_are_the_cpus():
    torch.manual_seed(5)
    expected = torch.rand(3)
    for device in DEVICES:
        torch.manual_seed(5)
        assert torch.equal(torch.rand(3, device=device).cpu(), expected)
    state = torch.sim.get_rng_state()
    first = torch.rand(3, device="sim:1")
    torch.sim.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="sim:2").cpu(), first.cpu())
    assert torch.Generator(device="sim:1").device.type == "cpu"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_computes_the_same_again(reentrant):
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to("sim:1")
    x, found = torch.randn(3, 4, device="sim:1", requires_grad=True), []
    for again in (False, True):
        torch.manual_seed(3)
        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant) if again else layer(x)
        found.append(torch.autograd.grad(y.sum(), layer.parameters()) if not reentrant else [y])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# -- building ------------------------------------------------------------------------------------------------------


def test_two_processes_may_build_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int answer() { return 42; }')
    processes = multiprocessing.get_context("spawn")
    with processes.Pool(2) as pool:
        built = pool.map(_built, [str(source)] * 2)
    assert built == [42, 42] and len(list(tmp_path.glob("*/*.so"))) == 1


def _built(source):
    import ctypes
    from pathlib import Path

    sim.SOURCE = Path(source)
    return ctypes.CDLL(str(sim.build())).answer()


def test_without_a_compiler_there_are_none(monkeypatch):
    monkeypatch.setattr(sim.shutil, "which", lambda name: None)
    assert "no C++ compiler" in sim.missing()
