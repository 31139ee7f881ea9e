"""Softmax, ALiBi, CoCA, linear attention and retention against their formulas."""

import math
from collections.abc import Callable

import pytest
import torch
from pairwise import (
    ALIBI_SLOPES,
    HEADS,
    INITIAL_STATE,
    T,
    assert_forward,
    assert_outputs,
    assert_same,
    build,
    dot,
    fixed_decay,
    gates_of,
    head_norm,
    matrix,
    mix,
    no_decay,
    pivots,
    product,
    projections,
    rotary_rates,
    rotated,
    rotation,
    sigmoid,
    softmax_rows,
    sympow_rates,
    tokens,
)
from torch import Tensor

from longhaul.modules.attention import Attention
from longhaul.modules.attention.parts import gates


@pytest.mark.parametrize(
    ("options", "theta"),
    [
        ({}, rotary_rates()),
        ({"rotary_base": 500.0}, rotary_rates(base=500.0)),
        ({"longest_document": 512}, sympow_rates(512)),
    ],
)
def test_softmax_uses_products_of_rotated_vectors(
    options: dict[str, int], theta: list[float]
) -> None:
    attention, x = build("softmax", **options), tokens()
    q, k, v = projections(x, attention.qkv.weight)
    q, k = rotated(q, theta), rotated(k, theta)
    logits = matrix(lambda t, i: dot(q[:, t], k[:, i]) / 8**0.5)
    assert_same(attention.logits(x).tril(), logits)
    assert_forward(attention, x, mix(softmax_rows(logits), v))


@pytest.mark.parametrize("heads", ALIBI_SLOPES)
def test_alibi_slopes_are_geometric_with_extra_heads_from_twice_as_many(heads: int) -> None:
    found = gates.alibi_slopes(heads, torch.device("cpu")).tolist()
    assert found == pytest.approx(ALIBI_SLOPES[heads], rel=1e-15)


@pytest.mark.parametrize("heads", [2, 3])
def test_alibi_is_a_fixed_gate(heads: int) -> None:
    attention, x = build("alibi", heads=heads), tokens(heads=heads)
    q, k, v = projections(x, attention.qkv.weight, heads)
    gates = torch.tensor([math.exp(-m) for m in ALIBI_SLOPES[heads]], dtype=x.dtype).expand(
        2, T, heads
    )
    weights = matrix(lambda t, i: product(gates, t, i) * (dot(q[:, t], k[:, i]) / 8**0.5).exp())
    assert_forward(attention, x, mix(weights / weights.sum(-1, keepdim=True), v))


@pytest.mark.parametrize("gate_init", ["plain", "long_memory"])
def test_fox_is_a_softmax_of_scores_plus_the_log_gates_between(gate_init: str) -> None:
    attention, x = build("fox", gate_init=gate_init), tokens()
    q, k, v = projections(x, attention.qkv.weight)
    f = sigmoid(x @ attention.gate.weight.mT + (attention.gate.bias if gate_init != "plain" else 0))
    logits = matrix(lambda t, i: dot(q[:, t], k[:, i]) / 8**0.5 + product(f, t, i).log())
    assert_forward(attention, x, mix(softmax_rows(logits), v))


def test_the_pro_form_of_fox_shifts_keys_and_values_before_their_norm() -> None:
    parts = {"output_norm": "rms", "output_gate": "sigmoid"}
    attention, x = build("fox", shift=True, head_norms=True, **parts), tokens()
    q, k, v = projections(x, attention.qkv.weight)
    shifts = attention.key_shift, attention.value_shift
    shares = [sigmoid(x @ one.weight.mT)[..., None] for one in shifts]
    k, v = (
        torch.stack(
            [a[:, t] * (one[:, t - 1] if t else 0) + (1 - a[:, t]) * one[:, t] for t in range(T)],
            dim=1,
        )
        for one, a in zip((k, v), shares, strict=True)
    )
    q, k = (rms(one) * norm.weight for one, norm in ((q, attention.q_norm), (k, attention.k_norm)))
    f = sigmoid(x @ attention.gate.weight.mT)
    logits = matrix(lambda t, i: dot(q[:, t], k[:, i]) / 8**0.5 + product(f, t, i).log())
    mixed = rms(mix(softmax_rows(logits), v)) * attention.output_norm.weight
    gate = sigmoid(x @ attention.output_gate.weight.mT).unflatten(2, (HEADS, 8))
    assert_forward(attention, x, mixed * gate)


def rms(one: Tensor) -> Tensor:
    return one / (one.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def test_a_sliding_window_leaves_out_what_is_further_away() -> None:
    attention, x = build("sliding_window", window=5), tokens()
    q, k, v = projections(x, attention.qkv.weight)
    q, k = (rotated(one, rotary_rates()) for one in (q, k))
    weights = matrix(lambda t, i: (t - i < 5) * (dot(q[:, t], k[:, i]) / 8**0.5).exp())
    assert_forward(attention, x, mix(weights / weights.sum(-1, keepdim=True), v))


def coca_operands(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, the coefficients [t, t], and v."""
    q, u, v = projections(x, attention.qtv.weight)
    t = torch.relu((u[..., :4] + u[..., 4:]) / 2)
    return q, torch.cat([t, t], -1), v


def test_coca_strict_depends_on_distance_alone() -> None:
    attention, x = build("coca", mode="strict"), tokens()
    (q, coefficient, v), theta = coca_operands(attention, x), rotary_rates()

    def summed(m: int, n: int) -> Tensor:
        logit = torch.zeros(2, HEADS, dtype=x.dtype)
        for j in range(4):
            size = q[:, m, :, j] ** 2 + q[:, m, :, j + 4] ** 2
            logit += size * coefficient[:, n, :, j] * math.cos((m - n) * theta[j])
        return logit / 8**0.5

    def expanded(m: int, n: int) -> Tensor:
        query, key = q[:, m], q[:, m] * coefficient[:, n]
        return dot(query @ rotation(m, theta).mT, key @ rotation(n, theta).mT) / 8**0.5

    logits = matrix(summed)
    assert_same(matrix(expanded), logits)
    assert_same(attention.logits(x).tril(), logits)
    assert_forward(attention, x, mix(softmax_rows(logits), v))


def test_coca_slack_rotates_coefficients_before_the_product() -> None:
    attention, x = build("coca", mode="slack"), tokens()
    q, coefficient, v = coca_operands(attention, x)
    from_0 = torch.arange(T).expand(2, T)  # the paper's n in [0, c)
    query, turned = (rotated(one, rotary_rates(), from_0) for one in (q, coefficient))
    logits = matrix(lambda m, n: dot(query[:, m], q[:, m] * turned[:, n]) / 8**0.5)
    assert_same(matrix(lambda m, n: dot(q[:, m] * query[:, m], turned[:, n]) / 8**0.5), logits)
    # The first token is not rotated, and reads itself by |q|^2 t.
    assert_same(logits[..., 0, 0], dot(q[:, 0] ** 2, coefficient[:, 0]) / 8**0.5)
    assert_same(attention.logits(x).tril(), logits)
    assert_forward(attention, x, mix(softmax_rows(logits), v))


@pytest.mark.parametrize(("mode", "is_invariant"), [("strict", True), ("slack", False)])
def test_coca_strict_alone_is_shift_invariant(mode: str, is_invariant: bool) -> None:
    attention, x = build("coca", mode=mode), tokens()
    shifted = attention.logits(torch.cat([tokens(7), x], 1))[:, :, 7:, 7:]
    change = (shifted - attention.logits(x)).abs().max()
    assert change < 1e-11 if is_invariant else change > 1


# Variants with a feature map or a fixed decay


@INITIAL_STATE
@pytest.mark.parametrize(
    ("feature_map", "normalizer", "f"),
    [
        ("elu", "sum", lambda x: torch.where(x > 0, x + 1, x.exp())),
        ("relu", "sum", lambda x: x.clamp(min=0)),
        ("relu", "head_norm", lambda x: x.clamp(min=0)),
        ("identity", "head_norm", lambda x: x),
    ],
)
def test_linear_weights_are_products_of_features(
    feature_map: str, normalizer: str, f: Callable[[Tensor], Tensor], initial_state: str
) -> None:
    options = {"feature_map": feature_map, "normalizer": normalizer, "initial_state": initial_state}
    attention, x = build("linear", **options), tokens()
    q, k, v = projections(x, attention.qkv.weight)
    weights = matrix(lambda t, i: dot(f(q[:, t]), f(k[:, i])) / 8**0.5)
    before, mass = pivots(attention, f(q), no_decay, 8**-0.5, f=f)
    mixed = mix(weights, v) + before
    if normalizer == "sum":
        total = weights.sum(-1).mT + mass
        mixed = mixed / torch.where(total == 0, 1, total)[..., None]  # 0 where all weights are 0
    assert_forward(attention, x, mixed)


@INITIAL_STATE
@pytest.mark.parametrize("gate", ["none", "data"])
@pytest.mark.parametrize("rotary", ["none", "fixed"])
def test_linear_weights_are_rotated_before_the_feature_map_and_gated(
    rotary: str, gate: str, initial_state: str
) -> None:
    options = {"rotary": rotary, "gate": gate, "gate_init": "long_memory", "rotary_base": 50.0}
    attention = build("linear", initial_state=initial_state, **options)
    x = tokens()
    q, k, v = projections(x, attention.qkv.weight)
    if rotary == "fixed":
        q, k = rotated(q, rotary_rates(base=50.0)), rotated(k, rotary_rates(base=50.0))
    gamma = gates_of(attention, x)

    def f(one: Tensor) -> Tensor:
        return torch.where(one > 0, one + 1, one.exp())

    def fade(t: int, i: int) -> Tensor:
        return product(gamma, t, i)

    weights = matrix(lambda t, i: fade(t, i) * dot(f(q[:, t]), f(k[:, i])) / 8**0.5)
    before, mass = pivots(attention, f(q), fade, 8**-0.5, f=f)
    assert_forward(
        attention, x, (mix(weights, v) + before) / (weights.sum(-1).mT + mass)[..., None]
    )


def test_linear_with_rotary_and_identity_depends_on_distance_alone() -> None:
    options = {"feature_map": "identity", "normalizer": "head_norm"}
    attention, x = build("linear", rotary="fixed", **options), tokens()
    shifted = attention.weights(torch.cat([tokens(7), x], 1))[:, :, 7:, 7:]
    assert_same(shifted, attention.weights(x))


@INITIAL_STATE
@pytest.mark.parametrize("group_norm", [True, False])
@pytest.mark.parametrize("swish_gate", [True, False])
def test_retention_matches_its_decay_matrix(
    group_norm: bool, swish_gate: bool, initial_state: str
) -> None:
    options = {"group_norm": group_norm, "swish_gate": swish_gate, "initial_state": initial_state}
    attention, x = build("retention", **options), tokens()
    q, k, v = projections(x, attention.qkv.weight)
    q, k = rotated(q, rotary_rates()), rotated(k, rotary_rates())
    weights = matrix(fixed_decay) * matrix(lambda t, i: dot(q[:, t], k[:, i]) / 8**0.5)
    mixed = mix(weights, v) + pivots(attention, q, fixed_decay, 8**-0.5)[0]
    y = head_norm(attention, mixed) if group_norm else mixed.flatten(2)
    if swish_gate:
        gate = x @ attention.swish.weight.mT
        y = y * gate * sigmoid(gate)
    assert_outputs(attention, x, y @ attention.out.weight.mT)
