"""Cartan kernels against their formulas."""

import math
from collections.abc import Callable

import pytest
import torch
from pairwise import (
    GENERATORS,
    HEADS,
    INITIAL_STATE,
    T,
    assert_forward,
    assert_same,
    build,
    by_head,
    dot,
    forget_gate,
    key_softmax,
    matrix,
    mix,
    product,
    projections,
    rotary_rates,
    rotated,
    tokens,
    unit,
)
from torch import Tensor

from longhaul.modules.attention import Attention, build_attention
from longhaul.modules.attention.cartan import log_softplus

Diagonal = Callable[[int, int], Tensor]  # from (t, i) to (B, H, width)


def generator_diagonal(attention: Attention, x: Tensor, width: int) -> Diagonal:
    """The diagonal of Sigma_ti, also for position 0; pairs are the coordinates c, c + width / 2."""
    config = attention.config
    parts = {"head": 1, "pair": width // 2, "coordinate": width}[config.generator_per]
    softmax, gates = None, None
    if config.generator != "product":
        s = by_head(x, attention.logit.weight)
        if config.step_size:
            delta = (1 + by_head(x, attention.step_size.weight).exp()).log()
            s = s + delta.log()
        softmax = key_softmax(attention, s)
    if config.generator != "additive":
        gates = forget_gate(attention.gate, x).unflatten(-1, (HEADS, parts))

    def diagonal(t: int, i: int) -> Tensor:
        g = torch.ones(2, HEADS, parts, dtype=x.dtype)
        g = g if softmax is None else g * softmax(t, i)
        g = g if gates is None else g * product(gates, t, i)
        assert (g > 0).all()
        return g.repeat(1, 1, width // parts)  # part c mod parts

    return diagonal


@INITIAL_STATE
@pytest.mark.parametrize(
    "options",
    [
        *({"negative_diagonal": True, "generator": generator} for generator in GENERATORS),
        *(
            {"generator": generator, "generator_per": per}
            for generator in GENERATORS
            for per in ("head", "pair", "coordinate")
        ),
        {"generator_per": "coordinate", "negative_diagonal": True, "gate_init": "long_memory"},
        {"step_size": True},
        {"step_size": True, "generator_per": "pair", "lengths": "raw"},
        {"lengths": "ratio"},
        {"lengths": "ratio", "generator": "product", "negative_diagonal": True},
        {"lengths": "raw"},
    ],
    ids=str,
)
def test_cartan_weighs_inner_products_of_rotated_vectors(
    options: dict[str, object], initial_state: str
) -> None:
    attention, x = build("cartan", initial_state=initial_state, **options), tokens()
    q, k, v = projections(x, attention.qkv.weight)
    lengths = [one.square().sum(-1, keepdim=True).sqrt() for one in (q, k)]
    scales = {"unit": (1.0, 1.0), "ratio": (lengths[0], 1 / lengths[1]), "raw": lengths}
    q, k = (
        scale * rotated(unit(one), rotary_rates())
        for scale, one in zip(scales[attention.config.lengths], (q, k), strict=True)
    )
    if options.get("negative_diagonal"):
        diagonal = torch.tanh(1 + by_head(x, attention.diagonal.weight))
        assert (diagonal < 0).any()
        k = diagonal * k
    sigma = generator_diagonal(attention, x, width=8)
    weights = matrix(lambda t, i: dot(q[:, t], sigma(t, i) * k[:, i]))
    assert_same(attention.weights(x), weights)
    mixed = mix(weights, v)
    if (start := attention.initial_state) is not None:
        before = torch.stack([q[:, t] * sigma(t, -1) for t in range(T)], 1)
        mixed = mixed + torch.einsum("bthk,hrk,hrv->bthv", before, start.key, start.value)
    assert_forward(attention, x, mixed)


@INITIAL_STATE
@pytest.mark.parametrize(
    ("generator", "per"),
    [
        *((generator, "head") for generator in GENERATORS),
        ("additive", "pair"),
        ("product", "pair"),
        ("full", "pair"),
        ("full", "coordinate"),
    ],
)
def test_cartan_without_bilinear_form_sums_per_channel(
    generator: str, per: str, initial_state: str
) -> None:
    options = {"generator": generator, "generator_per": per, "initial_state": initial_state}
    attention, x = build("cartan", bilinear=False, **options), tokens()
    q, k, v = (by_head(x, weight) for weight in attention.qkv.weight.split([32, 32, 16]))
    theta = rotary_rates(width=16)  # one rate for each of the 8 channels of a head
    q, k = rotated(q, theta), rotated(k, theta)  # channel c has the coordinates c and c + 8
    sigma = generator_diagonal(attention, x, width=16)

    def read(t: int, i: int, stored: Tensor) -> Tensor:
        return (q[:, t] * sigma(t, i) * stored).unflatten(-1, (2, 8)).sum(-2)

    weights = matrix(lambda t, i: read(t, i, k[:, i]))  # (B, H, V, T, T)
    assert_same(attention.weights(x), weights.flatten(1, 2))
    mixed = torch.einsum("bhcti,bihc->bthc", weights, v)
    if (start := attention.initial_state) is not None:
        initial = (start.key * start.value).sum(1)
        mixed = mixed + torch.stack([read(t, -1, initial) for t in range(T)], 1)
    assert_forward(attention, x, mixed)


def test_one_generator_in_all_parts_of_a_head_equals_one_per_head() -> None:
    one = build("cartan", gate_init="long_memory")
    many = build("cartan", generator_per="coordinate", gate_init="long_memory")
    copies = {"logit.weight": 8, "gate.weight": 8, "gate.bias": 8}
    weights = {
        name: x.repeat_interleave(copies.get(name, 1), 0) for name, x in one.state_dict().items()
    }
    many.load_state_dict(weights)
    assert_same(many(tokens())[0], one(tokens())[0])


def test_new_gates_of_the_parts_of_a_head_start_alike() -> None:
    options = {"generator_per": "pair", "gate_init": "long_memory"}
    bias = build_attention("cartan", 16, 2, **options).gate.bias
    assert_same(bias, torch.tensor([31.0] * 4 + [63.0] * 4).log(), 1e-6)


def test_log_softplus_is_exact_far_from_zero() -> None:
    wanted = {one: math.log(math.log1p(math.exp(one))) for one in (-30.0, -19.0, 0.0, 5.0, 500.0)}
    wanted |= {-800.0: -800.0}
    x = torch.tensor(list(wanted), dtype=torch.float64, requires_grad=True)
    y = log_softplus(x)
    assert_same(y, torch.tensor(list(wanted.values()), dtype=torch.float64), 1e-14)
    (slope,) = torch.autograd.grad(y.sum(), x)
    expected = [1 - math.exp(-30) / 2, 1 - math.exp(-19) / 2, 0.5 / math.log(2)]
    assert slope[:3].tolist() == pytest.approx(expected, rel=1e-12)
    assert slope.isfinite().all()
    assert log_softplus(torch.tensor([-300.0])).item() == -300.0  # float32
