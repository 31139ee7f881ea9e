"""The attention-free form of a variant: a rotation per channel instead of products of vectors."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from longhaul.modules.attention.parts.vector_gates import VectorGates
from longhaul.modules.attention.power import GatedSum, OpInputs, for_each_query_head
from longhaul.modules.documents import Documents


class Channels(VectorGates):
    """y_t,c = sum_i w_ti (R_t q_t,c) . (R_i k_i,c) v_i,c, with q_t,c and k_i,c in R^2, per channel.

    Every channel has its own pair of query and key coordinates and its own rotation rate; w_ti is
    the variant's. The state holds two numbers per channel and gated sum, sum_i w_ti R_i k_i v_i.
    The op computes it with queries and keys of width 1 that are all ones, and values R_i k_i v_i of
    width 2 V; the real queries R_t q_t scale its output. There are H V attention matrices, one per
    channel.

    A class with this form inherits from this one first, and from the variant next.
    Source: the notes on Cartan decomposition, "Getting rid of the bilinear form".
    """

    coordinates = 2  # channel c of a head has the coordinates c and c + V of its queries and keys
    splits_values = True
    shares_scores = False  # Scales are of channels.
    in_float32 = False
    generate: Callable[..., tuple[tuple[GatedSum, ...], dict[str, Tensor]]]
    """The variant's method: its gates and scales, and the carried values at every token."""

    def op_widths(self) -> tuple[int, int]:
        return 1, 2 * self.head_dim

    def before_rotation(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k  # taken as they are, also where the variant normalises them

    def project(
        self, x: Float[Tensor, "B T D"], documents: Documents, carried: dict[str, Tensor]
    ) -> tuple[OpInputs, dict[str, Tensor]]:
        sums, after = self.generate(x, documents, carried)
        q, k, v = self.queries_keys_values(
            x, after["rotation"], documents.T, qkv=carried.get("qkv")
        )
        v = v.to(q.dtype)
        q_ones, k_ones = (torch.ones_like(one[..., :1]) for one in (q, v))
        sums = tuple(
            one._replace(output_scale=q if one.output_scale is None else q * one.output_scale)
            for one in sums
        )
        operands = OpInputs(q_ones, k_ones, k * torch.cat([v, v], dim=-1), sums)
        return operands, {name: documents.last(value) for name, value in after.items()}

    def merge(
        self, out: Float[Tensor, "B T NH V2"], operands: OpInputs
    ) -> Float[Tensor, "B T H V"]:
        first, second = super().merge(out, operands).chunk(2, dim=-1)
        return first + second

    def values(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T HV 1"]:
        v = for_each_query_head(self.queries_keys_values(x)[2], self.num_heads)
        return v.flatten(2)[..., None]

    def weights(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B HV T T"]:
        documents = Documents(x)
        sums, after = self.generate(x, documents, self.initial_carried(len(x), x.device))
        q, k, v = self.queries_keys_values(x, after["rotation"])
        q, k, _, sums = self.of_query_heads(OpInputs(q, k, v, sums))
        q, k = (one.unflatten(-1, (2, -1)).mT for one in (q, k))  # (B, T, H, V, 2)
        w = 2 * self.head_dim // self.num_parts
        radial = self._radial(sums, x).unflatten(1, (self.num_parts, -1)).transpose(1, 2)
        radial = radial.repeat(1, 1, w, 1, 1)  # (B, H, 2V, T, T)
        radial = radial.unflatten(2, (2, -1)).transpose(2, 3)  # (B, H, V, 2, T, T)
        weights = torch.einsum("bthvs,bihvs,bhvsti->bhvti", q, k, radial)
        return weights.flatten(1, 2)

    def _radial(
        self, sums: tuple[GatedSum, ...], x: Float[Tensor, "B T D"]
    ) -> Float[Tensor, "B NH T T"]:
        """w_ti for every part of every head."""
        N = self.num_parts

        def scale(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[..., :N].mT.flatten(2)[..., None]  # (B, T, NH, 1)

        def gate(log_g: Tensor | None) -> Tensor | None:
            return log_g if log_g is None or N == 1 else log_g.mT.flatten(2)  # (B, T, NH)

        parts = tuple(GatedSum(gate(g), scale(column), scale(row)) for g, column, row in sums)
        ones = x.new_ones(*x.shape[:2], N * self.num_heads, 1)
        return self.coefficients(OpInputs(ones, ones, ones, parts))
