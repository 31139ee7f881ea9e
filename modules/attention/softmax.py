"""Softmax attention with rotary positions: the quadratic baseline."""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from longhaul.modules.attention.base import Attention, AttentionConfig, register
from longhaul.modules.rotary import (
    accumulate,
    frequencies,
    frequencies_from_base,
    phases,
    rotate,
)


@register("softmax")
@dataclass(frozen=True, kw_only=True)
class SoftmaxConfig(AttentionConfig):
    """Rotary softmax attention."""

    cost: ClassVar[str] = "quadratic"

    rotary_base: float = 10_000.0
    """theta_j = rotary_base^(-2 (j - 1) / K), radians a token."""

    longest_document: int | None = None
    """When given, N in theta_j = 2 pi / N^(2 (j - 1) / K) instead, tokens."""

    def __post_init__(self) -> None:
        if self.rotary_base <= 1:
            raise ValueError(f"rotary_base: found {self.rotary_base}, wanted more than 1")
        if self.longest_document is not None and self.longest_document < 2:
            raise ValueError(f"longest_document: found {self.longest_document}, wanted 2 or more")

    def build(self, model_dim: int, num_heads: int) -> Attention:
        return Softmax(self, model_dim, num_heads)


class KeyValueCache(NamedTuple):
    """Everything seen so far; grows with T."""

    k: Float[Tensor, "B H T K"]
    v: Float[Tensor, "B H T K"]
    rotation: Float64[Tensor, "B"]  # of the last token, in tokens


class Softmax(Attention):
    """y_t = sum_i softmax_i(q_t . k_i / sqrt(K)) v_i, with q and k rotated by their positions."""

    def __init__(self, config: SoftmaxConfig, model_dim: int, num_heads: int) -> None:
        super().__init__(model_dim, num_heads)
        self.config = config
        self.qkv = nn.Linear(model_dim, 3 * model_dim, bias=False)
        self.out = nn.Linear(model_dim, model_dim, bias=False)

    def project(
        self,
        x: Float[Tensor, "B T D"],
        start: Float64[Tensor, "B"] | None,
        cu_seqlens: Int[Tensor, "documents_plus_1"] | None,
    ) -> tuple[Tensor, Tensor, Tensor, Float64[Tensor, "B T"]]:
        """Rotated q and k, v, all (B, H, T, K), and the rotation of every token."""
        q, k, v = rearrange(self.qkv(x), "b t (s h k) -> s b t h k", s=3, h=self.num_heads)
        rotation = accumulate(x.new_ones(x.shape[:2]), start, cu_seqlens)
        dtype = torch.promote_types(x.dtype, torch.float32)
        if self.config.longest_document is None:
            turns = frequencies_from_base(self.head_dim, self.config.rotary_base, x.device)
        else:
            turns = frequencies(self.head_dim, self.config.longest_document, x.device)
        cos, sin = phases(rotation, turns, dtype)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), rotation

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: KeyValueCache | None = None,
        *,
        cu_seqlens: Int[Tensor, "documents_plus_1"] | None = None,
        keep_state: bool = True,
    ) -> tuple[Float[Tensor, "B T D"], KeyValueCache | None]:
        q, k, v, rotation = self.project(x, None if state is None else state.rotation, cu_seqlens)
        if cu_seqlens is not None:
            if state is not None or keep_state:
                raise ValueError("cu_seqlens: packed documents carry no key-value cache")
            lengths = cu_seqlens.diff().tolist()
            parts = zip(*(tensor.split(lengths, dim=2) for tensor in (q, k, v)), strict=True)
            documents = [
                F.scaled_dot_product_attention(*part, is_causal=True)  # type: ignore[misc]
                for part in parts
            ]
            mixed = torch.cat(documents, dim=2)
        elif state is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            k, v = torch.cat([state.k, k], dim=2), torch.cat([state.v, v], dim=2)
            bias = causal_lower_right(q.shape[2], k.shape[2])
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        new_state = KeyValueCache(k, v, rotation[:, -1]) if keep_state else None
        return self.out(rearrange(mixed, "b h t k -> b t (h k)")), new_state

    def step(
        self, x: Float[Tensor, "B 1 D"], state: KeyValueCache
    ) -> tuple[Float[Tensor, "B 1 D"], KeyValueCache]:
        y, new_state = self(x, state)
        return y, new_state

    def weights(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T T"]:
        q, k, _, _ = self.project(x, None, None)
        logits = q @ k.mT / math.sqrt(self.head_dim)
        future = torch.ones_like(logits, dtype=torch.bool).triu(1)
        return logits.masked_fill(future, -math.inf).softmax(dim=-1)

    def flops_per_token(self, T: int) -> int:
        return 8 * self.model_dim**2 + 2 * (T + 1) * self.model_dim

    def state_size(self) -> int | None:
        return None
