"""What every attention variant is: a frozen config, registered by name, that builds a module."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(ABC):
    """Options of one variant; its registered name is the `kind:` of a YAML file."""

    kind: ClassVar[str] = ""
    cost: ClassVar[str] = "linear"  # or "quadratic": the growth of training time with T

    @abstractmethod
    def build(self, model_dim: int, num_heads: int) -> "Attention":
        """The module, with freshly initialised parameters on the default device."""


class Attention(nn.Module, ABC):
    """Causal mixing of tokens: (B, T, D) to (B, T, D), carrying any past in an explicit state."""

    def __init__(self, model_dim: int, num_heads: int) -> None:
        super().__init__()
        if num_heads < 1 or model_dim % num_heads:
            raise ValueError(f"num_heads: found {num_heads}, wanted a divisor of width {model_dim}")
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
    def weights(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B H T T"]:
        """The mixing matrix written out, in the dtype of x: for tests and pictures."""

    @abstractmethod
    def flops_per_token(self, T: int) -> int:
        """Forward FLOPs a token at context T: projections and mixing (a multiply-add is two)."""

    @abstractmethod
    def state_size(self) -> int | None:
        """Numbers carried a sequence, without padding; None when they grow with T."""


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
    """Build a variant by name; options are the fields of its config."""
    return attention_config(kind)(**options).build(model_dim, num_heads)


def linear_in_float32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A projection that autocast does not round: gates and rotation rates are summed over T."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
