"""GPT-2 (Radford et al., 2019) and GPT-NeoX (Black et al., 2022, arXiv:2204.06745)."""

from longhaul.modules.attention import Attention
from longhaul.pipeline.architectures.architecture import (
    Architecture,
    Biases,
    Dropout,
    Field,
    Fixed,
    Rows,
)
from longhaul.pipeline.architectures.layers import Layers

GELUS = {
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_erf",
    "relu2": "relu2",
}

GPT2 = Architecture(
    name="GPT2LMHeadModel",
    model_type="gpt2",
    fields=(
        Field("vocab_size", 50257, "vocabulary"),
        Field("n_positions", 1024, "learned_positions"),
        Field("n_embd", 768, "width"),
        Field("n_layer", 12, "layers"),
        Field("n_head", 12, "heads"),
        Field("n_inner", None, "mlp_width"),
        Field("activation_function", "gelu_new", "mlp", GELUS),
        Field("layer_norm_epsilon", 1e-5, "norm_eps"),
        Field("tie_word_embeddings", True, "tied_head"),
        Fixed("scale_attn_weights", True, True),
        Fixed("scale_attn_by_inverse_layer_idx", False, False),
        Fixed("reorder_and_upcast_attn", False, False, (True,)),
        Fixed("add_cross_attention", False, False),
        Dropout("resid_pdrop", 0.1),
        Dropout("embd_pdrop", 0.1),
        Dropout("attn_pdrop", 0.1),
    ),
    biases=("qkv", "out", "mlp", "norms"),
    ignored_fields=(
        *("n_ctx", "task_specific_params", "summary_type", "summary_use_proj"),
        *("summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    ),
    context=1024,
    layers=Layers(is_rotated=False),
    modules={
        "transformer.wte": "embedding",
        "transformer.wpe": "positions",
        "transformer.ln_f": "final_norm",
        "lm_head": "lm_head",
    },
    layer="transformer.h.{}",
    layer_modules={
        "ln_1": "attention_norm",
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.out",
        "ln_2": "mlp_norm",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.out",
    },
    transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    old_prefix="transformer.",
    ignored_tensors=r"\.attn\.(bias|masked_bias)$",
)


def by_heads(attention: Attention) -> Rows:
    """The rows of q, k and v of one head, then those of the next one; ours: all of q first."""
    K, D = attention.head_dim, attention.qkv_widths[0]
    return tuple(
        (part * D + head * K, part * D + (head + 1) * K)
        for head in range(attention.num_heads)
        for part in range(3)
    )


GPT_NEOX = Architecture(
    name="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    fields=(
        Field("vocab_size", 50432, "vocabulary"),
        Field("hidden_size", 6144, "width"),
        Field("num_hidden_layers", 44, "layers"),
        Field("num_attention_heads", 64, "heads"),
        Field("use_parallel_residual", True, "parallel_residual"),
        Field("tie_word_embeddings", False, "tied_head"),
        Field("intermediate_size", 24576, "mlp_width"),
        Field("hidden_act", "gelu", "mlp", GELUS),
        Field("layer_norm_eps", 1e-5, "norm_eps"),
        Biases("attention_bias", True, ("qkv", "out")),
        Dropout("attention_dropout"),
        Dropout("hidden_dropout"),
    ),
    biases=("mlp", "norms"),
    ignored_fields=("classifier_dropout", "is_decoder"),
    context=2048,
    layers=Layers(
        share=0.25,
        old={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
    ),
    modules={
        "gpt_neox.embed_in": "embedding",
        "gpt_neox.final_layer_norm": "final_norm",
        "embed_out": "lm_head",
    },
    layer="gpt_neox.layers.{}",
    layer_modules={
        "input_layernorm": "attention_norm",
        "attention.query_key_value": ("attention.qkv", by_heads),
        "attention.dense": "attention.out",
        "post_attention_layernorm": "mlp_norm",
        "mlp.dense_h_to_4h": "mlp.up",
        "mlp.dense_4h_to_h": "mlp.out",
    },
    old_tensors={r"^lm_head\.": "embed_out."},
    ignored_tensors=r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",
)
