"""Operands of several devices are brought together, and what is written is written where it is."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxsplit.trace.spread import Together, is_spread

A, B = "sim:0", "sim:1"


def on(device, *shape, grad=False):
    return torch.randn(*shape).to(device).requires_grad_(grad)


def iadd(h, y):
    h += y
    return h


@pytest.mark.parametrize(
    "write",
    [
        iadd,
        lambda h, y: h.add_(y),
        lambda h, y: h.__setitem__(0, y[1]),
        lambda h, y: torch.add(h, y, out=h),
        lambda h, y: h.copy_(y),
        lambda h, y: h[0].mul_(y[0]),
        lambda h, y: h.masked_fill_(y > 0, 3.0),
        lambda h, y: torch._foreach_add_([h], [y]),
        lambda h, y: torch.addcmul(y, y, y, out=h),
        lambda h, y: h.view(12).view_as(y).add_(1),
        lambda h, y: h.view(12).reshape_as(y).mul_(2),
        lambda h, y: h[(y[:, 0] > 9).nonzero().sum()].add_(1),
    ],
)
def test_writes_are_seen_by_views(write):
    here, there = torch.randn(3, 4), torch.randn(3, 4)
    wanted = here.clone()
    write(wanted, there)
    found = here.to(A)
    view = found.view(12)
    with Together(nn.Module()):
        write(found, there.to(B))
    assert found.device == torch.device(A)
    torch.testing.assert_close(view.cpu().view(3, 4), wanted)


def test_an_operation_is_where_its_parameter_is():
    layer = nn.Linear(4, 4).to(B)
    x = on(A, 3, 4, grad=True)
    with Together(layer):
        y = layer(x)
        z = x + y
        loss = (z * y).sum() + F.mse_loss(y, x.detach())
        loss.backward()
    assert y.device == torch.device(B) and x.grad.device == torch.device(A)
    plain = nn.Linear(4, 4)
    plain.load_state_dict({k: v.cpu() for k, v in layer.state_dict().items()})
    u = x.detach().cpu().requires_grad_()
    v = plain(u)
    (((u + v) * v).sum() + F.mse_loss(v, u.detach())).backward()
    torch.testing.assert_close(x.grad.cpu(), u.grad)
    torch.testing.assert_close(layer.weight.grad.cpu(), plain.weight.grad)


def test_what_moves_by_itself_is_left_alone():
    x, p = on(A, 3), nn.Parameter(on(A, 3).detach())
    with Together(nn.Module()):
        assert x.to(B).device == torch.device(B) and x.to(on(B, 1)).device == torch.device(B)
        p.data = on(B, 3)
        assert p.device == torch.device(B)
        assert (x * torch.tensor(2.0)).device == torch.device(A)


def test_is_spread():
    assert not is_spread(nn.Linear(2, 2)) and not is_spread(nn.Module())
    assert is_spread(nn.Sequential(nn.Linear(2, 2).to(A), nn.Linear(2, 2).to(B)))
