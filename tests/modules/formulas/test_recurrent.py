"""Kinds with published recurrences against their formulas, token by token, with every gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, silu, softplus

from longhaul.modules.attention import Attention, LayerShape, attention_config

D, H, T = 12, 2, 15


def build(kind: str, **options: Any) -> Attention:
    torch.manual_seed(0)
    shape = LayerShape(width=D, heads=H, key_heads=H, head_dim=8)
    attention = attention_config(kind)(**options).build(shape).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(std=0.5)
    return attention


def convolved(attention: Attention, x: Tensor) -> Tensor:
    """silu of the sum over the last tokens, those before the first being zeros."""
    taps = attention.convolution.weight[:, 0]  # the last is that of the present token
    y = torch.zeros_like(x)
    for t in range(T):
        for back in range(taps.shape[1]):
            if t >= back:
                y[:, t] = y[:, t] + taps[:, -1 - back] * x[:, t - back]
    if attention.convolution.bias is not None:
        y = y + attention.convolution.bias
    return silu(y)


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1))


def low_rank(part: Any, x: Tensor) -> Tensor:
    return x @ part.down_weight.T @ part.up_weight.T


def mamba2(attention: Any, x: Tensor, *, groups: int) -> Tensor:
    """h_t = e^(-A dt) h + dt x B^T, y = h C + D x, for C, B and x of the convolution."""
    count = 2 * H
    C, B, v = convolved(attention, x @ attention.qkv.weight.T).split(attention.qkv_widths, dim=-1)
    C, B = (heads(one, groups).repeat_interleave(count // groups, dim=2) for one in (C, B))
    v = heads(v, count)
    step = softplus(x @ attention.step_size.weight.T + attention.time_step.dt_bias)
    decay = torch.exp(-attention.time_step.A_log.exp() * step)
    h = x.new_zeros(len(x), count, v.shape[-1], C.shape[-1])
    outputs = []
    for t in range(T):
        written = torch.einsum("bhv,bhk->bhvk", step[:, t, :, None] * v[:, t], B[:, t])
        h = decay[:, t, :, None, None] * h + written
        read = torch.einsum("bhvk,bhk->bhv", h, C[:, t])
        outputs.append(read + attention.skip[:, None] * v[:, t])
    y = torch.stack(outputs, 1).flatten(2) * silu(x @ attention.output_gate.weight.T)
    y = rms(heads(y, groups)).flatten(2) * attention.output_norm.weight
    return y @ attention.out.weight.T


def recurrence(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gates: Tensor) -> Tensor:
    """S = Diag(gate) S, then S += beta k (v - S^T k)^T, or with a beta of nan S += k v^T."""
    S = q.new_zeros(len(q), H, q.shape[-1], v.shape[-1])
    outputs = []
    for t in range(T):
        S = gates[:, t, :, :, None] * S
        held = torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        new = v[:, t] if beta.isnan().any() else beta[:, t, :, None] * (v[:, t] - held)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], new)
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) / q.shape[-1] ** 0.5)
    return torch.stack(outputs, 1)


def delta(kind: str, attention: Any, x: Tensor, *, strongest: float = 1.0) -> Tensor:
    qkv = x @ attention.qkv.weight.T
    qkv = qkv if attention.convolution is None else convolved(attention, qkv)
    q, k, v = qkv.split(attention.qkv_widths, dim=-1)
    keys = attention.groups
    q, k = (heads(one, keys).repeat_interleave(H // keys, dim=2) for one in (q, k))
    v = heads(v, H)
    if kind == "gated_linear":
        beta = x.new_full((len(x), T, H), torch.nan)
        log_g = logsigmoid(low_rank(attention.decay, x) + attention.decay.bias) / 16
    else:
        q, k = unit(q), unit(k)
        beta = strongest * torch.sigmoid(x @ attention.write.weight.T)
    if kind == "deltanet":
        log_g = x.new_zeros(len(x), T, H)
    if kind == "gated_deltanet":
        f = x @ attention.decay.weight.T + attention.time_step.dt_bias
        log_g = -attention.time_step.A_log.exp() * softplus(f)
    if kind == "kimi_delta":
        f = low_rank(attention.decay, x) + attention.time_step.dt_bias
        rate, bound = attention.time_step.A_log.exp()[:, None], attention.config.decay_bound
        log_g = -rate * softplus(heads(f, H))
        if bound is not None:
            log_g = -bound / (1 + torch.exp(-rate * heads(f, H)))
    log_g = heads(log_g.flatten(2), H).expand(-1, -1, -1, k.shape[-1])
    y = (rms(recurrence(q, k, v, beta, log_g.exp())) * attention.output_norm.weight).flatten(2)
    if kind == "kimi_delta":
        first, second = attention.output_gate
        y = y * torch.sigmoid(x @ first.weight.T @ second.weight.T)
    elif attention.output_gate is not None:
        y = y * silu(x @ attention.output_gate.weight.T)
    return y @ attention.out.weight.T


def turned(x: Tensor) -> Tensor:
    """Pairs (j, j + K / 2) turned by 2 pi t / 64^(2 j / K), t = 1, 2, ..."""
    half = x.shape[-1] // 2
    rates = 2 * torch.pi * 64.0 ** (-2 * torch.arange(half, dtype=x.dtype) / x.shape[-1])
    angle = (torch.arange(1, T + 1, dtype=x.dtype)[:, None] * rates)[:, None]
    first, second = x.split(half, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def power_delta(attention: Any, x: Tensor) -> Tensor:
    """The delta rule on all K^2 products of two coordinates, of turned unit queries and keys."""
    q, k, v = (heads(one, H) for one in (x @ attention.qkv.weight.T).chunk(3, dim=-1))
    q, k = (
        torch.einsum("bthi,bthj->bthij", one, one).flatten(3)
        for one in (turned(unit(q)), turned(unit(k)))
    )
    beta = torch.sigmoid(x @ attention.write.weight.T)
    gates = torch.sigmoid(x @ attention.gate.weight.T)[..., None].expand_as(k)
    # `recurrence` divides by the root of the width of its keys.
    y = recurrence(q, k, v, beta, gates) * k.shape[-1] ** 0.5
    y = (rms(y) * attention.output_norm.weight).flatten(2)
    return y @ attention.out.weight.T


CASES: list[tuple[str, dict[str, Any]]] = [
    ("mamba2", {"groups": 2, "key_dim": 5}),
    ("deltanet", {"negative_eigenvalues": True, "output_gate": "silu"}),
    ("deltanet", {"short_convolution": 0}),
    ("gated_deltanet", {"negative_eigenvalues": True}),
    ("gated_deltanet", {"groups": 1, "key_dim": 5, "value_dim": 3}),
    ("kimi_delta", {}),
    ("kimi_delta", {"decay_bound": 2.5}),
    ("gated_linear", {}),
    ("power_delta", {"longest_document": 64}),
    ("power_delta", {"longest_document": 64, "chunk_size": 4}),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_a_layer_computes_its_recurrence(kind: str, options: dict[str, Any]) -> None:
    attention = build(kind, **options)
    x, probe = torch.randn(2, 2, T, D, dtype=torch.float64).unbind(0)
    x.requires_grad_()
    if kind == "mamba2":
        wanted = mamba2(attention, x, groups=options["groups"])
    elif kind == "power_delta":
        wanted = power_delta(attention, x)
    else:
        strongest = 2.0 if options.get("negative_eigenvalues") else 1.0
        wanted = delta(kind, attention, x, strongest=strongest)
    found, _ = attention(x, keep_state=False)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    names, leaves = zip(*[("x", x), *attention.named_parameters()], strict=True)
    gradients = (torch.autograd.grad(y, leaves, probe) for y in (found, wanted))
    for name, one, other in zip(names, *gradients, strict=True):
        assert other.abs().max() > 1e-6, name
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=lambda t, n=name: n + t)
