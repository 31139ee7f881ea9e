"""Softmax attention with PyTorch's fused kernels: what all variants of quadratic cost share."""

import math
from abc import abstractmethod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Float64
from torch import Tensor

from longhaul.modules.attention.base import Attention, AttentionConfig, LayerShape
from longhaul.modules.attention.parts.masked_softmax import masked_softmax
from longhaul.modules.documents import Documents


class KeyValueCache(NamedTuple):
    """Keys, as the variant caches them, and values of all tokens so far; grows with T."""

    k: Float[Tensor, "B H T J"]
    v: Float[Tensor, "B H T V"]


class FusedAttention(Attention):
    """y_t = sum_i softmax_i(logit_ti) v_i. A variant defines the cache and the logits."""

    def __init__(self, config: AttentionConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.out = shape.out_projection()

    @abstractmethod
    def project(
        self, x: Float[Tensor, "B T D"], position: Float64[Tensor, "#B T"]
    ) -> tuple[Float[Tensor, "B H T K"], KeyValueCache]:
        """Queries and new cache entries of x, from the positions of its tokens, 1 and up."""

    def operands(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B H S J"],
        position: Float64[Tensor, "#B S"],
    ) -> tuple[Float[Tensor, "B H T K"], Float[Tensor, "B H S K"]]:
        """q' and k' in the logits q'_t . k'_i / sqrt(K), for the last T of S tokens."""
        return q, k

    def mix(
        self,
        q: Float[Tensor, "B H T K"],
        cache: KeyValueCache,
        position: Float64[Tensor, "#B S"],
        documents: Documents | None = None,
    ) -> Float[Tensor, "B H T V"]:
        """Softmax attention of the last T cached tokens to all cached tokens of their document."""
        q, k = self.operands(q, cache.k, position)
        if documents is not None:
            return masked_softmax(q, k, cache.v, None, documents.age)
        if q.shape[2] == k.shape[2]:
            return F.scaled_dot_product_attention(q, k, cache.v, is_causal=True)
        # Imported here, because the import takes seconds and most commands do not need it.
        from torch.nn.attention.bias import causal_lower_right

        bias = causal_lower_right(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, cache.v, attn_mask=bias)

    def logits(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T T"]:
        """The logits written out, without the causal mask."""
        position = _positions(x.shape[1], x.device)
        q, cache = self.project(x, position)
        q, k = self.operands(q, cache.k, position)
        return q @ k.mT / math.sqrt(q.shape[-1])

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: KeyValueCache | None = None,
        *,
        documents: Documents | None = None,
        keep_state: bool = True,
    ) -> tuple[Float[Tensor, "B T D"], KeyValueCache | None]:
        past = 0 if state is None else state.k.shape[2]
        position = _positions(past + x.shape[1], x.device)
        if documents is not None:
            position = documents.positions(position.new_zeros(len(x)))
        q, cache = self.project(x, position[:, past:])
        if state is not None:
            pairs = zip(state, cache, strict=True)
            cache = KeyValueCache(*(torch.cat(pair, dim=2) for pair in pairs))
        elif keep_state:
            # A view would keep the whole projection in memory.
            cache = KeyValueCache(*(one.contiguous() for one in cache))
        mixed = rearrange(self.mix(q, cache, position, documents), "b h t v -> b t h v")
        return self.read_out(x, mixed), cache if keep_state else None

    def weights(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T T"]:
        logits = self.logits(x)
        future = torch.ones_like(logits, dtype=torch.bool).triu(1)
        return logits.masked_fill(future, -math.inf).softmax(dim=-1)

    def values(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H V"]:
        return self.project(x, _positions(x.shape[1], x.device))[1].v.transpose(1, 2)

    def read_out(
        self, x: Float[Tensor, "B T D"], mixed: Float[Tensor, "B T H V"]
    ) -> Float[Tensor, "B T D"]:
        y: Tensor = self.out(rearrange(mixed, "b t h v -> b t (h v)"))
        return y

    def form(self, T: int, backend: str) -> str:
        return "fused softmax"

    def mixing_flops(self, T: int, backend: str = "torch") -> int:
        return 2 * (T + 1) * self.model_dim  # the causal half of 4 T D

    def allocated_bytes(self, T: int, dtype: torch.dtype) -> int:
        # A single token's values may be a view, which holds the whole projection.
        return T * super().allocated_bytes(2, dtype) // 2


def _positions(T: int, device: torch.device) -> Float64[Tensor, "1 T"]:
    return torch.arange(1, T + 1, dtype=torch.float64, device=device)[None]
