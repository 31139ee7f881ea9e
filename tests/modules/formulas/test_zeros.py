"""ZeroS against its formulas: the published method and the notes."""

import math

import pytest
import torch
from pairwise import (
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
    pivots,
    product,
    projections,
    rotary_rates,
    rotated,
    sigmoid,
    softmax_rows,
    tokens,
    unit,
)
from torch import Tensor

from longhaul.kernels import power_attention
from longhaul.kernels.power.torch import compiled
from longhaul.modules.attention import Attention
from longhaul.modules.documents import Documents


def zeros_logits(attention: Attention, x: Tensor) -> Tensor:
    """s_i (B, T, H): how far u_i points away from the running mean of u_1 .. u_i."""
    u, mass = by_head(x, attention.logit.project.weight), attention.logit.tau.exp()[:, None]
    means = [(mass * attention.logit.mu + u[:, : i + 1].sum(1)) / (mass + i + 1) for i in range(T)]
    return torch.stack([-dot(u[:, i], mean) / 8**0.5 for i, mean in enumerate(means)], 1)


def zeros_gates(attention: Attention, x: Tensor, names: str) -> dict[str, Tensor]:
    """The gates sigma of these names, (B, T, H); only sigma^0 may be negative."""
    assert set(attention.sigma) == set(names)
    logits = {name: x @ attention.sigma[name].weight.mT for name in names}
    return {name: one.tanh() if name == "0" else sigmoid(one) for name, one in logits.items()}


def orders(s: Tensor, t: int, i: int) -> list[Tensor]:
    """The terms of order 0, 1 and 2 in s of softmax_i(s_1 .. s_t)."""
    count, mean = t + 1, s[:, : t + 1].mean(1)
    variance = (s[:, : t + 1] - mean[:, None]).square().mean(1)
    first = s[:, i] - mean
    return [torch.ones_like(mean) / count, first / count, (first**2 - variance) / (2 * count)]


def zeros_radial(attention: Attention, x: Tensor, names: str) -> Tensor:
    """w_ti (B, H, T, T): the weights without the inner products of unit vectors."""
    s, sigma = zeros_logits(attention, x), zeros_gates(attention, x, names)
    softmax, num_orders = key_softmax(attention, s), 3 if "2" in names else 2
    fading = [torch.ones_like(s)] * num_orders
    if attention.config.ordered:
        fading = [forget_gate(one, x) for one in attention.fading]

    def weight(t: int, i: int) -> Tensor:
        terms = orders(s, t, i)[:num_orders]
        rest = softmax(t, i)
        for gates, term in zip(fading, terms, strict=True):
            rest = rest - product(gates, t, i) * term
        kept = sum(sigma[name][:, t] * terms[int(name)] for name in names if name != "h")
        return kept + sigma["h"][:, t] * rest

    return matrix(weight)


def zeros_directions(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = projections(x, attention.qkv.weight)
    return rotated(unit(q), rotary_rates()), rotated(unit(k), rotary_rates()), v


# Options, layer, and the names of the gates sigma that follow from them.
ZEROS = [
    ({}, 0, "1h"),
    ({"second_order": True}, 0, "12h"),
    ({"zeroth": "first_layer"}, 0, "01h"),
    ({"zeroth": "first_layer"}, 1, "1h"),
    ({"ordered": True}, 0, "1h"),
    ({"ordered": True, "second_order": True, "zeroth": "first_layer"}, 0, "012h"),
]


@INITIAL_STATE
@pytest.mark.parametrize(("options", "layer", "names"), ZEROS)
def test_zeros_matches_its_formula(
    options: dict[str, object], layer: int, names: str, initial_state: str
) -> None:
    attention, x = build("zeros", layer=layer, initial_state=initial_state, **options), tokens()
    q, k, v = zeros_directions(attention, x)
    radial = zeros_radial(attention, x, names)
    assert_same(attention.coefficients(attention.operands(x)), radial)
    mixed = mix(radial * matrix(lambda t, i: dot(q[:, t], k[:, i])), v)
    high = zeros_gates(attention, x, names)["h"]
    softmax = key_softmax(attention, zeros_logits(attention, x))
    mixed += pivots(attention, q, lambda t, i: high[:, t] * softmax(t, i))[0]
    assert_forward(attention, x, mixed)


@pytest.mark.parametrize(("options", "layer", "names"), ZEROS)
def test_zeros_weights_sum_to_zero_or_to_the_gate_of_the_mean(
    options: dict[str, object], layer: int, names: str
) -> None:
    attention, x = build("zeros", layer=layer, **options), tokens()
    sums = attention.coefficients(attention.operands(x)).sum(-1).mT  # (B, T, H)
    if attention.config.ordered:
        assert (sums.abs() > 0.1).any()
    elif "0" in names:
        assert_same(sums, zeros_gates(attention, x, names)["0"])
    else:
        assert_same(sums, torch.zeros_like(sums), 1e-12)


# The notes


def notes_radial(attention: Attention, x: Tensor) -> Tensor:
    """w_ti (B, H, T, T): softmax - sigma_0 / t - sigma_1 (s_i - mean) / t - ..."""
    config, s = attention.config, x @ attention.logit.weight.mT
    softmax, num_orders = key_softmax(attention, s), 3 if config.second_order else 2

    def factor(n: int, t: int, i: int) -> Tensor:
        if config.ordered:
            return product(forget_gate(attention.fading[n], x), t, i)
        return sigmoid(x @ attention.sigma[str(n)].weight.mT)[:, t]

    def weight(t: int, i: int) -> Tensor:
        last = t if config.form == "notes_row_mean" else i  # of the logits in mean and variance
        rest = softmax(t, i)
        for n, term in enumerate(orders(s, last, i)[:num_orders]):
            rest = rest - factor(n, t, i) * term * (last + 1) / (t + 1)  # divided by t, not by last
        return rest

    assert len(attention.sigma) == (0 if config.ordered else num_orders)
    assert len(attention.fading) == (num_orders if config.ordered else 0)
    return matrix(weight)


NOTES = [
    {"form": form, "second_order": second, "ordered": ordered}
    for form in ("notes", "notes_row_mean")
    for second in (False, True)
    for ordered in (False, True)
]


@INITIAL_STATE
@pytest.mark.parametrize("options", [*NOTES, {**NOTES[1], "gate_init": "long_memory"}], ids=str)
def test_zeros_of_the_notes_matches_its_formula(
    options: dict[str, object], initial_state: str
) -> None:
    attention, x = build("zeros", initial_state=initial_state, **options), tokens()
    q, k, v = zeros_directions(attention, x)
    weights = notes_radial(attention, x) * matrix(lambda t, i: dot(q[:, t], k[:, i]))
    assert_same(attention.weights(x), weights)
    softmax = key_softmax(attention, x @ attention.logit.weight.mT)
    assert_forward(attention, x, mix(weights, v) + pivots(attention, q, softmax)[0])


@INITIAL_STATE
@pytest.mark.parametrize("options", NOTES[::3], ids=str)
def test_zeros_without_bilinear_form_has_the_same_bracket(
    options: dict[str, object], initial_state: str
) -> None:
    attention = build("zeros", bilinear=False, initial_state=initial_state, **options)
    x = tokens()
    q, k, v = (by_head(x, weight) for weight in attention.qkv.weight.split([32, 32, 16]))
    theta = rotary_rates(width=16)  # one rate for each of the 8 channels of a head
    q, k = (rotated(one, theta).unflatten(-1, (2, 8)) for one in (q, k))
    pairs = matrix(lambda t, i: (q[:, t] * k[:, i]).sum(-2))  # (B, H, V, T, T)
    weights = notes_radial(attention, x)[:, :, None] * pairs
    assert_same(attention.weights(x), weights.flatten(1, 2))
    mixed = torch.einsum("bhcti,bihc->bthc", weights, v)
    if (start := attention.initial_state) is not None:
        softmax = key_softmax(attention, x @ attention.logit.weight.mT)
        mass = torch.stack([softmax(t, -1) for t in range(T)], 1)[..., None]  # (B, T, H, 1)
        initial = (start.key * start.value).sum(1).unflatten(-1, (2, 8))
        mixed = mixed + mass * (q * initial).sum(-2)
    assert_forward(attention, x, mixed)


@pytest.mark.parametrize("second_order", [False, True])
def test_rows_of_the_notes_sum_to_what_sigma_0_leaves(second_order: bool) -> None:
    options = {"second_order": second_order}
    attention, x = build("zeros", form="notes_row_mean", **options), tokens()
    sums = attention.coefficients(attention.operands(x)).sum(-1).mT  # (B, T, H)
    assert_same(sums, 1 - sigmoid(x @ attention.sigma["0"].weight.mT), 1e-12)
    as_written = build("zeros", form="notes", **options)
    as_written.load_state_dict(attention.state_dict())
    others = as_written.coefficients(as_written.operands(x)).sum(-1).mT
    assert (others - sums).abs().max() > 0.1


@pytest.mark.parametrize("options", [{}, {"second_order": True}, {"bilinear": False}], ids=str)
def test_rounding_does_not_reach_a_first_token_whose_weight_is_zero(
    options: dict[str, object],
) -> None:
    attention = build("zeros", form="notes_row_mean", ordered=True, **options)
    with torch.no_grad():
        attention.logit.weight.normal_()
        attention.norm.bias.zero_()
    outputs = attention.float()(tokens().float(), keep_state=False)[0]
    assert torch.equal(outputs[:, 0], torch.zeros_like(outputs[:, 0]))
    assert (outputs[:, 1:].abs().amax(-1) > 0.01).all()


def test_zeros_terms_are_the_taylor_terms_of_the_softmax() -> None:
    s, rests = tokens()[..., :HEADS], []
    for size in (1e-2, 5e-3):
        softmax = softmax_rows(matrix(lambda t, i, s=size * s: s[:, i]))
        terms = matrix(lambda t, i, s=size * s: sum(orders(s, t, i)))
        rests.append((softmax - terms).abs().max().item())
    assert rests[0] / rests[1] == pytest.approx(2**3, rel=0.02)


@pytest.mark.parametrize("second_order", [False, True])
def test_ordered_zeros_with_gates_of_one_equals_unordered(second_order: bool) -> None:
    ordered = build("zeros", ordered=True, second_order=second_order, gate_init="long_memory")
    unordered = build("zeros", second_order=second_order)
    unordered.load_state_dict(ordered.state_dict(), strict=False)
    wanted = unordered(tokens(), keep_state=False)[0]
    assert not torch.allclose(ordered(tokens(), keep_state=False)[0], wanted, rtol=1e-2)
    with torch.no_grad():
        for gate in ordered.fading:
            gate.weight.zero_()
            gate.bias.fill_(60.0)  # gamma = 1 - 1e-26
    assert_same(ordered(tokens(), keep_state=False)[0], wanted)


@pytest.mark.skipif(not compiled.attends(1, torch.empty(0)), reason="there is no C++ compiler")
@pytest.mark.parametrize(
    "options", [{}, {"ordered": True, "second_order": True}, {"form": "notes"}], ids=str
)
def test_all_sums_in_one_call_are_those_of_the_op(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = build("zeros", **options)
    is_first = torch.zeros(tokens().shape[:2], dtype=torch.bool)
    is_first[:, [0, 1, T // 2]] = True

    def results(dtype: torch.dtype) -> list[Tensor]:
        x = tokens().to(dtype).requires_grad_()
        documents = Documents(x, is_first)
        y = attention.to(dtype)(x, documents=documents, keep_state=False)[0]
        leaves = [x, *attention.parameters()]
        return [y, *torch.autograd.grad(y, leaves, tokens().flip(1).to(dtype))]

    wanted = results(torch.float64)
    monkeypatch.setattr(attention, "stack", None)  # what the op takes is not made
    for found, right in zip(results(torch.float32), wanted, strict=True):
        bound = 1e-4 * max(1, right.abs().max().item())
        torch.testing.assert_close(found.double(), right, rtol=0, atol=bound)


def test_zeros_is_three_calls_of_the_op() -> None:
    attention, x = build("zeros"), tokens()
    q, k, v = zeros_directions(attention, x)
    s, sigma = zeros_logits(attention, x), zeros_gates(attention, x, "1h")
    mass = torch.stack([s[:, : t + 1].exp().sum(1) for t in range(T)], 1).log()
    mean_s = torch.stack([s[:, : t + 1].mean(1) for t in range(T)], 1)[..., None]
    count = torch.arange(1, T + 1, dtype=x.dtype)[:, None].expand_as(s)

    def gated_sum(log_g: Tensor, value_scale: Tensor) -> Tensor:
        options = {"degree": 1, "scale": 1.0, "normalize": False, "backend": "reference"}
        return power_attention(q, k, v * value_scale[..., None], log_g, **options)[0]

    before = torch.cat([torch.full_like(mass[:, :1], -math.inf), mass[:, :-1]], 1)
    soft = gated_sum(before - mass, (s - mass).exp())
    mean, mean_sv = (gated_sum(((count - 1) / count).log(), one / count) for one in (s**0, s))
    high, low = sigma["h"][..., None], (sigma["1"] - sigma["h"])[..., None]
    mixed = high * soft + low * mean_sv - (low * mean_s + high) * mean
    radial = zeros_radial(attention, x, "1h")
    assert_same(mixed, mix(radial * matrix(lambda t, i: dot(q[:, t], k[:, i])), v))
    assert_forward(attention, x, mixed)
