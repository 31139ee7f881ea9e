"""One residual block as in GPT-2 or GPT-NeoX, around any attention variant."""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from longhaul.kernels.gelu import gelu
from longhaul.modules.attention import Attention
from longhaul.modules.attention.base import product_flops
from longhaul.modules.documents import Documents


class MLP(nn.Module):
    """Two projections with a GELU between them; the hidden width is 4 D."""

    def __init__(self, model_dim: int, *, biases: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(model_dim, 4 * model_dim, bias=biases)
        self.out = nn.Linear(4 * model_dim, model_dim, bias=biases)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.out(gelu(self.up(x)))  # type: ignore[no-any-return]

    def flops_per_token(self) -> int:
        """Forward FLOPs per token."""
        return product_flops(self)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    A parallel block, as in GPT-NeoX, is x + attention(norm(x)) + mlp(norm'(x)) of one x.
    """

    def __init__(
        self,
        *,
        attention: Attention,
        mlp: MLP,
        attention_norm: nn.Module,
        mlp_norm: nn.Module,
        parallel: bool,
    ) -> None:
        super().__init__()
        self.is_parallel = parallel
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: Any = None,
        *,
        documents: Documents | None = None,
        keep_state: bool = True,
    ) -> tuple[Float[Tensor, "B T D"], Any]:
        mixed, state = self.attention(
            self.attention_norm(x), state, documents=documents, keep_state=keep_state
        )
        return self._add(x, mixed), state

    def step(
        self, x: Float[Tensor, "B 1 D"], state: Any, *, inplace: bool = False
    ) -> tuple[Float[Tensor, "B 1 D"], Any]:
        """One more token; with `inplace`, the state may be overwritten."""
        step = self.attention.step_in_place if inplace else self.attention.step
        mixed, state = step(self.attention_norm(x), state)
        return self._add(x, mixed), state

    def projection_flops(self) -> int:
        """Forward FLOPs per token of all products with weights."""
        return self.attention.projection_flops() + self.mlp.flops_per_token()

    def _add(
        self, x: Float[Tensor, "B T D"], mixed: Float[Tensor, "B T D"]
    ) -> Float[Tensor, "B T D"]:
        """The residual stream after the output of the attention and that of the MLP."""
        y = x + mixed
        return y + self.mlp(self.mlp_norm(x if self.is_parallel else y))  # type: ignore[no-any-return]
