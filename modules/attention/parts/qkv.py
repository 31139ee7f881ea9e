"""Queries, keys and values of a layer: their projection, their norms and their rotation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from longhaul.modules.attention.parts.short_convolution import ShortConvolution
from longhaul.modules.documents import Documents
from longhaul.modules.norms import RMSNorm
from longhaul.modules.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The sizes of a layer of attention, and what the model around it asks of the layer."""

    width: int
    """Width D of its inputs and outputs."""

    heads: int
    """Number of query heads H, a divisor of the width."""

    key_heads: int
    """Number of key and value heads G, a divisor of H: each serves H / G query heads in a row."""

    head_dim: int
    """Width K of a head; H K need not be D."""

    biases: bool = False
    """Whether its projections of x have biases, which begin at zero."""

    out_bias: bool = False
    """Whether its output projection has one."""

    layer: int = 0
    """Its index, from 0."""

    qk_norm: Literal["none", "head", "full"] = "none"
    """head: each query and key head is RMS-normalised, before it rotates; full: all together."""

    norm_eps: float = 1e-5
    """Added to the mean square in those norms."""

    norm_offset: bool = False
    """Whether those norms multiply by 1 + w, as in Gemma."""

    def __post_init__(self) -> None:
        if self.key_heads < 1 or self.heads % self.key_heads:
            raise ValueError(
                f"key_heads: found {self.key_heads}, wanted a divisor of {self.heads} heads"
            )

    @property
    def mixed_width(self) -> int:
        """Width H K of the outputs of all heads, which `out` projects to D."""
        return self.heads * self.head_dim

    def projection(self, outputs: int) -> nn.Linear:
        """A projection of x to so many outputs, with a bias of zeros if the model has biases."""
        return _linear(self.width, outputs, self.biases)

    def out_projection(self) -> nn.Linear:
        """The projection of the outputs of all heads to the width."""
        return _linear(self.mixed_width, self.width, self.out_bias)


def check_groups(groups: int, heads: int) -> int:
    """So many queries and keys, if heads can share them equally; else ValueError."""
    if heads % groups:
        raise ValueError(f"attention.groups: found {groups}, wanted a divisor of {heads} heads")
    return groups


def _linear(inputs: int, outputs: int, has_bias: bool) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False)
    if has_bias:
        linear.bias = nn.Parameter(torch.zeros(outputs))
    return linear


class QKV(nn.Module):
    """The only part that knows how q, k and v follow from x. Layers of attention inherit from it.

    So its parameters are named `qkv`, `q_norm` and `k_norm` beside the others of a layer.
    """

    qkv_name = "qkv"
    coordinates = 1  # of a query or key, for each of a value: K = coordinates x V
    in_float32 = False  # whether queries and keys get at least float32, before they are rotated
    short_convolution = 0  # tokens that the convolution of q, k and v reads; 0: there is none
    convolution_bias = False
    rotary: Rotary | None = None
    fused_rows: dict[str, tuple[int, ...]]  # for the optimizer (modules/roles.py)

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape
        self.model_dim = shape.width
        self.num_heads = shape.heads
        self.num_key_heads = shape.key_heads
        self.head_dim = shape.head_dim
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.convolution: ShortConvolution | None = None

    def head_shapes(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Number and width of the heads of queries, of keys, and of values."""
        V, H, G = self.head_dim, self.num_heads, self.num_key_heads
        K = self.coordinates * V
        return (H, K), (G, K), (G, V)

    def add_qkv(
        self,
        rotary: Callable[[int], Rotary | None] | None = None,
        *,
        head_norm_eps: float | None = None,
    ) -> None:
        """Make what `queries_keys_values` needs.

        Args:
            rotary: makes the rotation of queries and keys of a width. None: they are not rotated.
            head_norm_eps: that of a norm of each head that the kind wants, where the model has no
                norms of queries and keys.
        """
        (H, K), (G, _), (values, V) = self.head_shapes()
        self.qkv_widths = H * K, G * K, values * V
        self.fused_rows = {f"{self.qkv_name}.weight": self.qkv_widths}
        self.rotary = None if rotary is None else rotary(K)
        setattr(self, self.qkv_name, self.shape.projection(sum(self.qkv_widths)))
        shape = self.shape
        if shape.qk_norm != "none":
            options: dict[str, Any] = {"eps": shape.norm_eps, "has_offset": shape.norm_offset}
            q, k = (K, K) if shape.qk_norm == "head" else (K * H, K * G)
            self.q_norm, self.k_norm = RMSNorm(q, **options), RMSNorm(k, **options)
        elif head_norm_eps is not None:
            self.q_norm, self.k_norm = (RMSNorm(K, eps=head_norm_eps) for _ in range(2))
        if self.short_convolution:
            self.convolution = ShortConvolution(
                sum(self.qkv_widths), self.short_convolution, bias=self.convolution_bias
            )

    def projected(
        self,
        x: Float[Tensor, "B T D"],
        documents: Documents,
        convolved: Float[Tensor, "B past W"] | None = None,
    ) -> tuple[Float[Tensor, "B T W"], Float[Tensor, "B past W"] | None]:
        """Queries, keys and values of all heads side by side, convolved in a layer that does so.

        Args:
            x: activations.
            documents: those of x.
            convolved: the state of the convolution; None at the start of a document.

        Returns:
            What `queries_keys_values` takes as `qkv`, and the new state; None: no convolution.
        """
        qkv = getattr(self, self.qkv_name)(x)
        return (
            (qkv, None) if self.convolution is None else self.convolution(qkv, documents, convolved)
        )

    def queries_keys_values(
        self,
        x: Float[Tensor, "B T D"],
        rotation: Float64[Tensor, "#B T"] | None = None,
        length: int | None = None,
        speed: Float64[Tensor, "G J"] | None = None,
        *,
        qkv: Float[Tensor, "B T W"] | None = None,
    ) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T G K"], Float[Tensor, "B T S V"]]:
        """Queries, keys and values of every head. S is G, unless `head_shapes` says otherwise.

        Args:
            x: activations.
            rotation, length, speed: as in `rotated`. Without a rotation q and k are not rotated.
            qkv: what `projected` gives for x; None: that for whole documents, one per row.
        """
        qkv = self.projected(x, Documents(x))[0] if qkv is None else qkv
        q, k, v = qkv.split(self.qkv_widths, dim=-1)
        has_full_norms = self.shape.qk_norm == "full"
        if has_full_norms:
            q, k = self._normed(q, k)
        q, k, v = (
            one.unflatten(-1, shape)
            for one, shape in zip((q, k, v), self.head_shapes(), strict=True)
        )
        if not has_full_norms:
            q, k = self._normed(q, k)
        if self.in_float32:
            q, k = (one.to(torch.promote_types(one.dtype, torch.float32)) for one in (q, k))
        q, k = self.before_rotation(q, k)
        if rotation is not None:
            q, k = self.rotated(q, k, rotation, length, speed)
        return q, k, v

    def num_convolved(self) -> int:
        """Numbers that the state of a sequence has for the short convolution."""
        return 0 if self.convolution is None else self.convolution.state_size

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return self.q_norm(q), self.k_norm(k)

    def before_rotation(
        self, q: Float[Tensor, "B T H K"], k: Float[Tensor, "B T G K"]
    ) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T G K"]]:
        """Queries and keys as they are rotated, in a kind that changes them before."""
        return q, k

    def rotated(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B T G K"],
        rotation: Float64[Tensor, "#B T"],
        length: int | None = None,
        speed: Float64[Tensor, "G J"] | None = None,
    ) -> tuple[Float[Tensor, "B T H K"], Float[Tensor, "B T G K"]]:
        """Queries and keys rotated by mu_t theta, unchanged in a layer without rotary positions.

        Args:
            q, k: what `queries_keys_values` gives without a rotation.
            rotation: mu_t, in tokens, such as the position.
            length: tokens of the whole sequence; None: T.
            speed: factors of the rates of every key head and pair.
        """
        if self.rotary is None:
            return q, k
        cos, sin = self.rotary.phases(rotation, length or q.shape[1], q.dtype, speed)
        k = self.rotary.rotated(k, cos, sin)
        if speed is not None and self.num_heads != self.num_key_heads:
            queries = self.num_heads // self.num_key_heads
            cos, sin = (one.repeat_interleave(queries, dim=2) for one in (cos, sin))
        return self.rotary.rotated(q, cos, sin), k
