"""Softmax attention with ALiBi's bias, or within documents: never a T x S tensor of all tokens."""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longhaul.modules.attention.parts.document_softmax import (
    QUERIES_AT_ONCE,
    causal_bias,
    document_softmax,
)

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Flex attention skips blocks of so many queries and keys, by its own default.
_MASK_BLOCK = 128


def masked_softmax(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B H S K"],
    v: Float[Tensor, "B H S V"],
    slopes: Float[Tensor, "H"] | None,
    age: Int[Tensor, "B T"] | None,
) -> Float[Tensor, "B H T V"]:
    """softmax_i(q_t . k_i / sqrt(K) - m_h (t - i)) over the keys i <= t of the document of query t.

    Args:
        q: the queries of the last T of S tokens.
        k, v: the keys and values of all tokens.
        slopes: m_h, in float32 or wider; None: no bias, and T = S.
        age: tokens of its document before each query; T = S then. None: a document per row.

    Cost: that of each document alone on a CPU. On a GPU, blocks of 128 x 128 tokens are skipped
    where they belong to two documents.
    """
    if q.is_cuda:
        return _mix_flex(q, k, v, slopes, age)
    if age is not None:
        return document_softmax(q, k, v, slopes, age)
    if slopes is not None:
        return _mix_blocks(q, k, v, slopes)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _mix_blocks(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """Attention for one block of queries at a time; keys after the whole block are left out.

    Where there are several blocks, the backward pass recomputes the bias of each block.
    """
    T, S = q.shape[2], k.shape[2]
    if T <= QUERIES_AT_ONCE:
        return _mix_block(q, k, v, slopes)
    outputs = []
    for start in range(S - T, S, QUERIES_AT_ONCE):
        end = min(start + QUERIES_AT_ONCE, S)
        block = q[:, :, start - (S - T) : end - (S - T)], k[:, :, :end], v[:, :, :end], slopes
        outputs.append(checkpoint(_mix_block, *block, use_reentrant=False))
    return torch.cat(outputs, dim=2)


def _mix_block(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    bias = causal_bias(q.shape[2], k.shape[2], slopes).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _mix_flex(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, age: Tensor | None) -> Tensor:
    """Bias and mask as formulas in a fused kernel, without a T x S tensor. CPUs: forward only."""
    # Imported here and below, because it takes seconds and most commands do not need it.
    from torch.nn.attention.flex_attention import flex_attention

    T, S = q.shape[2], k.shape[2]
    biased = None
    if slopes is not None:
        # Lambdas, because run-time type checks wrap functions and flex attention counts arguments.
        biased = lambda score, b, h, t, i: score - slopes[h] * (t + (S - T) - i)  # noqa: E731
    # Without compilation it would write the logits out.
    attend = _compiled_flex() if q.is_cuda else flex_attention
    mask = _causal(T, S, q.device) if age is None else _within_documents(T, age)
    mixed: Tensor = attend(q, k, v, score_mod=biased, block_mask=mask)
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


def _within_documents(T: int, age: Int[Tensor, "B T"]) -> "BlockMask":
    """Tokens attend to themselves and to all before in their document."""
    return _block_mask(T, T, age, lambda b, h, t, i: (t >= i) & (t - i <= age[b, t]))


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
