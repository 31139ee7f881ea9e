"""Llama (Touvron et al., 2023, arXiv:2302.13971), and the models that have its modules' names."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from longhaul.datamodules.files.untrusted import Count, Positive, checked_value
from longhaul.modules.attention import Attention
from longhaul.pipeline.architectures.architecture import (
    Architecture,
    Biases,
    Dropout,
    Field,
    Fixed,
    Modules,
    Rows,
)
from longhaul.pipeline.architectures.gpt import GELUS
from longhaul.pipeline.architectures.layers import FULL, WINDOWED, Layers


def queries(attention: Attention) -> Rows:
    return ((0, attention.qkv_widths[0]),)


def keys(attention: Attention) -> Rows:
    return ((attention.qkv_widths[0], sum(attention.qkv_widths[:2])),)


def values(attention: Attention) -> Rows:
    return ((sum(attention.qkv_widths[:2]), None),)


ATTENTION: Modules = {
    "self_attn.q_proj": ("attention.qkv", queries),
    "self_attn.k_proj": ("attention.qkv", keys),
    "self_attn.v_proj": ("attention.qkv", values),
    "self_attn.o_proj": "attention.out",
}
QK_NORM: Modules = {"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"}
MLP: Modules = {"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.out"}
NORMS_BEFORE: Modules = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}
NORMS_AFTER: Modules = {
    "post_attention_layernorm": "attention_post_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
_NORMS_AROUND: Modules = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
_CONSTANTS = {"norm": "rms"}


def fields_of(
    vocabulary: int,
    width: int,
    mlp_width: int,
    layers: int,
    heads: int,
    kv_heads: int | None,
    *,
    eps: float = 1e-6,
    tied: bool = False,
) -> tuple[Field | Dropout, ...]:
    """The fields of all of them, and their defaults, without that of the activation."""
    return (
        Field("vocab_size", vocabulary, "vocabulary"),
        Field("hidden_size", width, "width"),
        Field("intermediate_size", mlp_width, "mlp_width"),
        Field("num_hidden_layers", layers, "layers"),
        Field("num_attention_heads", heads, "heads"),
        Field("num_key_value_heads", kv_heads, "kv_heads"),
        Field("rms_norm_eps", eps, "norm_eps"),
        Field("tie_word_embeddings", tied, "tied_head"),
        Dropout("attention_dropout"),
    )


SILU = Field("hidden_act", "silu", "mlp", {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"})
_ATTENTION_BIAS = Biases("attention_bias", False, ("qkv", "out"))

LLAMA = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    fields=(
        *fields_of(32000, 4096, 11008, 32, 32, None),
        SILU,
        Field("head_dim", None, "head_dim"),
        _ATTENTION_BIAS,
        Biases("mlp_bias", False, ("mlp",)),
        Fixed("rope_interleaved", None, None, (False,)),
    ),
    constants=_CONSTANTS,
    ignored_fields=("pretraining_tp", "is_llama_config"),
    context=2048,
    layers=Layers(),
    modules={
        "model.embed_tokens": "embedding",
        "model.norm": "final_norm",
        "lm_head": "lm_head",
    },
    layer="model.layers.{}",
    layer_modules={**ATTENTION, **MLP, **NORMS_BEFORE},
    ignored_tensors=r"\.rotary_emb\.inv_freq$",
)


def _from_layer(content: Mapping[str, Any], rotated: Sequence[int]) -> list[str]:
    """Windows from layer `max_window_layers` on, as in Qwen."""
    name = "max_window_layers"
    first = checked_value(Count, content.get(name, 28), name)
    return [WINDOWED if layer >= first else FULL for layer in range(len(rotated))]


def _all_but_every(usual: int, field: str | None = None) -> Any:
    """All but every n-th layer have a window; n may be the value of a field."""

    def types(content: Mapping[str, Any], rotated: Sequence[int]) -> list[str]:
        period = usual
        if field is not None:
            period = checked_value(Positive, content.get(field, usual), field)
        return [WINDOWED if (layer + 1) % period else FULL for layer in range(len(rotated))]

    return types


def _unrotated(_: Mapping[str, Any], rotated: Sequence[int]) -> list[str]:
    """The layers without positions have a window, as in SmolLM3."""
    return [FULL if one else WINDOWED for one in rotated]


_QWEN_LAYERS = Layers(has_window=True, window=4096, has_switch=True, types=_from_layer)

QWEN2 = dataclasses.replace(
    LLAMA,
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    fields=(
        *fields_of(151936, 4096, 22016, 32, 32, 32),
        SILU,
        Fixed("use_mrope", None, None, (False,)),
    ),
    biases=("qkv",),
    ignored_fields=(),
    context=32768,
    layers=_QWEN_LAYERS,
)

QWEN3 = dataclasses.replace(
    QWEN2,
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    fields=(*QWEN2.fields, Field("head_dim", 128, "head_dim"), _ATTENTION_BIAS),
    constants={**_CONSTANTS, "qk_norm": "head"},
    biases=(),
    layer_modules={**LLAMA.layer_modules, **QK_NORM},
)

OLMO2 = dataclasses.replace(
    LLAMA,
    name="Olmo2ForCausalLM",
    model_type="olmo2",
    fields=(*fields_of(50304, 4096, 11008, 32, 32, None, eps=1e-5), SILU, _ATTENTION_BIAS),
    constants={**_CONSTANTS, "norm_order": "post", "qk_norm": "full"},
    ignored_fields=(),
    layer_modules={**ATTENTION, **MLP, **QK_NORM, **NORMS_AFTER},
)

OLMO3 = dataclasses.replace(
    OLMO2,
    name="Olmo3ForCausalLM",
    model_type="olmo3",
    layers=Layers(
        theta=500_000.0,
        local_theta=500_000.0,
        has_window=True,
        window=4096,
        types=_all_but_every(4),
    ),
)

_GEMMA_FIELDS = (
    Field(
        "hidden_activation",
        "gelu_pytorch_tanh",
        "mlp",
        {"gelu_pytorch_tanh": "geglu", "silu": "swiglu"},
    ),
    Field("head_dim", 256, "head_dim"),
    _ATTENTION_BIAS,
    Fixed("use_bidirectional_attention", None, None, (False,)),
)

GEMMA2 = Architecture(
    name="Gemma2ForCausalLM",
    model_type="gemma2",
    fields=(
        *fields_of(256000, 2304, 9216, 26, 8, 4, tied=True),
        *_GEMMA_FIELDS,
        Field("final_logit_softcapping", 30.0, "logit_softcap"),
    ),
    constants={"norm": "rms_offset", "norm_order": "sandwich"},
    has_scaled_embedding=True,
    # transformers reads hidden_activation and sliding_window alone.
    ignored_fields=("hidden_act", "sliding_window_size", "cache_implementation"),
    context=8192,
    layers=Layers(
        has_window=True, window=4096, types=_all_but_every(2),
        score_width=256, has_softcap=True, softcap=50.0,
    ),
    modules=LLAMA.modules,
    layer="model.layers.{}",
    layer_modules={**ATTENTION, **MLP, **_NORMS_AROUND},
    ignored_tensors=LLAMA.ignored_tensors,
)  # fmt: skip

GEMMA3 = dataclasses.replace(
    GEMMA2,
    name="Gemma3ForCausalLM",
    model_type="gemma3_text",
    fields=(
        *fields_of(262_208, 2304, 9216, 26, 8, 4, tied=True),
        *_GEMMA_FIELDS,
        Field("final_logit_softcapping", None, "logit_softcap"),
    ),
    constants={**GEMMA2.constants, "qk_norm": "head"},
    # Its code reads attn_logit_softcapping nowhere.
    ignored_fields=(*GEMMA2.ignored_fields, "attn_logit_softcapping"),
    context=131_072,
    layers=Layers(
        theta=1_000_000.0,
        local_theta=10_000.0,
        has_window=True,
        window=4096,
        types=_all_but_every(6, "sliding_window_pattern"),
        score_width=256,
    ),
    layer_modules={**GEMMA2.layer_modules, **QK_NORM},
)

SMOLLM3 = dataclasses.replace(
    LLAMA,
    name="SmolLM3ForCausalLM",
    model_type="smollm3",
    fields=(
        *fields_of(128256, 2048, 11008, 36, 16, 4, tied=True),
        SILU,
        _ATTENTION_BIAS,
        Biases("mlp_bias", False, ("mlp",)),
    ),
    context=32768,
    layers=Layers(
        theta=2_000_000.0,
        has_window=True,
        has_switch=True,
        types=_unrotated,
        has_unrotated=True,
    ),
)

STARCODER2 = dataclasses.replace(
    LLAMA,
    name="Starcoder2ForCausalLM",
    model_type="starcoder2",
    fields=(
        *(one for one in fields_of(49152, 3072, 12288, 30, 24, 2, tied=True)
          if one.name != "rms_norm_eps"),
        Field("norm_epsilon", 1e-5, "norm_eps"),
        Field("hidden_act", "gelu_pytorch_tanh", "mlp", GELUS),
        Biases("use_bias", True, ("qkv", "out", "mlp")),
        Dropout("residual_dropout"),
        Dropout("embedding_dropout"),
    ),
    constants={},
    biases=("norms",),
    # The first code of it had these, that of transformers reads none of them.
    ignored_fields=(
        *("activation_function", "mlp_type", "norm_type", "scale_attn_weights"),
        *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
    ),
    context=4096,
    layers=Layers(has_window=True),
    layer_modules={
        **ATTENTION, **NORMS_BEFORE, "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.out",
    },
)  # fmt: skip
