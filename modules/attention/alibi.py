"""ALiBi: softmax attention whose only positions are a bias that falls with distance."""

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int32
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longhaul.modules.attention.base import Attention, AttentionConfig, LayerShape, register
from longhaul.modules.attention.fused import FusedAttention, KeyValueCache
from longhaul.modules.attention.parts.gates import alibi_slopes

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Without a GPU the bias is written out, for a block of this many queries at a time.
_QUERIES_AT_ONCE = 1024
# Flex attention skips blocks of so many queries and keys, by its own default.
_MASK_BLOCK = 128


@register("alibi")
@dataclass(frozen=True, kw_only=True)
class AlibiConfig(AttentionConfig):
    """ALiBi has no options: its slopes are fixed."""

    cost: ClassVar[str] = "quadratic"

    def build(self, shape: LayerShape) -> Attention:
        return Alibi(self, shape)


class Alibi(FusedAttention):
    """y_t = sum_i softmax_i(q_t . k_i / sqrt(K) - m_h (t - i)) v_i, m_h = 2^(-8 h / H), h = 1, ...

    The bias is a fixed decay: the weights are those of a forget gate exp(-m_h) on exp(q . k).
    Source: Press, Smith, Lewis (2021), arXiv:2108.12409, with its slopes for any number of heads.
    """

    def __init__(self, config: AlibiConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.add_qkv()

    def project(
        self, x: Float[Tensor, "B T D"], past: int
    ) -> tuple[Float[Tensor, "B H T K"], KeyValueCache]:
        q, k, v = (one.transpose(1, 2) for one in self.queries_keys_values(x))
        return q, KeyValueCache(k, v)

    def operands(
        self, q: Float[Tensor, "B H T K"], k: Float[Tensor, "B H S K"]
    ) -> tuple[Float[Tensor, "B H T K"], Float[Tensor, "B H S K"]]:
        return q, k

    def logits(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T T"]:
        logits = super().logits(x)
        position = torch.arange(x.shape[1], dtype=logits.dtype, device=x.device)
        return logits - self._slopes(logits) * (position[:, None] - position)

    def mix(self, q: Float[Tensor, "B H T K"], cache: KeyValueCache) -> Float[Tensor, "B H T V"]:
        return _mix_flex(q, *cache) if q.is_cuda else self._mix_biased(q, *cache)

    def _mix_biased(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention for one block of queries at a time; keys after the whole block are left out.

        Where there are several blocks, the backward pass recomputes the bias of each block.
        """
        T, S = q.shape[2], k.shape[2]
        outputs = []
        for start in range(S - T, S, _QUERIES_AT_ONCE):
            end = min(start + _QUERIES_AT_ONCE, S)
            block = q[:, :, start - (S - T) : end - (S - T)], k[:, :, :end], v[:, :, :end]
            if T <= _QUERIES_AT_ONCE:
                outputs.append(self._mix_block(*block))
            else:
                outputs.append(checkpoint(self._mix_block, *block, use_reentrant=False))
        return torch.cat(outputs, dim=2)

    def _mix_block(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the last T of S tokens, with the bias written out."""
        T, S = q.shape[2], k.shape[2]
        dtype = torch.promote_types(q.dtype, torch.float32)
        position = torch.arange(S, dtype=dtype, device=q.device)
        distance = position[S - T :, None] - position
        bias = (-self._slopes(distance) * distance).masked_fill(distance < 0, -math.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype)[None])

    def _slopes(self, like: Tensor) -> Float[Tensor, "H 1 1"]:
        return _slopes(self.num_heads, like.dtype, like.device)[:, None, None]

    def cached_per_token(self) -> int:
        return 2 * self.model_dim


@lru_cache(maxsize=8)
def _slopes(num_heads: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "H"]:
    """Cached, because every call of flex attention reads the same ones."""
    return alibi_slopes(num_heads, device).to(dtype)


def _mix_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The bias as a formula in a fused kernel, without a T x S tensor. CPUs: forward only."""
    # Imported here and below, because it takes seconds and most commands do not need it.
    from torch.nn.attention.flex_attention import flex_attention

    T, S = q.shape[2], k.shape[2]
    slopes = _slopes(q.shape[1], torch.promote_types(q.dtype, torch.float32), q.device)

    # Without compilation it would write the logits out.
    attend = _compiled_flex() if q.is_cuda else flex_attention
    mixed: Tensor = attend(
        q,
        k,
        v,
        # Lambdas, because run-time type checks wrap functions and flex attention counts arguments.
        score_mod=lambda score, b, h, t, i: score - slopes[h] * (t + (S - T) - i),
        block_mask=_causal(T, S, q.device),
    )
    return mixed


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@lru_cache(maxsize=8)
def _causal(T: int, S: int, device: torch.device) -> "BlockMask":
    """The last T of S tokens attend to themselves and to all before.

    From the blocks that are masked, because create_block_mask would write the mask out: T x S.
    """
    from torch.nn.attention.flex_attention import BlockMask

    row = torch.arange(0, T, _MASK_BLOCK, device=device)  # the first query of each block
    column = torch.arange(0, S, _MASK_BLOCK, device=device)
    first = (row + (S - T))[:, None]
    last = (row + _MASK_BLOCK).clamp(max=T)[:, None] + (S - T - 1)
    is_full_block = (row + _MASK_BLOCK <= T)[:, None]
    whole = (column + (_MASK_BLOCK - 1) <= first) & is_full_block
    partial = (column <= last) & ~whole
    return BlockMask.from_kv_blocks(
        *_listed(partial),
        *_listed(whole),
        BLOCK_SIZE=_MASK_BLOCK,
        mask_mod=lambda b, h, t, i: t + (S - T) >= i,
        seq_lengths=(T, S),
    )


def _listed(
    blocks: Bool[Tensor, "R C"],
) -> tuple[Int32[Tensor, "1 1 R"], Int32[Tensor, "1 1 R C"]]:
    """How many blocks of each row are in the set, and the columns, theirs first."""
    columns = blocks.int().argsort(dim=1, descending=True, stable=True)
    return blocks.sum(dim=1, dtype=torch.int32)[None, None], columns.int()[None, None]
