"""Cartan kernels: rotated queries and keys, and a generator that weighs each pair of tokens."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize

from longhaul.modules.attention.base import Attention, LayerShape, RotaryConfig, register
from longhaul.modules.attention.parts.channels import Channels
from longhaul.modules.attention.parts.gates import ForgetGate, ForgetGateConfig, ScalarPerHead
from longhaul.modules.attention.parts.key_softmax import key_softmax
from longhaul.modules.attention.parts.vector_gates import VectorGates
from longhaul.modules.attention.power import GatedSum, OpInputs, PowerConfig
from longhaul.modules.documents import Documents


@register("cartan")
@dataclass(frozen=True, kw_only=True)
class CartanConfig(ForgetGateConfig, RotaryConfig, PowerConfig):
    """The generator of the weights, and the form of the inner product."""

    generator: Literal["additive", "product", "full"] = "full"
    """additive (softmax over key logits) | product (of forget gates) | full (both multiplied)."""

    generator_per: Literal["head", "pair", "coordinate"] = "head"
    """head | pair (of rotated coordinates) | coordinate: the unit that has its own generator."""

    step_size: bool = False
    """full only: add log softplus(W x) to the logits of the softmax, the notes' log Delta."""

    lengths: Literal["unit", "ratio", "raw"] = "unit"
    """unit (directions of q and k only) | ratio (times |q_t| / |k_i|) | raw (times |q_t| |k_i|)."""

    negative_diagonal: bool = False
    """Multiply each coordinate of rotated keys by tanh(1 + W x); negative factors reflect it."""

    bilinear: bool = True
    """true: inner products of queries and keys | false: attention-free, two numbers per channel."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.bilinear or self.generator_per == "pair":
            self.check_whole_rotary("with bilinear false or generator_per pair, which are of pairs")
        if self.step_size and self.generator != "full":
            raise ValueError(
                f"step_size: found true with generator {self.generator}, wanted generator full"
            )
        if self.negative_diagonal and not self.bilinear:
            raise ValueError(
                "negative_diagonal: found true with bilinear false, whose keys already are a "
                "diagonal of either sign; wanted false"
            )
        if self.lengths != "unit" and not self.bilinear:
            raise ValueError(
                f"lengths: found {self.lengths!r} with bilinear false, whose q and k are taken as "
                "they are; wanted unit"
            )

    def build(self, shape: LayerShape) -> Attention:
        variant = Cartan if self.bilinear else CartanChannels
        return variant(self, shape)


class Cartan(VectorGates):
    """y_t = sum_i (R_t q_t / |q_t|) . (Sigma_ti D_i R_i k_i / |k_i|) v_i, then a norm per head.

    Sigma_ti is g_ti times the identity, or a diagonal of such numbers:

        additive: g_ti = exp(s_i) / sum_(j <= t) exp(s_j)     what to attend to
        product:  g_ti = gamma_(i+1) ... gamma_t              how memories fade
        full:     the product of the two

    with s_t = W_s x_t and gamma_t = sigmoid(W_g x_t) per head, R the rotation by position, and
    D_i = diag(tanh(1 + W_d x_i)) with negative_diagonal, else 1. key_softmax.py shows how the
    additive generator becomes a gate.

    generator_per "pair" gives every rotated pair its own s and gamma, so that Sigma_ti is in
    SPD(n) x I_2 and commutes with rotations. "coordinate" gives one to every coordinate: a diagonal
    in SPD(2n), which does not. vector_gates.py shows how they become gates of the op, and what they
    cost. Sigma_ti is diagonal always; the notes do not say how one that is not would be generated.

    step_size makes s_t = W_s x_t + log Delta_t with Delta_t = softplus(W_Delta x_t), the step size
    of Mamba (arXiv:2312.00752). The notes write exp(p_i + log Delta_i) and do not define Delta; a
    bias would shift all logits of a head by nearly the same, so there is none.

    `lengths` "ratio" puts |q_t| / |k_i| between the rotations, as assumption 1 asks, and "raw" is
    q_t and k_i as the notes write them in the full generator, without hats. The norm per head
    removes |q_t| again, so that the length of the key is what remains of either.

    Sources: the notes on Cartan decomposition, assumptions 1, 2 and 4 and "Prefix-product Sigmoid *
    Softmax". They do not say how s, gamma and D follow from x, how many there are, or where
    positions begin (here at 1, which matters where Sigma or D does not commute with rotations): all
    of that is ours, and so are the norm, and rotations in the full generator too.
    """

    scale = 1.0
    in_float32 = True

    def __init__(self, config: CartanConfig, shape: LayerShape) -> None:
        coordinates = self.coordinates * shape.head_dim
        parts = {"head": 1, "pair": coordinates // 2, "coordinate": coordinates}
        N = parts[config.generator_per]
        self.logits_per_head = 0 if config.generator == "product" else N
        super().__init__(config, shape)
        self.lengths = config.lengths
        self.split_heads(N)
        self.logit, self.step_size, self.gate = None, None, None
        if config.generator != "product":
            self.logit = ScalarPerHead(shape.width, shape.key_heads * N)
        if config.step_size:
            self.step_size = ScalarPerHead(shape.width, shape.key_heads * N)
        if config.generator != "additive":
            self.gate = ForgetGate(shape.width, shape.key_heads, config.gate_init, per_head=N)
        # Weights times cosines are small, and the usual eps of 1e-5 would dominate their variance.
        self.norm = nn.GroupNorm(shape.heads, shape.mixed_width, eps=1e-10)
        self.add_qkv(config.build_rotary)
        self.diagonal = None
        if config.negative_diagonal:
            self.diagonal = shape.projection(shape.key_heads * shape.head_dim)

    def initial_carried(self, count: int, device: torch.device) -> dict[str, Tensor]:
        carried = super().initial_carried(count, device)
        if self.logit is not None:
            carried["log_mass"] = self.initial_log_mass(count, device)
        return carried

    def project(
        self, x: Float[Tensor, "B T D"], documents: Documents, carried: dict[str, Tensor]
    ) -> tuple[OpInputs, dict[str, Tensor]]:
        (gated_sum,), after = self.generate(x, documents, carried)
        q, k, v = self.queries_keys_values(
            x, after["rotation"], documents.T, qkv=carried.get("qkv")
        )
        if self.diagonal is not None:
            k = k * (1 + self.diagonal(x)).tanh().unflatten(-1, (-1, k.shape[-1]))
        if self.num_parts > 1 and gated_sum.value_scale is not None:
            # The scales of the parts of a key; the values of a head are one for all parts.
            k = k * gated_sum.value_scale
            gated_sum = gated_sum._replace(value_scale=None)
        operands = OpInputs(q.to(v.dtype), k.to(v.dtype), v, (gated_sum,))
        return operands, {name: documents.last(value) for name, value in after.items()}

    def before_rotation(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.lengths == "raw":
            return q, k
        if self.lengths == "ratio":
            # The eps of `normalize`, once more.
            return q, normalize(k, dim=-1) / k.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        return normalize(q, dim=-1), normalize(k, dim=-1)

    def generate(
        self, x: Float[Tensor, "B T D"], documents: Documents, carried: dict[str, Tensor]
    ) -> tuple[tuple[GatedSum, ...], dict[str, Tensor]]:
        """The gates and value scales in one gated sum, and the carried values at every token.

        With gates for N parts of a head, the value scales have one column per coordinate.
        """
        after = {"rotation": documents.positions(carried["rotation"])}
        log_g = None if self.gate is None else self.gate(x)
        alpha = None
        if self.logit is not None:
            s = self.logit(x)
            if self.step_size is not None:
                s = s + log_softplus(self.step_size(x))
            softmax = key_softmax(s, documents, carried["log_mass"])
            log_g = softmax.log_g if log_g is None else log_g + softmax.log_g
            alpha = softmax.alpha.unflatten(-1, (-1, self.num_parts))  # (B, T, H, N)
            after["log_mass"] = softmax.log_mass
        if self.num_parts > 1:
            assert log_g is not None
            log_g = log_g.unflatten(-1, (-1, self.num_parts))  # (B, T, H, N)
            if alpha is not None:
                width = self.value_dim if self.splits_values else self.key_dim
                alpha = alpha.repeat(1, 1, 1, width)  # (B, T, H, WN)
        return (GatedSum(log_g, alpha),), after

    def weights(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B W T T"]:
        if self.num_parts == 1:
            return super().weights(x)
        return self.part_weights(self.of_query_heads(self.operands(x))).sum(dim=2)


def log_softplus(x: Tensor) -> Tensor:
    """log(log(1 + exp(x))), also where exp(x) is too small for the dtype."""
    smallest = -20.0
    near = (-logsigmoid(-x.clamp(min=smallest))).log()
    # log(1 + e) = e - e^2 / 2 + ..., so that its log is x - e / 2 + ...
    return torch.where(x > smallest, near, x - x.clamp(max=smallest).exp() / 2)


class CartanChannels(Channels, Cartan):
    """The attention-free form of Cartan; with generator_per "pair", a generator per channel."""
