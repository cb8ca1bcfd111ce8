"""Linear layers laid out for oneDNN: the same products, and out of the way wherever they don't apply."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import Tensor, nn

from models import packed
from models.packed import PackedLinear, pack_linears


class Net(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(24, 40, bias=bias), nn.Linear(40, 7, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)))
        return out


def net(bias: bool = True) -> Net:
    torch.manual_seed(0)
    return Net(bias).requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_in_float64(bias: bool) -> None:
    plain, fast = net(bias), net(bias)
    assert pack_linears(fast) == packed.available() == isinstance(fast.first, PackedLinear)
    for shape in ((1, 24), (5, 24), (2, 3, 24), (300, 24), (0, 24)):
        x = torch.randn(shape)
        expected = copy.deepcopy(plain).double()(x.double())
        torch.testing.assert_close(fast(x).double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(fast(x.flip(0)).double(), expected.flip(0), atol=1e-5, rtol=1e-5)
    assert fast.state_dict().keys() == plain.state_dict().keys()


def test_a_changed_weight_is_laid_out_anew() -> None:
    fast, x = net(), torch.randn(3, 24)
    pack_linears(fast)
    fast(x)
    torch.testing.assert_close(copy.deepcopy(fast)(x), fast(x))
    with torch.no_grad():
        fast.first.weight.mul_(2)
    twin = net()
    with torch.no_grad():
        twin.first.weight.mul_(2)
    torch.testing.assert_close(fast(x), twin(x), atol=1e-5, rtol=1e-5)


def test_gradients_and_other_types_take_pytorchs_way(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, plain = net().requires_grad_(True), net().requires_grad_(True)
    pack_linears(fast)
    x = torch.randn(3, 24)
    for module in (fast, plain):
        module(x).square().sum().backward()
    torch.testing.assert_close(fast.first.weight.grad, plain.first.weight.grad)
    half = net().bfloat16()
    assert not pack_linears(half) and type(half.first) is nn.Linear
    monkeypatch.setattr(packed, "available", lambda: False)
    assert not pack_linears(net())


def test_a_copy_that_does_not_fit_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 2 * 4 * (24 * 40 + 40 * 7)
    for total, fits in ((2 * needed - 1, False), (2 * needed, packed.available())):
        monkeypatch.setattr(psutil, "virtual_memory", lambda total=total: SimpleNamespace(total=total))
        assert pack_linears(net()) is fits
