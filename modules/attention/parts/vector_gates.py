"""A forget gate for each part of a head, such as each pair of coordinates that rotates together."""

import torch
from jaxtyping import Float
from torch import Tensor

from longhaul.modules.attention.power import GatedSum, OpInputs, PowerAttention

Stacked = tuple[Tensor, Tensor, Tensor, Tensor | None]


class VectorGates(PowerAttention):
    """y_t = sum_n sum_i exp(G_tn - G_in) (scale q_tn . k_in) v_i, for the parts n of a head's keys.

    The op has one gate per head. At degree 1 an inner product is the sum of its parts', so that
    every part is a head of the op, with keys of width K / N and all values of its head. This is
    exact, and stable for gates of any size: only gates of i + 1 .. t are multiplied. The state is
    as large as with one gate. In exchange the op reads N copies of the values, and scores the pairs
    of tokens in a chunk N times.

    Where `splits_values`, the parts are those of the values instead, and are not summed. Part n of
    N has the coordinates n, n + N, ... With N = K / 2 it is a pair that rotates together.
    """

    num_parts = 1  # with 1, log gates are (B, T, G), as usual; otherwise (B, T, G, N)
    splits_values = False

    def split_heads(self, num_parts: int) -> None:
        """From now on, log gates have one number for each of so many parts of a head."""
        self.num_parts = num_parts
        if self.splits_values:
            self.value_dim //= num_parts
        else:
            self.key_dim //= num_parts

    @property
    def op_heads(self) -> int:
        return super().op_heads * self.num_parts

    def stack(self, operands: OpInputs) -> Stacked:
        return self.parts(*super().stack(operands))

    def parts(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B T G K"],
        v: Float[Tensor, "B T G V"],
        log_g: Float[Tensor, "B T G N"] | Float[Tensor, "B T G"] | None,
    ) -> Stacked:
        """The arguments of the op with each part as a head."""
        N = self.num_parts
        if N == 1:
            return q, k, v, log_g

        def split(x: Tensor) -> Tensor:
            parts: Tensor = x.unflatten(-1, (-1, N))
            return parts.movedim(-1, 2).flatten(2, 3)  # (B, T, NH, W)

        def copy(x: Tensor) -> Tensor:
            return x.repeat(1, 1, N, 1)  # (B, T, NH, W)

        if self.splits_values:
            q, k, v = copy(q), copy(k), split(v)
        else:
            q, k, v = split(q), split(k), copy(v)
        return q, k, v, None if log_g is None else log_g.mT.flatten(2)

    def merge(self, out: Float[Tensor, "B T NH V"], operands: OpInputs) -> Tensor:
        N = self.num_parts
        if self.splits_values:
            out = out.unflatten(2, (N, -1)).movedim(2, -1).flatten(-2)  # (B, T, H, WN)
        elif N > 1:
            out = out.unflatten(2, (N, -1)).sum(dim=2)  # (B, T, H, V)
        return super().merge(out, operands)

    def part_weights(self, operands: OpInputs) -> Float[Tensor, "B H N T T"]:
        """(scale q_tn . k_in) exp(G_tn - G_in), of the only gated sum, without scales."""
        q, k, v, log_g = self.parts(*operands[:3], operands.sums[0].log_g)
        scale = self.key_dim**-0.5 if self.scale is None else self.scale
        scores = scale * torch.einsum("bthk,bihk->bhti", q, k)
        weights = scores * self.coefficients(OpInputs(q, k, v, (GatedSum(log_g),)))
        parts: Tensor = weights.unflatten(1, (self.num_parts, -1))
        return parts.transpose(1, 2)
