"""Softmax attention with a bias, a window or a cap, or within documents.

There is never a T x S tensor of all tokens.
"""

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int, Int32
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longhaul.modules.attention.parts.document_softmax import (
    QUERIES_AT_ONCE,
    document_softmax,
)

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Flex attention skips blocks of so many queries and keys, by its own default.
_MASK_BLOCK = 128


def masked_softmax(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S V"],
    slopes: Float[Tensor, "H"] | None,
    age: Int[Tensor, "B T"] | None,
    *,
    decay: Float64[Tensor, "B H S"] | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "B H T V"]:
    """softmax_i(scale q_t . k_i - m_h (t - i) + c_t - c_i) over the keys that query t sees.

    These are the keys i <= t of its document, of which a window has the last.

    Args:
        q: the queries of the last T of S tokens.
        k, v: the keys and values of all tokens; G divides H.
        slopes: m_h, in float32 or wider; None: no such bias.
        age: tokens of its document before each query; None: a document per row.
        decay: c, the running sums of log gates over all tokens of a row; None: no such bias.
        scale: None is 1 / sqrt(K).
        window: tokens that a query sees, itself included; None: all of its document.
        softcap: c in c tanh(score / c), taken of the scaled score; None: none. It does not go with
            slopes.

    Cost: that of each document alone on a CPU, but that of the row with a cap, a decay or T < S,
    and with a window that of the windows. On a GPU, blocks of 128 x 128 tokens that no query sees
    are skipped.
    """
    if q.is_cuda:
        return _mix_flex(q, k, v, slopes, age, decay, scale, window, softcap)
    if q.shape[2] == k.shape[2] and decay is None and window is None and softcap is None:
        if age is not None:
            return document_softmax(q, k, v, slopes, age, scale)
        if slopes is None:
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
    return _mix_blocks(q, k, v, slopes, age, decay, scale, window, softcap)


def _mix_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    age: Tensor | None,
    decay: Tensor | None,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention for one block of queries at a time, without the keys that no query of it sees.

    Where there are several blocks, the backward pass recomputes the bias of each block.
    """
    T, S = q.shape[2], k.shape[2]
    seen = torch.arange(S - T, S, device=q.device)[None] if age is None else age
    rows = QUERIES_AT_ONCE
    if window is not None:
        seen = seen.clamp(max=window - 1)
        # Short blocks, since a block scores all keys that one of its queries sees.
        rows = min(rows, max(window, _MASK_BLOCK))
    outputs = []
    for start in range(S - T, S, rows):
        end = min(start + rows, S)
        first = 0 if window is None else max(0, start - window + 1)
        own = slice(start - (S - T), end - (S - T))
        sums = None if decay is None else decay[:, :, first:end]
        block = q[:, :, own], k[:, :, first:end], v[:, :, first:end], slopes, seen[:, own], sums
        if rows >= T:
            return _mix_block(*block, scale, softcap)
        outputs.append(checkpoint(_mix_block, *block, scale, softcap, use_reentrant=False))
    return torch.cat(outputs, dim=2)


def _mix_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    seen: Tensor,
    decay: Tensor | None,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    T, S = q.shape[2], k.shape[2]
    position = torch.arange(S, device=q.device)
    distance = position[S - T :, None] - position
    is_seen = ((distance >= 0) & (distance <= seen[..., None]))[:, None]  # (B, 1, T, S)
    queries = q.shape[1] // k.shape[1]
    if softcap is None and decay is None:
        mask = is_seen
        if slopes is not None:
            bias = -slopes[:, None, None] * distance.to(slopes.dtype)
            mask = bias.masked_fill(~is_seen, -math.inf).to(q.dtype)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=queries > 1
        )
    if queries > 1:
        k, v = (one.repeat_interleave(queries, dim=1) for one in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = (scale * q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    if decay is not None:
        # In float64, since the sums of a long row are large and their differences small.
        logits = logits + (decay[:, :, S - T :, None] - decay[:, :, None]).to(logits.dtype)
    return logits.masked_fill(~is_seen, -math.inf).softmax(dim=-1).to(v.dtype) @ v


def _mix_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    age: Tensor | None,
    decay: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Bias and mask as formulas in a fused kernel, without a T x S tensor. CPUs: forward only."""
    # Imported here and below, because it takes seconds and most commands do not need it.
    from torch.nn.attention.flex_attention import flex_attention

    T, S = q.shape[2], k.shape[2]
    biased = None
    if slopes is not None:
        # Lambdas, because run-time type checks wrap functions and flex attention counts arguments.
        biased = lambda score, b, h, t, i: score - slopes[h] * (t + (S - T) - i)  # noqa: E731
    if softcap is not None:
        biased = lambda score, b, h, t, i: softcap * torch.tanh(score / softcap)  # noqa: E731
    if decay is not None:
        capped: Callable[..., Tensor] = biased or (lambda score, *_: score)
        added: Callable[..., Tensor] = lambda score, b, h, t, i: (  # noqa: E731
            score + (decay[b, h, t + (S - T)] - decay[b, h, i]).to(score.dtype)
        )
        biased = lambda score, b, h, t, i: added(capped(score, b, h, t, i), b, h, t, i)  # noqa: E731
    # Without compilation it would write the logits out.
    attend = _compiled_flex() if q.is_cuda else flex_attention
    if age is not None:
        seen = age if window is None else age.clamp(max=window - 1)
        mask = _within_documents(T, S, seen)
    else:
        mask = _causal(T, S, q.device) if window is None else _within(T, S, window, q.device)
    is_grouped = q.shape[1] != k.shape[1]
    mixed: Tensor = attend(
        q, k, v, score_mod=biased, block_mask=mask, scale=scale, enable_gqa=is_grouped
    )
    return mixed


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@lru_cache(maxsize=8)
def _causal(T: int, S: int, device: torch.device) -> "BlockMask":
    """The last T of S tokens attend to themselves and to all before."""
    age = torch.arange(S - T, S, device=device)[None]
    return _block_mask(T, S, age, lambda b, h, t, i: t + (S - T) >= i)


@lru_cache(maxsize=8)
def _within(T: int, S: int, window: int, device: torch.device) -> "BlockMask":
    """The last T of S tokens attend to themselves and to window - 1 tokens before."""
    age = torch.arange(S - T, S, device=device)[None].clamp(max=window - 1)
    past = S - T
    return _block_mask(T, S, age, lambda b, h, t, i: (t + past >= i) & (t + past - i < window))


def _within_documents(T: int, S: int, age: Int[Tensor, "B T"]) -> "BlockMask":
    """The last T of S tokens attend to themselves and to `age` tokens before."""
    past = S - T
    return _block_mask(T, S, age, lambda b, h, t, i: (t + past >= i) & (t + past - i <= age[b, t]))


def _block_mask(
    T: int, S: int, age: Int[Tensor, "B T"], sees: Callable[..., Tensor]
) -> "BlockMask":
    """The last T of S tokens attend to themselves and to `age` tokens before, as `sees` says.

    From the blocks that are masked, because create_block_mask would write the mask out: T x S.
    """
    from torch.nn.attention.flex_attention import BlockMask

    row = torch.arange(0, T, _MASK_BLOCK, device=age.device)  # the first query of each block
    column = torch.arange(0, S, _MASK_BLOCK, device=age.device)
    first = row + (S - T)
    final = (row + _MASK_BLOCK).clamp(max=T) - 1
    last = final + (S - T)
    # Documents begin ever later from query to query.
    first_begin, last_begin = first - age[:, row], last - age[:, final]  # (B, R)
    is_full_block = row + _MASK_BLOCK <= T
    is_before = column + (_MASK_BLOCK - 1) <= first[:, None]
    whole = is_before & is_full_block[:, None] & (column >= last_begin[..., None])
    is_seen = column + (_MASK_BLOCK - 1) >= first_begin[..., None]
    partial = (column <= last[:, None]) & is_seen & ~whole
    return BlockMask.from_kv_blocks(
        *_listed(partial),
        *_listed(whole),
        BLOCK_SIZE=_MASK_BLOCK,
        mask_mod=sees,
        seq_lengths=(T, S),
    )


def _listed(
    blocks: Bool[Tensor, "B R C"],
) -> tuple[Int32[Tensor, "B 1 R"], Int32[Tensor, "B 1 R C"]]:
    """How many blocks of each row are in the set, and the columns, theirs first."""
    columns = blocks.int().argsort(dim=2, descending=True, stable=True)
    return blocks.sum(dim=2, dtype=torch.int32)[:, None], columns.int()[:, None]
