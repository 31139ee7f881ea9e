"""Symmetric-power attention: the kernel (q . k)^p, whose state has a fixed size."""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from longhaul.modules.attention.base import (
    Attention,
    DocumentRotaryConfig,
    LayerShape,
    register,
)
from longhaul.modules.attention.parts.gates import ScalarPerHead
from longhaul.modules.attention.power import GatedSum, OpInputs, PowerAttention, PowerConfig
from longhaul.modules.documents import Documents
from longhaul.modules.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class SympowOptions(DocumentRotaryConfig, PowerConfig):
    """Options that all symmetric-power variants share."""

    degree: int = 2
    """Power p of the kernel (q . k)^p, even, 2 or more."""

    longest_document: int | None = 65_536
    """N of theta_j = 2 pi / N^(2 (j - 1) / K), in tokens, 2 or more; null: rotary_base is used."""

    qk_norm: bool = False
    """As model.qk_norm head, with an eps of 2^-23, where the model has none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.degree) is not int or self.degree < 2 or self.degree % 2:
            raise ValueError(f"degree: found {self.degree}, wanted an even number of 2 or more")
        if self.degree > 4 and self.initial_state == "learned":
            raise ValueError(
                f"initial_state: found learned with degree {self.degree}, whose states are too "
                "large to build; wanted zero, or degree 2 or 4"
            )


@register("sympow")
@dataclass(frozen=True, kw_only=True)
class SympowConfig(SympowOptions):
    """The options of symmetric-power attention without learned rotation rates."""

    rotary: Literal["fixed", "none"] = "fixed"
    """fixed (rotate queries and keys by their positions) | none (longest_document is not read)."""

    def build_rotary(self, width: int) -> Rotary | None:
        return super().build_rotary(width) if self.rotary == "fixed" else None

    def build(self, shape: LayerShape) -> Attention:
        return Sympow(self, shape)


class RotationRate(ScalarPerHead):
    """beta_t = 1 + tanh(W x_t), one per layer, at least float32.

    beta_t = 1 rotates by as much as one position does in fixed rotary embeddings. The source does
    not say how W is initialised; we draw it from N(0, 0.02^2), as GPT-2 does.
    """

    def __init__(self, model_dim: int) -> None:
        super().__init__(model_dim, 1)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T"]:
        return 1 + super().forward(x).squeeze(-1).tanh()


class Sympow(PowerAttention):
    """y_t = sum_i w_ti v_i / sum_i w_ti with w_ti = (q_t . k_i)^p / K^(p / 2).

    q_t and k_t are rotated by t theta, unless rotary is none: then tokens differ only in their
    content. Subclasses may set `gate`, which multiplies w_ti by gamma_(i+1) ... gamma_t, and
    `rate`, which makes the rotation mu_t = mu_(t-1) + beta_t theta.
    The papers have no 1 / sqrt(K) in the power. It cancels in y_t, and keeps weights near 1.
    Source: Symmetric Power Transformers, Buckman, Gelada, Zhang (2024). Without rotation: Conformal
    Transformations for Symmetric Power Transformers (2025), section 2.1.
    """

    normalize = True

    def __init__(self, config: SympowOptions, shape: LayerShape) -> None:
        super().__init__(config, shape)
        self.degree = config.degree
        # torch's default of float32 for all dtypes.
        self.add_qkv(config.build_rotary, head_norm_eps=2.0**-23 if config.qk_norm else None)
        self.gate: nn.Module | None = None
        self.rate: RotationRate | None = None

    def project(
        self, x: Float[Tensor, "B T D"], documents: Documents, carried: dict[str, Tensor]
    ) -> tuple[OpInputs, dict[str, Tensor]]:
        q, k, v = self.queries_keys_values(x, qkv=carried.get("qkv"))
        sums = (GatedSum(None if self.gate is None else self.gate(x)),)
        if self.rotary is None:
            return OpInputs(q, k, v, sums), {}
        if self.rate is None:
            rotation = documents.positions(carried["rotation"])
        else:
            rotation = documents.cumsum(self.rate(x).double(), carried["rotation"])
        q, k = self.rotated(q, k, rotation, documents.T)
        return OpInputs(q, k, v, sums), {"rotation": documents.last(rotation)}

    def tensor_power_size(self) -> int:
        """Numbers that the state would hold if features were the full tensor power."""
        return self.num_key_heads * int(self.key_dim**self.degree) * (self.value_dim + 1)
