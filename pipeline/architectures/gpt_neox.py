"""GPT-NeoX (Black et al., 2022, arXiv:2204.06745): a parallel block with biases."""

from longhaul.modules.attention import LayerShape
from longhaul.pipeline.architectures.architecture import Architecture, Biases, Dropout, Field, Rows
from longhaul.pipeline.architectures.layers import Layers

GELUS = {
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_erf",
    "relu2": "relu2",
}


def by_heads(shape: LayerShape) -> Rows:
    """The rows of q, k and v of one head, then those of the next one; ours: all of q first."""
    K, D = shape.head_dim, shape.heads * shape.head_dim
    return tuple(
        (part * D + head * K, part * D + (head + 1) * K)
        for head in range(shape.heads)
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
    constants={"embedding_norm": False},
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
    old_tensors={"lm_head.weight": "embed_out.weight"},
    ignored_tensors=r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",
)  # fmt: skip
