"""Rotary phases are accurate over a million tokens, and positions scale at evaluation."""

import dataclasses
import math
import re

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
from longhaul.modules.rotary import PositionScaling, Rotary, RotaryScaling

CPU = torch.device("cpu")
MILLION = 1_048_576
ROTARY = [kind for kind in registered_variants() if build_attention(kind, 16, 2).rotary is not None]
STATEFUL = [kind for kind in ROTARY if attention_config(kind).cost == "linear"]
# Those whose rotation may depend on the length.
STRETCHED = [kind for kind in ROTARY if "dynamic_ntk" in attention_config(kind).positions]


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


def wanted_rates(scaling: RotaryScaling, base: float, pairs: int, length: int) -> list[float]:
    """Radians per token, pair by pair, as the sources write them."""
    rates, L0 = [], scaling.original_max_position_embeddings or 0
    for j in range(pairs):
        theta = base ** (-j / pairs)
        slow, wavelength = theta / scaling.factor, 2 * math.pi / theta
        if scaling.rope_type == "linear":
            theta = slow
        elif scaling.rope_type == "longrope":
            theta /= (scaling.long_factor if length > L0 else scaling.short_factor)[j]
        elif scaling.rope_type == "llama3":
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            if wavelength > L0 / low:
                theta = slow
            elif wavelength >= L0 / high:
                share = (L0 / wavelength - low) / (high - low)
                theta = (1 - share) * slow + share * theta
        elif scaling.rope_type == "yarn":
            first, last = (
                2 * pairs * math.log(L0 / (often * 2 * math.pi)) / (2 * math.log(base))
                for often in (scaling.beta_fast, scaling.beta_slow)
            )
            if scaling.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, 2 * pairs - 1)
            share = min(max((j - first) / (last - first), 0), 1)
            theta = share * slow + (1 - share) * theta
        rates.append(theta)
    return rates


SCALINGS = [
    RotaryScaling(rope_type="linear", factor=4.0),
    RotaryScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=64),
    RotaryScaling(
        rope_type="llama3",
        factor=32.0,
        original_max_position_embeddings=8192,
        low_freq_factor=2.0,
        high_freq_factor=5.0,
    ),
    RotaryScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096),
    RotaryScaling(
        rope_type="yarn",
        factor=16.0,
        original_max_position_embeddings=256,
        beta_fast=16.0,
        truncate=False,
    ),
    RotaryScaling(
        rope_type="longrope",
        factor=4.0,
        original_max_position_embeddings=100,
        short_factor=[1.0 + j for j in range(8)],
        long_factor=[2.0 + j * j for j in range(8)],
    ),
]


@pytest.mark.parametrize("length", [100, 101])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda one: one.rope_type)
def test_rates_of_scaled_models_match_the_formulas(scaling: RotaryScaling, length: int) -> None:
    rotary = Rotary(20, base=5_000.0, share=0.8, model_scaling=scaling)
    found = (rotary.turns(length, CPU) * 2 * math.pi).tolist()
    wanted = wanted_rates(scaling, 5_000.0, 8, length)
    assert found == pytest.approx(wanted, rel=1e-12)
    assert found != pytest.approx(wanted_rates(RotaryScaling(), 5_000.0, 8, length), rel=1e-3)


@pytest.mark.parametrize(
    ("options", "gain"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, 0.1 * math.log(4) + 1),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}, 1.5),
        ({"rope_type": "llama3", "factor": 4.0}, 1.0),
        (
            {
                "rope_type": "longrope",
                "factor": 4.0,
                "short_factor": [1.0] * 4,
                "long_factor": [1.0] * 4,
            },
            (1 + math.log(4) / math.log(512)) ** 0.5,
        ),
    ],
)
def test_scaled_models_multiply_what_rotates(options: dict[str, object], gain: float) -> None:
    scaling = RotaryScaling(original_max_position_embeddings=512, **options)
    rotary = Rotary(8, base=100.0, model_scaling=scaling)
    cos, sin = rotary.phases(torch.arange(9.0).double()[None], 9, torch.float64)
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, gain**2))


@pytest.mark.parametrize("kind", ["softmax", "sympow"])
def test_longrope_is_refused_where_lengths_are_not_known(kind: str) -> None:
    attention, x = build_attention(kind, 16, 2, rotary_scaling=LONGROPE), tokens(9).float()
    found = "^positions: found longrope"
    with pytest.raises(ValueError, match=found):
        attention.check_documents(has_state=False)
    if kind == "softmax":
        whole, _ = attention(x)
        _, state = attention(x[:, :3])
        rest, _ = attention(x[:, 3:], state)
        torch.testing.assert_close(rest, whole[:, 3:])
        return
    with pytest.raises(ValueError, match=found):
        attention(x)


LONGROPE = RotaryScaling(
    rope_type="longrope",
    factor=4.0,
    original_max_position_embeddings=5,
    short_factor=[1.0] * 4,
    long_factor=[3.0] * 4,
)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("softmax", {"rotary_share": 0.0}, "rotary_share: found 0.0, wanted more than 0"),
        ("softmax", {"rotary_share": 0.4}, "head width: found 3 coordinates to rotate of 8"),
        ("coca", {"rotary_share": 0.5}, "rotary_share: found 0.5 with kind coca"),
        ("complex", {"rotary_share": 0.5}, "rotary_share: found 0.5 with kind complex"),
        ("cartan", {"rotary_share": 0.5, "generator_per": "pair"}, "rotary_share: found 0.5 with"),
        ("zeros", {"rotary_share": 0.5, "form": "notes", "bilinear": False}, "rotary_share: found"),
        (
            "retention",
            {"rotary_scaling": RotaryScaling(rope_type="linear", factor=0.5)},
            "rotary_scaling.factor: found 0.5, wanted 1 or more",
        ),
        (
            "sympow",
            {"rotary_scaling": RotaryScaling(rope_type="yarn", factor=2.0)},
            "rotary_scaling.original_max_position_embeddings: found None, wanted 2 or more",
        ),
        *(
            (
                "sympow",
                {"rotary_scaling": RotaryScaling(rope_type=rope_type, **{name: value})},
                f"rotary_scaling.{name}: found {value}, wanted it left out with {rope_type}",
            )
            for rope_type, name, value in (
                ("none", "factor", 2.0),
                ("linear", "original_max_position_embeddings", 64),
                ("linear", "attention_factor", 1.5),
                ("llama3", "beta_fast", 16.0),
                ("yarn", "low_freq_factor", 2.0),
                ("yarn", "short_factor", [1.0]),
                ("longrope", "truncate", False),
            )
        ),
        (
            "softmax",
            {"rotary_scaling": dataclasses.replace(LONGROPE, long_factor=[])},
            "rotary_scaling.long_factor: found [], wanted one number more than 0 for each pair",
        ),
        (
            "softmax",
            {"rotary_scaling": dataclasses.replace(LONGROPE, long_factor=[1.0] * 3)},
            "rotary_scaling.long_factor: found 3 numbers, wanted one for each of 4 pairs",
        ),
        (
            "softmax",
            {"rotary_scaling": LONGROPE, "window": 4},
            "window: found 4 with rotary_scaling longrope",
        ),
    ],
)
def test_bad_rotations_are_named(kind: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        build_attention(kind, 16, 2, **options)


@pytest.mark.usefixtures("unchecked_types")
def test_an_unknown_scaling_is_refused() -> None:
    scaling = RotaryScaling(rope_type="ntk", original_max_position_embeddings=64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^rotary_scaling\.rope_type: found 'ntk', wanted one of"):
        build_attention("sympow", 16, 2, rotary_scaling=scaling)


def test_a_window_refuses_rates_that_change_with_the_length() -> None:
    attention = build_attention("softmax", 16, 2, window=4)
    attention.set_positions(PositionScaling(name="linear", factor=2.0))
    with pytest.raises(ValueError, match=r"^positions: found dynamic_ntk for attention with a"):
        attention.set_positions(PositionScaling(name="dynamic_ntk", factor=2.0, context=20))


def small(kind: str, scaling: PositionScaling) -> Attention:
    torch.manual_seed(0)
    attention = build_attention(kind, 16, 2).double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    attention.set_positions(scaling)
    return attention


def tokens(T: int) -> torch.Tensor:
    return torch.randn(1, T, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", STRETCHED)
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


@pytest.mark.parametrize("kind", STRETCHED)
def test_dynamic_ntk_leaves_the_training_context_alone(kind: str) -> None:
    x = tokens(40)
    plain, _ = small(kind, PositionScaling())(x, keep_state=False)
    scaling = PositionScaling(name="dynamic_ntk", factor=8.0, context=40)
    assert torch.equal(small(kind, scaling)(x, keep_state=False)[0], plain)


@pytest.mark.parametrize("kind", [kind for kind in STRETCHED if kind not in STATEFUL])
def test_dynamic_ntk_rotates_cached_keys_again(kind: str) -> None:
    attention = small(kind, PositionScaling(name="dynamic_ntk", factor=2.0, context=20))
    x = tokens(40)
    y, state = attention(x[:, :18])
    for t in range(18, 40):
        y, state = attention.step(x[:, t : t + 1], state)
        torch.testing.assert_close(y[:, 0], attention(x[:, : t + 1], keep_state=False)[0][:, -1])


@pytest.mark.parametrize("kind", [kind for kind in STRETCHED if kind in STATEFUL])
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
