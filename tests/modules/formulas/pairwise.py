"""The formulas of attention variants, written out over pairs of tokens, for the tests beside it.

Only parameters are taken from the modules. A matrix over pairs (t, i) is filled entry by entry.
Rows and columns count from 0 and positions from 1; i = -1 stands for position 0, where a learned
initial state has its pivot tokens.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from longhaul.modules.attention import Attention, LayerShape, attention_config

HEADS, T = 2, 11  # heads are 8 wide
SYMPOW = ["sympow", "sympow_gated", "sympow_rotary", "conformal_sympow"]
GENERATORS = ["additive", "product", "full"]
INITIAL_STATE = pytest.mark.parametrize("initial_state", ["zero", "learned"])
PairWeight = Callable[[int, int], Tensor]  # from (t, i) to a weight for every row and head, (B, H)


def build(kind: str, *, heads: int = HEADS, layer: int = 0, **options: object) -> Attention:
    """A float64 module with large parameters, so that each of them influences the output.

    `head_norms` are norms of queries and keys that the shape asks for.
    """
    torch.manual_seed(0)
    if options.get("initial_state") == "learned":
        options["rank"] = 3
    shape = LayerShape(
        width=8 * heads,
        heads=heads,
        key_heads=heads,
        head_dim=8,
        layer=layer,
        qk_norm="head" if options.pop("head_norms", False) else "none",
    )
    attention = attention_config(kind)(**options).build(shape).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(std=0.5)
    return attention


def tokens(length: int = T, heads: int = HEADS) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(2, length, 8 * heads, dtype=torch.float64, generator=generator)
    return x.requires_grad_()


def assert_same(found: Tensor, wanted: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def by_head(x: Tensor, weight: Tensor, heads: int = HEADS) -> Tensor:
    """W x as (B, T, H, K)."""
    return (x @ weight.mT).unflatten(-1, (heads, -1))


def projections(x: Tensor, weight: Tensor, heads: int = HEADS) -> list[Tensor]:
    """Queries, keys and values, whose projections are the three thirds of one weight."""
    return [by_head(x, part, heads) for part in weight.chunk(3)]


def rotary_rates(width: int = 8, base: float = 10_000.0) -> list[float]:
    return [base ** (-2 * j / width) for j in range(width // 2)]


def sympow_rates(longest_document: int) -> list[float]:
    return [2 * math.pi / longest_document ** (2 * j / 8) for j in range(4)]


def rotation(position: float | Tensor, theta: list[float] | Tensor) -> Tensor:
    """The matrix that rotates the plane (j, j + K / 2) by position theta_j."""
    angle = position * torch.as_tensor(theta, dtype=torch.float64)
    cos, sin = torch.diag(angle.cos()), torch.diag(angle.sin())
    return torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])


def rotated(x: Tensor, theta: list[float], position: Tensor | None = None) -> Tensor:
    """x (B, T, H, K) rotated by positions (B, T), which default to 1, 2, ..."""
    y = torch.empty_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            mu = t + 1 if position is None else position[b, t]
            y[b, t] = x[b, t] @ rotation(mu, theta).mT
    return y


def unit(x: Tensor) -> Tensor:
    return x / x.square().sum(-1, keepdim=True).sqrt()


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1)


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def matrix(weight: PairWeight) -> Tensor:
    """(B, H, T, T), zero where i > t."""
    zero = torch.zeros_like(weight(0, 0))
    rows = [[weight(t, i) if i <= t else zero for i in range(T)] for t in range(T)]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def product(gates: Tensor, t: int, i: int) -> Tensor:
    """gamma_(i+1) ... gamma_t, of gates (B, T, H)."""
    kept = torch.ones_like(gates[:, 0])
    for j in range(i + 1, t + 1):
        kept = kept * gates[:, j]
    return kept


def no_decay(t: int, i: int) -> Tensor:
    return torch.ones(2, HEADS, dtype=torch.float64)


def fixed_decay(t: int, i: int) -> Tensor:
    """gamma_h^(t - i), gamma_h = 1 - 2^(-5 - h), h = 0, 1, ..."""
    gamma = 1 - 2.0 ** (-5 - torch.arange(HEADS, dtype=torch.float64))
    return (gamma ** (t - i)).expand(2, -1)


def forget_gate(gate: nn.Module, x: Tensor) -> Tensor:
    """sigmoid(W x), with the bias b inside where gate_init is long_memory."""
    bias = 0 if gate.bias is None else gate.bias
    return sigmoid(x @ gate.weight.mT + bias)


ALIBI_SLOPES = {
    1: [2**-8],
    2: [2**-4, 2**-8],
    3: [2**-4, 2**-8, 2**-2],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
    8: [2.0**-h for h in range(1, 9)],
    12: [*(2.0**-h for h in range(1, 9)), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
}


def gates_of(attention: Attention, x: Tensor) -> Tensor:
    """gamma (B, T, H), from the option `gate` of the variant."""
    gate = getattr(attention.config, "gate", "none")
    per_head = {
        "none": [1.0] * HEADS,
        "retention": [1 - 2.0 ** (-5 - h) for h in range(HEADS)],
        "alibi": [math.exp(-m) for m in ALIBI_SLOPES[HEADS]],
    }
    if gate == "data":
        return forget_gate(attention.gate, x)
    if gate == "learned":
        return sigmoid(attention.gate.bias).expand(*x.shape[:2], HEADS)
    return torch.tensor(per_head[gate], dtype=x.dtype).expand(*x.shape[:2], HEADS)


def key_softmax(attention: Attention, s: Tensor) -> PairWeight:
    """exp(s_i) / sum_j exp(s_j), where the sum includes pivot tokens at position 0."""
    start = attention.initial_state
    mass = torch.zeros_like(s[:, 0])
    if start is not None:
        mass = start.log_mass.exp().view(s.shape[2:]).expand(2, *s.shape[2:])
    return lambda t, i: (mass if i < 0 else s[:, i].exp()) / (mass + s[:, : t + 1].exp().sum(1))


def softmax_rows(logits: Tensor) -> Tensor:
    exponentials = logits.exp().tril()
    return exponentials / exponentials.sum(-1, keepdim=True)


def mix(weights: Tensor, v: Tensor) -> Tensor:
    """sum_i w_ti v_i, (B, T, H, V)."""
    return torch.einsum("bhti,bihv->bthv", weights, v)


def pivots(
    attention: Attention,
    q: Tensor,
    weight: PairWeight,
    scale: float = 1.0,
    degree: int = 1,
    f: Callable[[Tensor], Tensor] = lambda key: key,
) -> tuple[Tensor, Tensor]:
    """What pivot tokens add to the numerator (B, T, H, V) and the denominator (B, T, H)."""
    start = attention.initial_state
    if start is None:
        return torch.zeros_like(q), torch.zeros_like(q[..., 0])
    numerator, denominator = torch.zeros_like(q), torch.zeros_like(q[..., 0])
    for t in range(T):
        for r in range(3):
            w = weight(t, -1) * (scale * dot(q[:, t], f(start.key[:, r]))) ** degree
            numerator[:, t] += w[..., None] * start.value[:, r]
            denominator[:, t] += w
    return numerator, denominator


def head_norm(attention: Attention, mixed: Tensor) -> Tensor:
    """Normalise each head of each token, then apply a gain and a bias per channel."""
    y = mixed - mixed.mean(-1, keepdim=True)
    eps = 1e-10 if attention.config.kind in ("cartan", "zeros") else 1e-5
    y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt()
    return y.flatten(2) * attention.norm.weight + attention.norm.bias


def assert_forward(attention: Attention, x: Tensor, mixed: Tensor) -> None:
    has_norm = getattr(attention, "norm", None) is not None
    y = head_norm(attention, mixed) if has_norm else mixed.flatten(2)
    assert_outputs(attention, x, y @ attention.out.weight.mT)


def assert_outputs(attention: Attention, x: Tensor, wanted: Tensor) -> None:
    """The module's outputs and all gradients are those of the formula's."""
    found = attention(x, keep_state=False)[0]
    assert_same(found, wanted)
    names, parameters = zip(("x", x), *attention.named_parameters(), strict=True)
    probe = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(1))
    gradients = (torch.autograd.grad((y * probe).sum(), parameters) for y in (found, wanted))
    for name, one, other in zip(names, *gradients, strict=True):
        torch.testing.assert_close(
            one, other, rtol=1e-8, atol=1e-8 * other.abs().max().item(), msg=f"gradient of {name}"
        )
