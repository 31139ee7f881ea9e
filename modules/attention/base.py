"""Base classes of attention variants: a config registered by its kind, and the module it builds."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from longhaul.modules.rotary import PositionScaling, Rotary
from longhaul.modules.sequence_part import SequencePart


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(ABC):
    """Options of one variant. `kind` in a YAML file is the name it is registered under."""

    kind: ClassVar[str] = ""
    cost: ClassVar[str] = "linear"  # or "quadratic": how training time grows with T
    positions: ClassVar[tuple[str, ...]] = ("none",)  # supported values of PositionScaling.name

    def __post_init__(self) -> None:  # noqa: B027 (the end of the chain of super() calls)
        """Check the options. A subclass calls super().__post_init__() first."""

    @abstractmethod
    def build(self, model_dim: int, num_heads: int, layer: int = 0) -> "Attention":
        """A freshly initialised module, on the default device, for the layer of this index."""


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(AttentionConfig):
    """The option of variants with the usual rotary positions."""

    positions: ClassVar[tuple[str, ...]] = ("none", "linear", "dynamic_ntk")

    rotary_base: float = 10_000.0
    """Base of theta_j = rotary_base^(-2 (j - 1) / K) radians per token, more than 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 < self.rotary_base < math.inf:
            raise ValueError(f"rotary_base: found {self.rotary_base}, wanted more than 1, finite")


class Attention(nn.Module, ABC):
    """Causal attention from (B, T, D) to (B, T, D). An explicit state holds the past."""

    config: AttentionConfig
    rotary: Rotary | None = None
    sequence_part: SequencePart | None = None
    """Set under context parallelism: x is one part of a sequence, cu_seqlens refer to all of it."""

    def __init__(self, config: AttentionConfig, model_dim: int, num_heads: int) -> None:
        super().__init__()
        if num_heads < 1 or model_dim % num_heads:
            raise ValueError(f"num_heads: found {num_heads}, wanted a divisor of width {model_dim}")
        self.config = config
        self.model_dim = model_dim
        self.num_heads = num_heads
        self.head_dim = model_dim // num_heads

    @abstractmethod
    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: Any = None,
        *,
        cu_seqlens: Int[Tensor, "documents_plus_1"] | None = None,
        keep_state: bool = True,
    ) -> tuple[Float[Tensor, "B T D"], Any]:
        """The output for x, and the new state, which is None when keep_state is False.

        Args:
            x: activations of T new tokens.
            state: the state that an earlier call returned, or None at the start of a document.
            cu_seqlens: offsets of documents packed into B = 1. Documents do not see each other.
            keep_state: whether to return the new state. Training passes False, because computing
                a state that nobody uses costs time.
        """

    @abstractmethod
    def step(self, x: Float[Tensor, "B 1 D"], state: Any) -> tuple[Float[Tensor, "B 1 D"], Any]:
        """One more token after `state`, in variants of linear cost at a cost independent of T."""

    @abstractmethod
    def weights(self, x: Float[Tensor, "B T D"]) -> Shaped[Tensor, "B W T T"]:
        """The attention matrices written out, in the precision of x: for tests and figures.

        There are W = H of them, unless the variant documents another number. `forward` equals
        read_out(weights @ values), except for what a learned initial state adds.
        """

    @abstractmethod
    def values(self, x: Float[Tensor, "B T D"]) -> Shaped[Tensor, "B T W V"]:
        """The values that the attention matrices multiply."""

    @abstractmethod
    def read_out(
        self, x: Float[Tensor, "B T D"], mixed: Shaped[Tensor, "B T W V"]
    ) -> Float[Tensor, "B T D"]:
        """The output of the layer from weights @ values: norm and gate, if any, then W_o."""

    @abstractmethod
    def form(self, T: int, backend: str) -> str:
        """The form that training uses at context T, with its chunk size if it has chunks.

        backend is "torch" or "triton": each has its own cost model.
        """

    def projection_flops(self) -> int:
        """Forward FLOPs per token of all products with weights (a multiply-add counts as two)."""
        return sum(
            2 * parameter.numel()
            for name, parameter in self.named_parameters()
            if name.endswith("weight") and parameter.ndim == 2
        )

    @abstractmethod
    def mixing_flops(self, T: int, backend: str = "torch") -> int:
        """Forward FLOPs per token of attention or state at context T, in the backend's form."""

    def flops_per_token(self, T: int, backend: str = "torch") -> int:
        """Forward FLOPs per token at context T."""
        return self.projection_flops() + self.mixing_flops(T, backend)

    @abstractmethod
    def state_size(self) -> int | None:
        """Numbers in the state of one sequence, without padding; None if it grows with T."""

    @abstractmethod
    def allocated_bytes(self, T: int, dtype: torch.dtype) -> int:
        """Bytes in the state of one sequence after T tokens of `dtype`, padding included."""

    def check_positions(self, scaling: PositionScaling) -> None:
        """Raise ValueError where the variant does not support this scaling of positions."""
        if scaling.name not in self.config.positions:
            raise ValueError(
                f"positions: found {scaling.name!r} for attention of kind {self.config.kind}, "
                f"wanted {' or '.join(self.config.positions)}"
            )

    def set_positions(self, scaling: PositionScaling) -> None:
        """Scale positions from now on. ValueError where the variant does not support it."""
        self.check_positions(scaling)
        if self.rotary is not None:
            self.rotary.scaling = scaling

    def check_context_parallel(self) -> None:
        """Raise ValueError where the variant does not support context parallelism."""
        raise ValueError(
            f"attention.kind: found {self.config.kind}, wanted a kind of linear cost, whose states "
            "the ranks of context parallelism can exchange"
        )


ConfigT = TypeVar("ConfigT", bound=type[AttentionConfig])
_REGISTRY: dict[str, type[AttentionConfig]] = {}


def register(kind: str) -> Callable[[ConfigT], ConfigT]:
    """Class decorator that registers the config of a variant under `kind`."""

    def add(config: ConfigT) -> ConfigT:
        assert kind not in _REGISTRY, f"two variants are called {kind}"
        config.kind = kind
        _REGISTRY[kind] = config
        return config

    return add


def registered_variants() -> tuple[str, ...]:
    """The kinds of all variants, sorted."""
    return tuple(sorted(_REGISTRY))


def attention_config(kind: str) -> type[AttentionConfig]:
    """The config class of a kind. The ValueError for an unknown kind lists the known ones."""
    if kind not in _REGISTRY:
        known = ", ".join(registered_variants())
        raise ValueError(f"attention.kind: found {kind!r}, wanted one of {known}")
    return _REGISTRY[kind]


def build_attention(kind: str, model_dim: int, num_heads: int, **options: Any) -> Attention:
    """Build a variant by its kind, as the first layer; options are the fields of its config."""
    return attention_config(kind)(**options).build(model_dim, num_heads)


class InFloat32(nn.Module):
    """A module that uses its weights in `linear_in_float32` only. FSDP does not cast them to bf16.

    Its outputs, such as rotation rates and log gates, are summed over tokens, so that rounding
    errors would add up.
    """


def linear_in_float32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A projection in at least float32, also under autocast, for outputs summed over tokens."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
