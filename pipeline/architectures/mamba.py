"""Mamba-2 (Dao and Gu, 2024, arXiv:2405.21060)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from longhaul.modules.attention import Attention, AttentionConfig
from longhaul.modules.attention.recurrent.mamba2 import Mamba2Config
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.pipeline.architectures.architecture import Architecture, Field, Fixed, Rows
from longhaul.pipeline.architectures.layers import Layers, Options, Taps, size_in
from longhaul.pipeline.architectures.llama import keys, queries, values


@dataclass(frozen=True, kw_only=True)
class Mamba2Layers(Layers):
    """Layers of the kind mamba2, all of them alike, whose heads are the model's."""

    kinds: ClassVar[tuple[str, ...]] = ("mamba2",)

    def read(
        self, content: dict[str, Any], sizes: LanguageModelConfig, context: int
    ) -> list[Options]:
        heads, mixed = sizes.heads, sizes.shape_of(0).mixed_width
        expand = size_in(content, "expand", 2)
        if expand * sizes.width != mixed:
            raise ValueError(
                f"expand: found {expand}, wanted {mixed / sizes.width:g}, the width of all heads "
                "over hidden_size"
            )
        groups = size_in(content, "n_groups", 8)
        if heads % groups:
            raise ValueError(f"n_groups: found {groups}, wanted a divisor of {heads} heads")
        layer = {
            "kind": "mamba2",
            "expand": 1,
            "groups": groups,
            "key_dim": size_in(content, "state_size", 128),
            "short_convolution": size_in(content, "conv_kernel", 4, Taps),
        }
        return [layer] * sizes.layers

    def write(
        self, attentions: Sequence[AttentionConfig], sizes: LanguageModelConfig
    ) -> dict[str, Any]:
        first = cast(Mamba2Config, attentions[0])
        return {
            "expand": sizes.shape_of(0).mixed_width // sizes.width,
            "n_groups": first.groups,
            "state_size": first.key_dim,
            "conv_kernel": first.short_convolution,
        }


# As transformers writes 0 and infinity.
_UNBOUNDED = [0.0, {"__float__": "Infinity"}]


def _convolved(attention: Attention) -> dict[str, Rows]:
    K, _, V = attention.qkv_widths
    return {"x": ((0, V),), "B": ((V, V + K),), "C": ((V + K, V + 2 * K),)}


def _projected(attention: Attention) -> dict[str, Rows]:
    K, _, V = attention.qkv_widths
    return {
        "z": ((0, V),),
        "x": ((V, 2 * V),),
        "B": ((2 * V, 2 * V + K),),
        "C": ((2 * V + K, 2 * (V + K)),),
        "dt": ((2 * (V + K), 2 * (V + K) + attention.num_heads),),
    }


MAMBA2 = Architecture(
    name="Mamba2ForCausalLM",
    model_type="mamba2",
    fields=(
        Field("vocab_size", 32768, "vocabulary"),
        Field("hidden_size", 4096, "width"),
        Field("num_hidden_layers", 64, "layers"),
        Field("num_heads", 128, "heads"),
        Field("head_dim", 64, "head_dim"),
        Field("tie_word_embeddings", False, "tied_head"),
        # That of the norm after the gate too.
        Fixed("layer_norm_epsilon", 1e-5, 1e-5),
        Fixed("hidden_act", "silu", "silu"),
        Fixed("use_bias", False, False),
        Fixed("use_conv_bias", True, True),
        Fixed("time_step_limit", _UNBOUNDED, _UNBOUNDED, ([0.0, float("inf")],)),
    ),
    constants={"norm": "rms", "mlp": "none"},
    # Of the initial values, of speed, and of sums in 16 bits.
    ignored_fields=(
        *("time_step_rank", "time_step_min", "time_step_max", "time_step_floor"),
        *("rescale_prenorm_residual", "chunk_size", "residual_in_fp32"),
    ),
    context=2048,
    layers=Mamba2Layers(),
    modules={
        "backbone.embeddings": "embedding",
        "backbone.norm_f": "final_norm",
        "lm_head": "lm_head",
    },
    layer="backbone.layers.{}",
    layer_modules={
        "norm": "attention_norm",
        "mixer.in_proj.z": "attention.output_gate",
        "mixer.in_proj.x": ("attention.qkv", values),
        "mixer.in_proj.B": ("attention.qkv", keys),
        "mixer.in_proj.C": ("attention.qkv", queries),
        "mixer.in_proj.dt": "attention.step_size",
        "mixer.conv1d.x": ("attention.convolution", values),
        "mixer.conv1d.B": ("attention.convolution", keys),
        "mixer.conv1d.C": ("attention.convolution", queries),
        "mixer.A_log": "attention.time_step.A_log",
        "mixer.dt_bias": "attention.time_step.dt_bias",
        "mixer.D": "attention.skip",
        "mixer.norm": "attention.output_norm",
        "mixer.out_proj": "attention.out",
    },
    cut={"mixer.in_proj": _projected, "mixer.conv1d": _convolved},
)
