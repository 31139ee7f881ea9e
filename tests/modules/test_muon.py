"""Muon against its formula in float64 and against torch's own; matrices that are held in one."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from longhaul.modules import muon
from longhaul.modules.muon import Muon, orthogonalization_flops, orthogonalized
from longhaul.modules.roles import fused_rows

SHAPES = [(24, 8), (8, 24), (24, 8), (9, 9), (1, 7), (7, 1), (18, 9)]
ROWS = [(8, 12, 4), (8,), (24,), (9,), (1,), (3, 4), (9, 9)]
LEARNING_RATE, DECAY = 0.02, 0.1


def gradients(step: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    chance = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=chance, dtype=torch.float64).to(dtype) for shape in SHAPES]


def matrices(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(one) for one in gradients(1000, dtype)]


def group(parameters: list[nn.Parameter], rows: list[tuple[int, ...]]) -> dict[str, Any]:
    return {"params": parameters, "rows": rows, "kind": "muon", "weight_decay": DECAY}


def build(*groups: dict[str, Any]) -> Muon:
    return Muon(list(groups), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8)


def train(parameters: list[nn.Parameter], optimizer: Muon, steps: int = 4, first: int = 0) -> None:
    for step in range(first, first + steps):
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


def by_formula(steps: int = 4) -> list[Tensor]:
    """Every matrix by itself, in the order of the formula and with its sum of momenta."""
    weights = [one.detach() for one in matrices()]
    momenta = [torch.zeros_like(one) for one in weights]
    for step in range(steps):
        for number, gradient in enumerate(gradients(step)):
            momenta[number] = 0.95 * momenta[number] + 0.05 * gradient
            direction = 0.95 * momenta[number] + 0.05 * gradient
            parts, first = [], 0
            for rows in ROWS[number]:
                parts.append(_along(direction[first : first + rows]))
                first += rows
            kept = (1 - LEARNING_RATE * DECAY) * weights[number]
            weights[number] = kept - LEARNING_RATE * torch.cat(parts)
    return weights


def _along(matrix: Tensor) -> Tensor:
    rows, columns = matrix.shape
    x = matrix / (matrix.square().sum().sqrt() + 1e-7)
    for _ in range(5):
        # X X^T X and X X^T X X^T X, whichever of both products is the smaller.
        cube = x @ x.T @ x
        x = 3.4445 * x - 4.7750 * cube + 2.0315 * (x @ x.T @ cube)
    return 0.2 * math.sqrt(max(rows, columns)) * x


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["64", "32"]
)
@pytest.mark.parametrize("most", [1, 300, 1 << 24])
def test_steps_are_those_of_the_formula(
    dtype: torch.dtype, tolerance: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many matrices are worked on at once."""
    monkeypatch.setattr(muon, "_MOST_AT_ONCE", most)
    parameters = matrices(dtype)
    train(parameters, build(group(parameters, ROWS)))
    for found, wanted in zip(parameters, by_formula(), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=tolerance)


def test_in_16_bits_directions_are_nearly_the_same() -> None:
    stacked = torch.stack([gradients(number)[1] for number in range(3)])  # (3, 8, 24)
    found, wanted = orthogonalized(stacked.bfloat16()), orthogonalized(stacked)
    assert found.dtype == torch.bfloat16
    assert (found - wanted).norm() < 0.03 * wanted.norm()
    assert wanted.norm() == pytest.approx((3 * 8) ** 0.5, rel=0.2)


def test_matrices_of_one_shape_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def noted(stacked: Tensor) -> Tensor:
        shapes.append(tuple(stacked.shape))
        return orthogonalized(stacked)

    monkeypatch.setattr(muon, "orthogonalized", noted)
    parameters = matrices()
    train(parameters, build(group(parameters, ROWS)), steps=1)
    assert sorted(shapes) == [
        (1, 1, 3), (1, 1, 4), (1, 1, 7), (1, 4, 8), (1, 8, 8), (1, 8, 12), (2, 8, 24), (3, 9, 9),
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [(20, 12), (12, 20), (16, 16)])
def test_the_trajectory_is_that_of_torchs_own(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=chance)
    own, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = [
        build(group([own], [shape[:1]])),
        torch.optim.Muon(
            [theirs], lr=LEARNING_RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"
        ),
    ]
    # Theirs iterates in 16 bits, in which no two orders of sums agree.
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    for _ in range(20):
        own.grad = torch.randn(shape, generator=chance)
        theirs.grad = own.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    travelled = (theirs.detach() - start).abs().max()
    assert travelled > 0.1
    torch.testing.assert_close(own, theirs, rtol=0, atol=1e-5 * float(travelled))


def test_all_that_is_not_muons_is_adams() -> None:
    """To the bit, whether Muon has parameters or not."""
    with_matrices, alone, theirs = (nn.Parameter(torch.ones(5)) for _ in range(3))
    (matrix, *_) = matrices()
    settings = {"kind": "adam", "weight_decay": 0.0}
    optimizers = [
        build({"params": [with_matrices], **settings}, group([matrix], ROWS[:1])),
        build({"params": [alone], **settings}),
        torch.optim.Adam([theirs], lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, fused=True),
    ]
    for step in range(3):
        for one in (with_matrices, alone, theirs):
            one.grad = torch.randn(5, generator=torch.Generator().manual_seed(step))
        matrix.grad = gradients(step)[0]
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(with_matrices, theirs)
    assert torch.equal(alone, theirs)
    assert len(optimizers[0].param_groups) == 2


def test_it_goes_on_from_its_state_dict() -> None:
    """As in a plain trainer's checkpoint."""
    wholes, halves = matrices(), matrices()
    whole, half = (build(group(one, ROWS)) for one in (wholes, halves))
    train(wholes, whole)
    train(halves, half, steps=2)
    again = build(group(halves, ROWS))
    again.load_state_dict(half.state_dict())
    train(halves, again, steps=2, first=2)
    for found, wanted in zip(halves, wholes, strict=True):
        assert torch.equal(found, wanted)


def test_without_a_gradient_nothing_changes_and_a_zero_one_gives_no_step() -> None:
    parameters = matrices()
    optimizer = build({**group(parameters[:2], ROWS[:2]), "weight_decay": 0.0})
    parameters[0].grad = torch.zeros_like(parameters[0])
    optimizer.step()
    for one, before in zip(parameters[:2], matrices()[:2], strict=True):
        assert torch.equal(one, before)
    assert parameters[1] not in optimizer.state


def test_a_step_has_the_size_of_adams() -> None:
    """0.2 times the learning rate, in the root mean square, for a gradient of full rank."""
    parameter = nn.Parameter(torch.zeros(64, 256))
    parameter.grad = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    build(group([parameter], [(64,)])).step()
    size = parameter.detach().square().mean().sqrt().item()
    assert size == pytest.approx(0.2 * LEARNING_RATE, rel=0.2)


def test_flops_are_counted() -> None:
    parameters = matrices()
    optimizer = build(group(parameters, ROWS), {"params": [nn.Parameter(torch.ones(2))],
                                                "kind": "adam", "weight_decay": 0.0})  # fmt: skip
    with FlopCounterMode(display=False) as counter:
        train(parameters, optimizer, steps=1)
    assert orthogonalization_flops(optimizer.param_groups) == counter.get_total_flops()


class _Holder(nn.Module):
    def __init__(self, **rows: tuple[int, ...]) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 12)
        self.fused_rows = {name.replace("_", "."): own for name, own in rows.items()}


def _inside(holder: nn.Module) -> nn.Module:
    return nn.Sequential(holder)


@pytest.mark.parametrize(("around", "prefix"), [(nn.Identity(), ""), (_inside, "0.")])
def test_a_module_states_rows_of_its_own_or_a_childs_parameters(
    around: Callable[[nn.Module], nn.Module], prefix: str
) -> None:
    found = fused_rows(around(_Holder(inner_weight=(4, 8))))
    assert found == {f"{prefix}inner.weight": (4, 8)}


@pytest.mark.parametrize("rows", [{"inner_weight": (4, 7)}, {"other_weight": (12,)}])
def test_rows_that_are_not_those_of_a_parameter_are_refused(rows: dict[str, Any]) -> None:
    name = next(iter(rows)).replace("_", ".")
    with pytest.raises(ValueError, match=rf"_Holder\.fused_rows: found {name} of .*wanted"):
        fused_rows(_Holder(**rows))
