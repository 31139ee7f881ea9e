"""Gated DeltaNet: the delta rule with a scalar decay per head."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from longhaul.modules.attention.base import Attention, LayerShape, register
from longhaul.modules.attention.parts.gates import ScalarPerHead
from longhaul.modules.attention.parts.time_step import TimeStep
from longhaul.modules.attention.recurrent.delta import DeltaAttention, DeltaConfig
from longhaul.modules.choices import check_bounds


@register("gated_deltanet")
@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig(DeltaConfig):
    """Keys have 3/4 of the width of a head, and values twice that, unless told otherwise.

    Projections then have 6 D^2 numbers, where those of softmax have 4 D^2.
    """

    groups: int | None = None
    """Queries and keys per token, a divisor of the heads, which share them; null: one for each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "groups", least=1)

    def widths(self, head_dim: int) -> tuple[int, int]:
        K = max(1, 3 * head_dim // 4) if self.key_dim is None else self.key_dim
        return K, 2 * K if self.value_dim is None else self.value_dim

    def build(self, shape: LayerShape) -> Attention:
        return GatedDeltaNet(self, shape)


class GatedDeltaNet(DeltaAttention):
    """The delta rule with g_t = -A softplus(W x_t + c), one b_t, g_t, A and c per head of values.

    Source: Yang, Kautz, Hatamizadeh (2024), arXiv:2412.06464, and the layer in the library of its
    authors; negative eigenvalues: Grazzi et al. (2024), arXiv:2411.12537.
    """

    def __init__(self, config: GatedDeltaNetConfig, shape: LayerShape) -> None:
        super().__init__(config, shape, groups=config.groups)
        self.decay = ScalarPerHead(shape.width, shape.heads)
        self.time_step = TimeStep(shape.heads, rates=(0.0, 16.0))

    def log_gates(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H"]:
        _, log_g = self.time_step(self.decay(x))
        return log_g  # type: ignore[no-any-return]
