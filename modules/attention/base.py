"""Base classes of attention variants: a config registered by its kind, and the module it builds."""

import logging
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # torch has no public name for it yet
from torch.utils.flop_counter import FlopCounterMode

from longhaul.kernels.common.custom_ops import without_autocast
from longhaul.modules.attention.parts.output_norm import OutputNorm
from longhaul.modules.attention.parts.qkv import QKV
from longhaul.modules.attention.parts.qkv import LayerShape as LayerShape
from longhaul.modules.choices import check_bounds, check_choices
from longhaul.modules.documents import Documents
from longhaul.modules.rotary import PositionScaling, Rotary, RotaryScaling
from longhaul.modules.sequence_part import SequencePart

logger = logging.getLogger(__name__)

# FLOPs of a kind of linear cost are counted on this many tokens: more would take longer to count,
# and cost the same per token.
_COUNTED_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(ABC):
    """Options of one variant. `kind` in a YAML file is the name it is registered under."""

    kind: ClassVar[str] = ""
    cost: ClassVar[str] = "linear"  # or "quadratic": how training time grows with T
    positions: ClassVar[tuple[str, ...]] = ("none",)  # supported values of PositionScaling.name
    speed_options: ClassVar[tuple[str, ...]] = ()  # options that change nothing but speed

    def __post_init__(self) -> None:
        """Check the options. A subclass that does so too calls super().__post_init__() first."""
        check_choices(self)

    @abstractmethod
    def build(self, shape: LayerShape) -> "Attention":
        """A freshly initialised module of this shape, on the default device."""


@dataclass(frozen=True, kw_only=True)
class PartsConfig(AttentionConfig):
    """Parts that some kinds have by publication, and that any other may have."""

    short_convolution: int = 0
    """Tokens that a convolution of queries, keys and values reads, with silu; 0: there is none."""

    output_norm: Literal["none", "rms"] = "none"
    """none | rms (each head is divided by its root mean square, with one gain for all heads)."""

    output_gate: Literal["none", "silu", "sigmoid"] = "none"
    """none | silu | sigmoid: of one more projection of x, which multiplies the output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        width = self.short_convolution
        if width < 0 or width == 1:
            raise ValueError(f"short_convolution: found {width}, wanted 2 or more, or 0 for none")


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(AttentionConfig):
    """The options of variants with the usual rotary positions."""

    positions: ClassVar[tuple[str, ...]] = ("none", "linear", "dynamic_ntk")

    rotary_base: float = 10_000.0
    """Base of theta_j = rotary_base^(-2 (j - 1) / K) radians per token, more than 1."""

    rotary_share: float = 1.0
    """Share of a head's width that rotates, its first coordinates; above 0, at most 1."""

    rotary_scaling: RotaryScaling = field(default_factory=RotaryScaling)
    """How the rates are scaled, as in models that were made to read longer contexts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "rotary_base", above=1, below=math.inf)
        check_bounds(self, "rotary_share", above=0, most=1)
        self.rotary_scaling.check()

    def build_rotary(self, width: int) -> Rotary | None:
        """The rotation of queries and keys of this width; None without positions."""
        return self.rotary_with(width, base=self.rotary_base)

    def rotary_with(self, width: int, **rates: Any) -> Rotary:
        """The rotation with other rates; `rates` are arguments of Rotary."""
        share, scaling = self.rotary_share, self.rotary_scaling
        return Rotary(width, share=share, model_scaling=scaling, **rates)

    def check_whole_rotary(self, reason: str) -> None:
        """Raise ValueError where only a share rotates, in a variant that needs all pairs."""
        if self.rotary_share != 1:
            raise ValueError(f"rotary_share: found {self.rotary_share} {reason}; wanted 1")


@dataclass(frozen=True, kw_only=True)
class DocumentRotaryConfig(RotaryConfig):
    """The options of variants whose rates may be those of the symmetric-power papers."""

    longest_document: int | None = None
    """N of theta_j = 2 pi / N^(2 (j - 1) / K), in tokens, 2 or more; null: rotary_base is used."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "longest_document", least=2)

    def build_rotary(self, width: int) -> Rotary | None:
        if self.longest_document is None:
            return super().build_rotary(width)
        return self.rotary_with(width, base=float(self.longest_document), first_turns=1.0)


def overwrite(state: Any, new_state: Any) -> Any:
    """`new_state`, copied into the tensors of `state` that have its sizes and dtypes."""

    def overwritten(old: Tensor, new: Tensor) -> Tensor:
        if old is new or (old.shape, old.dtype) != (new.shape, new.dtype):
            return new
        return old.copy_(new)

    return pytree.tree_map(overwritten, state, new_state)


class Attention(QKV):
    """Causal attention from (B, T, D) to (B, T, D). An explicit state holds the past.

    A variant must write `forward`. All other methods have defaults, which measure what `forward`
    does; a variant replaces those that it knows better.
    """

    config: AttentionConfig
    can_round_state: ClassVar[bool] = False
    """Whether decoding may keep states in bfloat16."""
    can_cut_state: ClassVar[bool] = False
    """Whether its states have `without_last(count)`, which gives those before the last tokens."""
    groups_keys: ClassVar[bool] = False
    """Whether several query heads may share a key head."""
    sequence_part: SequencePart | None = None
    """Set under context parallelism: x is one part of a sequence."""

    def __init__(self, config: AttentionConfig, shape: LayerShape) -> None:
        super().__init__(shape)
        _check_complete(config.kind, type(self))
        self.config = config
        if isinstance(config, PartsConfig):
            self.short_convolution = config.short_convolution
        if shape.key_heads != shape.heads and not self.groups_keys:
            raise ValueError(
                f"model.kv_heads: found {shape.key_heads} for kind {config.kind}, which has a key "
                f"head for each query head; wanted {shape.heads}"
            )

    def add_output(self, config: PartsConfig, *, groups: int | None = None) -> None:
        """Make what `project_output` needs, for outputs of the shape's heads."""
        shape = self.shape
        self.out = shape.out_projection()
        self.output_gate: nn.Module | None = None
        self.output_norm: OutputNorm | None = None
        if config.output_gate != "none":
            self.output_gate = self.build_output_gate()
        if config.output_norm != "none" or config.output_gate != "none":
            width = shape.head_dim if groups is None else shape.mixed_width
            self.output_norm = OutputNorm(
                None if config.output_norm == "none" else width,
                activation=config.output_gate,
                groups=groups,
            )

    def build_output_gate(self) -> nn.Module:
        """What the output gate is the activation of."""
        return self.shape.projection(self.shape.mixed_width)

    def project_output(
        self, x: Float[Tensor, "B T D"], y: Float[Tensor, "B T HV"]
    ) -> Float[Tensor, "B T D"]:
        """The output projection of all heads, after the norm and the gate that there may be."""
        if self.output_norm is not None:
            gate = None if self.output_gate is None else self.output_gate(x)
            y = self.output_norm(y, gate).to(x.dtype)
        return self.out(y)  # type: ignore[no-any-return]

    @abstractmethod
    def forward(
        self,
        x: Float[Tensor, "B T D"],
        state: Any = None,
        *,
        documents: Documents | None = None,
        keep_state: bool = True,
    ) -> tuple[Float[Tensor, "B T D"], Any]:
        """The output for x, and the new state, which is None when keep_state is False.

        A state is a tensor, or tuples, lists and dicts of tensors, all of whose first dimension is
        B: states of several sequences are joined, and taken apart, along it.

        Args:
            x: activations of T new tokens.
            state: the state that an earlier call returned, or None at the start of a document.
            documents: where documents begin in rows that hold several. They do not see each other.
                `check_documents` says what does not go with them.
            keep_state: whether to return the new state. Training passes False, because computing
                a state that nobody uses costs time.
        """

    def step(self, x: Float[Tensor, "B 1 D"], state: Any) -> tuple[Float[Tensor, "B 1 D"], Any]:
        """One more token after `state`, in variants of linear cost at a cost independent of T."""
        y, new_state = self(x, state)
        return y, new_state

    def step_in_place(
        self, x: Float[Tensor, "B 1 D"], state: Any
    ) -> tuple[Float[Tensor, "B 1 D"], Any]:
        """`step` without gradients, which may overwrite `state`.

        The state returned has the memory of `state` where its sizes do not change.
        """
        y, new_state = self.step(x, state)
        return y, overwrite(state, new_state)

    def weights(self, x: Float[Tensor, "B T D"]) -> Shaped[Tensor, "B W T T"]:
        """The attention matrices written out, in the precision of x: for tests and figures.

        There are W = H of them, unless the variant documents another number. `forward` equals
        read_out(weights @ values), except for what a learned initial state adds. ValueError in a
        variant that does not write its matrices out.
        """
        self._refuse_to_write_out()

    def values(self, x: Float[Tensor, "B T D"]) -> Shaped[Tensor, "B T W V"]:
        """The values that the attention matrices multiply."""
        self._refuse_to_write_out()

    def read_out(
        self, x: Float[Tensor, "B T D"], mixed: Shaped[Tensor, "B T W V"]
    ) -> Float[Tensor, "B T D"]:
        """The output of the layer from weights @ values: norm and gate, if any, then W_o."""
        self._refuse_to_write_out()

    def log_gates(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H *parts"] | None:
        """The log forget gates that the kind computes from x: for figures. None if it has none."""
        return None

    def _refuse_to_write_out(self) -> NoReturn:
        raise ValueError(
            f"attention.kind: found {self.config.kind}, which does not write out its attention "
            "matrices; wanted kinds with weights, values and read_out"
        )

    def form(self, T: int, backend: str) -> str:
        """The form that training uses at context T, with its chunk size if it has chunks.

        backend is "torch" or "triton": each has its own cost model.
        """
        return self.config.cost

    def passes_on_state(self, T: int, backend: str) -> bool:
        """Whether T tokens are read best in pieces, each of which passes its state to the next."""
        return self.config.cost == "linear"

    def projection_flops(self) -> int:
        """Forward FLOPs per token of all products with weights."""
        return product_flops(self)

    def mixing_flops(self, T: int, backend: str = "torch") -> int:
        """Forward FLOPs per token of attention or state at context T, in the backend's form.

        By default all matrix products of `forward`, as torch's FlopCounterMode counts them, but
        those of `projection_flops`.
        """
        T = T if self.config.cost == "quadratic" else min(T, _COUNTED_TOKENS)
        with FlopCounterMode(display=False) as counter:
            self._state_after(T, torch.float32)
        counted: int = counter.get_total_flops()
        return max(0, counted // T - self.projection_flops())

    def flops_per_token(self, T: int, backend: str = "torch") -> int:
        """Forward FLOPs per token at context T."""
        return self.projection_flops() + self.mixing_flops(T, backend)

    def state_size(self) -> int | None:
        """Numbers in the state of one sequence, without padding; None if it grows with T.

        By default a state that is larger after two tokens than after one is one that grows, also
        if it grows no more from some length on.
        """
        one, two = (sum(x.numel() for x in self._state_after(T, torch.float32)) for T in (1, 2))
        return one if one == two else None

    def allocated_bytes(self, T: int, dtype: torch.dtype) -> int:
        """Bytes in the state of one sequence after T tokens of `dtype`, padding included."""
        T = T if self.state_size() is None else 1
        storages = [x.untyped_storage() for x in self._state_after(T, dtype)]
        # Tensors that are views of the same memory hold it once, but all of it.
        held: dict[int, int] = {one._cdata: one.nbytes() for one in storages}
        return sum(held.values())

    def _state_after(self, T: int, dtype: torch.dtype) -> list[Tensor]:
        """The tensors of the state that `forward` returns for T tokens: shapes without data."""
        tensors = {
            name: torch.empty(
                x.shape, dtype=dtype if x.is_floating_point() else x.dtype, device="meta"
            )
            for name, x in chain(self.named_parameters(), self.named_buffers())
        }
        x = torch.empty(1, T, self.model_dim, dtype=dtype, device="meta")
        with torch.no_grad():
            _, state = torch.func.functional_call(self, tensors, (x,))
        return pytree.tree_leaves(state)

    def check_positions(self, scaling: PositionScaling) -> None:
        """Raise ValueError where the variant does not support this scaling of positions."""
        supported = ("none",) if self.rotary is None else self.config.positions
        if scaling.name not in supported:
            rotated = "with" if self.rotary else "without"
            raise ValueError(
                f"positions: found {scaling.name!r} for attention of kind {self.config.kind}, "
                f"wanted {' or '.join(supported)} for one {rotated} rotary positions"
            )

    def set_positions(self, scaling: PositionScaling) -> None:
        """Scale positions from now on. ValueError where the variant does not support it."""
        self.check_positions(scaling)
        if self.rotary is not None:
            self.rotary.scaling = scaling

    def check_documents(self, *, has_state: bool) -> None:
        """Raise ValueError where a layer does not support several documents per row."""
        if has_state:
            raise ValueError(
                "documents: found with a state or keep_state, wanted neither: a state is that of "
                "one document per row"
            )
        if self.rotary is not None and self.rotary.depends_on_length:
            raise ValueError(
                f"positions: found {self.rotary.length_scaling} with several documents per row, "
                "each of its own length; wanted linear or none, or one document per row"
            )

    def check_stateless(self, *, has_state: bool) -> None:
        """Raise ValueError for a state of a part of a sequence."""
        if self.sequence_part is not None and has_state:
            raise ValueError(
                "state: found one, or keep_state, under context parallelism, which supports only "
                "training and losses; wanted neither"
            )

    def check_context_parallel(self) -> None:
        """Raise ValueError where the variant does not support context parallelism."""
        raise ValueError(
            f"attention.kind: found {self.config.kind}, wanted a kind that supports context "
            "parallelism"
        )


def _check_complete(kind: str, cls: type) -> None:
    """Raise ValueError for a class with abstract methods; Python's TypeError would name no kind."""
    methods = ((name, getattr(cls, name, None)) for name in dir(cls))
    missing = [name for name, one in methods if getattr(one, "__isabstractmethod__", False)]
    if missing:
        raise ValueError(
            f"attention.kind: found {kind}, whose class {cls.__name__} does not define "
            f"{', '.join(missing)}; wanted every method that docs/adding-a-variant.md asks for"
        )


ConfigT = TypeVar("ConfigT", bound=type[AttentionConfig])
_REGISTRY: dict[str, type[AttentionConfig]] = {}
_DUPLICATES: dict[str, str] = {}  # the modules that register the same kind
_LEFT_OUT: list[str] = []  # why modules of kinds could not be imported


def register(kind: str) -> Callable[[ConfigT], ConfigT]:
    """Class decorator that registers the config of a variant under `kind`."""

    def add(config: ConfigT) -> ConfigT:
        _check_complete(kind, config)
        if (other := _REGISTRY.get(kind)) is not None:
            _DUPLICATES[kind] = f"{other.__module__} and {config.__module__}"
        config.kind = kind
        _REGISTRY[kind] = config
        return config

    return add


def registered_variants() -> tuple[str, ...]:
    """The kinds of all variants, sorted."""
    return tuple(sorted(_REGISTRY))


def attention_config(kind: str) -> type[AttentionConfig]:
    """The config class of a kind.

    Raises:
        ValueError: no module registers the kind, or two do. One line, with the known kinds and the
            modules that could not be imported.
    """
    if kind in _DUPLICATES:
        raise ValueError(
            f"attention.kind: found {kind!r} in {_DUPLICATES[kind]}, wanted one of them"
        )
    if kind not in _REGISTRY:
        known = ", ".join(registered_variants())
        left_out = "".join(f"; not imported: {reason}" for reason in _LEFT_OUT)
        raise ValueError(f"attention.kind: found {kind!r}, wanted one of {known}{left_out}")
    return _REGISTRY[kind]


def skip_module(reason: str) -> None:
    """Warn of a module whose import failed for this reason, and forget what it registered."""
    for kind, config in list(_REGISTRY.items()):
        if config.__module__ not in sys.modules:
            del _REGISTRY[kind]
    if reason not in _LEFT_OUT:  # that of a module is also the one of all that import it
        _LEFT_OUT.append(reason)
        logger.warning("%s; the kinds that need this file are left out", reason)


def left_out() -> tuple[str, ...]:
    """Why kinds are left out: file, line and error of each module that could not be imported."""
    return tuple(_LEFT_OUT)


def build_attention(kind: str, model_dim: int, num_heads: int, **options: Any) -> Attention:
    """Build a variant by its kind, as the first layer; options are the fields of its config."""
    if num_heads < 1 or model_dim % num_heads:
        raise ValueError(f"num_heads: found {num_heads}, wanted a divisor of width {model_dim}")
    shape = LayerShape(
        width=model_dim, heads=num_heads, key_heads=num_heads, head_dim=model_dim // num_heads
    )
    return attention_config(kind)(**options).build(shape)


class Float32Parameters(nn.Module):
    """A module that uses its weights in float32 or wider only. FSDP does not cast them to bf16.

    Its outputs, such as rotation rates and log gates, are summed over tokens, so that rounding
    errors would add up.
    """


def float32_weights(module: nn.Module) -> set[nn.Parameter]:
    """The weights of all `Float32Parameters` in a module."""
    return {
        weight
        for part in module.modules()
        if isinstance(part, Float32Parameters)
        for weight in part.parameters()
    }


def product_flops(module: nn.Module) -> int:
    """FLOPs of one row's products with all weights of a module; a multiply-add counts as two."""
    return sum(
        2 * parameter.numel()
        for name, parameter in module.named_parameters()
        if name.endswith("weight") and parameter.ndim == 2
    )


def linear_in_float32(x: Tensor, weight: Tensor) -> Tensor:
    """A projection in at least float32, also under autocast, for outputs summed over tokens."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    with without_autocast(x):
        return F.linear(x.to(dtype), weight.to(dtype))
