"""Complex attention and its eigenvalues and amplitudes against the formulas of their source."""

import pytest
import torch
from pairwise import (
    HEADS,
    INITIAL_STATE,
    T,
    assert_forward,
    assert_outputs,
    assert_same,
    build,
    dot,
    fixed_decay,
    matrix,
    mix,
    no_decay,
    projections,
    rotary_rates,
    tokens,
)
from torch import Tensor

from longhaul.modules.attention import Attention, build_attention
from longhaul.modules.rotary import PositionScaling

EIGENVALUES = [
    {},
    {"decay": True},
    {"learned_rates": True},
    {"learned_sizes": True},
    {"learned_rates": True, "learned_sizes": True},
]
AMPLITUDES = [
    {"normalizer": "amplitudes", **one} for one in EIGENVALUES if "learned_sizes" not in one
]


def complex_from(x: Tensor) -> Tensor:
    return torch.complex(*x.chunk(2, -1))


def eigenvalues(attention: Attention) -> tuple[Tensor, Tensor]:
    """The sizes alpha and the rates theta of R, (H, J)."""
    theta = torch.tensor(rotary_rates(), dtype=torch.float64).expand(HEADS, -1)
    alpha = torch.ones_like(theta)
    learned = attention.eigenvalues
    if attention.config.learned_rates:
        theta = learned.speed.view(HEADS, -1) * theta
    if attention.config.learned_sizes:
        alpha = torch.exp(-torch.exp(learned.nu.view(HEADS, -1)))
        assert (alpha < 1).all()
    return alpha, theta


@INITIAL_STATE
@pytest.mark.parametrize("options", EIGENVALUES + AMPLITUDES, ids=str)
def test_complex_uses_real_and_imaginary_part_of_the_inner_product(
    options: dict[str, object], initial_state: str
) -> None:
    attention, x = build("complex", initial_state=initial_state, **options), tokens()
    q, k, v = (complex_from(one) for one in projections(x, attention.qkv.weight))
    (alpha, theta), fade = eigenvalues(attention), fixed_decay if options.get("decay") else no_decay

    def weight(n: int, m: int, key: Tensor) -> Tensor:
        power = alpha ** (n - m) * torch.exp(1j * (n - m) * theta)
        return fade(n, m) * dot(q[:, n].conj(), power * key) / 8**0.5

    weights = matrix(lambda n, m: weight(n, m, k[:, m]))
    assert weights.dtype == torch.complex128
    mixed, probabilities = mix(weights, v), weights.abs().square().sum(-1).mT
    if (start := attention.initial_state) is not None:
        keys, values = (complex_from(one) for one in (start.key, start.value))
        before = [torch.stack([weight(n, -1, keys[:, r]) for r in range(3)], -1) for n in range(T)]
        pivots = torch.stack(before, 1)  # (B, T, H, R)
        mixed = mixed + torch.einsum("bthr,hrv->bthv", pivots, values)
        probabilities = probabilities + pivots.abs().square().sum(-1)
    if "normalizer" not in options:
        assert_same(attention.weights(x), weights)
        assert_forward(attention, x, torch.cat([mixed.real, mixed.imag], -1))
        return
    # The written-out weights are without pivot tokens; the squares of a row sum to 1.
    assert_same(attention.weights(x), weights / weights.abs().square().sum(-1, True).sqrt())
    mixed = mixed / probabilities[..., None].sqrt()
    y = torch.cat([mixed.real, mixed.imag], -1).flatten(2)
    assert_outputs(attention, x, y @ attention.out.weight.mT)


@torch.no_grad()
def test_new_eigenvalues_are_those_of_the_fixed_rates_and_decays() -> None:
    torch.manual_seed(0)
    fixed = build_attention("complex", 16, 2, decay=True).double()
    learned = build_attention("complex", 16, 2, learned_rates=True, learned_sizes=True).double()
    assert learned.eigenvalues.speed.eq(1).all()
    left_over = learned.load_state_dict(fixed.state_dict(), strict=False)
    assert set(left_over.missing_keys) == {"eigenvalues.speed", "eigenvalues.nu"}
    assert_same(learned(tokens())[0], fixed(tokens())[0], 1e-6)
    # Sizes are below 1 also where a head's decay is 1 - 2^-68.
    many = build_attention("complex", 256, 64, learned_sizes=True).eigenvalues.nu
    assert many.isfinite().all()


@torch.no_grad()
def test_learned_rates_are_scaled_with_the_positions() -> None:
    attention, usual = build("complex", learned_rates=True), build("complex")
    attention.eigenvalues.speed.fill_(1.0)
    usual.load_state_dict(attention.state_dict(), strict=False)
    for scaling in (
        PositionScaling(name="linear", factor=2.0),
        PositionScaling(name="dynamic_ntk", factor=2.0, context=8),
    ):
        outputs = []
        for one in (attention, usual):
            one.set_positions(scaling)
            outputs.append(one(tokens(), keep_state=False)[0])
        assert_same(*outputs)


@torch.no_grad()
def test_a_small_eigenvalue_forgets_and_overflows_nothing() -> None:
    """Folded into keys, alpha^-m would be 1e300 after a few tokens of these."""
    attention = build_attention("complex", 16, 2, learned_sizes=True)
    attention.eigenvalues.nu.fill_(4.0)  # alpha = exp(-55)
    x = torch.randn(1, 50, 16)
    y, _ = attention(x, keep_state=False)
    alone = torch.cat([attention(one, keep_state=False)[0] for one in x.split(1, dim=1)], 1)
    torch.testing.assert_close(y, alone)


@torch.no_grad()
def test_heads_of_one_pair_have_learned_sizes_too() -> None:
    attention = build_attention("complex", 4, 2, learned_sizes=True).double()
    x = torch.randn(1, 9, 4, dtype=torch.float64)
    whole, _ = attention(x, keep_state=False)
    outputs, state = [], attention(x[:, :1])[1]
    for token in x[:, 1:].split(1, dim=1):
        y, state = attention.step(token, state)
        outputs.append(y)
    assert_same(torch.cat(outputs, 1), whole[:, 1:])
    mixed = torch.einsum("bhti,bihv->bthv", attention.weights(x), attention.values(x))
    assert_same(attention.read_out(x, mixed), whole)
