"""One residual block as in GPT-2, around any attention variant."""

from typing import Any

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from longhaul.modules.attention import Attention


class MLP(nn.Module):
    """Two projections with a GELU between them; the hidden width is 4 D."""

    def __init__(self, model_dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(model_dim, 4 * model_dim, bias=False)
        self.out = nn.Linear(4 * model_dim, model_dim, bias=False)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.out(F.gelu(self.up(x), approximate="tanh"))  # type: ignore[no-any-return]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(attention.model_dim, bias=False)
        self.attention = attention
        self.mlp_norm = nn.LayerNorm(attention.model_dim, bias=False)
        self.mlp = MLP(attention.model_dim)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: Any = None,
        *,
        cu_seqlens: Int[Tensor, "documents_plus_1"] | None = None,
        keep_state: bool = True,
    ) -> tuple[Float[Tensor, "B T D"], Any]:
        mixed, state = self.attention(
            self.attention_norm(x), state, cu_seqlens=cu_seqlens, keep_state=keep_state
        )
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), state

    def step(self, x: Float[Tensor, "B 1 D"], state: Any) -> tuple[Float[Tensor, "B 1 D"], Any]:
        mixed, state = self.attention.step(self.attention_norm(x), state)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), state
