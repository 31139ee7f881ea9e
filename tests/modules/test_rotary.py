"""Rotary phases are accurate over a million tokens, and positions scale at evaluation."""

import math

import pytest
import torch

from longhaul.kernels.rotary import rotate
from longhaul.modules.attention import (
    Attention,
    attention_config,
    build_attention,
    registered_variants,
)
from longhaul.modules.documents import Documents
from longhaul.modules.rotary import PositionScaling, Rotary

CPU = torch.device("cpu")
MILLION = 1_048_576
ROTARY = [kind for kind in registered_variants() if build_attention(kind, 16, 2).rotary is not None]
STATEFUL = [kind for kind in ROTARY if attention_config(kind).cost == "linear"]


def accumulate(rates: torch.Tensor) -> torch.Tensor:
    """mu_t, summed as the variants do."""
    return Documents(rates).cumsum(rates.double(), torch.zeros(len(rates), dtype=torch.float64))


def circular_distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    difference = (found - wanted).abs() % 1.0
    return float(torch.minimum(difference, 1 - difference).max())


def phase_in_turns(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.atan2(sin.double(), cos.double()) / (2 * torch.pi)


def test_phase_is_within_1e_4_turns_after_a_million_tokens() -> None:
    torch.manual_seed(0)
    rates = 1 + torch.randn(1, MILLION).tanh()
    rotary = Rotary(8, base=65_536.0, first_turns=1.0)
    cos, sin = rotary.phases(accumulate(rates), MILLION, torch.bfloat16)
    assert cos.dtype == torch.float32
    # The oracle adds integers: rates are exact in units of 2^-40, and so are their sums.
    exact = (rates[0].double() * 2.0**40).round().to(torch.int64).cumsum(0)
    turns_per_token = rotary.turns(MILLION, CPU)
    wanted = exact.double()[:, None] / 2.0**40 * turns_per_token
    error = circular_distance(phase_in_turns(cos, sin)[0, :, 0], wanted)
    assert error < 1e-4
    # The same sum in float32 exceeds the bound, which shows that the bound is not too loose.
    naive = rates[0].cumsum(0).double()[:, None] * turns_per_token
    assert circular_distance(naive, wanted) > 1e-4


def test_rates_match_the_formulas() -> None:
    found = (Rotary(8, base=65_536.0, first_turns=1.0).turns(1, CPU) * 2 * math.pi).tolist()
    assert found == pytest.approx([2 * math.pi / 65_536 ** (2 * (j - 1) / 8) for j in range(1, 5)])
    found = (Rotary(8, base=10_000.0).turns(1, CPU) * 2 * math.pi).tolist()
    assert found == pytest.approx([10_000 ** (-2 * (j - 1) / 8) for j in range(1, 5)])


def test_rotation_keeps_norms_and_depends_on_differences_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 50, 1, 8)
    cos, sin = Rotary(8, base=100.0).phases(accumulate(torch.ones(1, 50)), 50, q.dtype)
    turned_q, turned_k = rotate(q, cos, sin), rotate(k, cos, sin)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm(dim=-1))
    scores = torch.einsum("bthk,bihk->ti", turned_q, turned_k)
    torch.testing.assert_close(scores[10:, 10:], scores[:-10, :-10])
    assert (scores[:-1, :-1] - scores[:-1, 1:]).abs().max() > 1e-3


def test_linear_interpolation_divides_every_rate() -> None:
    rotary = Rotary(8, base=10_000.0)
    before = rotary.turns(4096, CPU)
    rotary.scaling = PositionScaling(name="linear", factor=4.0)
    torch.testing.assert_close(rotary.turns(4096, CPU), before / 4)


@pytest.mark.parametrize(("length", "grown"), [(512, 1.0), (300, 1.0), (1024, 3.0), (2048, 7.0)])
def test_dynamic_ntk_raises_the_base_with_the_length(length: int, grown: float) -> None:
    # base' = base (factor length / context - (factor - 1))^(d / (d - 2)), beyond the context.
    rotary = Rotary(8, base=10_000.0)
    rotary.scaling = PositionScaling(name="dynamic_ntk", factor=2.0, context=512)
    base = 10_000 * grown ** (8 / 6)
    wanted = [base ** (-2 * j / 8) / (2 * math.pi) for j in range(4)]
    assert rotary.turns(length, CPU).tolist() == pytest.approx(wanted)


def small(kind: str, scaling: PositionScaling) -> Attention:
    torch.manual_seed(0)
    attention = build_attention(kind, 16, 2).double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    attention.set_positions(scaling)
    return attention


def tokens(T: int) -> torch.Tensor:
    return torch.randn(1, T, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ROTARY)
def test_scaling_positions_changes_the_output_until_reset(kind: str) -> None:
    attention, x = small(kind, PositionScaling()), tokens(40)
    plain, _ = attention(x, keep_state=False)
    for scaling in (
        PositionScaling(name="linear", factor=2.0),
        PositionScaling(name="dynamic_ntk", factor=2.0, context=20),
    ):
        attention.set_positions(scaling)
        assert not torch.allclose(attention(x, keep_state=False)[0], plain)
    attention.set_positions(PositionScaling())
    assert torch.equal(attention(x, keep_state=False)[0], plain)


@pytest.mark.parametrize("kind", ROTARY)
def test_dynamic_ntk_leaves_the_training_context_alone(kind: str) -> None:
    x = tokens(40)
    plain, _ = small(kind, PositionScaling())(x, keep_state=False)
    scaling = PositionScaling(name="dynamic_ntk", factor=8.0, context=40)
    assert torch.equal(small(kind, scaling)(x, keep_state=False)[0], plain)


@pytest.mark.parametrize("kind", [kind for kind in ROTARY if kind not in STATEFUL])
def test_dynamic_ntk_rotates_cached_keys_again(kind: str) -> None:
    attention = small(kind, PositionScaling(name="dynamic_ntk", factor=2.0, context=20))
    x = tokens(40)
    y, state = attention(x[:, :18])
    for t in range(18, 40):
        y, state = attention.step(x[:, t : t + 1], state)
        torch.testing.assert_close(y[:, 0], attention(x[:, : t + 1], keep_state=False)[0][:, -1])


@pytest.mark.parametrize("kind", STATEFUL)
def test_dynamic_ntk_refuses_a_state(kind: str) -> None:
    attention, x = small(kind, PositionScaling()), tokens(40)
    _, state = attention(x)
    attention.set_positions(PositionScaling(name="dynamic_ntk", factor=2.0, context=20))
    attention(x, keep_state=False)
    for call in (
        lambda: attention(x),
        lambda: attention(x, state, keep_state=False),
        lambda: attention.step(x[:, :1], state),
        lambda: attention(x, documents=Documents(x), keep_state=False),
    ):
        with pytest.raises(ValueError, match="positions: found dynamic_ntk"):
            call()


@pytest.mark.parametrize("kind", STATEFUL)
def test_linear_interpolation_continues_in_steps(kind: str) -> None:
    attention, x = small(kind, PositionScaling(name="linear", factor=3.0)), tokens(20)
    whole, _ = attention(x)
    y, state = attention(x[:, :19])
    y, _ = attention.step(x[:, 19:], state)
    torch.testing.assert_close(y, whole[:, 19:])


@pytest.mark.parametrize("kind", ["alibi", "linear"])
def test_kinds_without_rotation_refuse_scaled_positions(kind: str) -> None:
    attention = build_attention(kind, 16, 2)
    attention.set_positions(PositionScaling())
    with pytest.raises(ValueError, match=f"found 'linear' for attention of kind {kind}, wanted no"):
        attention.set_positions(PositionScaling(name="linear", factor=2.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "ntk"}, "positions: found 'ntk'"),
        ({"name": "linear", "factor": 0.5}, "position factor: found 0.5"),
        ({"name": "dynamic_ntk", "factor": 2.0}, "position context: found 0"),
    ],
)
def test_bad_scalings_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PositionScaling(**options)
