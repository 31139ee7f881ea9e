"""The configuration of the language model: its shape, from which its blocks and norms follow."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal, get_type_hints

from torch import nn

from longhaul.modules.attention import AttentionConfig, LayerShape, attention_config
from longhaul.modules.block import MLP, Block, MLPKind
from longhaul.modules.choices import check_bounds, check_choices
from longhaul.modules.norms import RMSNorm

# Every layer is looked at before anything runs.
_MOST_LAYERS = 1024

BIAS_PLACES = ("qkv", "out", "mlp", "norms")
"""Where a model may have biases."""


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """Shape of the model. The default is that of GPT-2 with 124M parameters."""

    attention: AttentionConfig
    """The attention variant, by its `kind`, and the options of that kind."""

    layer_attention: dict[str, AttentionConfig] = field(default_factory=dict)
    """Other variants for the layers of a number ("5") or slice ("3::4"); the last match wins."""

    layers: int = 12
    """Number of residual blocks, 1 to 1024."""

    width: int = 768
    """Model width D; without head_dim a multiple of 2 x heads, because positions rotate pairs."""

    heads: int = 12
    """Number of query heads per layer, 1 or more."""

    kv_heads: int | None = None
    """Number of key and value heads per layer, a divisor of heads; null: as many as heads."""

    head_dim: int | None = None
    """Width of a head, an even number, 2 or more; null: width / heads."""

    qk_norm: Literal["none", "head", "full"] = "none"
    """none | head (RMS norm of each query and key head) | full; not in kinds of the delta rule."""

    learned_positions: int | None = None
    """Positions with a learned vector each, added to the embedding, the longest text; or null."""

    vocabulary: int = 50_304
    """Rows of the embedding, at least the tokenizer's number of ids; multiples of 64 are fast."""

    embedding_norm: bool = True
    """A norm after the embedding; GPT-NeoX has none."""

    parallel_residual: bool = False
    """Attention and MLP of a block read the same x, as in GPT-NeoX; false: one, then the other."""

    biases: bool | list[str] = False
    """Where they are: true (not in the head) | some of qkv (projections of x), out, mlp, norms."""

    tied_head: bool = True
    """The matrix of the logits is that of the embedding; false: it is one of its own."""

    norm: Literal["layer", "rms", "rms_offset"] = "layer"
    """layer | rms | rms_offset (times 1 + w, as in Gemma): every norm of width D."""

    norm_eps: float = 1e-5
    """Added to the variance or mean square in these norms, more than 0."""

    norm_order: Literal["pre", "post", "sandwich", "hybrid"] = "pre"
    """pre | post (OLMo-2) | sandwich (both) | hybrid (quadratic layers post, others pre)."""

    mlp: Literal["gelu", "gelu_erf", "relu2", "swiglu", "geglu", "none"] = "gelu"
    """gelu (by tanh) | gelu_erf | relu2 | swiglu | geglu (by tanh), two with a gate | none."""

    mlp_width: int | None = None
    """Hidden width F of the MLP, 1 or more; null: 4 x width. Gated, 8/3 x width is as large."""

    embedding_scale: float = 1.0
    """Factor of the embedding, more than 0. Gemma has the root of the width."""

    logit_softcap: float | None = None
    """c of c tanh(logit / c), more than 0, as in Gemma 2; null: logits are not capped."""

    init: Literal["gpt2", "normal", "olmo", "llama", "nanochat"] = "gpt2"
    """gpt2 | normal (std 0.02) | olmo (std 0.02, cut) | llama (torchtitan's) | nanochat."""

    def __post_init__(self) -> None:
        check_choices(self, "model.")
        check_bounds(self, "layers", least=1, most=_MOST_LAYERS, prefix="model.")
        # torch can still count the bytes of vectors of this width for each token id.
        widths = ("width", "heads", "kv_heads", "mlp_width")
        check_bounds(self, *widths, least=1, most=1 << 20, prefix="model.")
        check_bounds(self, "learned_positions", least=1, most=1 << 32, prefix="model.")
        check_bounds(self, "head_dim", least=2, most=1 << 20, prefix="model.")
        positive = ("norm_eps", "embedding_scale", "logit_softcap")
        check_bounds(self, *positive, above=0, below=math.inf, prefix="model.")
        check_bounds(self, "vocabulary", least=1, most=1 << 32, prefix="model.")
        self._check_biases()
        self._check_heads()
        self._check_layers()

    def _check_biases(self) -> None:
        places = [] if isinstance(self.biases, bool) else self.biases
        if unknown := [one for one in places if one not in BIAS_PLACES]:
            raise ValueError(
                f"model.biases: found {unknown[0]!r}, wanted true, false or some of "
                f"{', '.join(BIAS_PLACES)}"
            )
        if "norms" in places and self.norm != "layer":
            raise ValueError(
                f"model.biases: found 'norms' with model.norm {self.norm}, which has none; wanted "
                "it left out"
            )

    def _check_heads(self) -> None:
        if self.head_dim is None and self.width % (2 * self.heads):
            raise ValueError(
                f"model.width: found {self.width}, wanted a multiple of 2 x model.heads = "
                f"{2 * self.heads}"
            )
        if self.head_dim is not None and self.head_dim % 2:
            raise ValueError(f"model.head_dim: found {self.head_dim}, wanted an even number")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(
                f"model.kv_heads: found {self.kv_heads}, wanted a divisor of model.heads = "
                f"{self.heads}"
            )

    def _check_layers(self) -> None:
        if len(self.layer_attention) > self.layers:
            raise ValueError(
                f"model.layer_attention: found {len(self.layer_attention)} entries, wanted at "
                f"most one for each of {self.layers} layers"
            )
        used = [self._entry_of(layer) for layer in range(self.layers)]
        for key in self.layer_attention:
            self._layers_of(key)
            if key not in used:
                raise ValueError(
                    f"model.layer_attention: found {key!r}, all of whose layers match later "
                    "entries, which win; wanted at least one layer for every entry"
                )

    def attention_of(self, layer: int) -> AttentionConfig:
        """The config of a layer, counted from 0."""
        key = self._entry_of(layer)
        return self.attention if key is None else self.layer_attention[key]

    def shape_of(self, layer: int) -> LayerShape:
        """The shape of the attention of a layer, counted from 0."""
        return LayerShape(
            width=self.width,
            heads=self.heads,
            key_heads=self.heads if self.kv_heads is None else self.kv_heads,
            head_dim=self.width // self.heads if self.head_dim is None else self.head_dim,
            biases=self.has_biases("qkv"),
            out_bias=self.has_biases("out"),
            layer=layer,
            qk_norm=self.qk_norm,
            norm_eps=self.norm_eps,
            norm_offset=self.norm == "rms_offset",
        )

    def build_norm(self, is_there: bool = True) -> nn.Module:
        """A norm of activations (..., D); the identity in a place without one."""
        if not is_there:
            return nn.Identity()
        if self.norm == "layer":
            return nn.LayerNorm(self.width, eps=self.norm_eps, bias=self.has_biases("norms"))
        return RMSNorm(self.width, eps=self.norm_eps, has_offset=self.norm == "rms_offset")

    def build_block(self, layer: int) -> Block:
        """The block of a layer, counted from 0."""
        attention, order = self.attention_of(layer), self.norm_order
        if order == "hybrid":
            order = "post" if attention.cost == "quadratic" else "pre"
        before, after = order != "post", order != "pre"
        return Block(
            attention=attention.build(self.shape_of(layer)),
            mlp=None if self.mlp == "none" else self._build_mlp(self.mlp),
            attention_norm=self.build_norm(before),
            mlp_norm=self.build_norm(before and self.mlp != "none"),
            attention_post_norm=self.build_norm(after),
            mlp_post_norm=self.build_norm(after and self.mlp != "none"),
            parallel=self.parallel_residual,
        )

    def _build_mlp(self, kind: MLPKind) -> MLP:
        width = 4 * self.width if self.mlp_width is None else self.mlp_width
        return MLP(self.width, width, kind=kind, biases=self.has_biases("mlp"))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LanguageModelConfig":
        """The config with these fields, attention configs as their `kind` and options.

        Raises ValueError or TypeError for values of other names or types.
        """
        layers = {key: _attention_of(one) for key, one in values.get("layer_attention", {}).items()}
        attention = _attention_of(values["attention"])
        return cls(**{**values, "attention": attention, "layer_attention": layers})

    def has_biases(self, place: str) -> bool:
        """Whether there are biases in one of BIAS_PLACES. RMS norms have none."""
        if place == "norms" and self.norm != "layer":
            return False
        return self.biases if isinstance(self.biases, bool) else place in self.biases

    def _entry_of(self, layer: int) -> str | None:
        """The key of the last entry of `layer_attention` that matches the layer."""
        keys = [key for key in self.layer_attention if layer in self._layers_of(key)]
        return keys[-1] if keys else None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of all layers, each once, in the order of their first layer."""
        return tuple(dict.fromkeys(self.attention_of(layer).kind for layer in range(self.layers)))

    def _layers_of(self, key: str) -> range:
        """The layers of a key: a number, or a slice as in Python."""
        layers = range(self.layers)
        try:
            if ":" in key:
                found = layers[slice(*(int(bound) if bound else None for bound in key.split(":")))]
            else:
                found = layers[layers.index(int(key)) :][:1]
        except (ValueError, TypeError):
            found = range(0)
        if not found:
            raise ValueError(
                f"model.layer_attention: found {key!r}, wanted a number or slice of the layers 0 "
                f'to {self.layers - 1}, such as "0" or "::2"'
            )
        return found


def _attention_of(options: Mapping[str, Any]) -> AttentionConfig:
    cls, values = attention_config(options["kind"]), {}
    hints = get_type_hints(cls)
    for key, value in options.items():
        if key != "kind":
            is_nested = is_dataclass(hints.get(key)) and isinstance(value, Mapping)
            values[key] = hints[key](**value) if is_nested else value
    return cls(**values)
