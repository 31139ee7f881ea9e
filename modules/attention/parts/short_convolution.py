"""Short convolution: each channel of queries, keys and values is mixed over the last few tokens."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import silu

from longhaul.modules.attention.parts.context_parallel import tokens_before
from longhaul.modules.documents import Documents


class ShortConvolution(nn.Module):
    """y_t = silu(b + sum_(j < width) w_j x_(t - j)), each of them a vector with a number a channel.

    Tokens before the first of a document count as zeros. The state is the last width - 1 inputs.
    It begins as torch's Conv1d does, with b = 0. `weight` has the shape of one, with w_0 last.
    Source: Fu et al. (2023), arXiv:2212.14052; with silu as in Mamba (2023), arXiv:2312.00752.
    """

    def __init__(self, channels: int, width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.past = width - 1  # tokens before the present one that are read
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.weight.shape[-1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def state_size(self) -> int:
        """Numbers in the state of one sequence, which has the dtype of the inputs."""
        return self.past * len(self.weight)

    def forward(
        self,
        x: Float[Tensor, "B T W"],
        documents: Documents,
        state: Float[Tensor, "B past W"] | None = None,
    ) -> tuple[Float[Tensor, "B T W"], Float[Tensor, "B past W"]]:
        """The output for x, and the state after it.

        Args:
            x: inputs, the part of this rank under context parallelism.
            documents: those of x.
            state: what an earlier call returned; None at the start of a document.
        """
        T, past = x.shape[1], self.past
        inputs = with_past(x, documents, state, past)
        # Products of few numbers each: sums of slices are faster than torch's Conv1d on a CPU.
        weight = self.weight[:, 0].to(torch.promote_types(x.dtype, torch.float32))
        y = x * weight[:, past]
        for back in range(1, past + 1):
            tap = inputs[:, past - back :][:, :T] * weight[:, past - back]
            if documents.age is not None:
                tap = torch.where(documents.age[..., None] >= back, tap, 0)
            y = y + tap
        if self.bias is not None:
            y = y + self.bias
        # A view would keep all inputs in memory.
        return silu(y.to(x.dtype)), inputs[:, T:].clone()


def with_past(
    x: Float[Tensor, "B T W"],
    documents: Documents,
    state: Float[Tensor, "B past W"] | None,
    past: int,
) -> Float[Tensor, "B past_T W"]:
    """The last `past` inputs before x, and x, as `ShortConvolution` takes them.

    What is before the first token of a row is zeros.
    """
    if documents.sequence_part is not None:
        (inputs,) = tokens_before(documents.sequence_part, (x,), past)
    else:
        inputs = x if state is None else torch.cat([state, x], dim=1)
    missing = past + x.shape[1] - inputs.shape[1]
    return F.pad(inputs, (0, 0, missing, 0)) if missing else inputs  # none would be a copy
