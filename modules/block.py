"""One residual block as in GPT-2, GPT-NeoX or Llama, around any attention variant."""

from collections.abc import Callable
from typing import Any, Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from longhaul.kernels.gelu import gelu
from longhaul.modules.attention import Attention
from longhaul.modules.attention.base import product_flops
from longhaul.modules.documents import Documents

MLPKind = Literal["gelu", "gelu_erf", "relu2", "swiglu", "geglu"]


def relu2(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """max(x, 0)^2, So et al. (2021), arXiv:2109.08668."""
    return F.relu(x).square()


# In a gated kind the activation is that of the gate.
_ACTIVATIONS: dict[MLPKind, Callable[[Tensor], Tensor]] = {
    **{"gelu": gelu, "gelu_erf": F.gelu, "relu2": relu2},
    **{"swiglu": F.silu, "geglu": gelu},
}
_GATED = ("swiglu", "geglu")


class MLP(nn.Module):
    """out(act(up(x))), or in the gated kinds out(act(gate(x)) * up(x)); the hidden width is F.

    Source of the gated kinds: Shazeer (2020), arXiv:2002.05202.
    """

    def __init__(
        self, model_dim: int, hidden_dim: int, *, kind: MLPKind = "gelu", biases: bool = False
    ) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[kind]
        self.up = nn.Linear(model_dim, hidden_dim, bias=biases)
        self.gate = nn.Linear(model_dim, hidden_dim, bias=biases) if kind in _GATED else None
        self.out = nn.Linear(hidden_dim, model_dim, bias=biases)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        if self.gate is None:
            hidden = self.activation(self.up(x))
        else:
            hidden = self.activation(self.gate(x)) * self.up(x)
        return self.out(hidden)  # type: ignore[no-any-return]

    def flops_per_token(self) -> int:
        """Forward FLOPs per token."""
        return product_flops(self)


class Block(nn.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))).

    Most models have only the inner norms, OLMo-2 only the outer ones, and Gemma both. A parallel
    block, as in GPT-NeoX, adds what attention and MLP make of one x. That of Mamba has no MLP.
    """

    def __init__(
        self,
        *,
        attention: Attention,
        mlp: MLP | None,
        attention_norm: nn.Module,
        mlp_norm: nn.Module,
        attention_post_norm: nn.Module,
        mlp_post_norm: nn.Module,
        parallel: bool,
    ) -> None:
        super().__init__()
        self.is_parallel = parallel
        self.attention_norm = attention_norm
        self.attention = attention
        self.attention_post_norm = attention_post_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_post_norm = mlp_post_norm

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
        mlp = 0 if self.mlp is None else self.mlp.flops_per_token()
        return self.attention.projection_flops() + mlp

    def _add(
        self, x: Float[Tensor, "B T D"], mixed: Float[Tensor, "B T D"]
    ) -> Float[Tensor, "B T D"]:
        """The residual stream after the output of the attention and that of the MLP."""
        mixed = self.attention_post_norm(mixed)
        y = x + mixed
        if self.mlp is None:
            return y
        added = self.mlp(self.mlp_norm(x if self.is_parallel else y))
        return y + self.mlp_post_norm(added)  # type: ignore[no-any-return]
