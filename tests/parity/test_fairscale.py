"""`fairscale.nn.Pipe`, and torchgpipe, of which it is a fork: tests/nn/pipe/{test_pipe,test_bugs,skip/test_gpipe}.py."""

import copy
import threading
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxsplit
from fxsplit import Plan
from fxsplit.errors import PlanError

MODES = ["never", "always", "except_last"]


def pipe_of(model, balance=None, chunks=1, *, x=None, **fields):
    """What `Pipe(model, balance=..., chunks=...)` is here: the example is what has no counterpart there."""
    where = {"stages": 1} if balance is None else {"balance": balance}
    x = torch.rand(max(chunks, 2), 1) if x is None else x
    return fxsplit.compile(
        model, Plan(**where, micro_batches=chunks, **fields), example_args=x if isinstance(x, tuple) else (x,)
    )


def assert_equal_grads(model, twin):
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def two():
    return nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))


class ExpectedError(Exception):
    pass


class Opaque(nn.Module):
    """Doubles, by way of a function of autograd's own, which no capture looks into: what `seen` does, it does each time."""

    def __init__(self, seen=lambda x: None):
        super().__init__()

        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                seen(x)
                return x * 2

            @staticmethod
            def backward(ctx, grad):
                return grad * 2

        self.double = Double

    def forward(self, x):
        return self.double.apply(x)


def raising(armed):
    """Raises once it is told to: a model that always raises has nothing to be compiled from."""

    def seen(x):
        if armed.is_set():
            raise ExpectedError

    return Opaque(seen)


def test_parameters():
    model = nn.Sequential(nn.Linear(1, 1))
    assert [id(p) for p in pipe_of(model).parameters()] == [id(p) for p in model.parameters()]


def test_public_attrs():
    """Differs: what was asked for is in one place, `pipe.plan`; text for a number is refused, and not converted."""
    pipe = pipe_of(nn.Sequential(nn.Linear(1, 1)), (1,), 42, devices=("cpu",), checkpoint="always")
    assert list(pipe.plan.balance) == [1] and list(pipe.devices) == [torch.device("cpu")]
    assert pipe.plan.micro_batches == 42 and pipe.plan.checkpoint == "always"
    with pytest.raises(PlanError, match="micro_batches"):
        Plan(stages=1, micro_batches=42.5)


@pytest.mark.parametrize("balance", [[2], [1, 1]])
def test_sequential_like(balance):
    """Differs: `len`, `[i]` and iteration are the stages; the layers are `pipe.unsplit()`, which is the model itself."""
    model = two()
    pipe = pipe_of(model, balance)
    assert len(pipe) == len(balance) and list(pipe) == [pipe[i] for i in range(len(balance))]
    assert pipe[-1] is pipe[len(balance) - 1]
    with pytest.raises(IndexError):
        pipe[len(balance)]
    assert pipe.unsplit() is model and list(pipe.unsplit()) == list(model)


@pytest.mark.parametrize("balance", [[1], [3]])
def test_balance_wrong_length(balance):
    with pytest.raises(ValueError, match="balance"):
        pipe_of(two(), balance)


@pytest.mark.parametrize("balance", [[0, 2], [-1, 3]])
def test_balance_less_than_1(balance):
    with pytest.raises(ValueError, match="balance"):
        pipe_of(two(), balance)


@pytest.mark.parametrize("chunks", [0, -1])
def test_chunks_less_than_1(chunks):
    with pytest.raises(ValueError, match="micro_batches"):
        Plan(stages=1, micro_batches=chunks)


def test_too_few_devices():
    """Differs: a PlanError, which is a ValueError and no IndexError."""
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(4)])
    with pytest.raises(PlanError, match="devices"):
        pipe_of(model, [1, 1, 1, 1], devices=["cpu"])


@pytest.mark.parametrize("rows", [7, 2])
def test_batch_size_indivisible_and_small(rows):
    model = nn.Sequential(nn.Linear(1, 1))
    x = torch.rand(rows, 1)
    torch.testing.assert_close(pipe_of(model, [1], 4)(x), model(x))


@pytest.mark.parametrize(("mode", "recomputed"), [("always", 2), ("except_last", 1), ("never", 0)])
def test_checkpoint_mode(mode, recomputed):
    runs = []
    pipe = pipe_of(nn.Sequential(Opaque(runs.append), nn.Linear(1, 1)), [2], 2, checkpoint=mode)
    runs.clear()
    out = pipe(torch.rand(2, 1))
    assert len(runs) == 2
    out.sum().backward()
    assert len(runs) == 2 + recomputed


def test_checkpoint_mode_invalid():
    with pytest.raises(ValueError, match=r"always.*except_last.*never"):
        Plan(stages=1, checkpoint="INVALID_CHECKPOINT")


@pytest.mark.parametrize("mode", MODES)
def test_checkpoint_mode_when_chunks_1(mode):
    model, x = two(), torch.rand(2, 1)
    assert torch.equal(pipe_of(model, [1, 1], checkpoint=mode)(x), model(x))


def test_checkpoint_eval():
    """Differs: a layer in eval mode is recomputed too where there is a gradient to be had; under no_grad nothing is."""
    runs = []
    pipe = pipe_of(nn.Sequential(Opaque(runs.append), nn.Linear(1, 1)), [2], 2, checkpoint="always").eval()
    runs.clear()
    pipe(torch.rand(2, 1)).sum().backward()
    assert len(runs) == 4
    with torch.no_grad():
        assert pipe(torch.rand(2, 1)).grad_fn is None
    assert len(runs) == 6


def test_checkpoint_non_float_input():
    class ForkNonFloat(nn.Module):
        def forward(self, x):
            return x * 2, torch.tensor([False])

    class JoinNonFloat(nn.Module):
        def forward(self, pair):
            return pair[0] * 2

    pipe = pipe_of(
        nn.Sequential(ForkNonFloat(), JoinNonFloat()), [1, 1], x=torch.rand(1), checkpoint="always"
    )
    x = torch.rand(1, requires_grad=True)
    pipe(x).backward()
    assert x.grad.item() == 4


def test_no_grad():
    latents = []
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].register_forward_hook(lambda module, args, out: latents.append(out))
    pipe = pipe_of(model, [1], 2)
    latents.clear()
    with torch.no_grad():
        pipe(torch.rand(2, 1))
    assert len(latents) == 2 and all(latent.grad_fn is None for latent in latents)


def test_exception():
    """Differs: a forward that raises on the example raises at the compile, with the user's line."""
    armed = threading.Event()
    pipe = pipe_of(nn.Sequential(raising(armed)), [1])
    armed.set()
    with pytest.raises(ExpectedError):
        pipe(torch.rand(2, 1))
    armed.clear()
    assert pipe(torch.rand(2, 1)).shape == (2, 1)


def test_exception_early_stop_asap():
    """No micro-batch starts once one has failed, and none of the stages goes on by itself."""
    armed, counted, failed = threading.Event(), [], threading.Event()

    def count(x):
        counted.append(1)
        if armed.is_set() and len(counted) > 1:
            assert failed.wait(60)

    def fail(x):
        if armed.is_set():
            failed.set()
            raise ExpectedError

    layers = [nn.Identity(), nn.Linear(1, 1), Opaque(count), Opaque(fail)]
    pipe = pipe_of(nn.Sequential(*layers), [2, 1, 1], 8)
    counted.clear()
    armed.set()
    with pytest.raises(ExpectedError):
        pipe(torch.rand(8, 1))
    assert 1 <= len(counted) < 8


def test_exception_no_hang():
    armed = threading.Event()
    pipe = pipe_of(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), raising(armed)), [1, 1, 1], 3)
    armed.set()
    for _ in range(3):
        with pytest.raises(ExpectedError):
            pipe(torch.rand(3, 1))


def test_input_pair():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc_a, self.fc_b = nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, pair):
            a, b = pair
            return self.fc_a(a), self.fc_b(b)

    a, b = torch.rand(10, 1, requires_grad=True), torch.rand(10, 1, requires_grad=True)
    pipe = fxsplit.compile(nn.Sequential(Two()), Plan(stages=1, micro_batches=2), example_args=((a, b),))
    a_out, b_out = pipe((a, b))
    (a_out + b_out).mean().backward()
    assert a.grad is not None and b.grad is not None


def test_input_singleton():
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(1, 1)

        def forward(self, only):
            (a,) = only
            return (self.fc(a),)

    a = torch.rand(10, 1, requires_grad=True)
    pipe = fxsplit.compile(nn.Sequential(One()), Plan(stages=1, micro_batches=2), example_args=((a,),))
    (out,) = pipe((a,))
    out.mean().backward()
    assert a.grad is not None and all(p.grad is not None for p in pipe.parameters())


def test_input_varargs():
    """Too many arguments are a TypeError, as for the model. (As many as forward takes are taken, which Pipe refuses.)"""
    pipe = pipe_of(nn.Sequential(nn.Linear(1, 1)))
    with pytest.raises(TypeError):
        pipe(torch.rand(1, 1), torch.rand(1, 1))


def test_non_tensor():
    """Differs: what is no tensor is taken and given back. (A model that computes nothing is refused.)"""

    class NonTensorTuple(nn.Module):
        def forward(self, x):
            return x * 1, "hello"

    x = torch.rand(2, 1)
    out, word = pipe_of(nn.Sequential(nn.Linear(1, 1), NonTensorTuple()), [1, 1])(x)
    assert out.shape == (2, 1) and word == "hello"


@pytest.mark.parametrize("mode", MODES)
def test_deferred_batch_norm(mode):
    norm, x = nn.BatchNorm2d(3), torch.rand(4, 3, 10, 10)
    model = nn.Sequential(copy.deepcopy(norm))
    pipe = pipe_of(model, [1], 2, x=x, checkpoint=mode, deferred_batch_norm=True)
    pipe(x).mean().backward()
    norm(x).mean().backward()
    torch.testing.assert_close(model[0].running_mean, norm.running_mean)
    torch.testing.assert_close(model[0].running_var, norm.running_var)


@pytest.mark.parametrize("mode", ["never", "always"])
def test_deferred_batch_norm_params(mode):
    norm, x = nn.BatchNorm2d(3), torch.rand(4, 3, 10, 10)
    model = nn.Sequential(copy.deepcopy(norm))
    pipe_of(model, [1], x=x, checkpoint=mode, deferred_batch_norm=True)(x).square().mean().backward()
    norm(x).square().mean().backward()
    assert_equal_grads(model[0], norm)


def test_devices():
    """Differs: devices that no stage would have are refused, and not left out."""
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(3)])
    assert pipe_of(model, [1, 1, 1], devices=["cpu"] * 3).devices == (torch.device("cpu"),) * 3
    with pytest.raises(PlanError, match="devices"):
        pipe_of(model, [1, 1, 1], devices=["cpu"] * 5)


def test_partitions():
    """Differs: names are the model's, so a checkpoint of the model is one of the pipeline."""
    model = two()
    pipe = pipe_of(model, [1, 1])
    assert list(pipe.state_dict()) == list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [name for name, _ in pipe.stages[1].named_parameters()] == ["1.weight", "1.bias"]


def test_deny_moving():
    """Differs: what moves nothing, as `cpu()` where all is there already, is no move."""
    pipe = pipe_of(two(), [1, 1])
    for move in (pipe.cuda, lambda: pipe.to(torch.device("cuda")), lambda: pipe.to("cuda")):
        with pytest.raises(TypeError, match="placement"):
            move()
    with pytest.raises(TypeError, match="placement"):
        pipe.to(device="meta")
    with pytest.raises(TypeError, match="placement"):
        pipe.to(torch.rand(1, device="meta"))
    assert pipe.cpu() is pipe.to(torch.rand(1)) is pipe
    pipe.half()
    assert {p.dtype for p in pipe.parameters()} == {torch.half}
    pipe.to(torch.double)
    pipe.to(dtype=torch.float)
    assert {p.dtype for p in pipe.parameters()} == {torch.float}


def test_empty_module():
    """Differs: what computes nothing is refused."""
    with pytest.raises(TypeError, match="computes nothing"):
        pipe_of(nn.Sequential())


def test_named_children():
    """Differs: the children are the model's own, by their own names."""
    model = nn.Sequential(OrderedDict([("a", nn.Linear(1, 1)), ("b", nn.Linear(1, 1))]))
    pipe = pipe_of(model, [1, 1])
    assert pipe.unsplit().a is model.a
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_recommend_auto_balance():
    """A balance that is wrong names the fields that make one by themselves."""
    with pytest.raises(ValueError, match="stages="):
        pipe_of(two(), [1])


def test_verify_module_non_sequential():
    """Differs: any module with a forward is taken."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, x):
            return self.b(self.a(x)) + x

    model, x = Net(), torch.rand(2, 1)
    assert torch.equal(pipe_of(model, [1, 2])(x), model(x))
    with pytest.raises(TypeError):
        pipe_of(lambda x: x)


def test_verify_module_duplicate_children():
    """Differs: a module may be used twice: one parameter, one gradient."""
    linear = nn.Linear(1, 1)
    model, twin = (
        nn.Sequential(linear, nn.ReLU(), linear),
        copy.deepcopy(nn.Sequential(linear, nn.ReLU(), linear)),
    )
    x = torch.rand(2, 1)
    pipe_of(model, [2, 1])(x).sum().backward()
    twin(x).sum().backward()
    assert_equal_grads(model, twin)


def test_verify_module_duplicate_parameters_on_same_device():
    """Differs: on distinct devices too, with one home for the parameter (tests/on_devices)."""

    class Surrogate(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    conv = nn.Conv2d(3, 3, 1)
    model = nn.Sequential(Surrogate(conv), Surrogate(conv))
    x = torch.rand(2, 3, 4, 4)
    assert torch.equal(pipe_of(model, [1, 1], x=x)(x), model(x))


def test_forward_lockstep():
    """Stage 1 computes micro-batch i beside stage 0's i + 1: each waits here until the other one is there too."""
    beside, armed = [threading.Barrier(2, timeout=60) for _ in range(2)], threading.Event()

    def meet(first):
        calls = []

        def seen(x):
            if armed.is_set():
                calls.append(x)
                number = len(calls) - 1 - first  # of the barrier: what both compute at that time
                if 0 <= number < 2:
                    beside[number].wait()

        return Opaque(seen)

    pipe = pipe_of(nn.Sequential(meet(1), meet(0)), [1, 1], 3)
    armed.set()
    assert pipe(torch.rand(3, 1)).shape == (3, 1)


# of test_bugs.py


def test_python_autograd_function():
    pipe = pipe_of(nn.Sequential(Opaque(), Opaque()), [1, 1], checkpoint="always")
    x = torch.rand(42, 1, requires_grad=True)
    assert torch.equal(pipe(x), x * 4)
    pipe(x).sum().backward()
    assert (x.grad == 4).all()


def test_parallel_randoms():
    """Recomputation, beside another stage that draws, sees the masks that its forward saw."""

    class Dropouts(nn.Module):
        def forward(self, x):
            for _ in range(100):
                x = F.dropout(x, p=0.001)
            return x

    x = torch.rand(10, 10, requires_grad=True)
    pipe = pipe_of(nn.Sequential(Dropouts(), Dropouts()), [1, 1], 10, x=x, checkpoint="always")
    y = pipe(x)
    y.norm().backward()
    assert y.bool().tolist() == x.grad.bool().tolist()
    assert not y.all()


# of skip/test_gpipe.py, skip/test_leak.py


@pytest.mark.parametrize("balance", [[3], [1, 2], [2, 1], [1, 1, 1]])
@pytest.mark.parametrize("mode", MODES)
def test_1to3(balance, mode):
    """Differs: nothing is stashed or popped: the graph knows who reads what."""

    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Conv2d(3, 3, 1) for _ in range(3))

        def forward(self, x):
            return F.relu(self.c(self.b(self.a(x))) + x)

    model = Skip()
    twin, x = copy.deepcopy(model), torch.rand(6, 3, 8, 8)
    balance = [*balance[:-1], balance[-1] + 2]  # the sum and the relu are units of the graph
    first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = pipe_of(model, balance, 3, x=x, checkpoint=mode)(first)
    out.mean().backward()
    sum(twin(part).sum() / out.numel() for part in second.split(2)).backward()
    torch.testing.assert_close(first.grad, second.grad)


def test_none_skip():
    class Give(nn.Module):
        def forward(self, x):
            return x * 1, None

    class Take(nn.Module):
        def forward(self, pair):
            assert pair[1] is None
            return pair[0] * 1

    x = torch.rand(10, 1, requires_grad=True)
    pipe_of(nn.Sequential(Give(), Take()), [1, 1], 5, x=x)(x).sum().backward()
    assert x.grad.mean() == 1


# what their users were hurt by


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError, RuntimeError])
def test_out_of_memory(kind):
    """There wrapped in another error, which `except OutOfMemoryError` misses; here itself, with what takes less."""
    limit = [2]

    def fill(x):
        if len(x) > limit[0]:
            raise kind("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    with pytest.raises(kind, match="can't allocate"):  # at the compile too
        pipe_of(nn.Sequential(nn.Linear(1, 1), Opaque(fill)), [1, 1], 2, x=torch.rand(4, 1))
    limit[0] = 5  # what is compared has that many rows, where the example has fewer
    pipe = pipe_of(nn.Sequential(nn.Linear(1, 1), Opaque(fill)), [1, 1], 2, x=torch.rand(2, 1))
    limit[0] = 2
    with pytest.raises(kind) as caught:
        pipe(torch.rand(8, 1))
    assert "stage 1" in caught.value.__notes__[0] and "more micro_batches=" in caught.value.__notes__[0]
    assert pipe(torch.rand(4, 1)).shape == (4, 1)
