"""Models that mix softmax attention with layers of linear cost."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from longhaul.datamodules.files.untrusted import checked_value, shown
from longhaul.modules.attention import AttentionConfig
from longhaul.modules.attention.recurrent.gated_deltanet import GatedDeltaNetConfig
from longhaul.modules.language_model_config import LanguageModelConfig
from longhaul.pipeline.architectures.architecture import Field, Fixed
from longhaul.pipeline.architectures.layers import FULL, Layers, Options, Taps, size_in
from longhaul.pipeline.architectures.llama import (
    ATTENTION,
    MLP,
    NORMS_AFTER,
    NORMS_BEFORE,
    OLMO2,
    QK_NORM,
    fields_of,
    keys,
    queries,
    values,
)

_LINEAR = "linear_attention"


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetLayers(Layers):
    """Layers of softmax attention, and of Gated DeltaNet with as many heads."""

    kinds: ClassVar[tuple[str, ...]] = ("softmax", "gated_deltanet")

    def read(
        self, content: dict[str, Any], sizes: LanguageModelConfig, context: int
    ) -> list[Options]:
        shape, types = sizes.shape_of(0), self._types(content, sizes.layers)
        if shape.key_heads != shape.heads:
            raise ValueError(
                f"num_key_value_heads: found {shape.key_heads}, wanted {shape.heads}, the heads of "
                "layers that share no keys"
            )
        heads = size_in(content, "linear_num_value_heads", shape.heads)
        if heads != shape.heads:
            raise ValueError(
                f"linear_num_value_heads: found {heads}, wanted {shape.heads} as in the layers of "
                "softmax attention"
            )
        groups = size_in(content, "linear_num_key_heads", shape.heads)
        if heads % groups:
            raise ValueError(
                f"linear_num_key_heads: found {groups}, wanted a divisor of {heads} heads"
            )
        K = size_in(content, "linear_key_head_dim", max(1, 3 * sizes.width // (4 * groups)))
        name = "linear_allow_neg_eigval"
        linear = {
            "kind": "gated_deltanet",
            "groups": groups,
            "key_dim": K,
            "value_dim": size_in(content, "linear_value_head_dim", 2 * K),
            "short_convolution": size_in(content, "linear_conv_kernel_dim", 4, Taps),
            "negative_eigenvalues": checked_value(bool, content.pop(name, True), name),
        }
        full = super().read(content, sizes, context)
        return [linear if one == _LINEAR else own for one, own in zip(types, full, strict=True)]

    def write(
        self, attentions: Sequence[AttentionConfig], sizes: LanguageModelConfig
    ) -> dict[str, Any]:
        types = [FULL if one.kind == "softmax" else _LINEAR for one in attentions]
        if len(set(types)) == 1:
            raise ValueError(
                f"attention.kind: found {attentions[0].kind} in all layers, wanted softmax and "
                "gated_deltanet"
            )
        found = super().write([one for one in attentions if one.kind == "softmax"], sizes)
        linear = cast(GatedDeltaNetConfig, attentions[types.index(_LINEAR)])
        shape = sizes.shape_of(0)
        K, V = linear.widths(shape.head_dim)
        return found | {
            "layer_types": types,
            "linear_num_value_heads": shape.heads,
            "linear_num_key_heads": shape.heads if linear.groups is None else linear.groups,
            "linear_key_head_dim": K,
            "linear_value_head_dim": V,
            "linear_conv_kernel_dim": linear.short_convolution,
            "linear_allow_neg_eigval": linear.negative_eigenvalues,
        }

    def _types(self, content: dict[str, Any], count: int) -> list[str]:
        usual = [_LINEAR if (layer + 1) % 4 else FULL for layer in range(count)]
        if FULL not in usual:
            usual[-1] = FULL
        given = content.pop("layer_types", None)
        types: list[str] = (
            usual if given is None else checked_value(list[str], given, "layer_types")
        )
        if len(types) != count:
            raise ValueError(f"layer_types: found {len(types)} layers, wanted {count}")
        for one in types:
            if one not in (FULL, _LINEAR):
                raise ValueError(f"layer_types: found {shown(one)}, wanted {FULL} or {_LINEAR}")
        for one in (FULL, _LINEAR):
            if one not in types:
                raise ValueError(f"layer_types: found no {one}, wanted some, as in transformers")
        return types


OLMO_HYBRID = dataclasses.replace(
    OLMO2,
    name="OlmoHybridForCausalLM",
    model_type="olmo_hybrid",
    fields=(
        *fields_of(100352, 3840, 11008, 32, 30, None),
        Field("hidden_act", "silu", "mlp", {"silu": "swiglu"}),  # of the convolution too
        Field("head_dim", None, "head_dim"),
        Fixed("attention_bias", False, False),
    ),
    constants={**OLMO2.constants, "norm_order": "hybrid"},
    # Of the initial values.
    ignored_fields=(
        *("linear_a_log_min", "linear_a_log_max"),
        *("linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
    ),
    context=65536,
    layers=GatedDeltaNetLayers(has_null_theta=True),
    layer_modules=MLP,
    kind_modules={
        "softmax": {**ATTENTION, **QK_NORM, **NORMS_AFTER},
        "gated_deltanet": {
            **NORMS_BEFORE,
            "linear_attn.q_proj": ("attention.qkv", queries),
            "linear_attn.k_proj": ("attention.qkv", keys),
            "linear_attn.v_proj": ("attention.qkv", values),
            "linear_attn.q_conv1d": ("attention.convolution", queries),
            "linear_attn.k_conv1d": ("attention.convolution", keys),
            "linear_attn.v_conv1d": ("attention.convolution", values),
            "linear_attn.b_proj": "attention.write",
            "linear_attn.a_proj": "attention.decay",
            "linear_attn.A_log": "attention.time_step.A_log",
            "linear_attn.dt_bias": "attention.time_step.dt_bias",
            "linear_attn.g_proj": "attention.output_gate",
            "linear_attn.o_norm": "attention.output_norm",
            "linear_attn.o_proj": "attention.out",
        },
    },
    old_tensors={
        r"\.attention_layer_norm\.": ".input_layernorm.",
        r"\.feedforward_layer_norm\.": ".post_attention_layernorm.",
    },
    # transformers cuts the convolution into thirds, whatever the widths are.
    joined=tuple(f"linear_attn.{one}_conv1d" for one in "qkv"),
)
