"""Key logits that measure how far a token points away from those before it."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longhaul.modules.attention.base import LayerShape
from longhaul.modules.documents import Documents


class DeviationLogit(nn.Module):
    """s_i = -u_i . m_i / sqrt(K): how far u_i = W_u x_i points away from its running mean m_i.

    m_i = (e^tau mu + u_1 + ... + u_i) / (e^tau + i), with a learned prior mu of weight e^tau.
    There is one for each key head.
    Source: ZeroS, Lu et al. (2025), arXiv:2602.05230.
    """

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.num_heads = shape.key_heads
        self.project = shape.projection(shape.key_heads * shape.head_dim)
        self.mu = nn.Parameter(torch.empty(shape.key_heads, shape.head_dim))
        self.tau = nn.Parameter(torch.empty(shape.key_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.mu)
        nn.init.zeros_(self.tau)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        count: Float[Tensor, "B T"],
        documents: Documents,
        sum_u: Float[Tensor, "N H K"],
    ) -> tuple[Float[Tensor, "B T H"], Float[Tensor, "B T H K"]]:
        """Logits, and the sums of u up to every token, in at least float32."""
        u = self.project(x).unflatten(-1, (self.num_heads, -1))  # (B, T, H, K)
        u = u.to(torch.promote_types(u.dtype, torch.float32))
        total = documents.cumsum(u, sum_u).to(u.dtype)
        count = count[..., None, None].to(u.dtype)
        prior = (self.tau.to(u.dtype)[:, None] - count.log()).sigmoid()  # e^tau / (e^tau + i)
        mean = prior * self.mu.to(u.dtype) + (1 - prior) * total / count
        return -(u * mean).sum(dim=-1) / u.shape[-1] ** 0.5, total
