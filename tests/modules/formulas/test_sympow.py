"""The symmetric-power variants against their formulas."""

import math
from itertools import combinations_with_replacement

import pytest
import torch
from pairwise import (
    INITIAL_STATE,
    SYMPOW,
    T,
    assert_forward,
    assert_same,
    build,
    dot,
    gates_of,
    matrix,
    mix,
    pivots,
    product,
    projections,
    rotated,
    sympow_rates,
    tokens,
)
from torch import Tensor

from longhaul.kernels import symmetric_dim
from longhaul.kernels.power.torch.features import expand, multiplicity
from longhaul.modules import norms
from longhaul.modules.norms import RMSNorm


@INITIAL_STATE
@pytest.mark.parametrize("degree", [2, 4, 6, 8])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("kind", SYMPOW)
def test_sympow_weights_are_powers_times_products_of_gates(
    kind: str, qk_norm: bool, degree: int, initial_state: str
) -> None:
    options = {"degree": degree, "qk_norm": qk_norm, "initial_state": initial_state}
    if degree > 4 and initial_state == "learned":
        with pytest.raises(ValueError, match=f"initial_state: found learned with degree {degree}"):
            build(kind, **options)
        return
    attention, x = build(kind, longest_document=100 * degree, **options), tokens()
    q, k, v = projections(x, attention.qkv.weight)
    if qk_norm:
        q, k = (one / (one.square().mean(-1, keepdim=True) + 2**-23).sqrt() for one in (q, k))
        q, k = q * attention.q_norm.weight, k * attention.k_norm.weight
    rate, gates = torch.ones_like(x[..., 0]), gates_of(attention, x)
    if kind in ("sympow_rotary", "conformal_sympow"):
        rate = 1 + torch.tanh(x @ attention.rate.weight[0])
    mu = torch.stack([rate[:, : t + 1].sum(1) for t in range(T)], 1)
    q, k = (rotated(one, sympow_rates(100 * degree), mu) for one in (q, k))

    def fade(t: int, i: int) -> Tensor:
        return product(gates, t, i)

    weights = matrix(lambda t, i: fade(t, i) * (dot(q[:, t], k[:, i]) / 8**0.5) ** degree)
    before, mass = pivots(attention, q, fade, 8**-0.5, degree)
    total = weights.sum(-1).mT + mass
    assert_forward(attention, x, (mix(weights, v) + before) / total[..., None])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_norm_of_queries_has_one_constant_in_every_dtype(dtype: torch.dtype) -> None:
    x = torch.full((1, 1, 1, 8), 2.0**-11, dtype=dtype)  # whose square is twice the constant
    wanted = (2**-22 / (2**-22 + 2**-23)) ** 0.5
    norm = RMSNorm(8, eps=2.0**-23).to(dtype)
    torch.testing.assert_close(norm(x), torch.full_like(x, wanted))


def test_under_autocast_the_norm_of_queries_gets_its_gain_in_their_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else torch leaves its fused kernel."""
    dtypes, normed = [], norms._normed

    def noted(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtypes.append((x.dtype, weight.dtype))
        return normed(x, weight, eps)

    monkeypatch.setattr(norms, "_normed", noted)
    attention = build("sympow", qk_norm=True).float()
    with torch.autocast("cpu", torch.bfloat16):
        attention(tokens().float(), keep_state=False)[0].sum().backward()
    assert dtypes == 2 * [(torch.bfloat16, torch.bfloat16)]
    assert attention.q_norm.weight.grad.dtype == torch.float32


@INITIAL_STATE
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sympow", {"rotary": "none"}),
        *(
            ("sympow_gated", {"gate": gate, "rotary": rotary, "gate_init": "long_memory"})
            for gate in ("data", "learned", "retention", "alibi")
            for rotary in ("fixed", "none")
        ),
    ],
)
def test_sympow_gates_may_be_fixed_and_positions_absent(
    kind: str, options: dict[str, str], initial_state: str
) -> None:
    attention = build(kind, longest_document=100, initial_state=initial_state, **options)
    x = tokens()
    q, k, v = projections(x, attention.qkv.weight)
    if options["rotary"] == "fixed":
        q, k = rotated(q, sympow_rates(100)), rotated(k, sympow_rates(100))
    gamma = gates_of(attention, x)

    def fade(t: int, i: int) -> Tensor:
        return product(gamma, t, i)

    weights = matrix(lambda t, i: fade(t, i) * dot(q[:, t], k[:, i]) ** 2 / 8)
    before, mass = pivots(attention, q, fade, 8**-0.5, 2)
    assert_forward(
        attention, x, (mix(weights, v) + before) / (weights.sum(-1).mT + mass)[..., None]
    )


@pytest.mark.parametrize("degree", [2, 4, 6, 8])
def test_symmetric_power_is_the_multinomial_embedding(degree: int) -> None:
    torch.manual_seed(degree)
    a, b = torch.randn(2, 10, 8, dtype=torch.float64)
    chosen = list(combinations_with_replacement(range(8), degree))
    repeats = [math.prod(math.factorial(one.count(c)) for c in set(one)) for one in chosen]
    orders = math.factorial(degree) / torch.tensor(repeats, dtype=torch.float64)
    assert len(chosen) == math.comb(8 + degree - 1, degree) == symmetric_dim(8, degree)
    phi = [orders.sqrt() * x[:, torch.tensor(chosen)].prod(-1) for x in (a, b)]
    assert_same(dot(*phi), dot(a, b) ** degree)
    # The state layout multiplies by the multiplicity of a feature on the side of the query only.
    query = expand(a, degree) * multiplicity(8, degree, a)
    assert_same(dot(query, expand(b, degree)), dot(a, b) ** degree)
