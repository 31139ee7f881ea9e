"""Softmax attention with PyTorch's fused kernels: what all variants of quadratic cost share."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64
from torch import Tensor

from longhaul.modules.attention.base import Attention, LayerShape, PartsConfig
from longhaul.modules.attention.parts.context_parallel import tokens_before
from longhaul.modules.attention.parts.masked_softmax import masked_softmax
from longhaul.modules.documents import Documents
from longhaul.modules.sequence_part import SequencePart


class KeyValueCache(NamedTuple):
    """Keys, as the variant caches them, and values of all tokens so far; grows with T."""

    k: Float[Tensor, "B G T J"]
    v: Float[Tensor, "B G T V"]

    def without_last(self, count: int) -> "KeyValueCache":
        """The cache before the last `count` tokens, 1 or more."""
        return KeyValueCache(self.k[:, :, :-count], self.v[:, :, :-count])


class GatedCache(NamedTuple):
    """Keys, values and log forget gates of all tokens so far; grows with T."""

    k: Float[Tensor, "B G T K"]
    v: Float[Tensor, "B G T V"]
    log_f: Float[Tensor, "B H T 1"]

    def without_last(self, count: int) -> "GatedCache":
        """The cache before the last `count` tokens, 1 or more."""
        return GatedCache(*(one[:, :, :-count] for one in self))


class RecentCache(NamedTuple):
    """Keys and values of the last window - 1 tokens at most, and the number of all tokens."""

    k: Float[Tensor, "B G S J"]
    v: Float[Tensor, "B G S V"]
    length: Float64[Tensor, "B"]


Cache = KeyValueCache | GatedCache


class ConvolvedCache(NamedTuple):
    """The state of a layer with a short convolution, or a shift of keys and values."""

    cache: Cache | RecentCache
    convolved: Float[Tensor, "B past W"]


State = Cache | RecentCache | ConvolvedCache


class FusedAttention(Attention):
    """y_t = sum_i softmax_i(logit_ti) v_i. A variant defines the cache and the logits."""

    groups_keys = True
    window: int | None = None  # tokens that a token sees, itself included; None: all
    softcap: float | None = None  # c in c tanh(logit / c); None: logits stay as they are
    scale: float | None = None  # of logits; None: K^(-1/2)

    def __init__(self, config: PartsConfig, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.add_output(config)

    @property
    def can_cut_state(self) -> bool:  # type: ignore[override]  # a class attribute in the base
        # A window holds no more tokens than the next one sees, a convolution fewer.
        return self.window is None and not self.num_convolved()

    def project(
        self,
        x: Float[Tensor, "B T D"],
        position: Float64[Tensor, "#B T"],
        qkv: Float[Tensor, "B T W"] | None = None,
    ) -> tuple[Float[Tensor, "B H T K"], Cache]:
        """Queries and new cache entries of x, from the positions of its tokens, 1 and up.

        By default they do not depend on positions. With a short convolution or a shift, qkv is what
        `queries_keys_values` takes by that name.
        """
        q, k, v = (one.transpose(1, 2) for one in self.queries_keys_values(x, qkv=qkv))
        return q, KeyValueCache(k, v)

    def operands(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S J"],
        position: Float64[Tensor, "#B S"],
    ) -> tuple[Float[Tensor, "B H T K"], Float[Tensor, "B G S K"]]:
        """q' and k' in the logits scale q'_t . k'_i, for the last T of S tokens."""
        return q, k

    def mix(
        self,
        q: Float[Tensor, "B H T K"],
        cache: Cache,
        position: Float64[Tensor, "#B S"],
        documents: Documents | None = None,
    ) -> Float[Tensor, "B H T V"]:
        """Softmax attention of the last T cached tokens to the cached tokens that they see."""
        q, k = self.operands(q, cache.k, position)
        window = self.window if self.window is not None and self.window < k.shape[2] else None
        # On a CPU torch's fused kernel writes out the mask of T < S.
        is_written_out = self.sequence_part is not None and not q.is_cuda
        is_limited = window is not None or self.softcap is not None
        if documents is not None or is_limited or is_written_out:
            age = None if documents is None else documents.age
            return masked_softmax(
                q, k, cache.v, None, age, scale=self.scale, window=window, softcap=self.softcap
            )
        is_grouped = q.shape[1] != k.shape[1]
        if q.shape[2] == k.shape[2]:
            return F.scaled_dot_product_attention(
                q, k, cache.v, is_causal=True, scale=self.scale, enable_gqa=is_grouped
            )
        # Imported here, because the import takes seconds and most commands do not need it.
        from torch.nn.attention.bias import causal_lower_right

        bias = causal_lower_right(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(
            q, k, cache.v, attn_mask=bias, scale=self.scale, enable_gqa=is_grouped
        )

    def logits(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T T"]:
        """The logits written out, without the causal mask."""
        position = _positions(x.shape[1], x.device)
        q, cache = self.project(x, position)
        q, k = self.operands(q, cache.k, position)
        scores = q @ _for_each_query_head(k, q).mT
        logits = scores / math.sqrt(q.shape[-1]) if self.scale is None else scores * self.scale
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: State | None = None,
        *,
        documents: Documents | None = None,
        keep_state: bool = True,
    ) -> tuple[Float[Tensor, "B T D"], State | None]:
        convolved = None
        if isinstance(state, ConvolvedCache):
            state, convolved = state
        past = 0 if state is None else state.k.shape[2]
        position = _positions(past + x.shape[1], x.device)
        part = self.sequence_part
        self.check_stateless(has_state=state is not None or keep_state)
        where = Documents(x, sequence_part=part) if documents is None else documents
        if documents is not None or part is not None:
            position = where.positions(position.new_zeros(len(x)))
        elif isinstance(state, RecentCache):
            position = position + (state.length - past)[:, None]
        given = {}
        if self.num_convolved():
            given["qkv"], convolved = self.projected(x, where, convolved)
        q, cache = self.project(x, position[:, past:], **given)
        if state is not None:
            pairs = zip(state[: len(cache)], cache, strict=True)
            cache = type(cache)(*(torch.cat(pair, dim=2) for pair in pairs))
        elif keep_state:
            # A view would keep the whole projection in memory.
            cache = type(cache)(*(one.contiguous() for one in cache))
        if part is not None:
            cache, position = self._with_earlier_parts(part, cache, position)
        mixed = self.mix(q, cache, position, documents).transpose(1, 2)  # (B, T, H, V)
        y = self.read_out(x, mixed)
        if not keep_state:
            return y, None
        kept = self._kept(cache, position)
        return y, kept if convolved is None else ConvolvedCache(kept, convolved)

    def _with_earlier_parts(
        self, part: SequencePart, cache: Cache, position: Float64[Tensor, "B T"]
    ) -> tuple[Cache, Float64[Tensor, "B S"]]:
        """What the tokens of this part of a sequence may see: also that of earlier parts."""
        own = *(one.transpose(1, 2) for one in cache), position
        most = None if self.window is None else self.window - 1
        *joined, position = tokens_before(part, own, most)
        return type(cache)(*(one.transpose(1, 2) for one in joined)), position.detach()

    def check_context_parallel(self) -> None:
        """Every rank computes the attention of its queries to the tokens before, or to a window."""

    def whole_length(self, T: int, S: int) -> int:
        """Tokens of the whole sequence, where the last T of S are those of x."""
        return S if self.sequence_part is None else self.sequence_part.count * T

    def _kept(self, cache: Cache, position: Float64[Tensor, "#B S"]) -> Cache | RecentCache:
        """What later tokens may see of the cache."""
        if self.window is None:
            return cache
        S = cache.k.shape[2]
        k, v = (one[:, :, max(0, S - self.window + 1) :].clone() for one in cache)
        return RecentCache(k, v, position[:, -1].expand(len(k)).clone())

    def weights(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T T"]:
        logits = self.logits(x)
        unseen = torch.ones_like(logits, dtype=torch.bool).triu(1)
        if self.window is not None:
            unseen = unseen | torch.ones_like(unseen).tril(-self.window)
        return logits.masked_fill(unseen, -math.inf).softmax(dim=-1)

    def values(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H V"]:
        q, cache = self.project(x, _positions(x.shape[1], x.device))
        return _for_each_query_head(cache.v, q).transpose(1, 2)

    def read_out(
        self, x: Float[Tensor, "B T D"], mixed: Float[Tensor, "B T H V"]
    ) -> Float[Tensor, "B T D"]:
        return self.project_output(x, mixed.flatten(2))

    def form(self, T: int, backend: str) -> str:
        window = "" if self.window is None else f" in a window of {self.window} tokens"
        return f"fused softmax{window}"

    def mixing_flops(self, T: int, backend: str = "torch") -> int:
        seen = T if self.window is None else min(T, self.window)
        pairs = seen * (seen + 1) // 2 + (T - seen) * seen
        return 4 * pairs * self.shape.mixed_width // T

    def state_size(self) -> int | None:
        if self.window is None:
            return None
        return sum(x.numel() for x in self._state_after(self.window, torch.float32))

    def allocated_bytes(self, T: int, dtype: torch.dtype) -> int:
        convolved = self.num_convolved() * dtype.itemsize
        if self.window is not None:
            k, v, length, *_ = self._state_after(self.window, dtype)
            per_token = (k.nbytes + v.nbytes) // max(1, k.shape[2])
            return min(T, k.shape[2]) * per_token + length.nbytes + convolved
        # A single token's values may be a view, which holds the whole projection.
        return T * (super().allocated_bytes(2, dtype) - convolved) // 2 + convolved


def _for_each_query_head(
    x: Float[Tensor, "B G S V"], q: Float[Tensor, "B H T K"]
) -> Float[Tensor, "B H S V"]:
    """What each query head has of its key head."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _positions(T: int, device: torch.device) -> Float64[Tensor, "1 T"]:
    return torch.arange(1, T + 1, dtype=torch.float64, device=device)[None]
