"""What every attention variant is: a frozen config, registered by name, that builds a module."""

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
from longhaul.modules.sequence_parts import SequenceParts


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(ABC):
    """Options of one variant; its registered name is the `kind:` of a YAML file."""

    kind: ClassVar[str] = ""
    cost: ClassVar[str] = "linear"  # or "quadratic": the growth of training time with T
    positions: ClassVar[tuple[str, ...]] = ("none",)  # scalings that make sense at evaluation

    def __post_init__(self) -> None:  # noqa: B027 (the end of a chain)
        """Checks of options; a class calls those above it first."""

    @abstractmethod
    def build(self, model_dim: int, num_heads: int, layer: int = 0) -> "Attention":
        """The module of a layer, counted from 0, freshly initialised on the default device."""


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(AttentionConfig):
    """The option of kinds with the usual rotary positions."""

    positions: ClassVar[tuple[str, ...]] = ("none", "linear", "dynamic_ntk")

    rotary_base: float = 10_000.0
    """theta_j = rotary_base^(-2 (j - 1) / K), radians a token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 < self.rotary_base < math.inf:
            raise ValueError(f"rotary_base: found {self.rotary_base}, wanted more than 1, finite")


class Attention(nn.Module, ABC):
    """Causal mixing of tokens: (B, T, D) to (B, T, D), carrying any past in an explicit state."""

    config: AttentionConfig
    rotary: Rotary | None = None
    parts: SequenceParts | None = None
    """Set where T tokens are one part of a sequence, and cu_seqlens are the whole sequence's."""

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
        """Mix x, continuing from state; the new state is None when keep_state is False.

        Args:
            x: activations of T new tokens.
            state: what an earlier call returned, or None at the start of a document.
            cu_seqlens: bounds of documents packed into B = 1; nothing crosses them.
            keep_state: training passes False, since building a state that nobody reads is slow.
        """

    @abstractmethod
    def step(self, x: Float[Tensor, "B 1 D"], state: Any) -> tuple[Float[Tensor, "B 1 D"], Any]:
        """One more token after `state`, at a cost that the past does not raise for linear kinds."""

    @abstractmethod
    def weights(self, x: Float[Tensor, "B T D"]) -> Shaped[Tensor, "B W T T"]:
        """The mixing matrices written out, in the precision of x: for tests and pictures.

        There are W = H of them unless the kind says otherwise. forward is
        read_out(weights @ values), but for what a learned initial state adds to it.
        """

    @abstractmethod
    def values(self, x: Float[Tensor, "B T D"]) -> Shaped[Tensor, "B T W V"]:
        """What the mixing matrices mix."""

    @abstractmethod
    def read_out(
        self, x: Float[Tensor, "B T D"], mixed: Shaped[Tensor, "B T W V"]
    ) -> Float[Tensor, "B T D"]:
        """From mixed values to the layer's output: norms and gates where there are any, W_o."""

    @abstractmethod
    def form(self, T: int, backend: str) -> str:
        """How T tokens are mixed in training: the form of the op, and its chunk if it has one.

        backend is "torch" or "triton": each has its own cost model.
        """

    def projection_flops(self) -> int:
        """Forward FLOPs a token of all products with weights (a multiply-add is two)."""
        return sum(
            2 * parameter.numel()
            for name, parameter in self.named_parameters()
            if name.endswith("weight") and parameter.ndim == 2
        )

    @abstractmethod
    def mixing_flops(self, T: int, backend: str = "torch") -> int:
        """Forward FLOPs a token of mixing at context T, by the form that the backend takes."""

    def flops_per_token(self, T: int, backend: str = "torch") -> int:
        """Forward FLOPs a token at context T."""
        return self.projection_flops() + self.mixing_flops(T, backend)

    @abstractmethod
    def state_size(self) -> int | None:
        """Numbers carried a sequence, without padding; None when they grow with T."""

    @abstractmethod
    def allocated_bytes(self, T: int, dtype: torch.dtype) -> int:
        """Bytes that a sequence's state takes after T tokens of `dtype`, padding included."""

    def check_positions(self, scaling: PositionScaling) -> None:
        """ValueError where the kind has no such way to read positions."""
        if scaling.name not in self.config.positions:
            raise ValueError(
                f"positions: found {scaling.name!r} for attention of kind {self.config.kind}, "
                f"wanted {' or '.join(self.config.positions)}"
            )

    def set_positions(self, scaling: PositionScaling) -> None:
        """Read positions another way from now on; ValueError where the kind has no such way."""
        self.check_positions(scaling)
        if self.rotary is not None:
            self.rotary.scaling = scaling

    def check_parts(self) -> None:
        """ValueError where the kind cannot mix a sequence in parts."""
        raise ValueError(
            f"attention.kind: found {self.config.kind}, wanted a kind of linear cost, whose states "
            "can cross between the parts of a sequence"
        )


ConfigT = TypeVar("ConfigT", bound=type[AttentionConfig])
_REGISTRY: dict[str, type[AttentionConfig]] = {}


def register(kind: str) -> Callable[[ConfigT], ConfigT]:
    """Class decorator that gives a variant's config its name."""

    def add(config: ConfigT) -> ConfigT:
        assert kind not in _REGISTRY, f"two variants are called {kind}"
        config.kind = kind
        _REGISTRY[kind] = config
        return config

    return add


def registered_variants() -> tuple[str, ...]:
    """Names of all variants, sorted."""
    return tuple(sorted(_REGISTRY))


def attention_config(kind: str) -> type[AttentionConfig]:
    """The config class of a kind; ValueError names the known ones."""
    if kind not in _REGISTRY:
        known = ", ".join(registered_variants())
        raise ValueError(f"attention.kind: found {kind!r}, wanted one of {known}")
    return _REGISTRY[kind]


def build_attention(kind: str, model_dim: int, num_heads: int, **options: Any) -> Attention:
    """Build a variant by name, as a first layer has it; options are the fields of its config."""
    return attention_config(kind)(**options).build(model_dim, num_heads)


class InFloat32(nn.Module):
    """Uses its weights through `linear_in_float32`; FSDP does not round them to bf16 first.

    What it computes is summed over the tokens: rates of rotation, logarithms of gates.
    """


def linear_in_float32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A projection that autocast does not round: gates and rotation rates are summed over T."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
