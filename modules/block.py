"""One residual block as in GPT-2 or GPT-NeoX, around any attention variant."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from longhaul.kernels.gelu import gelu
from longhaul.modules.attention import Attention


class MLP(nn.Module):
    """Two projections with a GELU between them; the hidden width is 4 D."""

    def __init__(self, model_dim: int, *, biases: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(model_dim, 4 * model_dim, bias=biases)
        self.out = nn.Linear(4 * model_dim, model_dim, bias=biases)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.out(gelu(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    A parallel block, as in GPT-NeoX, is x + attention(norm(x)) + mlp(norm'(x)) of one x. With
    `biases` every projection (`nn.Linear`) has one, also those of the attention, and both norms.
    Whatever else a kind computes from x, such as gates, is as the kind defines it.
    """

    def __init__(self, attention: Attention, *, parallel: bool = False) -> None:
        super().__init__()
        biases = attention.shape.biases
        self.is_parallel = parallel
        self.attention_norm = nn.LayerNorm(attention.model_dim, bias=biases)
        self.attention = attention
        self.mlp_norm = nn.LayerNorm(attention.model_dim, bias=biases)
        self.mlp = MLP(attention.model_dim, biases=biases)

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
        return self._add(x, mixed), state

    def step(self, x: Float[Tensor, "B 1 D"], state: Any) -> tuple[Float[Tensor, "B 1 D"], Any]:
        mixed, state = self.attention.step(self.attention_norm(x), state)
        return self._add(x, mixed), state

    def step_in_place(
        self, x: Float[Tensor, "B 1 D"], state: Any
    ) -> tuple[Float[Tensor, "B 1 D"], Any]:
        mixed, state = self.attention.step_in_place(self.attention_norm(x), state)
        return self._add(x, mixed), state

    def _add(
        self, x: Float[Tensor, "B T D"], mixed: Float[Tensor, "B T D"]
    ) -> Float[Tensor, "B T D"]:
        """The residual stream after the output of the attention and that of the MLP."""
        y = x + mixed
        return y + self.mlp(self.mlp_norm(x if self.is_parallel else y))  # type: ignore[no-any-return]
