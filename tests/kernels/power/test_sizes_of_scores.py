"""At degrees 6 and 8 the size of scores changes nothing: the stable form of the article.

Its ε, added to scores and denominators to keep logarithms finite, is 0 here.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from longhaul.kernels import power_attention
from longhaul.kernels.power.cost import choose_form
from longhaul.modules.attention import build_attention

# The largest error of float32, relative to the largest value.
TOLERANCE = 1e-5
WIDTHS = {6: 5, 8: 4}
PAIRS: list[dict[str, Any]] = [{}, {"form": "attention"}, {"backend": "reference"}]
WITH_STATES: list[dict[str, Any]] = [
    {"form": "chunked", "chunk_size": 16},
    {"form": "recurrent"},
    {"form": "attention", "output_final_state": True},
]
either_degree = pytest.mark.parametrize("degree", [6, 8])


def inputs(degree: int, *, gated: bool = True, T: int = 40) -> list[Tensor]:
    """q, k, v and log gates in float64, whose numbers float32 has too."""
    torch.manual_seed(0)
    K = WIDTHS[degree]
    q, k, v = torch.randn(1, T, 2, K), torch.randn(1, T, 1, K), torch.randn(1, T, 1, 3)
    log_g = logsigmoid(torch.randn(1, T, 1) + 2)
    return [x.double() for x in ((q, k, v, log_g) if gated else (q, k, v))]


def definition(x: list[Tensor], degree: int) -> Tensor:
    """even_power_attn of the article: powers as logarithms, minus the largest of a row."""
    q, k, v = x[:3]
    log_weight = degree * torch.einsum("bthk,bigk->bhti", q, k).abs().log()
    if len(x) == 4:
        log_decay = x[3].cumsum(1)[..., 0]  # (B, T)
        log_weight = log_weight + (log_decay[:, :, None] - log_decay[:, None])[:, None]
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    log_weight = log_weight.masked_fill(future, -torch.inf)
    weight = (log_weight - log_weight.amax(-1, keepdim=True)).exp()
    mean = torch.einsum("bhti,biv->bthv", weight, v[:, :, 0])
    return mean / weight.sum(-1).mT[..., None]


def results(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """The output and every gradient of a random linear function of it."""
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out.detach(), *torch.autograd.grad((out * probe.to(out.dtype)).sum(), leaves)]


def run(x: list[Tensor], degree: int, dtype: torch.dtype, **how: Any) -> list[Tensor]:
    leaves = [y.to(dtype).requires_grad_() for y in x]
    out, _ = power_attention(*leaves, degree=degree, **how)
    return results(out, leaves)


def defined(x: list[Tensor], degree: int) -> list[Tensor]:
    leaves = [y.clone().requires_grad_() for y in x]
    return results(definition(leaves, degree), leaves)


def assert_same(found: list[Tensor], wanted: list[Tensor], tolerance: float = TOLERANCE) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@either_degree
@pytest.mark.parametrize("how", PAIRS, ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_scores_of_any_size_give_the_same_weights(
    degree: int, how: dict[str, Any], gated: bool
) -> None:
    T = 150  # more than the torch backend scores at a time
    assert choose_form(T, WIDTHS[degree], 3, degree) == "attention"
    q, k, *rest = inputs(degree, gated=gated, T=T)
    for size in (1e-5, 1.0, 1e5):
        # Rounded, so that float32 and float64 are given the same numbers.
        x = [(q * size).float().double(), k, *rest]
        wanted = defined(x, degree)
        assert_same(run(x, degree, torch.float64, **how), wanted, 1e-11)
        assert_same(run(x, degree, torch.float32, **how), wanted)
        x = [q, (k * size).float().double(), *rest]
        assert_same(run(x, degree, torch.float32, **how), defined(x, degree))


@either_degree
@pytest.mark.parametrize("how", [*PAIRS[:2], WITH_STATES[2]], ids=str)
def test_a_power_of_two_changes_no_bit(degree: int, how: dict[str, Any]) -> None:
    q, k, v, log_g = inputs(degree)
    wanted = run([q, k, v, log_g], degree, torch.float32, **how)
    for size in (2.0**-80, 2.0**17, 2.0**90):
        found = run([q * size, k * 2.0**-10, v, log_g], degree, torch.float32, **how)
        found[1], found[2] = found[1] * size, found[2] * 2.0**-10
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@either_degree
@pytest.mark.parametrize("how", PAIRS, ids=str)
@pytest.mark.parametrize("cosine", [1e-4, 1e-10, 1e-20])
def test_the_first_token_reads_its_own_value_whatever_its_score(
    degree: int, how: dict[str, Any], cosine: float
) -> None:
    q, k, v, log_g = inputs(degree)
    q[:, 0], k[:, 0] = 0, 0
    q[:, 0, :, 0], k[:, 0, :, 0] = 1, cosine
    q[:, 0, :, 1], k[:, 0, :, 2] = 1, 1
    out, *gradients = run([q, k, v, log_g], degree, torch.float32, **how)
    torch.testing.assert_close(out[:, 0].double(), v[:, 0].expand(-1, 2, -1))
    assert all(one.isfinite().all() for one in gradients)


@either_degree
@pytest.mark.parametrize("how", PAIRS, ids=str)
def test_huge_scores_before_a_reset_and_in_the_future_hide_none(
    degree: int, how: dict[str, Any]
) -> None:
    q, k, v, log_g = inputs(degree)
    k[:, :3], k[:, 30:] = 1e20 * k[:, :3], 1e20 * k[:, 30:]
    log_g[:, 3] = -torch.inf
    found = run([q, k, v, log_g], degree, torch.float32, **how)
    between = [y[:, 3:30].clone() for y in (q, k, v, log_g)]
    between[3][:, 0] = 0  # The first gate of a sequence has no effect.
    assert_same([found[0][:, 3:30]], [definition(between, degree)])
    assert all(one.isfinite().all() for one in found)


@either_degree
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, id=str(how), marks=pytest.mark.wide if how["form"] == "recurrent" else ())
        for how in WITH_STATES
    ],
)
def test_with_states_queries_may_have_any_size_and_keys_those_of_the_docstring(
    degree: int, how: dict[str, Any]
) -> None:
    q, k, v, log_g = inputs(degree, T=100)
    smallest, largest = {6: (1e-3, 1e5), 8: (1e-2, 1e4)}[degree]
    for q_size, k_size in ((1e-10, smallest), (1e10, largest), (1e10, smallest)):
        x = [(q * q_size).float().double(), (k * k_size).float().double(), v, log_g]
        x[3] = log_g.float().double()
        assert_same(run(x, degree, torch.float32, **how), defined(x, degree), 2e-4)


@either_degree
def test_a_variant_writes_out_the_weights_of_scores_of_any_size(degree: int) -> None:
    torch.manual_seed(0)
    attention = build_attention("conformal_sympow", 16, 2, degree=degree)
    x, wanted = torch.randn(1, 30, 16), None
    for size in (1.0, 1e-5, 1e5):
        with torch.no_grad():
            attention.qkv.weight[:16].mul_(size)
            weights = attention.weights(x)
            mixed = torch.einsum("bhti,bihv->bthv", weights, attention.values(x))
            found = attention(x, keep_state=False)[0]
            attention.qkv.weight[:16].div_(size)
        torch.testing.assert_close(attention.read_out(x, mixed), found, rtol=1e-4, atol=1e-6)
        wanted = weights if wanted is None else wanted
        torch.testing.assert_close(weights, wanted, rtol=1e-4, atol=1e-6)
