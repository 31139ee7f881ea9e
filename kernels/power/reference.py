"""The definition of power attention: the formula, quadratic in T, in plain torch.

    y_t = Σ_{i≤t} exp(G_t − G_i) (scale q_t·k_i)^p v_i   [ / the same sum without v_i ]

Above degree 4 both sums are divided by the same power of a unit of the row, which keeps them in the
range of numbers: the row's largest score, as in the symmetric-power article, or |q_t| with a state.

It shares no code with the forms that are tested against it, not even the layout of the state.
"""

from __future__ import annotations

from itertools import combinations_with_replacement, product
from math import factorial, prod

import torch
from jaxtyping import Float
from torch import Tensor

from longhaul.kernels.shapes import (
    DENOMINATOR_FLOOR,
    HIGHEST_UNSCALED_DEGREE,
    padded_width,
    tile_width,
)


def layout(width: int, degree: int) -> tuple[Tensor, Tensor]:
    """Key coordinates (P, p) of every feature, and its multiplicity (P,), applied to queries."""
    tile = tile_width(degree)
    coordinates, multiplicity = [], []
    for tiles in combinations_with_replacement(range(padded_width(width, degree) // tile), degree):
        repeats = prod(factorial(tiles.count(one)) for one in set(tiles))
        # The offset in the first tile varies fastest, so the product lists the last tile first.
        for offsets in product(range(tile), repeat=degree):
            pairs = zip(tiles, reversed(offsets), strict=True)
            coordinates.append([one * tile + offset for one, offset in pairs])
            multiplicity.append(factorial(degree) // repeats)
    return torch.tensor(coordinates), torch.tensor(multiplicity)


def features(x: Float[Tensor, "*rows K"], degree: int) -> Float[Tensor, "*rows P"]:
    """Products of `degree` coordinates of x in the layout of the state, padded with zeros."""
    coordinates, _ = layout(x.shape[-1], degree)
    padding = padded_width(x.shape[-1], degree) - x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, padding))
    return padded[..., coordinates.to(x.device)].prod(dim=-1)


def power_attention_reference(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T G K"],
    v: Float[Tensor, "B T G V"],
    log_g: Float[Tensor, "B T G"] | None,
    initial_kv: Float[Tensor, "B G P V"] | None,
    initial_norm: Float[Tensor, "B G P"] | None,
    *,
    degree: int,
    scale: float,
    normalize: bool,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B G P V"], Float[Tensor, "B G P"]]:
    """Output, and the state after the last token. float64 inputs give float64 results."""
    T, H, G = q.shape[1], q.shape[2], k.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    out_dtype = q.dtype
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    log_g = k.new_zeros(k.shape[:3]) if log_g is None else log_g.to(dtype)

    # A gate of exactly 0 would give (−inf) − (−inf) below. Such a position starts a new segment
    # instead, and weights between segments are 0.
    is_reset = log_g.exp() == 0
    segment = is_reset.cumsum(dim=1)  # (B, T, G)
    log_decay = log_g.masked_fill(is_reset, 0).double().cumsum(dim=1)  # (B, T, G)
    log_pair = log_decay[:, :, None] - log_decay[:, None]  # (B, T, T, G)
    is_future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)[None, :, :, None]
    is_apart = segment[:, :, None] != segment[:, None]
    decay = log_pair.masked_fill(is_future | is_apart, -torch.inf).exp().to(dtype)

    def per_query_head(x: Tensor, dim: int) -> Tensor:
        return x.repeat_interleave(H // G, dim=dim)

    q = scale * q
    scores = torch.einsum("bthk,bihk->btih", q, per_query_head(k, 2))
    if normalize and degree > HIGHEST_UNSCALED_DEGREE:
        # Roots of decays, so that a forgotten key is 0 before its power could be infinite.
        root = log_pair.masked_fill(is_future | is_apart, -torch.inf).div(degree).exp().to(dtype)
        scores = per_query_head(root, 3) * scores
        unit = scores.detach().abs().amax(dim=2, keepdim=True)  # (B, T, 1, H)
        if initial_kv is not None:
            unit = q.detach().norm(dim=-1)[:, :, None]
        unit = torch.where(unit == 0, 1.0, unit)
        weights = (scores / unit) ** degree
        q = q / unit.transpose(2, 3)
    else:
        weights = per_query_head(decay, 3) * scores**degree  # (B, T, T, H)
    numerator = torch.einsum("btih,bihv->bthv", weights, per_query_head(v, 2))
    denominator = weights.sum(dim=2)  # (B, T, H)

    from_start = log_decay.masked_fill(segment > 0, -torch.inf).exp().to(dtype)  # (B, T, G)
    key_features = features(k, degree)  # (B, T, G, P)
    kv = torch.einsum("big,bigp,bigv->bgpv", decay[:, -1], key_features, v)
    norm = torch.einsum("big,bigp->bgp", decay[:, -1], key_features)
    if initial_kv is not None and initial_norm is not None:
        initial_kv, initial_norm = initial_kv.to(dtype), initial_norm.to(dtype)
        multiplicity = layout(q.shape[-1], degree)[1].to(q)
        read = per_query_head(from_start, 2)[..., None] * features(q, degree)
        read = read * multiplicity  # (B, T, H, P)
        numerator = numerator + torch.einsum("bthp,bhpv->bthv", read, per_query_head(initial_kv, 1))
        denominator = denominator + torch.einsum(
            "bthp,bhp->bth", read, per_query_head(initial_norm, 1)
        )
        kv = kv + from_start[:, -1, :, None, None] * initial_kv
        norm = norm + from_start[:, -1, :, None] * initial_norm

    if normalize:
        denominator = denominator.masked_fill(
            denominator.abs() < DENOMINATOR_FLOOR, DENOMINATOR_FLOOR
        )
        numerator = numerator / denominator[..., None]
    return numerator.to(out_dtype), kv, norm
