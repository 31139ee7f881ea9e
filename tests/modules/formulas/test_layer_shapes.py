"""Key heads, widths of heads, norms of queries and keys, and rotations, written out over pairs."""

import math
from typing import Any

import pytest
import torch
from pairwise import assert_same
from torch import Tensor

from longhaul.modules.attention import Attention, LayerShape, attention_config
from longhaul.modules.rotary import RotaryScaling

D, H, G, K, T = 20, 4, 2, 6, 9


def build(kind: str, *, norm: str, offset: bool = False, **options: object) -> Attention:
    torch.manual_seed(0)
    shape = LayerShape(width=D, heads=H, key_heads=G, head_dim=K, qk_norm=norm, norm_offset=offset)
    attention = attention_config(kind)(**options).build(shape).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(std=0.5)
    return attention


def normed(x: Tensor, norm: Any, offset: bool) -> Tensor:
    if norm is None:
        return x
    gain = norm.weight + 1 if offset else norm.weight
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def turned(x: Tensor, position: int, rates: list[float], gain: float) -> Tensor:
    """The first 2 len(rates) coordinates, pair by pair."""
    J = len(rates)
    y = list(x.unbind(-1))
    for j, rate in enumerate(rates):
        c, s = gain * math.cos(position * rate), gain * math.sin(position * rate)
        y[j], y[j + J] = c * x[..., j] - s * x[..., j + J], s * x[..., j] + c * x[..., j + J]
    return torch.stack(y, dim=-1)


def written_out(
    attention: Attention,
    x: Tensor,
    *,
    norm: str,
    offset: bool = False,
    rates: list[float],
    gain: float = 1.0,
    degree: int | None = None,
    window: int = T,
    scale: float = K**-0.5,
    softcap: float | None = None,
) -> Tensor:
    """Softmax of the scores, or without degree None their powers over the sum of these."""
    q, k, v = (x @ attention.qkv.weight.mT).split([H * K, G * K, G * K], dim=-1)
    norms = attention.q_norm, attention.k_norm
    if norm == "full":
        q, k = (normed(one, by, offset) for one, by in zip((q, k), norms, strict=True))
    q, k, v = (one.unflatten(-1, (-1, K)) for one in (q, k, v))
    if norm == "head":
        q, k = (normed(one, by, offset) for one, by in zip((q, k), norms, strict=True))
    rows = []
    for t in range(T):
        heads = []
        for h in range(H):
            weights, values = [], []
            for i in range(max(0, t - window + 1), t + 1):
                q_t = turned(q[:, t, h], t, rates, gain)
                k_i = turned(k[:, i, h // (H // G)], i, rates, gain)
                score = scale * (q_t * k_i).sum(-1)
                if softcap is not None:
                    score = softcap * torch.tanh(score / softcap)
                weights.append(score.exp() if degree is None else score**degree)
                values.append(v[:, i, h // (H // G)])
            total = torch.stack(weights).sum(0)
            pairs = zip(weights, values, strict=True)
            heads.append(sum((w / total)[:, None] * one for w, one in pairs))
        rows.append(torch.cat(heads, dim=-1))  # type: ignore[arg-type]
    return torch.stack(rows, dim=1) @ attention.out.weight.mT


def usual(width: int, base: float) -> list[float]:
    return [base ** (-2 * j / width) for j in range(width // 2)]


LINEAR = RotaryScaling(rope_type="linear", factor=4.0)
SOFTMAX: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"rates": usual(K, 10_000.0)}),
    ({"rotary_base": 50.0, "rotary_share": 0.7}, {"rates": usual(4, 50.0)}),
    ({"rotary": "none"}, {"rates": []}),
    ({"rotary_scaling": LINEAR}, {"rates": [one / 4 for one in usual(K, 10_000.0)]}),
    (
        {"window": 5, "scale": 0.3, "softcap": 1.5, "longest_document": 64},
        {
            "rates": [2 * math.pi * one for one in usual(K, 64.0)],
            "window": 5,
            "scale": 0.3,
            "softcap": 1.5,
        },
    ),
]
SYMPOW: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"longest_document": None, "rotary_base": 50.0, "rotary_share": 0.7},
        {"rates": usual(4, 50.0)},
    ),
    ({"longest_document": 64}, {"rates": [2 * math.pi * one for one in usual(K, 64.0)]}),
]


@pytest.mark.parametrize(("norm", "offset"), [("none", False), ("head", True), ("full", False)])
@pytest.mark.parametrize(
    ("kind", "options", "wanted"),
    [("softmax", *case) for case in SOFTMAX] + [("sympow", *case) for case in SYMPOW],
)
def test_a_layer_computes_the_formula_and_its_gradients(
    kind: str, options: dict[str, Any], wanted: dict[str, Any], norm: str, offset: bool
) -> None:
    attention = build(kind, norm=norm, offset=offset, **options)
    x, probe = torch.randn(2, 2, T, D, dtype=torch.float64).unbind(0)
    x = x.requires_grad_()
    degree = 2 if kind == "sympow" else None
    explicit = written_out(attention, x, norm=norm, offset=offset, degree=degree, **wanted)
    found, _ = attention(x, keep_state=False)
    assert_same(found, explicit)
    leaves = [x, *attention.parameters()]
    gradients = (torch.autograd.grad(y, leaves, probe) for y in (found, explicit))
    for one, other in zip(*gradients, strict=True):
        assert_same(one, other, 1e-7)


def test_the_norm_of_a_kind_gives_way_to_that_of_the_model() -> None:
    norms = [build("sympow", norm=one, qk_norm=True).q_norm for one in ("none", "head")]
    assert [one.eps for one in norms] == [2.0**-23, 1e-5]
