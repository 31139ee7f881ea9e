"""GELU and its gradient, against the formula in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from longhaul.kernels.gelu import gelu


def defined(x: Tensor) -> Tensor:
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


# Less than a vector of any CPU, whole vectors, and some more.
@pytest.mark.parametrize("size", [0, 1, 15, 16, 4099])
def test_values_and_gradients(size: int) -> None:
    x = (4 * torch.randn(size)).requires_grad_()
    dy = torch.randn(size)
    y = gelu(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    wide = x.detach().double().requires_grad_()
    wanted = defined(wide)
    (dwanted,) = torch.autograd.grad(wanted, wide, dy.double())
    # What float32 rounds of x itself changes a value by at most twice as much.
    torch.testing.assert_close(y.double(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dx.double(), dwanted, rtol=2e-6, atol=5e-6)


def test_extremes() -> None:
    x = torch.tensor([-1e30, -100.0, -30.0, -0.0, 1e-30, 30.0, 1e30, torch.inf, torch.nan])
    x.requires_grad_()
    y = gelu(x)
    torch.testing.assert_close(
        y, F.gelu(x, approximate="tanh"), rtol=1e-6, atol=1e-6, equal_nan=True
    )
    (dx,) = torch.autograd.grad(y[1:6].sum(), x)
    torch.testing.assert_close(dx[1:6], torch.tensor([0.0, 0.0, 0.5, 0.5, 1.0]))


def test_strides_and_narrow_numbers() -> None:
    x = torch.randn(6, 8)
    torch.testing.assert_close(gelu(x.T), gelu(x).T)
    half = x.bfloat16()
    assert torch.equal(gelu(half), F.gelu(half, approximate="tanh"))


def test_a_gradient_of_equal_entries_is_taken() -> None:
    x = torch.randn(33, requires_grad=True)
    (dx,) = torch.autograd.grad(gelu(x).sum(), x)
    (wanted,) = torch.autograd.grad(defined(x).sum(), x)
    torch.testing.assert_close(dx, wanted, rtol=2e-6, atol=5e-6)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_second_derivatives(is_transposed: bool) -> None:
    x = torch.randn(5, 3, requires_grad=True)
    y = gelu(x.T if is_transposed else x)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(dx.sum(), x)
    wide = x.detach().double().requires_grad_()
    (dwide,) = torch.autograd.grad(defined(wide).square().sum(), wide, create_graph=True)
    (wanted,) = torch.autograd.grad(dwide.sum(), wide)
    torch.testing.assert_close(second.double(), wanted, rtol=1e-4, atol=1e-5)


def test_a_batch_of_gradients_and_a_traced_call() -> None:
    x = torch.randn(4)
    found = torch.autograd.functional.jacobian(gelu, x, vectorize=True)
    torch.testing.assert_close(found, torch.autograd.functional.jacobian(defined, x))
    traced = make_fx(gelu)(x)
    torch.testing.assert_close(traced(x + 1), gelu(x + 1))
