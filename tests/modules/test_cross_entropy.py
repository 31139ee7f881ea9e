"""The loss of a linear head and its gradients, against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longhaul.modules.cross_entropy import ROWS_AT_ONCE, RowLosses, linear_cross_entropy

VOCABULARY, WIDTH = 300, 24


def inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows)
    hidden = torch.randn(rows, WIDTH, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, requires_grad=True)
    # As in text, a few ids are most of the targets, and many are none.
    target = (torch.rand(rows) ** 4 * VOCABULARY).long()
    return hidden, weight, target


def in_float64(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    loss = F.cross_entropy(h @ w.T, target)
    return loss.detach(), *torch.autograd.grad(3 * loss, (h, w))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, ROWS_AT_ONCE, 2 * ROWS_AT_ONCE + 77])
def test_the_loss_and_its_gradients_are_those_of_the_definition(
    rows: int, dtype: torch.dtype
) -> None:
    hidden, weight, target = inputs(rows)
    if dtype == torch.float64:
        hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, target, dtype)
    found = loss, *torch.autograd.grad(3 * loss, (hidden, weight))
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    # Operands of bfloat16 are rounded, by 2^-9 of their size, and so are logits of about 5.
    bound = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    for one, wanted in zip(found, in_float64(hidden, weight, target), strict=True):
        assert (one - wanted).norm() <= bound * wanted.norm()
    assert found[1].dtype == hidden.dtype
    assert found[2].dtype == weight.dtype


def test_sums_over_pieces_are_not_rounded_to_bfloat16() -> None:
    hidden, weight, target = inputs(16 * ROWS_AT_ONCE)
    rounded = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    loss = linear_cross_entropy(*rounded, target, torch.bfloat16)
    (dweight,) = torch.autograd.grad(3 * loss, rounded[1:])
    _, _, wanted = in_float64(*rounded, target)
    assert (dweight - wanted).norm() <= 4e-3 * wanted.norm()


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient(frozen: int) -> None:
    hidden, weight, target = inputs(40)
    trained = [hidden, weight][1 - frozen]
    [hidden, weight][frozen].requires_grad_(False)
    loss = linear_cross_entropy(hidden, weight, target, torch.float32)
    (gradient,) = torch.autograd.grad(3 * loss, [trained])
    wanted = in_float64(hidden, weight, target)[2 - frozen]
    assert (gradient - wanted).norm() <= 2e-6 * wanted.norm()


def test_without_gradients_the_loss_is_the_same() -> None:
    hidden, weight, target = inputs(40)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, target, torch.float32)
    assert torch.equal(loss, linear_cross_entropy(hidden, weight, target, torch.float32))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_z_loss_and_soft_cap_are_those_of_their_formulas(
    dtype: torch.dtype, softcap: float | None
) -> None:
    hidden, weight, target = inputs(ROWS_AT_ONCE + 77)
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    if dtype == torch.float64:
        hidden, weight = h, w
    row_losses = RowLosses()
    loss = linear_cross_entropy(
        hidden, weight, target, dtype, row_losses, softcap=softcap, z_loss=0.25
    )
    y = h @ w.T
    y = y if softcap is None else softcap * (y / softcap).tanh()
    z = y.exp().sum(1).log()
    losses = z - y[range(len(target)), target]
    wanted = losses.mean() + 0.25 * z.square().mean()
    bound = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 2e-2}[dtype]
    found = loss, row_losses.all(), row_losses.normalizers()
    found += torch.autograd.grad(3 * loss, (hidden, weight))
    exact = wanted, losses, z, *torch.autograd.grad(3 * wanted, (h, w))
    for one, other in zip(found, exact, strict=True):
        assert (one - other).norm() <= bound * other.norm()
